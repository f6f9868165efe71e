"""Full-size Stable Diffusion 2.1 or ControlNet, really trained: two ranks against one process.

    python -m benchmarks.full_size [--model sd21|controlnet] [--quick] [--json]

Random weights, 256 px, one thread a rank, float32, AdamW. First a pipeline of two gloo processes
with the frozen work in its bubbles, then one process that accumulates the same micro-batches in a
plain loop and steps torch's own optimizer. Compared: the loss of every step (the second one shows
the update). Printed: peak host memory of each process, when its model is made and in all. The sides
run one after the other; sd21 needs about 18 GiB for either, and minutes on two cores. `--width`
narrows the U-Net (full: 320), for trying the benchmark itself; `--quick` is width 32, 64 px.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from diffusers import DDPMScheduler
from lightning.pytorch import Callback
from torch import Tensor

from benchmarks.common import Report, parser, show
from lightning_dpipe.cli.one_process import accumulate_step
from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.data.circles import CirclesDataModule
from lightning_dpipe.models import presets
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.profiling.roofline import count_model, roofline_profile
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.host_memory import peak_host_bytes
from lightning_dpipe.strategy.local import select_fields
from lightning_dpipe.strategy.modules.controlnet import ControlNet
from lightning_dpipe.strategy.modules.latent import LatentModule
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig
from lightning_dpipe.strategy.modules.stable_diffusion import StableDiffusion
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy

FULL_WIDTH, NUM_TOKENS, SEED = 320, 77, 0
NUM_STEPS = {"sd21": 2, "controlnet": 1}
OPTIMIZER = AdamWConfig(lr=1e-5, weight_decay=0.01)
CORE = Device(
    name="CPU core",
    flops_per_s={"float32": 100_000_000_000},
    memory_bytes=64 * 2**30,
    memory_bytes_per_s=10_000_000_000,
    max_efficiency=0.8,
    half_efficiency_flops=200_000,
    memory_efficiency=0.8,
    launch_us=5,
)


def build(options: argparse.Namespace) -> LatentModule:
    """The module, nothing built yet."""
    sd21 = options.model == "sd21"
    unet = dict(presets.SD21_UNET if sd21 else presets.SD15_UNET)
    text, vae = dict(presets.SD21_TEXT if sd21 else presets.SD15_TEXT), dict(presets.SD_VAE)
    if options.width != FULL_WIDTH:
        width = options.width
        unet["block_out_channels"] = (width, 2 * width, 4 * width, 4 * width)
        unet["attention_head_dim"] = 4
        text |= {"num_hidden_layers": 3, "intermediate_size": 256}
        vae["block_out_channels"] = (32, 64, 64, 64)
    prediction = "v_prediction" if sd21 else "epsilon"
    scheduler = DDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012,
        prediction_type=prediction, clip_sample=False,
    )  # fmt: skip
    kind = StableDiffusion if sd21 else ControlNet
    return kind(
        unet=unet, vae=vae, text=text, scheduler=scheduler, optimizer=OPTIMIZER, seed=SEED,
        image_size=options.image_size, num_tokens=NUM_TOKENS,
    )  # fmt: skip


def estimate(options: argparse.Namespace) -> Profile:
    """A profile without measuring: of the model on meta, for two cores."""
    module = build(options)
    module.prepare_spec = lambda: None  # type: ignore[method-assign]
    with torch.device("meta"):
        module.configure_model()
    del module.prepare_spec
    link = Link(latency_us=60, bytes_per_s=2_000_000_000, host_us=40)
    cluster = Cluster(
        name="two cores", nodes=1, devices_per_node=2, device=CORE, inside=link, between=link,
        nic_bytes_per_s=2_000_000_000,
    )  # fmt: skip
    return roofline_profile(count_model(module.spec, dtype="float32"), cluster=cluster)


class Record(Callback):
    """Batches, losses and memory of this rank, written when training ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.made_bytes = 0
        self._start_s = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.made_bytes = peak_host_bytes()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(select_fields(pl_module.spec, batch))
        self._start_s = time.monotonic()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds.append(time.monotonic() - self._start_s)
        self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        rank, plan = trainer.global_rank, trainer.strategy.plan
        torch.save(self.batches, self.folder / f"batches_{rank}.pt")
        stages = plan.stages_on(plan.locate(rank)[1])
        found = {
            "losses": self.losses, "seconds": self.seconds, "made_bytes": self.made_bytes,
            "peak_bytes": peak_host_bytes(), "stages": list(stages), "plan": to_data(plan),
        }  # fmt: skip
        (self.folder / f"rank_{rank}.json").write_text(json.dumps(found))


