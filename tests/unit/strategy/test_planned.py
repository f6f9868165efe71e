"""Planning a module that is in memory: refusals that need no process group."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bucketed import SIDES, Bucketed
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DPipeError, PlanError, ScheduleError, UnsupportedError
from lightning_dpipe.core.jsonio import save
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
        with pytest.raises(PlanError, match=r"plan again|measure again"):
            build(other.spec, options, setting(), HostLink())


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


def test_several_backbones_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Toy()
    module.configure_model()
    one = module.spec.backbones[0]
    second = Toy()
    second.configure_model()
    two = replace(second.spec.backbones[0], name="second")
    losses = {"mlp": module.spec.losses()["mlp"], "second": second.spec.losses()["mlp"]}
    spec = replace(module.spec, backbones=(one, two), loss=losses)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"2 backbones \(mlp, second\)"):
        build(spec, PlanOptions(), setting(), HostLink())
