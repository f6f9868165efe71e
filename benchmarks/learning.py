"""Do the recipes learn, not only run? Samples are judged by what knows nothing of the model.

    python -m benchmarks.learning [--quick] [--json] [--only digits,captions,hints]

Each run is one process on one core with the recipe's global batch; a pipeline computes the same
numbers (`python -m benchmarks.parity`).

digits    `digits_dit` with and without self-conditioning, several seeds each. A support vector
          machine that learnt the real digits reads 300 samples; the share it reads as the digit
          asked for is the accuracy, and its own on held-out real digits says what to expect of
          perfect samples. `distance` is the Frechet distance between Gaussians fitted to the pixels
          of samples and of held-out digits; that of the training digits is given beside it.
captions  `emoji_unet`: place of the asked picture among all 400 real ones, by pixel distance, for
          captions that were held out. The control judges the same samples against other held-out
          captions, so that a model which ignores captions scores like it.
hints     A ControlNet on drawn circles, on pixels in place of a VAE (`benchmarks.models_circles`):
          does the drawn circle lie where its outline is? The control is the same locked U-Net
          without its ControlNet, which knows the colours but not the place.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from sklearn.svm import SVC
from torch import Tensor
from torch.utils.data import default_collate

from benchmarks.common import OUT, Report, parser, show
from benchmarks.models_circles import SIZE, TOKENS, Circles
from lightning_dpipe.cli.parts import build_data, build_module
from lightning_dpipe.cli.paths import config_dir
from lightning_dpipe.data.circles import Circle, CirclesDataModule
from lightning_dpipe.data.digits import NUM_CLASSES
from lightning_dpipe.data.shapes import COLOURS
from lightning_dpipe.sampling.grid import save_grid
from lightning_dpipe.sampling.ranks import nearest_ranks

SEEDS = (1, 2, 3)
PER_DIGIT = 30
Floats = npt.NDArray[np.float64]


def trained(overrides: Sequence[str], *, seed: int) -> tuple[Any, Any, DictConfig, float]:
    """Train a recipe in this process; module in eval mode, data, config, seconds."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("config", [*overrides, f"seed={seed}"])
    L.seed_everything(seed, verbose=False)
    module, data = build_module(config), build_data(config)
    return module, data, config, fit(module, data, max_steps=config.trainer.max_steps)


def fit(module: Any, data: Any, *, max_steps: int) -> float:
    """Train in this process and leave the module in eval mode; seconds."""
    trainer = L.Trainer(
        strategy="auto", accelerator="cpu", devices=1, max_steps=max_steps,
        gradient_clip_val=1.0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=OUT, limit_val_batches=0,
    )  # fmt: skip
    start = time.monotonic()
    trainer.fit(module, datamodule=data)
    module.eval()
    return time.monotonic() - start


def draw(module: Any, fields: Mapping[str, Tensor], config: DictConfig) -> Tensor:
    """Samples as the recipe draws them."""
    grid = config.callbacks.sample_grid
    drawn: Tensor = module.draw_samples(fields, num_steps=grid.num_steps, guidance=grid.guidance)
    return drawn


