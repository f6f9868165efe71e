"""Files come back as they were saved; what a person spoilt is named, with file and place."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_dpipe.core.errors import DPipeError, PlanError
from lightning_dpipe.core.jsonio import from_data, load, save, to_data
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.search import make_plan
from synthetic import FrozenChain, model_profile

PROFILE = model_profile((3, 5), frozen=(FrozenChain(name="text", forward_us=(4, 2)),))
PLAN = make_plan(PROFILE, world_size=2, batch_size=4)


def spoilt(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_data(PLAN) | changes), encoding="utf-8")
    return path


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    for value in (PLAN, PROFILE):
        save(value, tmp_path / "file.json")
        assert load(type(value), tmp_path / "file.json") == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "4"}, r"Plan.batch_size is '4'; expected a whole number"),
        ({"batch_size": 4.5}, r"Plan.batch_size is 4.5; expected a whole number"),
        ({"batch_size": float("nan")}, r"Plan.batch_size is nan; expected a whole number"),
        ({"batch_size": True}, r"Plan.batch_size is True; expected a whole number"),
        ({"schedule": 1}, r"Plan.schedule is 1; expected a text"),
        ({"groups": 3}, r"Plan.groups is 3; expected a list"),
        ({"groups": [[0, "1"]]}, r"Plan.groups\[0\]\[1\] is '1'; expected a whole number"),
        ({"lengths": [[1]]}, r"Plan.lengths\[0\] is \[1\]; expected a list of 2"),
        ({"origin": []}, r"Plan.origin is \[\]; expected an object"),
        ({"stages": [{"backbone": "net"}]}, r"Plan.stages\[0\] lacks start, stop, devices"),
        ({"stags": []}, r"Plan has no field 'stags' .* make it again"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_file(changes, message, tmp_path: Path) -> None:
    with pytest.raises(DPipeError, match=rf"plan.json: {message}"):
        load(Plan, spoilt(tmp_path, **changes))


def test_an_error_of_the_value_itself_keeps_its_type(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan.json: .*batch_size=0"):
        load(Plan, spoilt(tmp_path, batch_size=0))


def test_another_kind_of_file_is_told_from_an_old_one(tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "profile.json")
    with pytest.raises(DPipeError, match=r"profile.json: Plan has no field .* it is no Plan, or"):
        load(Plan, tmp_path / "profile.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5_000])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(DPipeError, match=r"profile\.json"):
        load(Profile, path)


def test_numbers_and_words_of_a_choice() -> None:
    @dataclass(frozen=True)
    class Kind:
        share: float
        op: OpKind

    assert from_data(Kind, {"share": 1, "op": "F"}) == Kind(1, OpKind.F)
    for share in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(DPipeError, match=r"Kind.share is .*; expected a finite number"):
            from_data(Kind, {"share": share, "op": "F"})
    with pytest.raises(DPipeError, match=r"Kind.op is \[\]; expected one of F, B, I, W, N, S"):
        from_data(Kind, {"share": 0.5, "op": []})
