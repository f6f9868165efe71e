"""The engine around the arithmetic: errors, evaluation, mixed precision, traces."""

import copy
import threading
from itertools import pairwise

import pytest
import torch

from lightning_dpipe.core.errors import PlanError, SpecError
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.runtime.trace import merge
from lightning_dpipe.strategy.assemble import PipelineSession, cut
from pipeline import make_plan
from ranks import run_threads
from small import WIDTH, small_batch, small_unet

CPU = torch.device("cpu")


def session_of(spec, plan, rank, hub, **kwargs) -> PipelineSession:
    graph = trace(spec)
    return PipelineSession(
        graph=graph, binding=bind(spec, graph), plan=plan, rank=rank,
        transport=hub.transport(rank), device=CPU, seed=0, **kwargs,
    )  # fmt: skip


def two_stages(spec, **kwargs):
    options = {"num_microbatches": 4, "batch_size": 4} | kwargs
    return make_plan(trace(spec), (4,), **options)


def test_an_error_in_a_layer_names_rank_stage_op_and_microbatch() -> None:
    base = small_unet(3)
    plan = two_stages(base)

    class Broken(torch.nn.Module):
        calls = 0

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            Broken.calls += 1
            if Broken.calls == 3:
                raise RuntimeError("layer broke")
            return inputs[0]

    def body(rank, hub):
        spec = copy.deepcopy(base)
        session = session_of(spec, plan, rank, hub)
        if rank == 0:  # the last stage
            stage = session.stages[1]
            broken = copy.copy(stage.layers[-1])
            object.__setattr__(broken, "fn", Broken())
            stage.layers = (*stage.layers[:-1], broken)
        session.step(small_batch(4, rank), sizes=(4, 4), batch_index=0, loss_scale=1.0)

    with pytest.raises(RuntimeError, match="layer broke") as caught:
        run_threads(body, 2)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0, device 1: stage 1, forward, micro-batch 2 (op 1F2)" in notes


def test_a_wrong_batch_is_refused_before_any_message() -> None:
    base = small_unet(3)
    plan = two_stages(base)
    sent = []

    def body(rank, hub):
        session = session_of(copy.deepcopy(base), plan, rank, hub)
        transport = session.engine._transport
        session.engine._transport = type("Spy", (), {
            "send": lambda _, m, t: (sent.append(m), transport.send(m, t))[1],
            "post": lambda _, m, t: (sent.append(m), transport.post(m, t))[1],
        })()  # fmt: skip
        bad = small_batch(4, rank) | {"image": torch.zeros(4, WIDTH + 1)}
        with pytest.raises(SpecError, match=r"'image' is .* \(4, 7\); the spec declares"):
            session.step(bad, sizes=(4, 4), batch_index=0, loss_scale=1.0)
        missing = {k: v for k, v in small_batch(4, rank).items() if k != "time"}
        with pytest.raises(PlanError, match="the batch has no field 'time'"):
            session.step(missing, sizes=(4, 4), batch_index=0, loss_scale=1.0)

    run_threads(body, 2)
    assert not sent


def test_another_model_s_plan_is_refused() -> None:
    plan = two_stages(small_unet(3))
    with pytest.raises(PlanError, match="the plan was made for model"):
        run_threads(lambda rank, hub: session_of(small_unet(2), plan, rank, hub), 2)


def test_evaluation_between_two_steps_keeps_what_was_encoded_ahead() -> None:
    base = small_unet(3)
    plan = two_stages(base)
    grads = []
    for evaluate in (False, True):
        barrier = threading.Barrier(2)

        def body(rank, hub, evaluate=evaluate, barrier=barrier):
            spec = copy.deepcopy(base)
            session = session_of(spec, plan, rank, hub)
            batches = [small_batch(4, 10 * i + rank) for i in range(2)]
            common = {"sizes": (4, 4), "loss_scale": 0.1}
            session.step(
                batches[0], batch_index=0, next_batch=batches[1], next_sizes=(4, 4), **common
            )
            if evaluate:
                found = session.step(batches[0], batch_index=0, training=False, **common)
                assert bool(found.loss_sum) == (rank == 0)
                assert all(not x.requires_grad for x in found.loss_sum.values())
            barrier.wait()
            session.step(batches[1], batch_index=1, **common)
            return [p.grad for s in session.stages.values() for p in s.parameters]

        grads.append(run_threads(body, 2))
    for plain, evaluated in zip(*grads, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))