def digits(report: Report, *, quick: bool) -> None:
    """One row a run; accuracy of the samples by way of training."""
    steps = 400
    for conditioned in ("0.5", "null"):
        name = "conditioned" if conditioned != "null" else "plain"
        for seed in SEEDS[:1] if quick else SEEDS:
            recipe = [
                "recipe=digits_dit", "data.batch_size=64", f"model.self_conditioning={conditioned}",
                f"trainer.max_steps={steps}",
            ]  # fmt: skip
            module, data, config, seconds = trained(recipe, seed=seed)
            label = torch.arange(NUM_CLASSES).repeat_interleave(PER_DIGIT)
            images = draw(module, {"label": label}, config)
            judge = Judge(data)
            row = {
                "run": f"digits {name}", "seed": seed, "steps": steps, "train_s": seconds,
                "accuracy": judge.accuracy(images, label), "distance": judge.distance(images),
            }  # fmt: skip
            show(str(row))
            report.rows.append(row)
            shown = images[:: PER_DIGIT // 2].expand(-1, 3, -1, -1)
            captions = [str(int(x)) for x in label[:: PER_DIGIT // 2]]
            save_grid(OUT / f"learning_digits_{name}_{seed}.png", {"drawn": shown}, captions)
        own = [row for row in report.rows if row["run"] == f"digits {name}"]
        for figure in ("accuracy", "distance"):
            values = [row[figure] for row in own]
            report.figures |= {
                f"digits_{name}_{figure}": float(np.mean(values)),
                f"digits_{name}_{figure}_worst": max(values)
                if figure == "distance"
                else min(values),
            }
    report.figures["digits_classifier_accuracy"] = judge.held_out_accuracy
    report.figures["digits_real_distance"] = judge.real_distance
    report.bar("digits_conditioned_accuracy_worst", ">=", 0.9)
    report.bar("digits_plain_accuracy_worst", ">=", 0.9)


class Judge:
    """What real digits say about drawn ones."""

    def __init__(self, data: Any) -> None:
        data.setup()
        train, held_out = (
            x.dataset.fields for x in (data.train_dataloader(), data.val_dataloader())
        )
        self._held_out = _pixels(held_out["image"])
        pixels = _pixels(train["image"])
        self._classifier = SVC(gamma=0.001).fit(pixels, train["label"].numpy())
        self.held_out_accuracy = self.accuracy(held_out["image"], held_out["label"])
        self.real_distance = self.distance(train["image"])

    def accuracy(self, images: Tensor, label: Tensor) -> float:
        """Share of images ``[batch, 1, 8, 8]`` that are read as `label`."""
        return float((self._classifier.predict(_pixels(images)) == label.numpy()).mean())

    def distance(self, images: Tensor) -> float:
        """Frechet distance to the held-out digits, in squared grey levels of 16."""
        return frechet(_pixels(images), self._held_out)


def frechet(a: Floats, b: Floats) -> float:
    """Squared Frechet distance of the Gaussians fitted to two sets, each ``[samples, dim]``."""
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # The eigenvalues of a product of two covariances are real and not negative.
    roots = np.sqrt(np.linalg.eigvals(first @ second).real.clip(min=0.0))
    gap = a.mean(0) - b.mean(0)
    return float(gap @ gap + np.trace(first) + np.trace(second) - 2 * roots.sum())


def _pixels(images: Tensor) -> Floats:
    """Grey levels from 0 to 16, as the set has them, ``[batch, pixels]``."""
    levels: Floats = images.clamp(-1, 1).add(1).mul(8).flatten(1).double().numpy()
    return levels


def captions(report: Report, *, quick: bool) -> None:
    """Places of held-out pictures, and those of the control."""
    steps = 300 if quick else 1500
    recipe = ["recipe=emoji_unet", "data.batch_size=16", f"trainer.max_steps={steps}"]
    module, data, config, seconds = trained(recipe, seed=0)
    data.setup()
    asked = data.val_dataloader().dataset.fields
    images = draw(module, asked, config)
    real = torch.cat([asked["image"], data.train_dataloader().dataset.fields["image"]])
    own = torch.arange(len(images))
    ranks = nearest_ranks(images, real, own)
    # Every other held-out caption in turn: the place of a picture that was not asked for.
    others = [r for k in range(1, len(own)) for r in nearest_ranks(images, real, own.roll(k))]
    report.rows += [
        {"run": f"captions, {name}", "seed": 0, "steps": steps, "train_s": seconds,
         "accuracy": float(np.mean([r == 1 for r in places])), "distance": float(np.median(places))}
        for name, places in (("asked", ranks), ("control", others))
    ]  # fmt: skip
    report.figures |= {
        "captions_nearest": float(np.mean([r == 1 for r in ranks])),
        "captions_nearest_control": float(np.mean([r == 1 for r in others])),
        "captions_median_place": float(np.median(ranks)),
        "captions_median_place_control": float(np.median(others)),
        "captions_pictures": float(len(real)),
    }
    report.figures["captions_place_ratio"] = float(np.median(others)) / float(np.median(ranks))
    report.bar("captions_place_ratio", ">=", 2.0 if quick else 5.0)
    save_grid(
        OUT / "learning_captions.png",
        {"real": asked["image"], "drawn": images},
        data.validation_captions,
    )


def hints(report: Report, *, quick: bool) -> None:
    """How well drawn circles match their outlines, with the ControlNet and without."""
    steps = 150 if quick else 600
    L.seed_everything(0, verbose=False)
    data = CirclesDataModule(batch_size=16, size=SIZE, num_samples=4000, num_tokens=TOKENS)
    base = Circles()
    seconds = fit(base, data, max_steps=steps)
    asked = data.val_dataloader().dataset
    fields = default_collate([asked[i] for i in range(len(asked))])
    drawn = {"no hint": base.draw(fields)}
    controlled = Circles(locked=base.unet)
    seconds += fit(controlled, data, max_steps=steps)
    drawn["hint"] = controlled.draw(fields)
    for name, images in drawn.items():
        overlap, apart, colour = followed(images, fields["image"], asked.circles)
        key = name.replace(" ", "_")
        report.rows.append(
            {"run": f"circles, {name}", "seed": 0, "steps": steps, "train_s": seconds,
             "accuracy": colour, "distance": apart}
        )  # fmt: skip
        report.figures |= {
            f"circles_{key}_overlap": overlap,
            f"circles_{key}_centre_error": apart,
            f"circles_{key}_colours": colour,
        }
        show(str(report.rows[-1]))
    report.figures["circles_error_ratio"] = (
        report.figures["circles_no_hint_centre_error"] / report.figures["circles_hint_centre_error"]
    )
    report.bar("circles_error_ratio", ">=", 1.5 if quick else 3.0)
    save_grid(
        OUT / "learning_circles.png", {"real": fields["image"], **drawn}, data.validation_captions
    )


def followed(images: Tensor, real: Tensor, circles: Sequence[Circle]) -> tuple[float, float, float]:
    """Overlap of drawn and asked circle, distance of centres, share of colours that are right.

    A pixel is of the circle if it is nearer to the colour asked for inside than to the one around.
    The overlap is intersection over union; the distance is in sides of the picture; of the colours,
    the mean one of the asked circle and of the rest must be nearest to what was asked, of all six.
    """
    overlaps, apart, right = [], [], []
    table = torch.tensor(list(COLOURS.values())) * 2 - 1
    names = list(COLOURS)
    axis = (torch.arange(SIZE) + 0.5) / SIZE
    for image, truth, circle in zip(images, real, circles, strict=True):
        two = table[[names.index(circle.inside), names.index(circle.around)]]
        masks = []
        for picture in (image, truth):
            distances = torch.cdist(picture.flatten(1).T, two)
            masks.append((distances[:, 0] < distances[:, 1]).view(SIZE, SIZE))
        drawn, asked = masks
        overlaps.append(float((drawn & asked).sum() / (drawn | asked).sum().clamp(min=1)))
        count = drawn.sum().clamp(min=1)
        x, y = float((drawn * axis).sum() / count), float((drawn * axis[:, None]).sum() / count)
        apart.append(((x - circle.x) ** 2 + (y - circle.y) ** 2) ** 0.5)
        for mask, name in ((asked, circle.inside), (~asked, circle.around)):
            nearest = torch.cdist(image[:, mask].mean(1)[None], table).argmin()
            right.append(names[int(nearest)] == name)
    return float(np.mean(overlaps)), float(np.mean(apart)), float(np.mean(right))


PARTS: Mapping[str, Callable[..., None]] = {
    "digits": digits,
    "captions": captions,
    "hints": hints,
}


def main() -> int:
    """Run the chosen parts."""
    command_line = parser(__doc__)
    command_line.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    options = command_line.parse_args()
    torch.set_num_threads(1)
    report = Report("learning")
    for name in options.only.split(","):
        if name not in PARTS:
            command_line.error(f"--only {name}: choose from {', '.join(PARTS)}")
        PARTS[name](report, quick=options.quick)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
