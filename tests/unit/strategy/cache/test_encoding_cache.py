"""A tiny ControlNet on two thread ranks: kept encodings change no bit, and save work."""

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from bucketed import made_up_profile
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DataError, UnsupportedError
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.timeline import Activity, FrozenWork
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import DRAW_KEY, Field, PipelineSpec
from lightning_dpipe.planning.variants import with_fills
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.runtime.trace import merge
from lightning_dpipe.strategy.assemble import PipelineSession
from lightning_dpipe.strategy.cache.encodings import EncodingCache
from lightning_dpipe.strategy.cache.open import cut_of, open_cache
from lightning_dpipe.strategy.cache.recall import Recall
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.lookahead import LoaderLinks, Outlooks, agreed
from lightning_dpipe.strategy.modules.controlnet import ControlNet
from lightning_dpipe.strategy.pair_fills import CachedFills
from pipeline import make_plan
from ranks import run_threads
from saved import TEXT, UNET, VAE

WORLD, ROWS, STEPS = 2, 3, 2
"""Ranks, samples of each a step, steps of an epoch."""

SIDE, TOKENS = 16, 8


def build(vae_seed: int = 0, dropout: float = 0.0) -> ControlNet:
    torch.manual_seed(0)
    hinted = {k: v for k, v in UNET.items() if k not in ("sample_size", "up_block_types")}
    module = ControlNet(
        unet={**UNET, "sample_size": 2}, vae=VAE, text=TEXT, image_size=SIDE, num_tokens=TOKENS,
        controlnet={**hinted, "conditioning_embedding_out_channels": (4, 8, 8, 8)},
        scheduler=DDPMScheduler(), caption_dropout=dropout, seed=5,
    )  # fmt: skip
    module.configure_model()
    if vae_seed:
        with torch.no_grad():
            module.vae.quant_conv.bias += vae_seed
    return module


SPEC = build().pipeline_spec()
DROPPING = build(dropout=0.4).pipeline_spec()
GRAPH = trace(SPEC)


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "image": torch.rand(3, SIDE, SIDE, generator=generator) * 2 - 1,
        "hint": torch.rand(3, SIDE, SIDE, generator=generator),
        "input_ids": torch.randint(0, 7, (TOKENS,), generator=generator),
    }


