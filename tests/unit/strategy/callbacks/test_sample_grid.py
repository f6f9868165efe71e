"""The sample grid: whole weights for drawing, the module as it was afterwards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.data.shapes import ShapesDataModule
from lightning_dpipe.strategy.callbacks.ema import EMA
from lightning_dpipe.strategy.callbacks.samples import SampleGrid, _score
from lightning_dpipe.strategy.callbacks.whole import whole_weights


class Painter(L.LightningModule):
    """Repeats the asked image times a weight: 1 is perfect recall, 0 draws grey."""

    def __init__(self) -> None:
        super().__init__()
        self.brush = nn.Linear(1, 1, bias=False)
        self.other = nn.Linear(1, 1, bias=False, device="meta")  # on another stage

    def draw_samples(self, fields: dict[str, Tensor], *, num_steps: int, guidance: float) -> Tensor:
        assert not self.training
        images: Tensor = fields["image"] * self.brush.weight.item() * self.other.weight.item()
        return images


def trainer_with(weights: dict[str, Tensor], callbacks: list[Any]) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(
            lightning_module_state_dict=lambda: weights, barrier=lambda name: None
        ),
        is_global_zero=True,
        datamodule=ShapesDataModule(),
        callbacks=callbacks,
        logger=None,
    )


def test_absent_weights_are_put_in_and_taken_out_again() -> None:
    module = Painter().train()
    own = {name: id(p) for name, p in module.named_parameters()}
    with whole_weights(module, {"other.weight": torch.full((1, 1), 2.0)}):
        assert float(module.other.weight) == 2.0
        assert not module.training
        assert not torch.is_grad_enabled()
    assert {name: id(p) for name, p in module.named_parameters()} == own
    assert module.other.weight.is_meta
    assert module.training
    assert torch.is_grad_enabled()


def test_the_module_is_put_back_when_drawing_fails() -> None:
    module = Painter()
    with (
        pytest.raises(RuntimeError, match="boom"),
        whole_weights(module, {"other.weight": torch.ones(1, 1)}),
    ):
        raise RuntimeError("boom")
    assert module.other.weight.is_meta


@pytest.mark.parametrize(("average", "first"), [(None, True), (0.0, False)])
def test_ranks_tell_recall_from_grey_and_an_average_wins(
    average: float | None, first: bool, tmp_path: Path
) -> None:
    ones = {"brush.weight": torch.ones(1, 1), "other.weight": torch.ones(1, 1)}
    callbacks: list[Any] = []
    if average is not None:
        ema = EMA()
        ema.average = {"brush.weight": torch.full((1, 1), average)}
        callbacks.append(ema)
    grid = SampleGrid(tmp_path / "deep" / "samples.png", num_samples=5)
    grid.on_train_end(trainer_with(ones, callbacks), Painter())
    assert grid.drawn is not None
    assert grid.drawn.captions == ShapesDataModule().validation_captions[:5]
    assert grid.drawn.num_references == 24 + 24 * 36
    assert (grid.drawn.ranks == (1, 1, 1, 1, 1)) is first
    assert (grid.drawn.hits == 5) is first
    with Image.open(grid.drawn.path) as picture:
        assert picture.width > 5 * 96


def test_a_label_is_met_by_any_image_that_has_it() -> None:
    real = {
        "image": torch.tensor([0.0, 1.0, 5.0])[:, None, None, None],
        "label": torch.tensor([7, 8, 7]),
    }
    images = torch.tensor([4.0, 0.9, 0.1])[:, None, None, None]
    drawn = _score(["7", "8", "8"], {"label": torch.tensor([7, 8, 8])}, images, [real], Path("x"))
    assert (drawn.hits, drawn.ranks, drawn.num_references) == (2, (), 3)


def test_a_module_that_cannot_draw_is_refused_before_training() -> None:
    grid: Any = SampleGrid("x.png")
    with pytest.raises(UnsupportedError, match=r"asks LightningModule for draw_samples"):
        grid.setup(None, L.LightningModule(), "fit")


def test_every_second_validation_draws_the_same_prompts_under_its_step(tmp_path: Path) -> None:
    module = Painter()
    noted: list[Any] = []
    draw = module.draw_samples
    module.draw_samples = lambda fields, **how: noted.append(fields) or draw(fields, **how)  # type: ignore[method-assign]
    ones = {"brush.weight": torch.ones(1, 1), "other.weight": torch.ones(1, 1)}
    trainer = trainer_with(ones, [])
    trainer.state = SimpleNamespace(fn="fit")
    grid = SampleGrid(tmp_path / "samples.png", num_samples=3, every_n_validations=2)
    for step in range(5):
        trainer.global_step, trainer.sanity_checking = step, step == 0
        grid.on_validation_end(trainer, module)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "samples_step_2.png",
        "samples_step_4.png",
    ]
    assert torch.equal(noted[0]["image"], noted[1]["image"])
    grid.on_train_end(trainer, module)
    assert (tmp_path / "samples.png").exists()
    quiet = SampleGrid(tmp_path / "quiet.png")
    quiet.on_validation_end(trainer, module)
    assert not list(tmp_path.glob("quiet*"))