def pipeline(options: argparse.Namespace) -> None:
    """Train on two ranks."""
    L.seed_everything(SEED, verbose=False)
    profile = estimate(options)
    L.seed_everything(SEED, verbose=False)
    steps = NUM_STEPS[options.model]
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[BubbleFill(), Record(options.folder)],
        strategy=DiffusionPipeStrategy(
            num_stages=2, num_microbatches=options.microbatches, profile=profile,
            batch_size=options.batch_size,
        ),
    )  # fmt: skip
    data = CirclesDataModule(
        batch_size=options.batch_size, size=options.image_size, num_tokens=NUM_TOKENS,
        num_samples=2 * options.batch_size * (steps + 1), seed=SEED,
    )  # fmt: skip
    trainer.fit(build(options), data)


def alone(options: argparse.Namespace) -> None:
    """The same steps in one process: no strategy, engine or Lightning loop."""
    L.seed_everything(SEED, verbose=False)
    module = build(options)
    module.configure_model()
    made_bytes = peak_host_bytes()
    module.train()
    graph = trace(module.spec)
    binding = bind(module.spec, graph)
    plan: Plan = from_data(Plan, json.loads((options.folder / "rank_0.json").read_text())["plan"])
    trained = [p for p in module.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        trained, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )  # fmt: skip
    ranks = [torch.load(options.folder / f"batches_{rank}.pt") for rank in range(plan.world_size)]
    losses, seconds = [], []
    for step in range(NUM_STEPS[options.model]):
        start_s = time.monotonic()
        fields = [keyed(own[step], step, rank, len(ranks)) for rank, own in enumerate(ranks)]
        losses.append(accumulate_step(binding, graph, plan, fields, self_conditioned=False))
        adamw.step()
        adamw.zero_grad()
        seconds.append(time.monotonic() - start_s)
    found = {
        "losses": losses, "seconds": seconds, "made_bytes": made_bytes,
        "peak_bytes": peak_host_bytes(), "stages": [],
    }  # fmt: skip
    (options.folder / "alone.json").write_text(json.dumps(found))


def keyed(fields: Mapping[str, Tensor], step: int, rank: int, world: int) -> dict[str, Tensor]:
    """A rank's batch with the draw keys that training gives it."""
    slots = torch.arange(len(fields["image"])) * world + rank
    return {**fields, DRAW_KEY: torch.stack([torch.full_like(slots, step), slots], dim=1)}


def report(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run both sides as processes of their own, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        for role in ("pipeline", "alone"):
            show(f"{role} ...")
            command = [sys.executable, "-m", "benchmarks.full_size", *arguments]
            subprocess.run([*command, "--role", role, "--folder", folder], check=True, stdout=2)
        sides = {
            name: json.loads(Path(folder, f"{name}.json").read_text())
            for name in ("rank_0", "rank_1", "alone")
        }
    done = Report(bench="full_size")
    for name, side in sides.items():
        done.rows.append({
            "process": name,
            "stages": str(side["stages"]),
            "losses": " ".join(f"{loss:.7f}" for loss in side["losses"]),
            "made_gib": side["made_bytes"] / 2**30,
            "peak_gib": side["peak_bytes"] / 2**30,
            "step_s": max(side["seconds"]),
        })  # fmt: skip
        done.figures[f"made_gib_{name}"] = side["made_bytes"] / 2**30
        done.figures[f"peak_gib_{name}"] = side["peak_bytes"] / 2**30
    plan: Plan = from_data(Plan, sides["rank_0"]["plan"])
    pairs = list(zip(sides["rank_0"]["losses"], sides["alone"]["losses"], strict=True))
    done.figures["loss_max_rel"] = max(abs(a - b) / abs(b) for a, b in pairs)
    done.figures["steps"] = len(pairs)
    done.figures["fills_in_bubbles"] = sum(f.after is not None for f in plan.fills)
    done.bar("loss_max_rel", "<=", 1e-5)
    done.bar("fills_in_bubbles", ">=", 1)
    done.bar("steps", "==", NUM_STEPS[options.model])
    return done.finish(as_json=options.json)


def main() -> int:
    """Read the options and run the part that is asked for."""
    options = parser(__doc__)
    options.add_argument("--model", choices=list(NUM_STEPS), default="sd21")
    options.add_argument("--width", type=int, default=FULL_WIDTH, help="first level's channels")
    options.add_argument("--image-size", type=int, default=256)
    options.add_argument("--batch-size", type=int, default=2, help="samples per rank")
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--role", choices=["pipeline", "alone"], help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.quick:
        chosen.width, chosen.image_size = min(chosen.width, 32), min(chosen.image_size, 64)
    torch.set_num_threads(1)
    if chosen.role is not None:
        {"pipeline": pipeline, "alone": alone}[chosen.role](chosen)
        return 0
    return report(chosen, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