def test_announcing_one_batch_and_bringing_another_is_refused() -> None:
    spec = small_unet(3)
    plan = make_plan(trace(spec), (), num_microbatches=2, batch_size=4)

    def body(rank, hub):
        session = session_of(spec, plan, rank, hub)
        batch = small_batch(4, 0)
        session.step(
            batch, sizes=(4,), batch_index=0, loss_scale=1.0, next_batch=batch, next_sizes=(4,)
        )
        with pytest.raises(PlanError, match=r"encoded ahead for batch sizes \(4,\), got \(3,\)"):
            session.step(small_batch(3, 0), sizes=(3,), batch_index=1, loss_scale=1.0)
        session.forget()
        session.step(small_batch(3, 0), sizes=(3,), batch_index=1, loss_scale=1.0)

    run_threads(body, 1)


def test_self_conditioning_under_autocast_trains_every_weight() -> None:
    """Autocast caches weights cast without gradient by the first sweep; they must not be reused."""
    base = small_unet(2, self_conditioning=True)

    def body(rank, hub):
        spec = copy.deepcopy(base)
        graph = trace(spec, autocast=torch.bfloat16)
        plan = make_plan(graph, (), num_microbatches=2, batch_size=4)
        session = PipelineSession(
            graph=graph, binding=bind(spec, graph), plan=plan, rank=0,
            transport=hub.transport(0), device=CPU, seed=0,
        )  # fmt: skip
        with torch.autocast("cpu", dtype=torch.bfloat16):
            session.step(
                small_batch(4, 0), sizes=(4,), batch_index=0, loss_scale=1.0, self_conditioned=True
            )
        return [p.grad for s in session.stages.values() for p in s.parameters]

    (grads,) = run_threads(body, 1)
    assert all(g is not None and g.abs().sum() > 0 for g in grads)


def test_a_measured_timeline_shows_every_op_once_and_its_ledger_adds_up() -> None:
    base = small_unet(3)
    plan = two_stages(base)

    def body(rank, hub):
        session = session_of(copy.deepcopy(base), plan, rank, hub, trace=True)
        batch = small_batch(4, rank)
        result = session.step(batch, sizes=(4, 4), batch_index=0, loss_scale=1.0)
        return result.trace

    timeline = merge(run_threads(body, 2))
    ops = [str(s.op) for s in timeline.spans if s.op is not None]
    assert sorted(ops) == sorted(f"{s}{k}{m}" for s in range(2) for k in "FB" for m in range(4))
    assert timeline.total_us(Activity.FROZEN) > 0
    assert sum(timeline.ledger().values()) == timeline.num_devices * timeline.end_us
    for device in range(2):
        spans = [s for s in timeline.spans if s.device == device]
        assert all(a.end_us <= b.start_us for a, b in pairwise(spans))


def test_cut_keeps_names_order_and_frozen_weights_and_drops_the_other_stages() -> None:
    spec = small_unet(3)
    graph = trace(spec)
    plan = make_plan(graph, (4,), num_microbatches=2, batch_size=4)
    root = torch.nn.ModuleDict(
        {
            f"{c.name}_{layer.name}": layer.module
            for c in (*spec.frozen, *spec.backbones)
            for layer in c.layers
        }
    )
    before = [(n, p.shape) for n, p in root.named_parameters()]
    cut(root, bind(spec, graph), plan, 0)
    assert [(n, p.shape) for n, p in root.named_parameters()] == before
    held = {n.split(".")[0] for n, p in root.named_parameters() if not p.is_meta}
    first = {f"net_{layer.name}" for layer in spec.backbones[0].layers[:4]}
    assert held == first | {f"text_text{i}" for i in range(3)}
