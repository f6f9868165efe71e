"""What is known to go wrong when patches are sampled over stages: ranks and what travels."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import PlanError, RankError, SpecError, TransportError
from lightning_dpipe.core.program import Channel, Message
from lightning_dpipe.runtime.threads import ThreadHub, ThreadTransport
from lightning_dpipe.sampling.call import open_call
from lightning_dpipe.sampling.plan import SamplingPlan
from lightning_dpipe.sampling.sampler import sample
from ranks import run_threads
from sampled import (
    CASES,
    STALE,
    Case,
    ddim,
    drawn,
    flow_euler,
    model_of,
    options_of,
    sites,
    stages_of,
)

FAMILIES = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@FAMILIES
def test_stages_that_go_around_the_ranks_twice_change_nothing(case: Case) -> None:
    request = case.request()
    for plan in ({}, STALE, {**STALE, "patches": 6}):
        expected = drawn(case, request, **plan)
        assert torch.equal(drawn(case, request, ranks=2, stages=4, **plan), expected)
        assert torch.equal(drawn(case, request, ranks=3, stages=5, **plan), expected)


@FAMILIES
def test_an_error_on_one_rank_ends_all_with_its_traceback_and_puts_everything_back(
    case: Case,
) -> None:
    model = model_of(case.name)
    before = [m.processor for m in sites(model)]
    others: list[str] = []
    request = case.request()
    plan = SamplingPlan(stages=stages_of(model, request, 3), **STALE)
    options = options_of(case, request)

    def fail(step: int, latents: Tensor) -> None:
        if step == 1:
            raise KeyError("the cause")

    def body(rank: int, hub: ThreadHub) -> None:
        try:
            sample(
                model, case.schedulers[0](), request, plan, options=options,
                transport=hub.transport(rank), rank=rank, on_step=fail,
            )  # fmt: skip
        except RankError as error:
            others.append(str(error))
            raise

    with pytest.raises(KeyError, match="the cause"):
        run_threads(body, 3, timeout_s=30.0)
    assert len(others) == 2
    assert all("rank 2 failed" in text and "in fail" in text for text in others)
    assert all(m.processor is p for m, p in zip(sites(model), before, strict=True))


def test_a_rank_that_says_nothing_is_named_with_step_and_patch() -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request()
    plan = SamplingPlan(stages=stages_of(model, request, 2), **STALE)
    texts: list[str] = []

    class Lost:
        def wait(self) -> None:
            """As if it had been sent."""

    class Mute(ThreadTransport):
        """Loses all from the third step's second patch on."""

        lost = False

        def send(self, message: Message, tensor: Tensor) -> Any:
            self.lost = self.lost or message.tag.startswith("h of step 2 group 0 patch 1")
            return Lost() if self.lost else super().send(message, tensor)

    def body(rank: int, hub: ThreadHub) -> None:
        try:
            sample(model, ddim(), request, plan, transport=Mute(hub, rank), rank=rank)
        except RankError as error:
            texts.append(str(error))

    run_threads(body, 2, hub=ThreadHub(2, timeout_s=1.0), timeout_s=30.0)
    assert any("rank 0 never sent message 'h of step 2 group 0 patch 1" in text for text in texts)


