"""Two backbones in opposite directions against the same two trained one after the other.

    python -m benchmarks.bidirectional [--quick] [--json]

A cascade of two SD-2.1-sized U-Nets, at 256 and 512 px, with one text encoder and one VAE, on 4 and
8 emulated A100s: the real engine over threads, layers take their estimated time
(`benchmarks.emulation`). Both sides fill their bubbles and see the same batches; "one after the
other" is the sum of two iterations, each with the frozen work that its own backbone needs.
Counting the kernels takes a minute first. A busy machine shows up as `prediction_error`.
`gain_of_encoding_once` is what shared encodings alone would save; `gain_of_directions_D` is the
rest of the speed-up.
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn

from benchmarks.common import Report, parser, show
from benchmarks.emulation import Case, emulate
from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.graph import ComponentKind, ModelGraph
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models import presets
from lightning_dpipe.models.spec import Field, FrozenComponent, Layer, Loss, PipelineSpec
from lightning_dpipe.models.text import clip_encoder
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.latents import vae_encoder
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.profiling.roofline import count_model, roofline_profile
from lightning_dpipe.simulation.simulate import simulate

ROWS = 64
"""Samples per device."""

SIDE = 512
CLUSTER = Path(__file__).resolve().parents[1] / "conf" / "cluster" / "p4de_8x8.yaml"


def beside(noisy: Tensor, low: Tensor) -> Tensor:
    """The small latent, upsampled, beside the noisy large one."""
    return torch.cat([noisy, nn.functional.interpolate(low, scale_factor=2.0)], dim=1)


def cascade_spec() -> PipelineSpec:
    """Base U-Net on 32 x 32 latents, super-resolution U-Net on 64 x 64 ones; weights on meta."""
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler(prediction_type="v_prediction"))
    vae = presets.on_meta(AutoencoderKL, presets.SD_VAE)
    text = presets.text_encoder_on_meta(presets.SD21_TEXT)
    base = presets.on_meta(UNet2DConditionModel, presets.SD21_UNET)
    fine = presets.on_meta(UNet2DConditionModel, {**presets.SD21_UNET, "in_channels": 8})
    low = Layer(name="low", module=nn.AvgPool2d(2), reads=("latents",), writes=("low",))
    join = Layer(name="join", module=beside, reads=("fine_noisy", "low"), writes=("pair",))
    names = {
        "base": {"sample": "base_noisy", "timestep": "base_timestep"},
        "fine": {"sample": "pair", "timestep": "fine_timestep"},
    }
    return PipelineSpec(
        inputs={
            "image": Field(shape=(3, SIDE, SIDE)),
            "input_ids": Field(shape=(77,), dtype=torch.int64),
        },
        frozen=(
            clip_encoder(text, check=False),
            vae_encoder(vae, seed=0, check=False),
            FrozenComponent(name="low", layers=(low,)),
            noise_component(schedule, seed=0, latents="low", name="base_noise", prefix="base_"),
            noise_component(schedule, seed=0, name="fine_noise", prefix="fine_"),
            FrozenComponent(name="join", layers=(join,)),
        ),
        backbones=tuple(
            unet_backbone(unet, name=name, check=False, **names[name])
            for name, unet in (("base", base), ("fine", fine))
        ),
        loss={
            name: Loss(fn=weighted_mse, reads=("out", f"{name}_target", f"{name}_weight"))
            for name in names
        },
    )


def alone(profile: Profile, backbone: str) -> Profile:
    """The profile of one backbone and of the frozen work that it needs."""
    graph = profile.graph
    losses = tuple(x for x in graph.losses if x.backbone == backbone)
    kept = [graph.component(backbone)]
    wanted = {v for layer in kept[0].layers for v in layer.reads}
    wanted.update(v for loss in losses for v in loss.reads)
    for component in reversed(graph.frozen):  # readers come after writers
        if any(v in wanted for layer in component.layers for v in layer.writes):
            kept.insert(0, component)
            wanted |= {v for layer in component.layers for v in layer.reads}
    names = {c.name for c in kept}
    part = ModelGraph(
        values=graph.values, inputs=graph.inputs, components=tuple(kept), losses=losses
    )
    costs = tuple(c for c in profile.costs if c.name in names)
    return replace(profile, graph=part, costs=costs)


def work_us(profile: Profile, kind: ComponentKind) -> int:
    """Time of all components of a kind on a device's batch, cut nowhere."""
    total_us = 0
    for component in profile.graph.components:
        if component.kind is kind:
            span = (component.name, 0, len(component.layers), ROWS)
            total_us += profile.forward_us(*span)
            total_us += profile.backward_us(*span) if kind is ComponentKind.BACKBONE else 0
    return total_us


