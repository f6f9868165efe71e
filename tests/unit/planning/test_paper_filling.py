"""DiffusionPipe's greedy on an example worked by hand."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.paper_filling import paper_fill
from lightning_dpipe.planning.search import make_plan, schedule_of
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile

# 1F1B, 2 stages, 2 micro-batches of 8 samples; a stage's F takes 8 ms, its B 16 ms:
#
#   ms        0      8      16          32      40     48     56          72
#   device 0  |0F0   |0F1   |  bubble   |0B0           | idle |0B1        |
#   device 1  | idle |1F0   |1B0        |1F1    |1B1          |  bubble   |
#
# Bubbles of 16 ms: after 0F1 and after 1B1. The two of 8 ms are under 10 ms and ignored.
# Frozen, for a device's 8 samples: text 2 and 4 ms, vae 12 and 5 ms, noise (behind vae) 0.8 ms.
#
# Candidates for 16 ms, as full layers of (text, vae), then the best partial layer behind them:
#   (0, 0)  0 ms + vae 0 on 4 samples, 6 ms = 6       (0, 1) 12 ms + vae 1 on 4, 2.5 ms = 14.5
#   (1, 0)  2 ms + vae 0 on 4 samples, 6 ms = 8       (1, 1) 14 ms + text 1 on 4, 2 ms  = 16, best
#   (2, 0)  6 ms + vae 0 on 4 samples, 6 ms = 12      (2, 1) 18 ms does not fit
#
# Left over on both devices: text 1 on 4 samples 2 ms, vae 1 5 ms, noise 0.8 ms = 7.8 ms. Device 0
# does them after 0B1 (72 ms), device 1 after its bubble's fills (56 + 16 ms): the end is 79.8 ms.
FROZEN = (
    FrozenChain(name="text", forward_us=(250, 500)),
    FrozenChain(name="vae", forward_us=(1500, 625)),
    FrozenChain(name="noise", forward_us=(100,), after=("vae",)),
)
BUBBLE = ["text[0:1] 0:8", "vae[0:1] 0:8", "text[1:2] 0:4"]
LEFTOVER = ["text[1:2] 4:8", "vae[1:2] 0:8", "noise[0:1] 0:8"]


def example() -> tuple[Profile, Plan]:
    profile = model_profile([1000, 1000], frozen=FROZEN, width=0)
    plan = make_plan(profile, world_size=2, batch_size=8, num_microbatches=2, fill="paper")
    return profile, plan


def test_the_example_is_filled_as_by_hand() -> None:
    profile, plan = example()
    told = [
        (str(f.after), f"{f.component}[{f.start}:{f.stop}] {f.first}:{f.last}") for f in plan.fills
    ]
    assert told == [
        *(("0F1", work) for work in BUBBLE),
        *(("0B1", work) for work in LEFTOVER),
        *(("1B1", work) for work in BUBBLE + LEFTOVER),
    ]
    assert simulate(plan, schedule_of(plan), profile).end_us == 79_800


def test_ours_uses_the_short_bubbles_too() -> None:
    profile, _ = example()
    ours = make_plan(profile, world_size=2, batch_size=8, num_microbatches=2)
    assert simulate(ours, schedule_of(ours), profile).end_us <= 72_000 * 1.002


def test_a_layer_begun_in_one_bubble_is_the_next_one_of_its_component() -> None:
    # M = 3: device 0 has bubbles of 16 ms after 0F1 and of 8 ms after 0B0 and 0B1.
    profile = model_profile(
        [1000, 1000], frozen=(FrozenChain(name="vae", forward_us=(3000, 100)),), width=0
    )
    plan = make_plan(profile, world_size=2, batch_size=12, num_microbatches=3, fill=False)
    fills = paper_fill(plan, schedule_of(plan), profile, min_bubble_us=8000)
    mine = [(str(f.after), f.start, f.stop, f.first, f.last) for f in fills if f.device == 0]
    assert mine == [("0F1", 0, 1, 0, 4), ("0B2", 0, 1, 4, 12), ("0B2", 1, 2, 0, 12)]


@settings(deadline=None, max_examples=30)
@given(
    text=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    vae=st.lists(st.integers(1, 900), min_size=1, max_size=3),
    batch_size=st.sampled_from([3, 8, 20]),
    num_stages=st.integers(1, 4),
    feedback=st.booleans(),
)
def test_all_frozen_work_is_covered_once(
    text: list[int], vae: list[int], batch_size: int, num_stages: int, feedback: bool
) -> None:
    profile = model_profile(
        [700] * 4,
        frozen=(
            FrozenChain(name="text", forward_us=tuple(text), fixed_us=50),
            FrozenChain(name="vae", forward_us=tuple(vae)),
            FrozenChain(name="noise", forward_us=(3,), after=("vae",)),
        ),
        feedback=feedback,
    )
    plan = make_plan(
        profile, world_size=num_stages, batch_size=batch_size, num_microbatches=2, fill="paper"
    )
    for variant in {False, feedback}:
        done = [
            (f.device, f.component, layer, i)
            for f in plan.fills
            if f.self_conditioned == variant
            for layer in range(f.start, f.stop)
            for i in range(f.first, f.last)
        ]
        layers = sum(len(c.layers) for c in profile.graph.frozen)
        assert len(done) == len(set(done)) == num_stages * layers * batch_size
        schedule = schedule_of(plan, self_conditioned=variant)
        unfilled = simulate(replace(plan, fills=()), schedule, profile)
        assert simulate(plan, schedule, profile).end_us <= unfilled.end_us
