"""Two ranks that leave the plan to the search: ``python plan_job.py FOLDER``.

Trains under DDP, with a measured profile, and with that profile made so that one stage or two must
win; losses and plans are JSON files in the folder.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from strategy_job import train

from lightning_dpipe.core.jsonio import digest, save
from lightning_dpipe.core.profile import Link
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy

FREE = Link(latency_us=0, bytes_per_s=10**12)
DEAR = Link(latency_us=10**6, bytes_per_s=1000)


def main(folder: Path) -> None:
    train("ddp", folder, "ddp", epochs=2)
    auto = {"num_stages": "auto", "num_microbatches": "auto"}
    trainer, _ = train(
        "auto", folder, DiffusionPipeStrategy(**auto), epochs=2, callbacks=(BubbleFill(),)
    )
    profile = trainer.strategy.installed.built.profile
    plans = {"auto": trainer.strategy.plan}
    for name, p2p, allreduce in (("one", DEAR, FREE), ("two", FREE, DEAR)):
        strategy = DiffusionPipeStrategy(
            **auto, profile=replace(profile, p2p=p2p, allreduce=allreduce)
        )
        trainer, _ = train(name, folder, strategy, epochs=2, callbacks=(BubbleFill(),))
        plans[name] = trainer.strategy.plan
    rank = trainer.global_rank
    for name, plan in plans.items():
        save(plan, folder / f"{name}.plan.{rank}.json")
    found = {name: digest(plan) for name, plan in plans.items()}
    (folder / f"digests.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
