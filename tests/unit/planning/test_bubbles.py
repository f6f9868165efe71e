from lightning_dpipe.core.op import Op
from lightning_dpipe.core.timeline import Activity, Span, Timeline
from lightning_dpipe.planning.bubbles import Bubble, bubbles
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile


def test_bubbles_of_two_stages_and_two_microbatches_are_where_the_drawing_has_them() -> None:
    # f = 10, b = 20 per op. Device 0: F F . . B B with gaps; device 1: . F B F B .
    profile = model_profile([10, 10], width=0)
    plan = make_plan(profile, world_size=2, batch_size=1, num_microbatches=2)
    timeline = simulate(plan, schedule_of(plan), profile)
    assert bubbles(timeline) == (
        Bubble(device=0, after=Op.parse("0F1"), start_us=20, end_us=40),
        Bubble(device=0, after=Op.parse("0B0"), start_us=60, end_us=70),
        Bubble(device=1, after=None, start_us=0, end_us=10),
        Bubble(device=1, after=Op.parse("1B1"), start_us=70, end_us=90),
    )
    assert bubbles(timeline)[0].length_us == 20


def test_frozen_work_shortens_a_bubble_and_does_not_rename_it() -> None:
    op = Op.parse("0F0")
    spans = (
        Span(device=0, start_us=0, end_us=5, activity=Activity.FORWARD, label="0F0", op=op),
        Span(device=0, start_us=7, end_us=9, activity=Activity.FROZEN, label="text"),
    )
    timeline = Timeline(num_devices=1, end_us=12, spans=spans, predicted=False)
    assert bubbles(timeline) == (
        Bubble(device=0, after=op, start_us=5, end_us=7),
        Bubble(device=0, after=op, start_us=9, end_us=12),
    )


def test_bubbles_and_spans_tile_the_iteration() -> None:
    frozen = (FrozenChain(name="text", forward_us=(70, 30)),)
    profile = model_profile([30, 50, 20, 90], frozen=frozen, overhead_us=7, optimizer_us=3)
    plan = make_plan(profile, world_size=4, batch_size=4, num_microbatches=6)
    timeline = simulate(plan, schedule_of(plan), profile)
    assert sum(b.length_us for b in bubbles(timeline)) == timeline.bubble_us
    assert timeline.bubble_us > 0
