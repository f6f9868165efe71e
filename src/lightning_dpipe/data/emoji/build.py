#!/usr/bin/env python3
"""Build the emoji sample set: captioned 64x64 RGB images in the "imagefolder" layout.

The images and their index come from the unpacked npm package ``emoji-datasource-google``, the
captions from ``en/data.json`` of ``emojibase-data``. Output: ``train/`` and ``validation/``, each
with ``*.png`` and ``metadata.jsonl``, sorted by file name and free of timestamps, so the same
inputs and the same Pillow build give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image

SIZE = 64


def names(text: str) -> frozenset[str]:
    """Split a comma-separated block of names."""
    return frozenset(" ".join(name.split()) for name in text.split(","))


# Subcategories taken whole, and the captions in them that are too cluttered or vague for a demo.
WHOLE = names("""face-smiling, face-affection, face-tongue, face-hand, face-neutral-skeptical,
    face-sleepy, face-unwell, face-hat, face-glasses, face-concerned, face-negative, face-costume,
    cat-face, monkey-face, heart, geometric, food-fruit, food-vegetable, sky & weather,
    book-paper""")
DROPPED = names("""pile of poo, face vomiting, face with symbols on mouth, radio button, milky way,
    fog, newspaper, rolled-up newspaper, bookmark tabs""")
# Animals and visually simple objects picked one by one from the other subcategories.
PICKED = names("""monkey face, dog face, dog, wolf, fox, raccoon, cat face, cat, black cat, lion,
    tiger face, tiger, horse face, horse, moose, unicorn, zebra, cow face, cow, pig face, pig,
    pig nose, boar, mouse face, mouse, hamster, rabbit face, rabbit, bear, polar bear, koala, panda,
    chicken, hatching chick, baby chick, front-facing baby chick, bird, black bird, penguin, duck,
    owl, frog, dragon face, dragon, turtle, fish, tropical fish, whale, octopus, snail, lady beetle,
    butterfly, crab, paw prints, mushroom, soccer ball, baseball, softball, basketball, volleyball,
    american football, rugby football, pool 8 ball, crystal ball, balloon, bell, key, old key,
    locked, unlocked, light bulb, candle, gear, hammer, axe, magnet, bomb, shield, hook, crown,
    ring, gem stone, trophy, heart suit, diamond suit, spade suit, club suit, bullseye, doughnut,
    cookie, egg, ice cream, lollipop, bread, pizza, pencil, crayon, scissors, envelope,
    red envelope, musical note, musical notes, sparkles, ribbon, camera, television, pushpin,
    paperclip, straight ruler, triangular ruler, speech balloon, thought balloon, zzz, kiss mark,
    collision, dizzy, hole""")
# Validation captions: new combinations of words that all occur in the training captions.
HELD_OUT = names("""blue heart, brown heart, green circle, purple square, red square,
    black small square, small orange diamond, orange book, green apple, brown mushroom, black cat,
    tiger face, rabbit face, crying cat, cat with tears of joy, smiling face with heart-eyes,
    kissing face with smiling eyes, winking face with tongue, frowning face with open mouth,
    angry face with horns, full moon face, waning crescent moon, sun behind small cloud,
    cloud with rain""")


def emoji_key(code: str) -> str:
    """Drop variation selectors from an emoji code; the two packages differ in using them."""
    return "-".join(part for part in code.split("-") if part != "FE0F")


def select(datasource: Path, captions: Path) -> dict[str, str]:
    """Map the chosen image file names to lower-case captions, in file name order."""
    labels = {
        emoji_key(entry["hexcode"]): entry["label"].lower().replace("\u2019", "'")
        for entry in json.loads(captions.read_text(encoding="utf-8"))
    }
    chosen: dict[str, str] = {}
    available: set[str] = set()
    for entry in json.loads((datasource / "emoji.json").read_text(encoding="utf-8")):
        text = labels.get(emoji_key(entry["unified"]))
        if text is None or not entry["has_img_google"]:
            continue
        available |= {text, entry["subcategory"]}
        if text in PICKED or (entry["subcategory"] in WHOLE and text not in DROPPED):
            chosen[entry["image"]] = text
    texts = set(chosen.values())
    if missing := (WHOLE | DROPPED | PICKED) - available | HELD_OUT - texts:
        raise ValueError(f"names not found in the packages: {sorted(missing)}")
    if len(texts) < len(chosen):
        raise ValueError("two chosen emoji share a caption")
    return dict(sorted(chosen.items()))


def split(chosen: dict[str, str]) -> dict[str, dict[str, str]]:
    """Set ``HELD_OUT`` aside, provided training has every word of it."""
    train = {name: text for name, text in chosen.items() if text not in HELD_OUT}
    validation = {name: text for name, text in chosen.items() if text in HELD_OUT}
    known = {word for text in train.values() for word in text.split()}
    if unknown := {word for text in validation.values() for word in text.split()} - known:
        raise ValueError(f"held-out words missing from the training captions: {sorted(unknown)}")
    return {"train": train, "validation": validation}


def render(source: Path) -> Image.Image:
    """Load one emoji and composite it on white."""
    emoji = Image.open(source).convert("RGBA")
    if emoji.size != (SIZE, SIZE):
        raise ValueError(f"{source.name} is {emoji.size}, expected {SIZE}x{SIZE}")
    canvas = Image.new("RGBA", emoji.size, "white")
    canvas.alpha_composite(emoji)
    return canvas.convert("RGB")


def write(folder: Path, samples: dict[str, str], images: Path) -> None:
    """Write one split; refuse a folder that holds anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    if stray := {path.name for path in folder.iterdir()} - {*samples, "metadata.jsonl"}:
        raise FileExistsError(f"{folder} holds files of something else: {sorted(stray)}")
    for name in samples:
        render(images / name).save(folder / name, format="PNG", optimize=True)
    rows = [json.dumps({"file_name": name, "text": text}) for name, text in samples.items()]
    (folder / "metadata.jsonl").write_bytes(("\n".join(rows) + "\n").encode())


def main() -> None:
    """Parse the command line and build both splits."""
    parser = argparse.ArgumentParser(description="Build the emoji sample set.")
    parser.add_argument(
        "--datasource",
        type=Path,
        required=True,
        metavar="DIR",
        help="unpacked npm package emoji-datasource-google",
    )
    parser.add_argument(
        "--captions",
        type=Path,
        required=True,
        metavar="FILE",
        help="en/data.json of the npm package emojibase-data",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder that receives train/ and validation/",
    )
    args = parser.parse_args()
    for name, samples in split(select(args.datasource, args.captions)).items():
        write(args.out / name, samples, args.datasource / "img" / "google" / str(SIZE))
        print(f"{name}: {len(samples)} images")


if __name__ == "__main__":
    main()
