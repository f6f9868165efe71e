"""`dpipe verify` and `dpipe plan`: they pass what is right and fail what is not."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dpipe.cli import verify
from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.cli.one_process import joint
from lightning_dpipe.cli.threaded import Outcome
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.data.fields import FieldDataset
from lightning_dpipe.models.spec import Backbone, Field, Layer, Loss, PipelineSpec
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.strategy.module import DiffusionModule


class Counting(nn.Module):
    """A layer with a fault that no single call shows: its output depends on how often it ran."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drift = drift
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.linear(h) * (1.0 + self.drift * self.calls)
        return result


class Mine(DiffusionModule):
    """A user's own module: two layers, no frozen part."""

    def __init__(self, drift: float = 0.0) -> None:
        super().__init__()
        self.drift = drift

    def configure_model(self) -> None:
        self.first, self.second = Counting(self.drift), Counting(0.0)

    def pipeline_spec(self) -> PipelineSpec:
        layers = (
            Layer(name="first", module=self.first, reads=("x",), writes=("h",)),
            Layer(name="second", module=self.second, reads=("h",), writes=("out",)),
        )
        return PipelineSpec(
            inputs={"x": Field(shape=(4,))},
            backbones=(Backbone(name="mine", layers=layers),),
            loss=Loss(fn=lambda out, x: (out - x).square().mean(1), reads=("out", "x")),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(FieldDataset({"x": torch.randn(32, 4)}), batch_size=4)


SMALL = ("recipe=smoke", "trainer.devices=2", "data.batch_size=4", "strategy.num_microbatches=3")


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_the_smoke_recipe_is_bit_identical(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", *SMALL]) == 0
    report = last_line(capsys)
    (plain,) = report["variants"]
    assert report["passed"]
    assert (plain["limit"], plain["num_differing"], plain["loss"]["relative"]) == (0.0, 0, 0.0)
    assert plain["num_gradients"] > 100


def test_self_conditioning_and_replicas_are_compared_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    command = ["recipe=digits_dit", "trainer.devices=4", "strategy.num_stages=2"]
    assert main(["verify", "--json", *command, "data.batch_size=2", "model.dit.num_layers=2"]) == 0
    report = last_line(capsys)
    assert [v["variant"] for v in report["variants"]] == ["plain", "self-conditioned"]
    assert all(v["limit"] == verify.REPLICA_LIMIT for v in report["variants"])
    assert all(v["worst"]["relative"] <= verify.REPLICA_LIMIT for v in report["variants"])


def test_one_gradient_off_by_its_last_bit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = verify.run_threads

    def off_by_a_bit(*args: Any, **kwargs: Any) -> Outcome:
        outcome = honest(*args, **kwargs)
        name, gradient = next((n, g) for n, g in outcome.gradients.items() if g is not None)
        wrong = torch.nextafter(gradient, torch.full_like(gradient, math.inf))
        return dataclasses.replace(outcome, gradients={**outcome.gradients, name: wrong})

    monkeypatch.setattr(verify, "run_threads", off_by_a_bit)
    assert main(["verify", *SMALL]) == 1
    printed = capsys.readouterr().out
    assert "FAIL (no difference allowed)" in printed
    assert "gradients that are not bit-identical             1" in printed


@pytest.mark.parametrize(("drift", "code"), [(0.0, 0), (1e-3, 1)])
def test_a_users_module_is_checked_by_its_name_alone(drift: float, code: int) -> None:
    here = f"{Mine.__module__}"
    command = [f"model._target_={here}.Mine", f"+model.drift={drift}"]
    assert main(["verify", *command, f"data._target_={here}.MyData", "trainer.devices=2"]) == code


@pytest.mark.parametrize(
    ("a", "b", "relative", "identical"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0, True),
        ([3.0, 4.5], [3.0, 4.0], 0.1, False),
        ([0.0, 0.0], [0.0, 0.0], 0.0, True),
        ([1.0, 0.0], [0.0, 0.0], math.inf, False),
        ([math.nan, 0.0], [1.0, 0.0], math.inf, False),
        ([math.nan, 0.0], [math.nan, 0.0], math.inf, False),
        (None, [1.0], math.inf, False),
        (None, None, 0.0, True),
    ],
)
def test_a_difference_is_never_hidden(
    a: list[float] | None, b: list[float] | None, relative: float, identical: bool
) -> None:
    tensors = [None if x is None else torch.tensor(x) for x in (a, b)]
    found = verify._difference("w", tensors[0], tensors[1])
    assert found.relative == pytest.approx(relative)
    assert found.identical is identical


def test_two_backbones_in_opposite_directions_are_bit_identical(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their losses have sums of their own, which are added last."""
    command = ["model._target_=cascade.Cascade", "data._target_=cascade.CascadeData"]
    assert main(["verify", "--json", *command, "trainer.devices=2"]) == 0
    (plain,) = last_line(capsys)["variants"]
    assert (plain["num_differing"], plain["loss"]["relative"]) == (0, 0.0)


def test_slot_order_interleaves_ranks_and_copes_with_unequal_batches() -> None:
    values = {1: {0: torch.tensor([10, 11])}, 0: {0: torch.tensor([0, 1, 2])}}
    assert joint(values)[0].tolist() == [0, 10, 1, 11, 2]


def test_plan_writes_the_plan_it_describes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["recipe=smoke", "trainer.devices=4", "strategy.num_stages=2", "data.batch_size=4"]
    assert main(["plan", *command, "--json"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.strip().splitlines()[-1])
    folder = Path(report["folder"])
    plan, profile = load(Plan, folder / "plan.json"), load(Profile, folder / "profile.json")
    assert plan == make_plan(profile, world_size=4, batch_size=4, num_stages=2)
    assert (report["world_size"], report["num_stages"], report["num_replicas"]) == (4, 2, 2)
    assert report["global_batch"] == 16
    assert report["iteration_us_filled"] <= report["iteration_us_unfilled"]
    for name in ("timeline.png", "timeline.trace.json"):
        assert (folder / name).stat().st_size > 1000
    assert "stage  layers" in printed
    assert "device 1" in printed
    files = [f"strategy.plan={folder / 'plan.json'}", f"strategy.profile={folder / 'profile.json'}"]
    assert main(["verify", *command, *files]) == 0
    assert "2 stages x 2 replicas" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.num_stages=3", "4 ranks cannot form pipelines of 3 devices"),
        ("strategy.schedule=none", "'none'"),
        ("strategy.num_microbatches=99", "99"),
        ("strategy=ddp", "has no plan; use strategy=diffusionpipe"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["recipe=smoke", "trainer.devices=4", "data.batch_size=4", override]
    assert main(["plan", *command]) == 2
    assert message in capsys.readouterr().err
