"""The shipped emoji set, and the batches its datamodule makes of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DistributedSampler, RandomSampler

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data import minilm
from lightning_dpipe.data.emoji import EMOJI_FOLDER, EmojiDataModule
from lightning_dpipe.data.minilm import minilm_folder, tokenize


@pytest.fixture(scope="module")
def emoji() -> EmojiDataModule:
    module = EmojiDataModule(batch_size=32, repeat=3)
    module.setup("fit")
    return module


def test_the_set_has_376_training_images_and_24_held_out_captions(emoji: EmojiDataModule) -> None:
    train = {image.caption for image in emoji.train_images}
    held_out = {image.caption for image in emoji.validation_images}
    assert (len(train), len(held_out)) == (376, 24)
    assert not train & held_out
    assert {word for c in held_out for word in c.split()} <= {w for c in train for w in c.split()}


def test_the_licences_travel_with_the_pictures() -> None:
    assert "Noto Emoji" in (EMOJI_FOLDER / "NOTICE").read_text()
    assert "Version 2.0" in (EMOJI_FOLDER / "LICENSE-APACHE").read_text()
    assert "Cal Henderson" in (EMOJI_FOLDER / "LICENSE-MIT").read_text()


def test_a_batch_holds_the_declared_fields(emoji: EmojiDataModule) -> None:
    batch = next(iter(emoji.train_dataloader()))
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "image": ((32, 3, 32, 32), torch.float32),
        "input_ids": ((32, 16), torch.int64),
        "attention_mask": ((32, 16), torch.int64),
    }
    assert batch["image"].min() >= -1
    assert batch["image"].max() <= 1


def test_the_short_last_batch_is_kept_unless_dropped(emoji: EmojiDataModule) -> None:
    sizes = [len(batch["image"]) for batch in emoji.train_dataloader()]
    assert sum(sizes) == 3 * 376
    assert sizes[-1] == 3 * 376 % 32 == 8
    dropping = EmojiDataModule(batch_size=32, drop_last=True)
    dropping.setup()
    assert {len(batch["image"]) for batch in dropping.train_dataloader()} == {32}


def test_images_and_captions_stay_together(emoji: EmojiDataModule) -> None:
    loader = emoji.val_dataloader()
    batch = next(iter(loader))
    ids = tokenize(["blue heart"], max_tokens=16)["input_ids"][0]
    (row,) = [i for i in range(24) if torch.equal(batch["input_ids"][i], ids)]
    picture = Image.open(EMOJI_FOLDER / "validation" / "1f499.png").resize((32, 32), Image.LANCZOS)
    shown = ((batch["image"][row].permute(1, 2, 0) + 1) * 127.5).round().numpy()
    np.testing.assert_array_equal(shown, np.asarray(picture))


def test_the_training_loader_can_take_a_distributed_sampler(emoji: EmojiDataModule) -> None:
    """Lightning swaps the sampler only if it finds the one that shuffle=True makes."""
    loader = emoji.train_dataloader()
    assert isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1)
    assert len(list(sampler)) == 3 * 376 // 2


def test_tokens_are_the_tokenizers_own_and_long_captions_are_refused() -> None:
    tokens = tokenize(["red circle", "a"], max_tokens=6)
    assert tokens["input_ids"].tolist() == [[101, 2417, 4418, 102, 0, 0], [101, 1037, 102, 0, 0, 0]]
    assert tokens["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    with pytest.raises(DataError, match="'red circle' has 4 tokens, max_tokens is 3"):
        tokenize(["a", "red circle"], max_tokens=3)


def test_minilm_is_found_without_importing_its_package() -> None:
    assert (minilm_folder() / "model.safetensors").is_file()


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'lightning-dpipe\[emoji\]'"):
        EmojiDataModule().setup()


def test_another_folder_in_the_same_layout_works(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        folder = tmp_path / split
        folder.mkdir()
        Image.new("RGB", (5, 5), "red").save(folder / "a.png")
        (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "red"}\n')
    module = EmojiDataModule(batch_size=1, size=8, max_tokens=4, folder=tmp_path)
    module.setup()
    assert next(iter(module.train_dataloader()))["image"].shape == (1, 3, 8, 8)
