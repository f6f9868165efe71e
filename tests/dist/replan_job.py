"""Two ranks train with and without re-planning: ``python replan_job.py FOLDER``."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.strategy import replan
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.callbacks.ledger import Ledger
from lightning_dpipe.strategy.callbacks.plan_artifact import PlanArtifact
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from toy import Toy, ToyData


class Record(Callback):
    """Losses, the plan in use and what was logged, step by step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        strategy = trainer.strategy
        plans = {"plan": digest(strategy.plan), "settled": digest(strategy.settled_plan)}
        self.rows.append({**metrics, **plans})


def flip(plan: Plan, profile: Profile, *_: Any) -> replan.Proposal:
    """Other fills whatever was measured: all after the last op, or all before the first one."""
    last = plan.num_microbatches - 1
    late = tuple(
        replace(f, after=Op(stage=f.device, kind=OpKind.B, microbatch=last)) for f in plan.fills
    )
    early = tuple(replace(f, after=None) for f in plan.fills)
    return replan.Proposal(
        plan=replace(plan, fills=early if plan.fills == late else late), profile=profile, gain=0.5
    )


def train(name: str, folder: Path, *callbacks: Callback, every: int | None) -> None:
    record = Record()
    trainer = Trainer(
        strategy=DiffusionPipeStrategy(replan_every_n_steps=every),
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        callbacks=[BubbleFill(), record, *callbacks],
    )
    module = Toy(self_conditioning=False)
    # 8 full batches and a short one an epoch, and a validation after each.
    trainer.fit(module, ToyData(count=136, batch_size=8, val=16))
    weights = {k: v.double().sum().item() for k, v in _held(module).items()}
    rows = {"rows": record.rows, "weights": weights, "replans": every}
    (folder / f"{name}.{trainer.global_rank}.json").write_text(json.dumps(rows))


def _held(module: Toy) -> dict[str, torch.Tensor]:
    return {k: v for k, v in module.state_dict().items() if not v.is_meta}


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    train("plain", where, every=None)
    train("asked", where, every=5)
    replan.propose = flip
    train("forced", where, Ledger(every_n_steps=7, picture=False), PlanArtifact(where), every=5)
