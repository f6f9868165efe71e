"""Planning a module that is in memory: refusals that need no process group."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from bucketed import SIDES, Bucketed
from cascade import Cascade
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DPipeError, PlanError, ScheduleError
from lightning_dpipe.core.jsonio import save
from lightning_dpipe.core.profile import Link
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.strategy.assemble import cut
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.planned import Built, PlanOptions, Setting, build, refit
from toy import Toy


def setting(world_size: int = 2, batch_size: int = 4, fill: bool = True) -> Setting:
    return Setting(
        world_size=world_size,
        batch_size=batch_size,
        device=torch.device("cpu"),
        precision="32-true",
        autocast=None,
        fill=fill,
    )


def built(
    options: PlanOptions, where: Setting, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Built:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    module = Toy()
    module.configure_model()
    return build(module.spec, options, where, HostLink())


@pytest.mark.parametrize(
    ("options", "world_size", "error", "message"),
    [
        (PlanOptions(num_stages=3), 4, PlanError, "4 % 3 = 1"),
        (PlanOptions(cuts=(1, 2)), 4, PlanError, "pipelines of 3 devices"),
        (PlanOptions(schedule="nope"), 2, ScheduleError, "nope"),
        (PlanOptions(schedule="nope", num_stages="auto"), 2, ScheduleError, "nope"),
        (PlanOptions(num_stages="all"), 2, PlanError, r"'all'; give a whole number, \"auto\""),
        (PlanOptions(num_stages=1.5), 2, PlanError, r"num_stages=1\.5; give a whole number"),
        (PlanOptions(replan_every_n_steps=0), 2, PlanError, "replan_every_n_steps=0; give a whole"),
        (PlanOptions(cuts=3), 2, PlanError, "cuts=3; give the first layer"),
        (PlanOptions(num_microbatches="4"), 2, PlanError, "num_microbatches='4'"),
        (PlanOptions(num_stages="auto", cuts=(3,)), 2, PlanError, r"cuts=\(3,\) fix the stages"),
        (PlanOptions(num_microbatches="auto", cuts=(3,)), 2, PlanError, r"cuts=\(3,\) fix"),
        (PlanOptions(num_stages=3, num_microbatches="auto"), 4, PlanError, "4 % 3 = 1"),
    ],
)
def test_what_no_model_could_make_right_is_refused_without_one(
    options: PlanOptions, world_size: int, error: type[DPipeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        options.check(world_size)


def test_more_stages_than_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=r"8 stages.*6|6 layers.*8"):
        built(PlanOptions(), setting(world_size=8), tmp_path, monkeypatch)


def test_a_plan_from_a_file_is_taken_and_filled_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(cuts=(3,)), setting(), tmp_path, monkeypatch)
    assert [(s.start, s.stop) for s in made.plan.stages] == [(0, 3), (3, 6)]
    assert made.plan.fills
    save(made.plan, tmp_path / "plan.json")
    options = PlanOptions(plan=tmp_path / "plan.json")
    same = built(options, setting(), tmp_path, monkeypatch)
    assert same.plan == made.plan
    assert same.profile is None
    bare = built(options, setting(fill=False), tmp_path, monkeypatch)
    assert bare.plan.fills == ()
    assert bare.plan.stages == made.plan.stages


def test_a_plan_or_profile_of_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(), setting(), tmp_path, monkeypatch)
    other = Toy(blocks=4)
    other.configure_model()
    for options in (PlanOptions(plan=made.plan), PlanOptions(profile=made.profile)):
        with pytest.raises(
            PlanError, match=r"6 layers in mlp, this model .* 7 layers in mlp; (plan|measure) again"
        ):
            build(other.spec, options, setting(), HostLink())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch_size": 8},
            "4 samples per device, this run has 8; plan again, or use batch size 4",
        ),
        ({"precision": "bf16-mixed"}, "dtype 32-true there, bf16-mixed here"),
    ],
)
def test_a_plan_for_another_run_is_refused_with_both_values(
    change: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(), setting(), tmp_path, monkeypatch)
    here = replace(setting(), **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        built(PlanOptions(plan=made.plan), here, tmp_path, monkeypatch)


def test_a_plan_of_another_version_or_device_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(), setting(), tmp_path, monkeypatch)
    origin = made.plan.origin
    assert origin is not None
    old = tuple((name, "0.0" if name == "torch" else v) for name, v in origin.versions)
    plan = replace(made.plan, origin=replace(origin, device="a slower one", versions=old))
    with pytest.raises(PlanError, match=r"device a slower one there, .*; torch 0\.0 there, "):
        built(PlanOptions(plan=plan), setting(), tmp_path, monkeypatch)


def test_a_plan_with_a_profile_it_was_not_made_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(), setting(), tmp_path, monkeypatch)
    assert made.profile is not None
    other = replace(made.profile, overhead_us=made.profile.overhead_us + 1)
    bare = replace(made.plan, fills=())
    same = built(PlanOptions(plan=bare, profile=made.profile), setting(), tmp_path, monkeypatch)
    assert same.plan.fills == made.plan.fills
    with pytest.raises(PlanError, match=f"made of profile {made.plan.profile_digest}, this one is"):
        built(PlanOptions(plan=bare, profile=other), setting(), tmp_path, monkeypatch)


def test_a_run_that_does_not_train_may_use_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(), setting(), tmp_path, monkeypatch)
    validating = replace(setting(batch_size=16, fill=False), training=False)
    assert (
        built(PlanOptions(plan=made.plan), validating, tmp_path, monkeypatch).plan.batch_size == 16
    )


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(num_stages="auto"),
        PlanOptions(num_stages="auto", num_microbatches=2),
        PlanOptions(num_microbatches="auto"),
        PlanOptions(num_stages=2, num_microbatches="auto"),
    ],
)
def test_auto_is_the_planners_search_over_a_profile_that_covers_it(
    options: PlanOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.check(2)
    made = built(options, setting(), tmp_path, monkeypatch)
    assert made.profile is not None
    best = make_plan(
        made.profile,
        world_size=2,
        batch_size=4,
        num_stages=options.num_stages,
        num_microbatches=options.num_microbatches,
    )
    assert made.plan == best
    sizes = made.profile.component("mlp").samples
    # Two ranks of 4: a pipeline's whole batch of 8 is the most that a layer can get.
    assert sizes[0] == 1 or options.num_microbatches == 2
    assert sizes[-1] >= 4
    assert all(b <= 2 * a for a, b in pairwise(sizes))
    assert made.profile.component("encoder").samples[-1] == 4


def test_auto_chooses_one_stage_where_messages_are_dear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PlanOptions(num_stages="auto", num_microbatches="auto")
    measured = built(options, setting(), tmp_path, monkeypatch).profile
    assert measured is not None
    dear, free = Link(latency_us=10**6, bytes_per_s=1000), Link(latency_us=0, bytes_per_s=10**12)
    slow = replace(measured, p2p=dear, allreduce=free)
    made = built(replace(options, profile=slow), setting(), tmp_path, monkeypatch)
    assert made.plan.num_devices == 1
    quick = replace(measured, p2p=free, allreduce=dear)
    made = built(replace(options, profile=quick), setting(), tmp_path, monkeypatch)
    assert made.plan.num_devices == 2


def test_refitting_changes_fills_and_batch_but_never_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(PlanOptions(), setting(batch_size=8), tmp_path, monkeypatch)
    small = refit(made, setting(batch_size=1, fill=False)).plan
    assert (small.batch_size, small.num_microbatches, small.fills) == (1, 2, ())
    assert small.stages == made.plan.stages
    assert refit(made, setting(batch_size=8)).plan.fills == made.plan.fills


def test_a_cut_keeps_numbering_shared_names_and_what_encoders_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = Toy()
    module.configure_model()
    module.twin = nn.Linear(16, 8)
    module.twin.weight = module.join.mix.weight
    for p in module.time.parameters():  # a locked layer whose weight an encoder uses too
        p.requires_grad_(False)
    encoder = module.spec.frozen[0]
    first = replace(encoder.layers[0], owns=(encoder.layers[0].module, module.time))
    spec = replace(
        module.spec,
        frozen=(replace(encoder, layers=(first, *encoder.layers[1:])), module.spec.frozen[1]),
    )
    before = [tuple(p.shape) for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]
    made = build(spec, PlanOptions(cuts=(3,)), setting(), HostLink())
    cut(module, made.binding, made.plan, 1)
    assert [tuple(p.shape) for p in module.parameters()] == before
    assert [name for name, _ in module.named_parameters()] == names
    absent = {name for name, p in module.named_parameters() if p.is_meta}
    assert absent == {n for n in names if n.startswith(("entry.", "blocks.0."))}
    assert module.twin.weight is module.join.mix.weight


def test_every_class_is_measured_when_bubbles_are_filled_and_the_cut_is_the_bases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = Bucketed()
    module.configure_model()
    options = PlanOptions(budget_s=0.0)
    made = build(module.spec, options, setting(), HostLink())
    others = set(SIDES) - {BASE}
    assert set(made.buckets) == set(made.bucket_profiles) == others
    for name, profile in made.bucket_profiles.items():
        assert profile.graph == made.buckets[name]
    bare = build(module.spec, options, setting(fill=False), HostLink())
    assert (set(bare.buckets), set(bare.bucket_profiles)) == (others, set())
    assert bare.plan.stages == made.plan.stages
    given = PlanOptions(plan=made.plan, profile=made.profile, budget_s=0.0)
    again = build(module.spec, given, setting(), HostLink())
    assert again.plan == made.plan
    assert again.profile == made.profile
    assert set(again.bucket_profiles) == others


def test_two_backbones_are_measured_and_planned_in_opposite_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = Cascade()
    module.configure_model()
    options = PlanOptions(num_stages=2, cuts={"base": (5,), "fine": (4,)})
    made = build(module.spec, options, setting(world_size=4), HostLink())
    assert [(s.backbone, s.start, s.devices) for s in made.plan.stages] == [
        ("base", 0, (0,)), ("base", 5, (1,)), ("fine", 0, (1,)), ("fine", 4, (0,)),
    ]  # fmt: skip
    assert made.profile is not None
    assert {f.component for f in made.plan.fills} == {c.name for c in made.graph.frozen}
    smaller = refit(made, setting(world_size=4, batch_size=2))
    assert smaller.plan.stages == made.plan.stages
