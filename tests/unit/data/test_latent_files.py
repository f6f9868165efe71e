"""Precomputed latents: both formats, and files that are something else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lightning_dpipe.data.faults import FaultError, Kind
from lightning_dpipe.data.latent_data import LatentsDataModule
from lightning_dpipe.data.latents import LatentReader
from saved import save_tokenizer

READER = LatentReader(channels=4, factor=8, sides={"base": (32, 32), "wide": (16, 64)})


def moments(seed: int = 0, shape: tuple[int, ...] = (8, 4, 4)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(path: Path, **tensors: torch.Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_ways_of_writing_them_read_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = moments().to(dtype)
    mean, logvar = whole.chunk(2)
    paths = [
        save(tmp_path / "a.safetensors", moments=whole),
        save(tmp_path / "b.safetensors", mean=mean, logvar=logvar),
    ]
    if dtype is not torch.bfloat16:  # numpy has none
        np.save(tmp_path / "c.npy", whole.numpy())
        np.save(tmp_path / "d.npy", np.asfortranarray(whole.numpy()))
        paths += [tmp_path / "c.npy", tmp_path / "d.npy"]
    for path in paths:
        for decode in (False, True):
            found = READER.probe(path, decode=decode)
            assert (found.height, found.width) == (32, 32)
        assert torch.equal(READER.decode(path, (32, 32)), whole.float())


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        ({"moments": moments(shape=(4, 4, 4))}, Kind.MOMENTS, "store mean and log-variance"),
        ({"moments": moments(shape=(8, 4, 5))}, Kind.MOMENTS, r"no class' shape: base \[8, 4, 4\]"),
        ({"moments": moments(shape=(8, 16))}, Kind.MOMENTS, "no class' shape"),
        ({"latent": moments()}, Kind.MOMENTS, "holds latent; expected moments"),
        ({"mean": moments(), "logvar": moments()[:4]}, Kind.MOMENTS, "of one shape"),
    ],
)
def test_what_is_not_mean_and_log_variance_is_told(
    tmp_path: Path, tensors: Any, kind: Kind, words: str
) -> None:
    path = save(tmp_path / "a.safetensors", **tensors)
    with pytest.raises(FaultError, match=words) as caught:
        READER.probe(path, decode=False)
    assert caught.value.kind is kind


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy"])
def test_every_cut_and_other_content_is_damage(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, moments().numpy())
    else:
        save(path, moments=moments())
    data = path.read_bytes()
    contents = [data[:cut] for cut in (0, 4, 60, 100, len(data) // 2, len(data) - 1)]
    for content in [*contents, b"<html>404</html>" * 9]:
        path.write_bytes(content)
        with pytest.raises(FaultError) as caught:
            READER.probe(path, decode=False)
        assert caught.value.kind is Kind.DAMAGED
        with pytest.raises(FaultError):
            READER.decode(path, (32, 32))
    path.unlink()
    with pytest.raises(FaultError) as caught:
        READER.probe(path, decode=False)
    assert caught.value.kind is Kind.ABSENT


def test_numbers_that_are_not_finite_are_found_by_reading_them(tmp_path: Path) -> None:
    bad = moments()
    bad[3, 1, 1] = float("nan")
    path = save(tmp_path / "a.safetensors", moments=bad)
    READER.probe(path, decode=False)
    with pytest.raises(FaultError, match="not finite"):
        READER.probe(path, decode=True)


def test_captions_or_folders_and_classes_of_shapes_go_with_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "pipeline" / "tokenizer")
    rows = []
    for i in range(5):
        shape = (8, 2, 8) if i % 2 else (8, 4, 4)
        save(tmp_path / "set" / f"{i}.safetensors", moments=moments(i, shape))
        rows.append({"file_name": f"{i}.safetensors", "text": "ab"[i % 2]})
    (tmp_path / "set" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"num_workers": 0, "num_validation": 1, "batch_size": 2, "size": 32}
    data = LatentsDataModule(
        path=tmp_path / "set", tokenizer=str(tmp_path / "pipeline"), num_tokens=4,
        buckets={"wide": (16, 64)}, **options,
    )  # fmt: skip
    data.setup()
    got = {
        tuple(b["moments"].shape[1:]): b["input_ids"][:, 1].tolist()
        for b in data.train_dataloader()
    }
    assert got == {(8, 4, 4): [5, 5], (8, 2, 8): [6, 6]}
    for name in "ba":
        for i in range(2):
            save(tmp_path / "classes" / name / f"{i}.safetensors", moments=moments(i))
    labelled = LatentsDataModule(path=tmp_path / "classes", condition="label", **options)
    labelled.setup()
    labels = [b["label"].tolist() for b in labelled.train_dataloader()]
    assert sorted(x for batch in labels for x in batch) == [0, 1, 1]
