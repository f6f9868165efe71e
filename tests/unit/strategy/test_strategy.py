"""The strategy in one process (a pipeline of one stage): flags honoured, or refused by name."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_dpipe.core.errors import DPipeError, PlanError, ScheduleError, UnsupportedError
from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.callbacks.ledger import Ledger
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from toy import Images, Toy, ToyData

RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A world of one, taken down afterwards; profiles are kept for this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def trainer(strategy: Any = None, **flags: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(strategy=strategy or DiffusionPipeStrategy(), **defaults | flags)


class Ordered(ToyData):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(self.count), batch_size=self.batch_size)


def fit(strategy: Any = None, data: Any = None, module: Any = None, **flags: Any) -> Any:
    torch.manual_seed(0)
    module = module or Toy(self_conditioning=True)
    run = trainer(strategy, **flags)
    run.fit(module, data or Ordered(count=22, batch_size=8), ckpt_path=flags.pop("ckpt", None))
    return run, module


def test_a_fit_with_every_usual_flag_equals_plain_lightning(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "gradient_clip_val": 0.2,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "default_root_dir": tmp_path,
    }
    plain, expected = fit("auto", **flags)
    callbacks = [BubbleFill(), Ledger(every_n_steps=2, picture=False)]
    piped, got = fit(callbacks=callbacks, **flags)
    # Two summation orders: eight micro-batches here, one batch there.
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], value, rtol=0, atol=2e-6, msg=name)
    assert piped.global_step == plain.global_step == 4
    for key in ("train/loss", "val/loss"):
        assert float(piped.callback_metrics[key]) == pytest.approx(
            float(plain.callback_metrics[key]), rel=1e-5
        )
    assert got.batches_consumed == 6
    ledger = {k: float(v) for k, v in piped.callback_metrics.items() if k.startswith("time/")}
    spent = sum(v for k, v in ledger.items() if k != "time/iteration_s")
    assert spent == pytest.approx(ledger["time/iteration_s"], rel=1e-2)


def test_a_file_written_here_resumes_in_plain_lightning_and_the_other_way(tmp_path: Path) -> None:
    def epochs(strategy: Any, count: int, ckpt: Path | None = None, save: str = "") -> Any:
        torch.manual_seed(0)
        run = trainer(strategy, max_epochs=count, default_root_dir=tmp_path)
        module = Toy(self_conditioning=True)
        run.fit(module, Ordered(count=24), ckpt_path=ckpt)
        if save:
            run.save_checkpoint(tmp_path / save)
        return run, module

    run, whole = epochs(None, 2, save="whole.ckpt")
    epochs(None, 1, save="pipe.ckpt")
    epochs("auto", 1, save="plain.ckpt")
    files = {name: torch.load(tmp_path / f"{name}.ckpt") for name in ("pipe", "plain")}
    assert list(files["pipe"]["state_dict"]) == list(files["plain"]["state_dict"])
    assert files["pipe"].keys() == files["plain"].keys()
    states = [f["optimizer_states"][0] for f in files.values()]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert list(states[0]["state"]) == list(states[1]["state"])
    for strategy, file in ((None, "pipe"), ("auto", "pipe"), (None, "plain")):
        resumed_run, resumed = epochs(strategy, 2, tmp_path / f"{file}.ckpt")
        assert resumed_run.global_step == run.global_step
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=2e-6)


def test_validate_predict_and_a_second_fit_in_one_process(tmp_path: Path) -> None:
    run, module = fit(callbacks=[BubbleFill()], default_root_dir=tmp_path)
    value = float(run.callback_metrics["val/loss"])
    assert run.validate(module, ToyData(), verbose=False)[0]["val/loss"] == pytest.approx(value)
    assert run.test(module, ToyData(), verbose=False)[0]["test/loss"] == pytest.approx(value)
    assert len(run.predict(module, ToyData())) == 2
    before = module.batches_consumed
    again = trainer(max_epochs=1, default_root_dir=tmp_path)  # without BubbleFill, another batch
    again.fit(module, Ordered(count=8, batch_size=4))
    assert module.batches_consumed == before + 2
    assert again.strategy.plan.fills == ()
    assert again.strategy.plan.batch_size == 4


def test_checkpoints_are_written_and_monitored(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/loss", save_last=True)
    fit(callbacks=[best], enable_checkpointing=True, default_root_dir=tmp_path)
    assert Path(best.best_model_path).exists()
    assert (tmp_path / "last.ckpt").exists()


def test_bf16_and_the_string_name_work(tmp_path: Path) -> None:
    import lightning_dpipe  # noqa: F401

    run, _ = fit("diffusionpipe", precision="bf16-mixed", default_root_dir=tmp_path)
    plain, _ = fit("auto", precision="bf16-mixed", default_root_dir=tmp_path)
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(
        float(plain.callback_metrics["val/loss"]), rel=2e-2
    )


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnStep(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class IteratorStep(Toy):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class OwnBackward(Toy):
    def backward(self, loss: Any) -> None:
        loss.backward()


class Plain(LightningModule):
    def training_step(self, batch: Any) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


class TwoOptimizers(Toy):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.join.parameters(), lr=1), super().configure_optimizers()]


class Lbfgs(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.join.parameters())


class Transfers(Toy):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Normed(Toy):
    def configure_model(self) -> None:
        super().configure_model()
        self.join = nn.Sequential(self.join, nn.BatchNorm1d(8))
        self.join.forward = lambda h, skip: self.join[1](self.join[0](h, skip))
        self.prepare_spec()


class WeightAveraging(Callback):
    """Stands for Lightning's, which older versions lack."""


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (Manual, {}, "sets automatic_optimization = False"),
        (OwnStep, {}, "OwnStep overrides training_step"),
        (IteratorStep, {}, "overrides training_step"),
        (OwnBackward, {}, "OwnBackward overrides backward"),
        (Plain, {}, "Plain is not a DiffusionModule"),
        (TwoOptimizers, {}, "returned several optimizers; expected exactly 1"),
        (Lbfgs, {}, "optimizer LBFGS looks at all parameters"),
        (Transfers, {"callbacks": [BubbleFill()]}, "Transfers overrides on_after_batch_transfer"),
        (Normed, {}, "BatchNorm"),
        (Toy, {"precision": "16-true"}, 'precision="16-true" needs a gradient scaler'),
        (Toy, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (Toy, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        (Toy, {"callbacks": [WeightAveraging()]}, "callback WeightAveraging"),
        (functools.partial(Toy, spec_error=True), {}, "nowhere"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, module: Any, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(DPipeError, match=message):
        trainer(default_root_dir=tmp_path, **flags).fit(module(), ToyData())


def test_16_mixed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(default_root_dir=tmp_path)
    monkeypatch.setattr(run.strategy.precision_plugin, "precision", "16-mixed")
    with pytest.raises(UnsupportedError, match='precision="16-mixed" needs a gradient scaler'):
        run.fit(Toy(), ToyData())


PLAN = Plan(
    graph_digest="0",
    profile_digest="0",
    groups=((1, 0),),
    stages=(Stage(backbone="mlp", start=0, stop=6, devices=(0,)),),
    num_microbatches=1,
    batch_size=8,
    schedule="1f1b",
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": 2}, PlanError, "1 ranks cannot form pipelines of 2 devices"),
        ({"schedule": "2f2b"}, ScheduleError, "2f2b"),
        ({"num_microbatches": 9}, PlanError, r"num_microbatches=9.* 8 samples .8 per device x 1"),
        ({"plan": PLAN}, PlanError, "the plan is for 2 ranks, this run has 1"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[DPipeError], message: str
) -> None:
    strategy = DiffusionPipeStrategy(**options)
    with pytest.raises(error, match=message):
        trainer(strategy, default_root_dir=tmp_path).fit(Toy(), ToyData())


def test_two_training_loaders_are_refused(tmp_path: Path) -> None:
    loader = ToyData().train_dataloader()
    with pytest.raises(UnsupportedError, match="2 training loaders"):
        trainer(default_root_dir=tmp_path).fit(Toy(), {"a": loader, "b": loader})


def test_a_loader_without_batch_size_needs_it_given(tmp_path: Path) -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter([{"image": torch.ones(4, 8)} for _ in range(2)])

    batches = Batches()
    with pytest.raises(UnsupportedError, match=r"pass DiffusionPipeStrategy\(batch_size="):
        trainer(default_root_dir=tmp_path).fit(Toy(), batches)
    run = trainer(DiffusionPipeStrategy(batch_size=4), max_epochs=1, default_root_dir=tmp_path)
    run.fit(Toy(), batches)
    assert run.global_step == 2


def test_a_module_cut_from_elsewhere_is_refused(tmp_path: Path) -> None:
    module = Toy()
    module.configure_model()
    module.join.mix.weight = nn.Parameter(module.join.mix.weight.to("meta"))
    with pytest.raises(UnsupportedError, match="has weights on meta"):
        trainer(default_root_dir=tmp_path).fit(module, ToyData())


def test_without_a_pipeline_bubble_fill_says_that_it_does_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="BubbleFill does nothing under SingleDeviceStrategy"):
        fit("auto", callbacks=[BubbleFill()], max_epochs=1, default_root_dir=tmp_path)


class Resumable:
    """A loader that knows how many batches it has handed out in this epoch."""

    batch_size = 4

    def __init__(self) -> None:
        self.images, self.at = Images(24), 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self):
            indices = range(4 * self.at, 4 * self.at + 4)
            self.at += 1
            yield torch.utils.data.default_collate([self.images[i] for i in indices])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("fill", [False, True])
def test_a_stateful_loader_resumes_within_an_epoch(tmp_path: Path, fill: bool) -> None:
    class Seen(Callback):
        def __init__(self) -> None:
            self.indices: list[int] = []

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, i: int
        ) -> None:
            self.indices += batch["index"].tolist()

    def run(steps: int, ckpt: Path | None = None) -> tuple[list[int], Trainer]:
        seen = Seen()
        callbacks = [seen, BubbleFill()] if fill else [seen]
        it = trainer(max_steps=steps, max_epochs=-1, callbacks=callbacks, default_root_dir=tmp_path)
        it.fit(Toy(), Resumable(), ckpt_path=ckpt)
        return seen.indices, it

    whole, _ = run(9)
    first, stopped = run(4)
    stopped.save_checkpoint(tmp_path / "mid.ckpt")
    rest, _ = run(9, tmp_path / "mid.ckpt")
    assert first + rest == whole
