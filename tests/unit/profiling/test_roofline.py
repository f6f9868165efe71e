"""Estimates against the tables of the models and closed forms; what ships is what is made today."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch import nn

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.errors import ClusterError, ProfileError
from lightning_dpipe.core.graph import ComponentKind
from lightning_dpipe.core.jsonio import digest, load
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models.spec import Backbone, Field, Layer, Loss, PipelineSpec
from lightning_dpipe.objective.presets import controlnet_spec, sd21_spec
from lightning_dpipe.profiling.kernels import Kernel
from lightning_dpipe.profiling.roofline import (
    Correction,
    CountedModel,
    calibrate_estimate,
    corrections,
    count_model,
    layer_us,
    roofline_profile,
)

CONF = Path(__file__).parents[3] / "conf"
GIGA = 1_000_000_000


def cluster(name: str = "p4de_8x8") -> Cluster:
    file = OmegaConf.load(CONF / "cluster" / f"{name}.yaml")
    return Cluster.from_mapping(OmegaConf.to_container(file))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sd21() -> CountedModel:
    return count_model(sd21_spec())


@pytest.fixture(scope="module")
def controlnet() -> CountedModel:
    return count_model(controlnet_spec())


@pytest.fixture(scope="module")
def small() -> CountedModel:
    layers = (
        Layer(name="a", module=nn.Linear(64, 64), reads=("x",), writes=("h",)),
        Layer(name="b", module=nn.Linear(64, 8), reads=("h",), writes=("out",)),
    )
    spec = PipelineSpec(
        inputs={"x": Field(shape=(64,))},
        backbones=(Backbone(name="net", layers=layers),),
        loss=Loss(fn=lambda out: out.square().mean(1), reads=("out",)),
    )
    return count_model(spec, dtype="float32")


def gigaflops(model: CountedModel, component: str) -> tuple[float, float]:
    forward, backward = model.work.flops(component)
    return forward / GIGA, backward / GIGA


def test_flops_of_sd21_at_512_px_are_those_of_the_table(sd21: CountedModel) -> None:
    assert gigaflops(sd21, "unet") == pytest.approx((804, 1605), rel=0.02)
    assert gigaflops(sd21, "vae") == pytest.approx((1117, 0), rel=0.02)
    assert gigaflops(sd21, "text") == pytest.approx((45, 0), rel=0.02)


def test_flops_of_controlnet_at_512_px_are_those_of_the_table(controlnet: CountedModel) -> None:
    assert gigaflops(controlnet, "locked") == pytest.approx((261, 0), rel=0.02)
    # The copy trains, the decoder only passes gradients.
    assert gigaflops(controlnet, "controlnet") == pytest.approx((276 + 549, 551 + 628), rel=0.02)


def test_frozen_over_trained_flops_are_those_of_the_table(
    sd21: CountedModel, controlnet: CountedModel
) -> None:
    for model, expected in ((sd21, 0.48), (controlnet, 0.69)):
        frozen = sum(sum(model.work.flops(c.name)) for c in model.graph.frozen)
        trained = sum(sum(model.work.flops(c.name)) for c in model.graph.backbones)
        assert frozen / trained == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["sd21", "controlnet"])
def test_the_profiles_that_ship_are_what_is_estimated_today(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: CountedModel = request.getfixturevalue(name)
    shipped = load(Profile, CONF / "profiles" / f"{name}_a100_bf16.json")
    made = roofline_profile(model, cluster=cluster())
    # Another torch may launch other kernels; then scripts/estimate_profiles.py makes them anew.
    assert digest(shipped.graph) == digest(made.graph)
    assert replace(shipped, versions={}) == replace(made, versions={})
    assert shipped.estimated


def test_estimates_grow_with_the_batch_and_get_cheaper_by_the_sample(sd21: CountedModel) -> None:
    profile = roofline_profile(sd21, cluster=cluster())
    for component in sd21.graph.components:
        n = len(component.layers)
        times = [profile.forward_us(component.name, 0, n, b) for b in (1, 2, 4, 8, 16, 32, 64)]
        assert times == sorted(times)
        by_sample = [t / b for t, b in zip(times, (1, 2, 4, 8, 16, 32, 64), strict=True)]
        assert by_sample == sorted(by_sample, reverse=True)
    for layer in profile.component("unet").layers:
        assert all(0 <= i <= b for i, b in zip(layer.input_grad_us, layer.backward_us, strict=True))


def test_a_locked_decoder_costs_its_input_gradient_only(controlnet: CountedModel) -> None:
    profile = roofline_profile(controlnet, cluster=cluster(), samples=(8,))
    layers = {layer.name: layer for layer in profile.component("controlnet").layers}
    locked = layers["unet.up1.attn0"]
    assert locked.backward_us == locked.input_grad_us
    assert locked.trained_bytes == locked.optimizer_us == 0 < locked.param_bytes
    assert layers["unet.up1.resnet0"].trained_bytes == 4 * (1280 * 1280 + 1280)  # its zero conv
    trained = sum(layer.trained_bytes for layer in layers.values())
    assert trained == 4 * 361_279_120
    assert layers["down1.attn0"].input_grad_us < layers["down1.attn0"].backward_us


def test_faster_devices_are_faster_and_none_is_faster_than_its_peak(sd21: CountedModel) -> None:
    total = {}
    for name in ("l40_8", "p4de_8x8", "h100_8", "h200_8"):
        at = cluster(name)
        profile = roofline_profile(sd21, cluster=at, samples=(16,))
        total[name] = sum(
            profile.forward_us(c.name, 0, len(c.layers), 16)
            + profile.backward_us(c.name, 0, len(c.layers), 16)
            for c in sd21.graph.components
        )
        flops = sum(sum(sd21.work.flops(c.name, 16)) for c in sd21.graph.components)
        assert total[name] > flops / at.device.flops_per_s["bfloat16"] * 1e6
    assert total["l40_8"] > total["p4de_8x8"] > total["h100_8"] > total["h200_8"]


def test_a_kernel_takes_its_arithmetic_or_its_traffic_and_a_layer_its_launches() -> None:
    device = replace(
        cluster().device,
        flops_per_s={"bfloat16": 10**12},
        memory_bytes_per_s=10**9,
        max_efficiency=1.0,
        memory_efficiency=1.0,
        half_efficiency_flops=0,
        launch_us=10,
    )
    heavy = Kernel("mm", 50_000_000, 1000, "bfloat16")  # 50 us of arithmetic, 1 us of traffic
    wide = Kernel("add", 0, 30_000, "float32")  # 30 us of traffic
    tiny = Kernel("add", 0, 1, "float32")
    assert layer_us([heavy, wide], device) == 80
    assert layer_us([tiny] * 7, device) == 70
    assert layer_us([heavy, *[tiny] * 3], device) == 51  # launched while the first one runs
    assert layer_us([], device) == 0


def test_links_and_optimizer_follow_from_the_cluster(small: CountedModel) -> None:
    at = cluster()
    profile = roofline_profile(small, cluster=at, samples={"net": (4, 2, 4)})
    assert (profile.p2p, profile.allreduce) == (at.inside, at.ring(8))
    assert profile.component("net").samples == (2, 4)
    expected_us = 7 * 4 * (64 * 64 + 64) / (2.039e12 * 0.8) * 1e6
    assert profile.component("net").layers[0].optimizer_us == max(1, round(expected_us))


def test_a_calibrated_estimate_of_the_measured_device_has_the_measured_totals(
    small: CountedModel,
) -> None:
    here = roofline_profile(small, cluster=cluster("cpu_2"), samples=(1000, 2000))
    (cost,) = here.costs
    slower = replace(
        cost,
        layers=tuple(
            replace(
                layer,
                forward_us=tuple(2 * t for t in layer.forward_us),
                backward_us=tuple(3 * t for t in layer.backward_us),
            )
            for layer in cost.layers
        ),
    )
    measured = replace(here, costs=(slower,), estimated=False)
    factors = corrections(measured, here)
    assert factors == {"net": Correction(forward=2.0, backward=3.0)}
    corrected = calibrate_estimate(here, factors)
    assert corrected.estimated
    for kind in ("forward_us", "backward_us"):
        for n in (1000, 2000):
            assert getattr(corrected, kind)("net", 0, 2, n) == getattr(measured, kind)(
                "net", 0, 2, n
            )


def test_components_that_were_not_measured_get_the_mean_correction(sd21: CountedModel) -> None:
    profile = roofline_profile(sd21, cluster=cluster(), samples=(8,))
    factors = {
        "unet": Correction(forward=4.0, backward=1.0),
        "vae": Correction(forward=1.0, backward=1.0),
    }
    corrected = calibrate_estimate(profile, factors)
    text = [c.name for c in sd21.graph.components if c.kind is ComponentKind.FROZEN]
    assert "text" in text
    before, after = (p.component("text").layers[1].forward_us[0] for p in (profile, corrected))
    assert after == pytest.approx(2 * before, abs=1)


def test_what_cannot_be_estimated_is_refused(small: CountedModel) -> None:
    with pytest.raises(ProfileError, match="dtype is 'int8'; expected one of float32"):
        count_model(sd21_spec(), dtype="int8")
    with pytest.raises(ProfileError, match=r"component 'net' has sizes \[\]"):
        roofline_profile(small, cluster=cluster(), samples={})
    at = cluster()
    no_single = replace(at, device=replace(at.device, flops_per_s={"bfloat16": 10**14}))
    with pytest.raises(ClusterError, match="no flops_per_s for float32"):
        roofline_profile(small, cluster=no_single)
    profile = roofline_profile(small, cluster=at, samples=(2,))
    other = replace(profile, costs=(replace(profile.costs[0], samples=(3,)),))
    with pytest.raises(ProfileError, match=r"measured at \[3\] .* estimated at \[2\]"):
        corrections(other, profile)
