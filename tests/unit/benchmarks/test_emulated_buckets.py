"""Emulated shape classes: every pair occurs once, layers and links are of the class they serve."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from benchmarks.buckets import all_pairs, of_share
from benchmarks.emulated_buckets import bind_classes, graphs_of, link_of
from benchmarks.emulated_device import DeviceClock
from lightning_dpipe.core.buckets import BASE, check_alike
from lightning_dpipe.core.program import Channel, Lane, Message
from synthetic import FrozenChain, model_profile

CHAIN = (FrozenChain(name="vae", forward_us=(100, 200)), FrozenChain(name="text", forward_us=(7,)))


@pytest.mark.parametrize("count", range(1, 8))
def test_a_mixed_epoch_goes_through_every_pair_once(count: int) -> None:
    names = [f"class{i}" for i in range(count)]
    walked = Counter(pairwise(all_pairs(names)))
    assert len(walked) == count**2
    assert set(walked.values()) == {1}


def test_layers_take_the_time_and_links_the_bytes_of_their_class() -> None:
    base = model_profile([10, 20, 30], frozen=CHAIN)
    profiles = {BASE: base, "half": of_share(base, 0.5)}
    graphs = graphs_of(profiles)
    check_alike(graphs[BASE], graphs["half"], "half")
    slept: list[float] = []
    clock = DeviceClock(clock=lambda: 0.0, sleep=slept.append)
    binding = bind_classes(graphs, profiles, clock)
    for name, share in ((BASE, 1.0), ("half", 0.5)):
        for component in ("vae", "text", "net"):
            values = {
                v: torch.zeros(2, *known.shape) for v, known in enumerate(graphs[name].values)
            }
            clock.start(0.0)
            for layer in binding.layers[component]:
                made = layer.run(values)
                for v, tensor in made.items():
                    assert tensor.shape == (2, *graphs[name].values[v].shape)
                values |= made
            clock.settle()
            wanted_us = base.forward_us(component, 0, len(binding.layers[component]), 2)
            factor = 1.0 if component == "text" else share
            assert slept.pop() * 1e6 == pytest.approx(wanted_us * factor, abs=2)
    link = link_of(profiles, scale=1.0)
    channel = Channel(source=0, target=1, lane=Lane.PIPELINE)
    for name, profile in profiles.items():
        for value, known in enumerate(profile.graph.values):
            shape = (3, *graphs[name].values[value].shape)
            message = Message(channel=channel, tag="", shape=shape, dtype="float32")
            assert link.bytes_of(message) == 3 * known.bytes_per_sample
