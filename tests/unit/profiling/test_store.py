import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Backbone, Field, FrozenComponent, Layer, Loss, PipelineSpec
from lightning_dpipe.profiling import store
from lightning_dpipe.profiling.store import default_samples, profile_model
from synthetic import FrozenChain, model_graph

T = TypeVar("T")


class OneClock:
    """Everything takes one microsecond; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_measured = 0

    def measure(self, work: Callable[[], T]) -> tuple[T, float]:
        self.num_measured += 1
        return work(), 1.0


def spec(hidden: int = 8) -> PipelineSpec:
    encoder = Layer(name="e", module=nn.Linear(4, 4), reads=("x",), writes=("e",))
    inner = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 4))
    return PipelineSpec(
        inputs={"x": Field(shape=(4,))},
        frozen=(FrozenComponent(name="encoder", layers=(encoder,)),),
        backbones=(
            Backbone(
                name="net", layers=(Layer(name="a", module=inner, reads=("e",), writes=("h",)),)
            ),
        ),
        loss=Loss(fn=lambda h: h.square().mean(1), reads=("h",)),
    )


def measure(cache: Path, model: PipelineSpec | None = None, **changes: Any) -> tuple[Profile, int]:
    """Profile through the cache and say how often the clock was asked."""
    model, clock = model or spec(), OneClock()
    arguments: dict[str, Any] = {
        "samples": {"encoder": (1, 2), "net": (2,)},
        "device": torch.device("cpu"),
        "dtype": "float32",
        "cache_dir": cache,
        "clock": clock,
    }
    profile = profile_model(model, trace(model), **(arguments | changes))
    return profile, clock.num_measured


def test_a_second_call_reads_what_the_first_one_measured(tmp_path: Path) -> None:
    first, measured = measure(tmp_path)
    again, asked = measure(tmp_path)
    assert measured > 0
    assert asked == 0
    assert again == first
    assert first.costs[0].samples == (1, 2)
    assert first.costs[1].layers[0].forward_us == (1,)
    (path,) = tmp_path.iterdir()
    assert load(Profile, path) == first


def test_whatever_can_change_a_time_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(tmp_path)
    assert measure(tmp_path, samples={"encoder": (1, 2), "net": (2, 3)})[1] > 0
    assert measure(tmp_path, dtype="float64")[1] > 0
    assert measure(tmp_path, autocast=torch.bfloat16)[1] > 0
    assert measure(tmp_path, spec(hidden=16))[1] > 0  # same layers and borders, other insides
    monkeypatch.setattr(store, "device_name", lambda device: "another machine")
    assert measure(tmp_path)[1] > 0
    monkeypatch.setattr(store, "tool_versions", lambda: {"torch": "another version"})
    assert measure(tmp_path)[1] > 0
    assert len(list(tmp_path.iterdir())) == 7
    assert measure(tmp_path, samples={"net": (2,), "encoder": [2, 1, 1]})[1] == 0  # same sizes


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"graph": 3}', '{"costs": []}'])
def test_a_corrupt_file_is_reported_and_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    profile, _ = measure(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        again, asked = measure(tmp_path)
    assert asked > 0
    assert again.costs == profile.costs
    assert "measuring again" in caplog.text
    assert load(Profile, path) == again


def test_links_of_the_world_at_hand_replace_the_stored_ones(tmp_path: Path) -> None:
    stored, _ = measure(tmp_path)
    links = (Link(latency_us=1, bytes_per_s=2, host_us=3), Link(latency_us=4, bytes_per_s=5))
    profile, asked = measure(tmp_path, links=links)
    assert asked == 0
    assert (profile.p2p, profile.allreduce) == links
    assert profile.costs == stored.costs
    assert stored.p2p.bytes_per_s > stored.allreduce.bytes_per_s > 0


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_cache_dir() == tmp_path / "lightning-dpipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.default_cache_dir() == tmp_path / "home" / ".cache" / "lightning-dpipe"


@settings(deadline=None, max_examples=60)
@given(batch=st.integers(1, 70), devices=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_default_sizes_hold_every_size_that_the_plan_runs(
    batch: int, devices: int, microbatches: int
) -> None:
    graph = model_graph(2, frozen=(FrozenChain(name="encoder", forward_us=(1, 1)),))
    sizes = default_samples(
        graph, batch_size=batch, num_devices=devices, num_microbatches=microbatches
    )
    assert batch in sizes["encoder"]
    wanted = {n for n in split_sizes(batch * devices, microbatches) if n}
    assert wanted <= set(sizes["net"])
    for found in sizes.values():
        assert list(found) == sorted(set(found))
        assert found[0] >= 1
