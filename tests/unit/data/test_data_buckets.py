"""The bucket batch sampler against counting by hand, as Lightning and DDP use it."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _replace_dunder_methods, _set_sampler_epoch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.data import _update_dataloader
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.buckets import BucketBatchSampler, image_bucket, nearest_bucket

SIDES = {"square": (256, 256), "wide": (192, 320), "tall": (320, 192)}


def on_rank(buckets: Any, batch_size: int, rank: int, world: int, **options: Any) -> Any:
    sampler = DistributedSampler(range(len(buckets)), num_replicas=world, rank=rank)
    return BucketBatchSampler(buckets, batch_size, sampler=sampler, **options)


@settings(deadline=None, max_examples=60)
@given(
    buckets=st.lists(st.sampled_from("abcde"), min_size=1, max_size=60),
    batch_size=st.integers(1, 5),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_step_is_of_one_class_on_all_ranks_and_the_tally_adds_up(
    buckets, batch_size, world, drop_last, shuffle, epoch
) -> None:
    count, whole = Counter(buckets), batch_size * world
    options = {"drop_last": drop_last, "shuffle": shuffle, "seed": 3}
    if drop_last and all(n < whole for n in count.values()):
        with pytest.raises(DataError, match="one global batch"):
            on_rank(buckets, batch_size, 0, world, **options)
        return
    samplers = [on_rank(buckets, batch_size, r, world, **options) for r in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    ranks = [list(s) for s in samplers]
    assert [list(s) for s in samplers] == ranks
    assert len({len(batches) for batches in ranks}) == 1
    assert len(samplers[0]) == len(ranks[0])
    seen: Counter[int] = Counter()
    for step in zip(*ranks, strict=True):
        assert len({buckets[i] for batch in step for i in batch}) == 1
        assert len({len(batch) for batch in step}) == 1
        assert 1 <= len(step[0]) <= batch_size
        seen.update(i for batch in step for i in batch)
    for tally in samplers[0].tally():
        n = count[tally.name]
        used = sum(seen[i] for i, b in enumerate(buckets) if b == tally.name)
        assert tally.num_samples == n
        assert used == n - tally.num_dropped + tally.num_repeated
        assert tally.num_batches == math.ceil(used / whole)
        if drop_last:
            assert (tally.num_dropped, tally.num_repeated) == (n % whole, 0)
        else:
            assert (tally.num_dropped, tally.num_repeated) == (0, -n % world)
            assert all(seen[i] >= 1 for i, b in enumerate(buckets) if b == tally.name)


def test_an_epoch_is_another_order_and_the_seed_another_run() -> None:
    buckets = ["a", "b"] * 20

    def batches(epoch: int, seed: int) -> list[list[int]]:
        sampler = BucketBatchSampler(buckets, 4, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(0, 0) == batches(0, 0)
    assert batches(0, 0) != batches(1, 0)
    assert batches(0, 0) != batches(0, 1)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        buckets = [("a", "b", "c")[i % 3] for i in range(31)]
        return DataLoader(torch.arange(31), batch_sampler=BucketBatchSampler(buckets, 2, seed=5))


@pytest.mark.parametrize("rank", [0, 1])
def test_lightning_puts_its_distributed_sampler_in(rank: int) -> None:
    # What Lightning does around a dataloader hook, and then with a distributed strategy.
    with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
        loader = Data().train_dataloader()
    new = DistributedSampler(loader.dataset, num_replicas=2, rank=rank, seed=99)
    replaced = _update_dataloader(loader, new)
    _set_sampler_epoch(replaced, 4)
    expected = on_rank(loader.batch_sampler.buckets, 2, rank, 2, seed=5)
    expected.set_epoch(4)
    assert [b.tolist() for b in replaced] == list(expected)


def test_one_made_outside_a_hook_is_refused_with_advice() -> None:
    loader = DataLoader(torch.arange(4), batch_sampler=BucketBatchSampler(["a", "a", "b", "b"], 1))
    with pytest.raises(DataError, match=r"inside train_dataloader\(\)"):
        _update_dataloader(loader, DistributedSampler(range(4), num_replicas=2, rank=0))


@pytest.mark.parametrize(
    ("height", "width", "name"),
    [(500, 500, "square"), (600, 1000, "wide"), (1000, 600, "tall"), (9, 1000, "wide")],
)
def test_the_nearest_class_is_by_aspect_ratio(height: int, width: int, name: str) -> None:
    assert nearest_bucket(height, width, SIDES) == name


def test_an_exif_rotated_photo_is_classed_as_it_is_shown(tmp_path: Path) -> None:
    photo = Image.new("RGB", (320, 192))
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(tmp_path / "turned.jpg", exif=exif)
    photo.save(tmp_path / "plain.jpg")
    assert image_bucket(tmp_path / "plain.jpg", SIDES) == "wide"
    assert image_bucket(tmp_path / "turned.jpg", SIDES) == "tall"
    (tmp_path / "no.jpg").write_text("no picture")
    with pytest.raises(DataError, match="cannot be decoded"):
        image_bucket(tmp_path / "no.jpg", SIDES)


@pytest.mark.parametrize(("buckets", "size"), [([], 2), (["a"], 0)])
def test_nothing_to_draw_from_is_refused(buckets: list[str], size: int) -> None:
    with pytest.raises(DataError, match="at least 1"):
        BucketBatchSampler(buckets, size)