class Deal:
    """One rank's loader: each epoch deals the samples out anew, as a shuffling sampler does."""

    def __init__(self, rank: int, salt: int = 0) -> None:
        self.rank, self.salt, self.epoch, self.sampler = rank, salt, 0, self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        count = WORLD * STEPS * ROWS
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.epoch))
        for step in range(STEPS):
            slots = [(step * ROWS + i) * WORLD + self.rank for i in range(ROWS)]
            rows = [sample(self.salt + int(order[slot])) for slot in slots]
            yield {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


class Keys:
    """The part of a DiffusionModule that numbers batches and keys draws."""

    def __init__(self, rank: int) -> None:
        self.rank, self.batches_consumed, self.spec = rank, 0, SPEC

    def training_keys(self, count: int, ahead: int = 0) -> Tensor:
        step = self.batches_consumed + ahead
        return torch.tensor([[step, i * WORLD + self.rank] for i in range(count)])


class Meeting(HostLink):
    """What all threads say."""

    def __init__(self, barrier: threading.Barrier, table: list[Any], rank: int) -> None:
        self.rank, self.world_size, self.barrier, self.table = rank, WORLD, barrier, table

    def gather(self, value: int) -> tuple[int, ...]:
        return tuple(self.gather_objects(value))

    def gather_objects(self, value: Any) -> list[Any]:
        self.table[self.rank] = value
        self.barrier.wait(60)
        every = list(self.table)
        self.barrier.wait(60)
        return every


@dataclass
class Run:
    """Losses by step, gradients of all ranks, frozen spans by step, values that were at hand."""

    losses: list[float]
    gradients: list[Tensor]
    frozen: list[list[FrozenWork]]
    found: list[tuple[str, ...]]


def open_one(binding: Any, folder: Path) -> EncodingCache:
    return open_cache(
        GRAPH, binding, folder=folder, device=torch.device("cpu"), precision="32-true",
        link=HostLink(),
    )  # fmt: skip


def run(
    plan: Plan,
    folder: Path | None,
    *,
    epochs: int = 2,
    fills: Any = None,
    salt: int = 0,
    spec: PipelineSpec = SPEC,
    filled: bool = True,
) -> Run:
    """What a Trainer does with the strategy, over threads."""
    hub, outcomes = ThreadHub(WORLD), [None] * WORLD
    barrier, table = threading.Barrier(WORLD), [0] * WORLD

    def work(rank: int, _: Any) -> None:
        binding = bind(copy.deepcopy(spec), GRAPH)
        session = PipelineSession(
            graph=GRAPH, binding=binding, plan=plan, rank=rank, transport=hub.transport(rank),
            device=torch.device("cpu"), seed=7, trace=True,
        )  # fmt: skip
        cache = None
        if folder is not None:
            cache = open_one(binding, folder)
            session.keep(cache, fills)
        meeting = Meeting(barrier, table, rank)
        outcomes[rank] = one_rank(session, cache, meeting, Deal(rank, salt), epochs, filled)
        if cache is not None:
            cache.close()

    run_threads(work, WORLD, hub=hub, timeout_s=200)
    num_steps = epochs * STEPS
    timelines = [merge([o[2][step] for o in outcomes]) for step in range(num_steps)]
    frozen = [
        [FrozenWork.parse(s.label) for s in t.spans if s.activity is Activity.FROZEN]
        for t in timelines
    ]
    losses = [sum(o[0][step] for o in outcomes) for step in range(num_steps)]
    assert outcomes[0][3] == outcomes[1][3]
    return Run(losses, [g for o in outcomes for g in o[1]], frozen, outcomes[0][3])


def one_rank(
    session: PipelineSession,
    cache: EncodingCache | None,
    meeting: Meeting,
    deal: Deal,
    epochs: int,
    filled: bool,
) -> Any:
    """Losses, gradients, traces, and the names of what was at hand."""
    keys, outlooks = Keys(meeting.rank), Outlooks()
    links = LoaderLinks(
        exchange=meeting.gather, num_samples=lambda b: len(b["image"]), clear=lambda: None,
        announce=outlooks.training.append, limit=lambda: STEPS,
        next_epoch=lambda: deal.epoch + 1 if deal.epoch + 1 < epochs else None,
    )  # fmt: skip
    if cache is not None:
        recall = Recall(
            cache, keys, session, meeting, convert=lambda b: b,
            queued=lambda: len(outlooks.training),
        )  # fmt: skip
        links = replace(links, recall=recall, settle=lambda: recall.settle(deal))
    loader = agreed(deal, links, name="train", ahead=filled)
    losses, traces, found = [], [], []
    for epoch in range(epochs):
        deal.set_epoch(epoch)
        for raw in loader:
            step, outlook = keys.batches_consumed, outlooks.training.popleft()
            more, kept, following = outlook.next_batch, outlook.kept, outlook.next_kept
            result = session.step(
                raw | {DRAW_KEY: keys.training_keys(ROWS)},
                sizes=outlook.sizes, batch_index=step, loss_scale=1 / (ROWS * WORLD),
                kept=kept and kept.of(step), next_kept=following and following.of(step + 1),
                next_batch=more and more | {DRAW_KEY: keys.training_keys(ROWS, 1)},
                next_sizes=outlook.next_sizes,
            )  # fmt: skip
            losses.append(sum(float(x) for x in result.loss_sum.values()))
            traces.append(result.trace)
            groups = {} if kept is None else kept.groups
            found.append(tuple(sorted(GRAPH.values[v].name for g in groups.values() for v in g)))
            keys.batches_consumed += 1
    parameters = [p for s in session.stages.values() for p in s.parameters if p.requires_grad]
    return losses, [p.grad for p in parameters], traces, found


def plan_of(filled: bool = True, move: bool = False) -> Plan:
    """Two stages; bubbles filled, some samples of device 0 encoded by device 1 if `move`."""
    layers = len(GRAPH.backbones[0].layers)
    plan = make_plan(GRAPH, (layers // 2,), num_microbatches=2, batch_size=ROWS)
    if not filled:
        return plan
    plan = with_fills(plan, PROFILE)
    if not move:
        return plan
    moved = [
        replace(f, device=1, owner=0) if f.device == 0 and f.first < ROWS else f for f in plan.fills
    ]
    return replace(plan, fills=tuple(moved))


PROFILE = made_up_profile(GRAPH)
CUT = cut_of(GRAPH, bind(copy.deepcopy(SPEC), GRAPH))
ENCODERS = {"caption", "text"}
ALL = ("context", "moments")


def encodes(work: FrozenWork) -> bool:
    """Whether a frozen span is more than draws and the locked encoder that reads them."""
    last = len(GRAPH.component("vae").layers) - 1
    return work.component in ENCODERS or (work.component == "vae" and work.start < last)


def test_what_is_kept_of_a_controlnet_is_found_in_its_graph() -> None:
    kept = {GRAPH.values[v].name for v in CUT.kept}
    assert kept == {"moments", "context"}
    running = [p for p in places(GRAPH) if p not in CUT.idle]
    assert {component for component, _ in running} == {"vae", "noise", "locked"}
    sampling = ("vae", len(GRAPH.component("vae").layers) - 1)
    assert [p for p in running if p[0] == "vae"] == [sampling]


def places(graph: Any) -> list[tuple[str, int]]:
    return [(c.name, i) for c in graph.frozen for i in range(len(c.layers))]


@pytest.mark.parametrize("case", ["plan's fills", "own fills", "moved", "up front"])
def test_two_epochs_with_a_cache_are_those_without_and_the_second_encodes_nothing(
    tmp_path: Path, case: str
) -> None:
    plan = plan_of(filled=case != "up front", move=case == "moved")
    own = CachedFills(plan, {BASE: PROFILE}, HostLink(), CUT)
    fills = own if case == "own fills" else None
    ahead = case != "up front"
    plain = run(plan, None, filled=ahead)
    kept = run(plan, tmp_path, fills=fills, filled=ahead)
    assert kept.losses == plain.losses
    assert all(map(torch.equal, kept.gradients, plain.gradients))
    assert kept.found == [()] * STEPS + [ALL] * STEPS
    # A step encodes the next batch: the last step of the first epoch already has nothing to encode.
    first = [any(map(encodes, spans)) for spans in kept.frozen]
    assert first == [True] * (STEPS - ahead) + [False] * (STEPS + ahead)
    assert all(any(map(encodes, spans)) for spans in plain.frozen[: 2 * STEPS - ahead])
    # What depends on draws still runs, for every sample.
    rows = sum(w.last - w.first for w in kept.frozen[STEPS] if w.component == "noise")
    assert rows == WORLD * ROWS
    # Another run, other ranks, no first epoch: everything is found at once.
    again = run(plan, tmp_path, epochs=1, filled=ahead)
    assert again.found == [ALL] * STEPS
    assert again.losses == plain.losses[:STEPS]


def test_a_dropped_caption_is_kept_as_the_empty_one_and_text_is_encoded_until_all_are_known(
    tmp_path: Path,
) -> None:
    plan, epochs = plan_of(), 4
    plain = run(plan, None, epochs=epochs, spec=DROPPING)
    kept = run(plan, tmp_path, epochs=epochs, spec=DROPPING)
    assert kept.losses == plain.losses
    assert all(map(torch.equal, kept.gradients, plain.gradients))
    # By hand: a step has its context at hand if each of its captions, as dropped, was met before.
    known: set[bytes] = set()
    drop = DROPPING.component("caption").layers[0].module
    for step in range(epochs * STEPS):
        met = []
        for rank in range(WORLD):
            deal, keys = Deal(rank), Keys(rank)
            deal.set_epoch(step // STEPS)
            keys.batches_consumed = step
            ids = list(deal)[step % STEPS]["input_ids"]
            met += [row.numpy().tobytes() for row in drop(ids, keys.training_keys(ROWS))]
        expected = ("context",) * (set(met) <= known) + ("moments",) * (step >= STEPS)
        assert kept.found[step] == expected, step
        known |= set(met)
    assert len(set(kept.found)) > 2  # neither always nor never


def test_entries_of_other_weights_or_images_are_never_found(tmp_path: Path) -> None:
    plan = plan_of()
    run(plan, tmp_path, epochs=1)
    other = build(vae_seed=1).pipeline_spec()
    # Another VAE: the captions' encodings are still good.
    assert run(plan, tmp_path, epochs=1, spec=other).found == [("context",)] * STEPS
    assert run(plan, tmp_path, epochs=1, salt=100).found == [()] * STEPS


def test_a_broken_or_lost_entry_makes_its_batch_encoded_again(tmp_path: Path) -> None:
    plan = plan_of()
    plain = run(plan, None, epochs=1)
    run(plan, tmp_path, epochs=1)
    largest = sorted(tmp_path.rglob("*.safetensors"), key=lambda p: -p.stat().st_size)
    largest[0].write_bytes(b"half")
    largest[1].unlink()
    hurt = run(plan, tmp_path, epochs=1)
    assert hurt.found != [ALL] * STEPS
    assert hurt.losses == plain.losses
    assert run(plan, tmp_path, epochs=1).found == [ALL] * STEPS


def test_a_full_disk_costs_the_shortcut_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    plan = plan_of()
    monkeypatch.setattr(Path, "write_bytes", full)
    kept = run(plan, tmp_path)
    monkeypatch.undo()
    assert kept.losses == run(plan, None).losses
    assert kept.found == [()] * 2 * STEPS
    assert caplog.text.count("no longer kept") == WORLD


def test_a_model_with_nothing_to_keep_and_a_folder_in_the_data_are_refused(tmp_path: Path) -> None:
    binding = bind(copy.deepcopy(SPEC), GRAPH)
    with pytest.raises(DataError, match="is inside the data folder"):
        open_cache(
            GRAPH, binding, folder=tmp_path / "sub", device=torch.device("cpu"),
            precision="32-true", link=HostLink(), data_folder=tmp_path,
        )  # fmt: skip
    drawn = replace(SPEC, frozen=tuple(c for c in SPEC.frozen if c.name in ("noise", "locked")))
    fields = {**SPEC.inputs}
    fields["latents"] = Field(shape=GRAPH.values[value("latents")].shape)
    fields["context"] = Field(shape=GRAPH.values[value("context")].shape)
    drawn = replace(drawn, inputs=fields)
    graph = trace(drawn)
    with pytest.raises(UnsupportedError, match="draws: locked; components without weights: noise"):
        cut_of(graph, bind(copy.deepcopy(drawn), graph))


def value(name: str) -> int:
    return next(i for i, v in enumerate(GRAPH.values) if v.name == name)
