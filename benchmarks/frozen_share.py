"""How long the frozen part takes, as a share of the trained part: what there is to hide.

    python -m benchmarks.frozen_share [--quick] [--json]

Full-size Stable Diffusion 2.1 and ControlNet v1.0 at 512 px, batch 1, float32, one thread: forward
of all frozen components over forward and backward of the trained ones, measured layer by layer by
the profiler (weights are made up: times do not depend on them), next to the same ratio in FLOPs.
The DiffusionPipe paper (arXiv 2405.01248) reports 38-44 % and 76-89 % on an A100 at batch sizes 8
to 64: hardware, precision and batch differ here, so its figures are shown, not tested against. Some
minutes and 3 GiB, for weights are there one layer at a time; `--quick` is 128 px.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import Report, parser, show
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.objective.presets import controlnet_spec, sd21_spec
from lightning_dpipe.profiling.clock import Repeats
from lightning_dpipe.profiling.roofline import count_model
from lightning_dpipe.profiling.store import profile_model
from lightning_dpipe.strategy.host_memory import peak_host_bytes

MODELS: dict[str, tuple[Callable[..., PipelineSpec], str]] = {
    "sd21": (sd21_spec, "38-44 %"),
    "controlnet": (controlnet_spec, "76-89 %"),
}


def measure(name: str, image_size: int, repeats: Repeats) -> dict[str, float]:
    """Seconds and FLOPs of one sample, frozen and trained."""
    model = count_model(MODELS[name][0](image_size=image_size), dtype="float32")
    found = dict.fromkeys(("frozen_s", "trained_s", "frozen_tflop", "trained_tflop"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_model(
            MODELS[name][0](image_size=image_size), model.graph,
            samples={c.name: (1,) for c in model.graph.components},
            device=torch.device("cpu"), dtype="float32", cache_dir=Path(folder), repeats=repeats,
            progress=lambda text: show(f"{name}: {text}"),
        )  # fmt: skip
    backbones = {c.name for c in model.graph.backbones}
    for cost in profile.costs:
        side = "trained" if cost.name in backbones else "frozen"
        times_us = sum(x.forward_us[0] + x.backward_us[0] for x in cost.layers)
        found[f"{side}_s"] += times_us / 1e6
        forward, backward = model.work.flops(cost.name)
        found[f"{side}_tflop"] += (forward + backward) / 1e12
    return found


def main() -> int:
    """Measure both models."""
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    image_size = 128 if options.quick else 512
    done = Report(bench="frozen_share")
    for name in MODELS:
        found = measure(name, image_size, Repeats(warmup=1, repeats=1))
        share = found["frozen_s"] / found["trained_s"]
        by_flops = found["frozen_tflop"] / found["trained_tflop"]
        done.rows.append({
            "model": name,
            "pixels": image_size,
            **found,
            "time ratio (CPU, measured)": share,
            "FLOP ratio": by_flops,
            "paper (A100, batch 8-64)": MODELS[name][1],
        })  # fmt: skip
        done.figures[f"time_ratio_{name}"] = share
        done.figures[f"flop_ratio_{name}"] = by_flops
    done.figures["peak_gib"] = peak_host_bytes() / 2**30
    # What the paper builds on, whatever the hardware: ControlNet's frozen part is the larger one.
    more = done.figures["time_ratio_controlnet"] / done.figures["time_ratio_sd21"]
    done.figures["controlnet_over_sd21"] = more
    done.bar("controlnet_over_sd21", ">=", 1.0)
    return done.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
