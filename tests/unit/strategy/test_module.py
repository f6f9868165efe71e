"""`DiffusionModule` under plain Lightning, against a loop written by hand."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.strategy.local import sample_losses, select_fields
from lightning_dpipe.strategy.module import DiffusionModule
from small import cascade, small_batch
from toy import Toy, ToyData, draw, squared_error

trainer = functools.partial(
    Trainer,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)


class Record(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.indices: list[list[int]] = []
        self.val: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.indices.append(batch["index"].tolist())

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.val.append(float(trainer.callback_metrics["val/loss"]))


def by_hand(
    module: Toy, images: torch.Tensor, batch: int, estimate: torch.Tensor | None = None
) -> Any:
    """The toy's losses per sample, written out."""
    key = torch.tensor([[batch, slot] for slot in range(len(images))])
    with torch.no_grad():
        linear, tanh, _, last = module.encoder
        noisy, when, target = draw(last(tanh(linear(images))), key)
    temb = module.time(when)
    h = module.entry(noisy) if estimate is None else module.entry(noisy, estimate)
    skip = module.blocks[0](h, temb)
    h = skip
    for block in module.blocks[1:]:
        h = block(h, temb)
    prediction = module.join(h, skip)
    return squared_error(prediction, target), noisy - prediction


def test_losses_and_weights_equal_a_loop_by_hand(tmp_path: Path) -> None:
    record, module, data = Record(), Toy(), ToyData()
    trainer(max_epochs=2, callbacks=[record], default_root_dir=tmp_path).fit(module, data)

    expected = Toy()
    expected.configure_model()
    optimizer = expected.configure_optimizers()
    for step, indices in enumerate(record.indices):
        losses, _ = by_hand(expected, data.train_dataloader().dataset.images[indices], step)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        assert record.losses[step] == pytest.approx(float(losses.mean()), rel=1e-6)
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert module.batches_consumed == len(record.losses) == 8


def test_a_self_conditioned_step_reads_the_first_estimate() -> None:
    module = Toy(self_conditioning=True, seed=4)
    module.configure_model()
    images = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    coins = []
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module._trainer = None
    for batch in range(12):
        assert module.batches_consumed == batch
        coins.append(module.is_self_conditioned(batch))
        with torch.no_grad():
            zero = torch.zeros(6, 8)
            losses, estimate = by_hand(module, images, batch, zero)
            if coins[-1]:
                losses, _ = by_hand(module, images, batch, estimate)
        fields = {"image": images, "draw_key": module.training_keys(6)}
        got = sample_losses(module.spec, fields, self_conditioned=coins[-1])["mlp"]
        assert torch.equal(got, losses)
        module.batches_consumed += 1
    assert 0 < sum(coins) < 12


def test_bf16_self_conditioning_still_trains_every_weight() -> None:
    module = Toy(self_conditioning=True)
    module.configure_model()
    fields = {"image": torch.randn(4, 8), "draw_key": module.training_keys(4)}
    with torch.autocast("cpu", torch.bfloat16):
        losses = sample_losses(module.spec, fields, self_conditioned=True)["mlp"]
    losses.mean().backward()
    missing = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []


def test_frozen_components_never_train_nor_leave_eval_mode(tmp_path: Path) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
            self.seen.append(any(m.training for m in module.encoder.modules()))
            assert module.blocks.training

    module, watch = Toy(), Watch()
    run = trainer(max_epochs=2, callbacks=[watch], default_root_dir=tmp_path)
    run.fit(module, ToyData())
    run.validate(module, ToyData(), verbose=False)
    module.train()
    assert watch.seen
    assert not any(watch.seen)
    assert not any(m.training for m in module.encoder.modules())
    assert not any(p.requires_grad or p.grad is not None for p in module.encoder.parameters())


@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_validation_noise_depends_on_the_sample_only(tmp_path: Path, batch_size: int) -> None:
    module = Toy()
    run = trainer(default_root_dir=tmp_path)
    values = [
        run.validate(module, ToyData(batch_size=size), verbose=False)[0]["val/loss"]
        for size in (batch_size, 16)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_resume_keys_the_draws_as_an_uninterrupted_run(tmp_path: Path) -> None:
    def run(epochs: int, ckpt: Path | None = None) -> tuple[Record, Trainer]:
        record = Record()
        data = ToyData()
        data.train_dataloader = lambda: data.val_dataloader()  # type: ignore[method-assign]
        fit = trainer(max_epochs=epochs, callbacks=[record], default_root_dir=tmp_path)
        fit.fit(Toy(), data, ckpt_path=ckpt)
        return record, fit

    whole, _ = run(3)
    first, fit = run(1)
    fit.save_checkpoint(tmp_path / "a.ckpt")
    rest, _ = run(3, tmp_path / "a.ckpt")
    assert first.losses + rest.losses == whole.losses


def test_the_seed_of_seed_everything_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert Toy().seed == 17
    assert Toy(seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert Toy().seed == 0


@pytest.mark.parametrize("returned", [None, {"inputs": {}}])
def test_a_spec_that_is_none_is_refused(returned: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "pipeline_spec", lambda self: returned)
    with pytest.raises(SpecError, match=rf"of Toy returned a {type(returned).__name__}; return a"):
        Toy().prepare_spec()


def test_a_module_without_a_spec_is_told_what_to_write() -> None:
    class Bare(DiffusionModule):
        def configure_model(self) -> None:
            pass

    with pytest.raises(SpecError, match=r"Bare has no pipeline_spec\(\)"):
        Bare().configure_model()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1], "the batch is a list"),
        ({"index": torch.ones(2)}, r"batch field 'image' is NoneType.*has \['index'\]"),
        ({"image": torch.ones(2, 9)}, r"per-sample shape \(9,\), the spec declares \(8,\)"),
        ({"image": torch.ones(2, 8, dtype=torch.int64)}, "is torch.int64, the spec declares"),
    ],
)
def test_a_batch_that_does_not_fit_the_spec_is_named(batch: Any, message: str) -> None:
    module = Toy()
    module.configure_model()
    with pytest.raises(SpecError, match=message):
        select_fields(module.spec, batch)


def test_a_name_that_nobody_writes_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"layer 'join' reads \['nowhere'\]"):
        trainer(max_epochs=1, default_root_dir=tmp_path).fit(Toy(spec_error=True), ToyData())


def test_only_the_backbone_that_reads_the_estimate_runs_twice_in_one_process() -> None:
    """The other one may lack the names that the estimate is made of."""
    spec = cascade((2, 1), feedback=1)
    calls: Counter[str] = Counter()
    for backbone in spec.backbones:
        first = backbone.layers[0].module
        first.register_forward_hook(lambda *_, name=backbone.name: calls.update([name]))
    losses = sample_losses(spec, small_batch(4, seed=1), self_conditioned=True)
    assert {name: tuple(loss.shape) for name, loss in losses.items()} == {
        "net0": (4,),
        "net1": (4,),
    }
    assert calls == {"net0": 1, "net1": 2}
