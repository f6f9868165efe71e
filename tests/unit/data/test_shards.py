"""Tar archives: what is a sample, and that every one is read exactly as often as is counted."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.braces import archive_paths, expand_braces
from lightning_dpipe.data.buckets import BucketBatchSampler
from lightning_dpipe.data.faults import Broken, Kind, Missing, Policy, Verdict
from lightning_dpipe.data.images import decode_image
from lightning_dpipe.data.shard_data import ShardsDataModule
from lightning_dpipe.data.shards import Condition, Keys, list_shards
from saved import save_tokenizer

SKIP = Policy(missing=Missing.SKIP, broken=Broken.SKIP)


def png(value: int, side: int = 4) -> bytes:
    memory = io.BytesIO()
    Image.new("L", (side, side), value).save(memory, format="png")
    return memory.getvalue()


def archive(path: Path, files: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("d-{008..011}.tar", ["d-008.tar", "d-009.tar", "d-010.tar", "d-011.tar"]),
        ("d-{8..11}.tar", ["d-8.tar", "d-9.tar", "d-10.tar", "d-11.tar"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{x,{1..2}y}.tar", ["x.tar", "1y.tar", "x.tar", "2y.tar"]),
    ],
)
def test_braces_are_written_out(pattern: str, names: list[str]) -> None:
    assert sorted(expand_braces(pattern)) == sorted(names)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("pipe:cat a.tar", "read as a stream"),
        ("https://example.com/a.tar", "read as a stream"),
        ("{3..1}.tar", "runs backwards"),
        ("{one}.tar", "neither"),
        ("gone-{0..2}.tar", "3 of 3 archives do not exist, first gone-0.tar"),
    ],
)
def test_archives_that_cannot_be_are_named(given: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        archive_paths(given)


def test_folders_and_lists_are_archives_too_and_none_counts_twice(tmp_path: Path) -> None:
    paths = [archive(tmp_path / f"{i}.tar", []) for i in (1, 0, 2)]
    assert archive_paths(tmp_path) == tuple(sorted(paths))
    assert archive_paths([str(paths[0]), str(tmp_path / "{0,2}.tar")]) == tuple(paths)
    with pytest.raises(DataError, match=r"1\.tar is listed twice"):
        archive_paths([str(tmp_path), str(paths[0])])


def test_files_of_one_stem_are_one_sample_with_all_its_captions(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar",
        [
            ("deep/one.PNG", png(10)), ("deep/one.txt", b" a cat \n"),
            ("two.json", json.dumps({"caption": ["x", "", "y"]}).encode()), ("two.png", png(20)),
            ("two.hint.png", png(30)),
            ("one.png", png(40)), ("one.json", b'{"caption": "same stem, other folder"}'),
        ],
    )  # fmt: skip
    listing = list_shards([path], keys=Keys(image="png"))
    assert [(str(s.path), s.captions) for s in listing.samples] == [
        (f"{path}:deep/one.PNG", ("a cat",)),
        (f"{path}:two.png", ("x", "y")),
        (f"{path}:one.png", ("same stem, other folder",)),
    ]
    shown = [float(decode_image(s.path, 2)[0, 0, 0]) for s in listing.samples]
    assert shown == pytest.approx([v / 127.5 - 1 for v in (10, 20, 40)])
    hinted = list_shards([path], keys=Keys(image="png", hint="hint.png"), policy=SKIP)
    assert [str(s.hint) for s in hinted.samples] == [f"{path}:two.hint.png"]
    assert [f.kind for f in hinted.faults] == [Kind.HINT_ABSENT] * 2


def test_every_fault_of_an_archive_is_found(tmp_path: Path) -> None:
    files = [
        ("ok.png", png(0)), ("ok.txt", b"ok"), ("noimage.txt", b"x"), ("nocaption.png", png(0)),
        ("blank.png", png(0)), ("blank.txt", b"\n"), ("bad.png", png(0)), ("bad.json", b"{"),
        ("latin.png", png(0)), ("latin.txt", "größe".encode("latin-1")), ("README", b"hello"),
        ("ok.png", png(9)),
    ]  # fmt: skip
    path = archive(tmp_path / "a.tar", files)
    for policy, verdict in ((SKIP, Verdict.SKIPPED), (Policy(), Verdict.REFUSED)):
        listing = list_shards([path], policy=policy)
        assert [s.path.name for s in listing.samples] == ["ok.png"]
        assert Counter(f.kind for f in listing.faults) == {
            Kind.ARCHIVE: 1, Kind.NO_CAPTION: 3, Kind.ENCODING: 1, Kind.IGNORED: 1,
            Kind.REPEATED: 1,
        }  # fmt: skip
        refused = {f.kind for f in listing.faults if f.verdict is verdict}
        assert refused - {Kind.IGNORED} == {Kind.ARCHIVE, Kind.NO_CAPTION, Kind.ENCODING}
    assert len(list_shards([path], policy=Policy(missing=Missing.EMPTY)).samples) == 5


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
def test_of_an_archive_that_is_cut_short_the_whole_samples_before_are_kept(
    tmp_path: Path, cut: float
) -> None:
    files = [
        (f"{i}.{end}", data) for i in range(9) for end, data in (("txt", b"x"), ("png", png(i)))
    ]
    path = archive(tmp_path / "a.tar", files)
    with tarfile.open(path) as tar:
        ends = [m.offset_data + m.size for m in tar if m.name.endswith("png")]
    size = int(ends[-1] * cut)
    path.write_bytes(path.read_bytes()[:size])
    listing = list_shards([path], policy=SKIP)
    assert len(listing.samples) == sum(end <= size for end in ends)
    assert Kind.ARCHIVE in {f.kind for f in listing.faults}
    for sample in listing.samples:
        decode_image(sample.path, 4)


def test_compressed_and_other_files_are_no_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x.png"))
    (tmp_path / "b.tar").write_text("<html>")
    listing = list_shards(archive_paths(tmp_path))
    assert [f.kind for f in listing.faults] == [Kind.ARCHIVE] * 2
    assert "uncompressed" in listing.faults[0].text


def test_labels_are_whole_numbers(tmp_path: Path) -> None:
    files = [
        ("a.png", png(0)),
        ("a.cls", b"7\n"),
        ("b.png", png(0)),
        ("b.cls", b"cat"),
        ("c.png", png(0)),
    ]
    listing = list_shards([archive(tmp_path / "a.tar", files)], condition=Condition.LABEL)
    assert [s.label for s in listing.samples] == [7]
    assert [f.kind for f in listing.faults] == [Kind.NO_LABEL] * 2


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    world=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_no_sample_is_lost_or_doubled_beyond_what_the_tally_says(
    tmp_path_factory: pytest.TempPathFactory, sizes: Any, world: int, batch_size: int,
    drop_last: bool, epoch: int,
) -> None:  # fmt: skip
    """Archives of any sizes, empty ones too, on any number of ranks."""
    folder = tmp_path_factory.mktemp("tars")
    paths = [
        archive(folder / f"{k}.tar", [(f"{k}-{i}.png", b"") for i in range(n)] + [
            (f"{k}-{i}.txt", b"x") for i in range(n)
        ])
        for k, n in enumerate(sizes)
    ]  # fmt: skip
    samples = list_shards(paths).samples
    assert len({str(s.path) for s in samples}) == len(samples) == sum(sizes)
    if not samples or (drop_last and len(samples) < batch_size * world):
        return
    seen: Counter[int] = Counter()
    tallies = set()
    for rank in range(world):
        sampler = BucketBatchSampler(
            ["base"] * len(samples), batch_size, drop_last=drop_last, seed=1, with_epoch=True,
            sampler=DistributedSampler(range(len(samples)), num_replicas=world, rank=rank),
        )  # fmt: skip
        sampler.set_epoch(epoch)
        for batch in sampler:
            assert {number // len(samples) for number in batch} == {epoch}
            seen.update(number % len(samples) for number in batch)
        tallies.add(sampler.tally())
    ((tally,),) = tallies
    assert seen.total() == len(samples) - tally.num_dropped + tally.num_repeated
    assert len(samples) - len(seen) == tally.num_dropped
    if drop_last or len(samples) % world == 0:
        assert max(seen.values()) == 1
    assert tally.num_repeated < world


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three archives of 5, 0 and 8 samples; a sample's number is its grey value."""
    number = 0
    for k, count in enumerate((5, 0, 8)):
        files = []
        for i in range(count):
            files += [(f"{i}.png", png(10 * number)), (f"{i}.json", b'{"caption": ["a", "b"]}')]
            number += 1
        archive(tmp_path / "shards" / f"{k}.tar", files)
    save_tokenizer(tmp_path / "pipeline" / "tokenizer")
    return tmp_path / "shards"


