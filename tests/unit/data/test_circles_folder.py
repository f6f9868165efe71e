"""Circles on disk are the circles in memory, in a layout that our own reader takes."""

from pathlib import Path

import pytest
import torch

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.captions import Columns, read_captions
from lightning_dpipe.data.circles import TRAIN, draw_circle, drawn_circles
from lightning_dpipe.data.circles_folder import write_circles
from lightning_dpipe.data.images import decode_image


def test_what_is_written_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    assert main(["circles", str(folder), "--num", "5", "--size", "32", "--seed", "3"]) == 0
    assert "data.hint_column=conditioning_image" in capsys.readouterr().out
    samples = read_captions(folder, columns=Columns(hint="conditioning_image"))
    circles = drawn_circles(3, TRAIN, 5)
    assert [s.caption for s in samples] == [c.caption for c in circles]
    for sample, circle in zip(samples, circles, strict=True):
        image, hint = draw_circle(circle, 32)
        assert sample.hint is not None
        torch.testing.assert_close(decode_image(sample.path, 32), image, atol=1 / 127, rtol=0)
        shown = (decode_image(sample.hint, 32) + 1) / 2
        torch.testing.assert_close(shown, hint, atol=1 / 255, rtol=0)


def test_what_lies_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="holds something already"):
        write_circles(tmp_path, num=1, size=8)
    assert main(["circles", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(DataError, match="at least 1"):
        write_circles(tmp_path / "new", num=0, size=8)
