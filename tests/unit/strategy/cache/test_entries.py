"""Entries on disk: what was written, or nothing; never half of it, never another one's."""

import threading
from pathlib import Path

import pytest
import torch

from lightning_dpipe.strategy.cache.entries import Entries, default_folder, entry_key


def tensors(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "0": torch.randn(4, 3, generator=generator),
        "1": torch.randn(5, generator=generator).bfloat16(),
        "2": torch.arange(3),
    }


def test_an_entry_comes_back_bit_for_bit(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    assert entries.read("ab12") is None
    entries.write("ab12", tensors())
    found = entries.read("ab12")
    assert found is not None
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors().items())
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["ab12.safetensors"]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "text", "other"])
def test_a_broken_file_is_dropped_and_made_again(tmp_path: Path, harm: str, caplog) -> None:
    entries = Entries(tmp_path)
    entries.write("ab12", tensors())
    path = entries.path("ab12")
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-9] ^= 1
    broken = {
        "cut": bytes(data[: len(data) // 2]), "flip": bytes(data), "empty": b"",
        "text": b"<html>not found</html>" * 9, "other": torch.ones(3).numpy().tobytes(),
    }  # fmt: skip
    path.write_bytes(broken[harm])
    assert entries.read("ab12") is None
    assert "ab12" in caplog.text
    entries.write("ab12", tensors())
    assert entries.read("ab12") is not None


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path: Path) -> None:
    entries = [Entries(tmp_path) for _ in range(8)]
    threads = [threading.Thread(target=e.write, args=("cd34", tensors())) for e in entries]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert entries[0].read("cd34") is not None
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".safetensors"]


def test_a_key_says_what_was_encoded_and_by_whom() -> None:
    image = torch.arange(12.0).reshape(3, 4)
    keys = {
        entry_key("m", [image]),
        entry_key("other weights", [image]),
        entry_key("m", [image + 1e-6]),
        entry_key("m", [image.reshape(4, 3)]),  # another size
        entry_key("m", [image.double()]),
        entry_key("m", [image, torch.tensor(1)]),
    }
    assert len(keys) == 6
    assert entry_key("m", [image]) == entry_key("m", [image.clone().t().contiguous().t()])


def test_the_folder_follows_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lightning-dpipe" / "encodings"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "lightning-dpipe" / "encodings"