def planned(profile: Profile, devices: int, microbatches: int) -> Plan:
    return make_plan(
        profile, world_size=devices, batch_size=ROWS, num_stages=devices,
        num_microbatches=microbatches,
    )  # fmt: skip


def run(report: Report, profile: Profile, devices: int, microbatches: int, steps: int) -> None:
    """One row a way of training, and how much faster opposite directions are."""
    took: dict[str, float] = {}
    predicted: dict[str, int] = {}
    whole = {"together": profile, **{n: alone(profile, n) for n in ("base", "fine")}}
    for name, part in whole.items():
        show(f"{devices} devices, {microbatches} micro-batches, {name} ...")
        plan = planned(part, devices, microbatches)
        said = simulate(plan, schedule_of(plan), part)
        predicted[name] = said.end_us
        cases = {name: Case(plan=plan)}
        timelines = emulate(part, cases, rounds=steps)[name]
        took[name] = statistics.median(t.end_us for t in timelines)
        report.rows.append(
            {"devices": devices, "microbatches": microbatches, "iteration": name,
             "measured_ms": took[name] / 1e3, "predicted_ms": said.end_us / 1e3,
             "error": abs(said.end_us - took[name]) / took[name],
             "bubble": statistics.median(t.bubble_ratio for t in timelines),
             "predicted_bubble": said.bubble_ratio}
        )  # fmt: skip
    for name, us in (("speedup", took), ("predicted_speedup", predicted)):
        ratio = (us["base"] + us["fine"]) / us["together"]
        report.figures[f"{name}_{devices}_m{microbatches}"] = ratio


def main(arguments: list[str]) -> int:
    options = parser(__doc__).parse_args(arguments)
    report = Report("bidirectional")
    show("counting kernels ...")
    counted = count_model(cascade_spec())
    profile = roofline_profile(counted, cluster=cluster())
    frozen_us = work_us(profile, ComponentKind.FROZEN)
    trained_us = work_us(profile, ComponentKind.BACKBONE)
    apart_us = sum(work_us(alone(profile, n), ComponentKind.FROZEN) for n in ("base", "fine"))
    report.figures["frozen_over_trainable"] = frozen_us / trained_us
    # What is gained without any pipeline, since both backbones share the encodings.
    once = (apart_us + trained_us) / (frozen_us + trained_us)
    report.figures["gain_of_encoding_once"] = once
    for devices in (4, 8):
        counts = (devices,) if options.quick else (devices // 2, devices, 2 * devices)
        for microbatches in counts:
            run(report, profile, devices, microbatches, steps=2 if options.quick else 3)
        report.figures[f"speedup_{devices}"] = report.figures[f"speedup_{devices}_m{devices}"]
        report.figures[f"gain_of_directions_{devices}"] = (
            report.figures[f"speedup_{devices}"] / once
        )
        report.bar(f"speedup_{devices}", ">=", 1.0)
    report.figures["prediction_error"] = max(row["error"] for row in report.rows)
    report.bar("prediction_error", "<=", 0.05)
    return report.finish(as_json=options.json)


def cluster() -> Cluster:
    """One node of A100s."""
    from omegaconf import OmegaConf

    return Cluster.from_mapping(OmegaConf.to_container(OmegaConf.load(CLUSTER)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