class Recording(ThreadTransport):
    """Notes every transfer and whether it was waited for."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        super().__init__(hub, rank)
        self.waited: dict[str, bool] = {}
        self.sent_bytes: dict[Channel, int] = {}
        self.kept = self.most_kept = 0

    def send(self, message: Message, tensor: Tensor) -> Any:
        assert tensor.numel()
        if not message.tag.startswith("digest"):
            before = self.sent_bytes.get(message.channel, 0)
            self.sent_bytes[message.channel] = before + tensor.numel() * tensor.element_size()
        return self._noted("sent", message, super().send(message, tensor), 1)

    def post(self, message: Message, buffer: Tensor) -> Any:
        return self._noted("got", message, super().post(message, buffer), 0)

    def _noted(self, what: str, message: Message, handle: Any, count: int) -> Any:
        key = f"{what} {message.tag} {message.channel}"
        assert key not in self.waited
        self.waited[key] = False
        self.kept += count
        self.most_kept = max(self.most_kept, self.kept)
        recording = self

        class Handle:
            def wait(self) -> None:
                handle.wait()
                recording.waited[key] = True
                recording.kept -= count

        return Handle()


def test_every_transfer_is_waited_for_and_sends_are_let_go_of_on_the_way() -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request(steps=12)
    plan = SamplingPlan(stages=stages_of(model, request, 4), **{**STALE, "patches": 6})

    def body(rank: int, hub: ThreadHub) -> Recording:
        transport = Recording(hub, rank)
        sample(model, ddim(), request, plan, transport=transport, rank=rank)
        return transport

    for found in run_threads(body, 4):
        assert all(found.waited.values())
        assert len(found.waited) > 2 * 6 * 10
        assert found.most_kept <= 3 * 8  # of 12 steps: patches and conditions of three


def test_pipelines_side_by_side_open_the_same_channels_and_draw_their_own_images() -> None:
    case, model = CASES["sd3"], model_of("sd3")
    pipelines = ((1, 0), (3, 2))
    requests = [case.request(seed=seed, batch=1 + seed) for seed in (0, 1)]
    opened: list[list[Channel]] = []

    class Noting(ThreadTransport):
        def open(self, channels: Iterable[Channel]) -> None:
            opened.append(list(channels))
            super().open(opened[-1])

    def body(rank: int, hub: ThreadHub) -> Tensor | None:
        group, request = rank // 2, requests[rank // 2]
        stages = stages_of(model_of("sd3"), request, 2)
        plan = SamplingPlan(stages=stages, ranks=pipelines[group], **STALE)
        # Threads of two pipelines would share one module's processors: each has its own copy.
        return sample(
            copies[group], case.schedulers[0](), request, plan, transport=Noting(hub, rank),
            rank=rank, pipelines=pipelines,
        )  # fmt: skip

    copies = [model, copy.deepcopy(model)]
    found = run_threads(body, 4)
    assert opened[0]
    assert all(channels == opened[0] for channels in opened)
    for group, head in enumerate((0, 2)):
        assert torch.equal(found[head], drawn(case, requests[group], **STALE))
    plan = SamplingPlan(stages=stages_of(model, requests[0], 2), ranks=(0, 1), **STALE)
    with pytest.raises(PlanError, match=r"ranks \[0, 1\], which is none of the pipelines"):
        sample(model, flow_euler(), requests[0], plan, rank=0, pipelines=pipelines)


@FAMILIES
def test_channels_carry_the_bytes_that_are_foretold(case: Case) -> None:
    model, request = model_of(case.name), case.request(batch=2)
    options = options_of(case, request)
    plan = SamplingPlan(stages=stages_of(model, request, 3), **STALE)
    call = open_call(model, case.schedulers[0](), request, plan, options)
    opening = [unit for unit in call.units if unit.step == 0]
    foretold = call.traffic.sent_bytes(call.timeline.orders(), opening)

    def body(rank: int, hub: ThreadHub) -> dict[Channel, int]:
        transport = Recording(hub, rank)
        sample(
            model, case.schedulers[0](), request, plan, options=options,
            transport=transport, rank=rank,
        )  # fmt: skip
        return transport.sent_bytes

    carried = {channel: n for found in run_threads(body, 3) for channel, n in found.items()}
    assert carried == foretold


def test_sixteen_patches_of_a_large_image_pass_rendezvous_channels() -> None:
    case = CASES["pixart"]
    request, plan = case.request(size=(64, 48), steps=3), {**STALE, "patches": 16}
    expected = drawn(case, request, **plan)
    for rendezvous in (True, False):
        hub = ThreadHub(4, rendezvous=rendezvous)
        assert torch.equal(drawn(case, request, ranks=4, hub=hub, **plan), expected)


def test_every_directed_edge_has_a_channel_of_its_own() -> None:
    case, model = CASES["sd3"], model_of("sd3")
    request = case.request()
    plan = SamplingPlan(stages=stages_of(model, request, 4), **STALE)
    call = open_call(model, flow_euler(), request, plan, options_of(case, request))
    edges = [(c.source, c.target) for c in call.traffic.channels()]
    assert len(edges) == len(set(edges))
    # Neighbours, conditions straight from the first stage, and the solver's way back.
    assert set(edges) == {(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (3, 0)}


def test_ranks_that_mean_different_calls_are_told_so() -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request()
    stages = stages_of(model, request, 2)

    def body(rank: int, hub: ThreadHub) -> None:
        plan = SamplingPlan(stages=stages, **{**STALE, "warmup": 1 + rank})
        sample(model, ddim(), request, plan, transport=hub.transport(rank), rank=rank)

    with pytest.raises(TransportError, match="pass equal plan, steps, shapes and guidance"):
        run_threads(body, 2)


@FAMILIES
def test_a_rank_needs_the_weights_of_its_own_stages_only(case: Case) -> None:
    request = case.request()
    whole = model_of(case.name)
    stages = stages_of(whole, request, 3)
    plan = SamplingPlan(stages=stages, **STALE)
    options = options_of(case, request)
    expected = drawn(case, request, **STALE)
    held: list[int] = []

    def body(rank: int, hub: ThreadHub) -> Tensor | None:
        model = copy.deepcopy(whole)
        call = open_call(model, case.schedulers[0](), request, plan, options)
        mine = {m for layer in call.model.layers[slice(*stages[rank])] for m in layer.modules}
        for module in model.modules():
            if module not in mine and module is not model:  # PixArt's head has a bare parameter
                for name, weight in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(weight.to("meta")))
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return sample(
            model, case.schedulers[0](), request, plan, options=options,
            transport=hub.transport(rank), rank=rank,
        )  # fmt: skip

    assert torch.equal(run_threads(body, 3)[2], expected)
    bare = sum(p.numel() for p in whole.parameters(recurse=False))
    assert sum(held) - 2 * bare == sum(p.numel() for p in whole.parameters())


def test_bad_requests_are_refused_before_any_rank_is_spoken_to() -> None:
    case, model, lone = CASES["pixart"], model_of("pixart"), SamplingPlan(stages=((0, 7),))
    request = case.request()

    class Untouched:
        """Fails the test if it is used."""

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    def refused(error: type, match: str, plan: SamplingPlan = lone, **changes: Any) -> None:
        asked = dataclasses.replace(request, **changes)
        with pytest.raises(error, match=match):
            sample(model, flow_euler(), asked, plan, transport=Untouched())  # type: ignore[arg-type]

    stages = lone.stages
    refused(
        PlanError, "7 patches of an image of 6 token rows; legal are 1 to 6",
        SamplingPlan(stages=stages, mode="pipefusion", patches=7),
    )  # fmt: skip
    refused(PlanError, "2 groups of a batch of 1", SamplingPlan(stages=stages, groups=2))
    refused(PlanError, "each of 7 layers once", SamplingPlan(stages=((0, 6),)))
    refused(SpecError, r"13x8.*multiples of 2", noise=torch.randn(1, 4, 13, 8))
    refused(SpecError, "reads context", conditions={})
    refused(SpecError, "condition 'context' has 1 rows for 2", noise=torch.randn(2, 4, 12, 8))
    with pytest.raises(PlanError, match=r"ranks \[1\], this is rank 0 without a transport"):
        sample(model, flow_euler(), request, SamplingPlan(stages=stages, ranks=(1,)))
