import pytest

from benchmarks.fill_emulated import MODELS, PROFILES, SMALL_BUBBLE, cases_of, predicted
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.profile import Profile


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_search_finds_a_pipeline_whose_bubbles_are_filled(model: str, devices: int) -> None:
    profile = load(Profile, PROFILES / f"{model}_a100_bf16.json")
    cases = cases_of(profile, devices)
    said = {name: predicted(case.plan, profile) for name, case in cases.items()}
    assert {case.plan.num_devices for case in cases.values()} == {devices}
    assert len(cases["filled"].plan.stages) >= 2
    assert len(cases["deep filled"].plan.stages) == devices
    assert said["filled"].bubble_ratio <= SMALL_BUBBLE
    assert said["unfilled"].end_us >= 1.2 * said["filled"].end_us
    # Splitting batches and looking ahead pay where bubbles are short.
    for kind in ("whole", "greedy"):
        assert said["deep filled"].end_us < said[f"deep {kind}"].end_us