def module(shards: Path, **changes: Any) -> ShardsDataModule:
    options: dict[str, Any] = {
        "tokenizer": str(shards.parent / "pipeline"), "size": 4, "num_tokens": 4, "batch_size": 2,
        "num_workers": 0, "num_validation": 1,
    }  # fmt: skip
    data = ShardsDataModule(path=str(shards / "{0..2}.tar"), **{**options, **changes})
    data.setup()
    return data


def numbers(loader: DataLoader[Any]) -> list[int]:
    grey = torch.cat([batch["image"][:, 0, 0, 0] for batch in loader])
    return [round(float(value)) for value in (grey + 1) * 127.5 / 10]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_processes_read_each_sample_once(shards: Path, num_workers: int) -> None:
    data = module(shards, num_workers=num_workers)
    assert sorted(numbers(data.train_dataloader())) == list(range(1, 13))
    assert numbers(data.val_dataloader()) == [0]


def test_the_caption_of_an_epoch_is_drawn_alike_wherever_it_is_read(shards: Path) -> None:
    data, again = module(shards), module(shards, batch_size=5)

    def drawn(data: ShardsDataModule, epoch: int) -> dict[int, int]:
        loader = data.train_dataloader()
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        found = {}
        for batch in loader:
            grey = (batch["image"][:, 0, 0, 0] + 1) * 127.5 / 10
            found |= dict(
                zip(grey.round().int().tolist(), batch["input_ids"][:, 1].tolist(), strict=True)
            )
        return found

    epochs = [drawn(data, epoch) for epoch in range(6)]
    assert epochs == [drawn(again, epoch) for epoch in range(6)]
    assert {word for epoch in epochs for word in epoch.values()} == {5, 6}
    assert len({tuple(sorted(epoch.items())) for epoch in epochs}) == 6
    assert data.validation_captions == ("a",)


def test_labels_reach_the_batch_and_must_be_classes_of_the_model(tmp_path: Path) -> None:
    files = [x for i in range(4) for x in ((f"{i}.png", png(i)), (f"{i}.cls", str(i).encode()))]
    archive(tmp_path / "a.tar", files)
    options: dict[str, Any] = {
        "path": tmp_path / "a.tar", "condition": "label", "size": 4, "num_workers": 0,
        "num_validation": 1,
    }  # fmt: skip
    data = ShardsDataModule(**options, num_classes=4)
    data.setup()
    (batch,) = data.train_dataloader()
    assert sorted(batch["label"].tolist()) == [1, 2, 3]
    with pytest.raises(DataError, match=r"3\.png has label 3, the model has 3 classes"):
        ShardsDataModule(**options, num_classes=3).setup()
