"""Charts show every span where it is; files are what their readers expect."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.timeline import Activity, Span, Timeline
from lightning_dpipe.simulation.render import ascii_chart, save_png, save_trace

KINDS = {"F": Activity.FORWARD, "B": Activity.BACKWARD, "S": Activity.SELF_CONDITIONING}


def span(device: int, start_us: int, end_us: int, what: str) -> Span:
    """`what` is an op, or the label of frozen work."""
    op = Op.parse(what) if what[0].isdigit() else None
    return Span(
        device=device,
        start_us=start_us,
        end_us=end_us,
        activity=KINDS[op.kind.value] if op else Activity.FROZEN,
        label=what,
        op=op,
    )


TWO_STAGES = Timeline(
    num_devices=2,
    end_us=4000,
    predicted=True,
    spans=(
        span(0, 0, 500, "0F0"),
        span(0, 500, 1000, "0F1"),
        span(0, 1000, 2000, "vae 0:7"),
        span(0, 2000, 3000, "0B0"),
        span(0, 3000, 4000, "0B1"),
        span(1, 500, 1000, "1F0"),
        span(1, 1000, 2000, "1B0"),
        span(1, 2000, 2500, "1F1"),
        span(1, 2500, 3500, "1B1"),
    ),
)


def test_ascii_chart_looks_like_the_pipeline() -> None:
    assert ascii_chart(TWO_STAGES, width=40) == "\n".join(
        [
            "predicted, 4.0 ms, bubble ratio 12.5%, fill ratio 100.0%",
            "device 0  |F0---F1---vae 0:7+++B0========B1========|",
            "device 1  |.....F0---B0========F1---B1========.....|",
            "           0                                 4.0 ms",
            "           - forward   = backward   + frozen   . bubble",
        ]
    )


def test_stages_are_named_where_a_device_has_several() -> None:
    chunks = Timeline(
        num_devices=1,
        end_us=20,
        predicted=False,
        spans=(span(0, 0, 10, "0F0"), span(0, 10, 20, "3S0")),
    )
    assert "|0F0-------3S0~~~~~~~|" in ascii_chart(chunks, width=20)


def test_an_empty_timeline_is_all_bubble() -> None:
    empty = Timeline(num_devices=1, end_us=0, predicted=False, spans=())
    assert f"|{'.' * 30}|" in ascii_chart(empty, width=30)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    spans: list[Span] = []
    num_devices, end = draw(st.integers(1, 3)), 1
    for device in range(num_devices):
        at = 0
        for activity in draw(st.lists(st.sampled_from(Activity), max_size=5)):
            start = at + draw(st.integers(0, 50))
            at = start + draw(st.integers(1, 80))
            spans.append(
                Span(device=device, start_us=start, end_us=at, activity=activity, label="")
            )
        end = max(end, at)
    return Timeline(num_devices=num_devices, end_us=end, spans=tuple(spans), predicted=True)


@settings(deadline=None, max_examples=100)
@given(timelines(), st.integers(20, 120))
def test_each_column_shows_what_runs_there_or_nothing(timeline: Timeline, width: int) -> None:
    """Oracle: sample the timeline at the column's end; narrow spans may lose their column."""
    rows = ascii_chart(timeline, width).splitlines()[1 : 1 + timeline.num_devices]
    marks = dict(zip(Activity, "-=~+>%odh", strict=True))
    for device, row in enumerate(rows):
        cells = row[row.index("|") + 1 : -1]
        assert len(cells) == width
        for column, cell in enumerate(cells):
            low, high = (c * timeline.end_us / width for c in (column, column + 1))
            around = {
                marks[s.activity]
                for s in timeline.spans
                if s.device == device and s.start_us < high and s.end_us > low
            }
            assert cell in around | {"."}
            covered = any(
                s.device == device and s.start_us <= low and s.end_us >= high
                for s in timeline.spans
            )
            assert not (covered and cell == ".")


def test_png_has_a_colour_for_each_activity_and_grows_with_devices(tmp_path: Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "deep" / "two.png"
    save_png(TWO_STAGES, one, "one")
    save_png([TWO_STAGES, replace(TWO_STAGES, predicted=False)], two, "two\nfirst\nsecond")
    small, large = imread(one), imread(two)
    assert large.shape[0] > 1.3 * small.shape[0]
    assert large.shape[1] == small.shape[1]

    def share(image, colour: str) -> float:
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        return float((abs(image[..., :3] - rgb).max(-1) < 0.01).mean())

    # Areas follow the spans: backward takes 4 of 8 lane-ms, forward 2, frozen 1.
    forward, backward, frozen = (share(small, c) for c in ("4C8BC9", "2F4B7C", "F2A541"))
    assert backward / forward == pytest.approx(2, rel=0.1)
    assert forward / frozen == pytest.approx(2, rel=0.1)


def test_png_leaves_matplotlibs_global_state_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from lightning_dpipe.core.timeline import Timeline\n"
        "from lightning_dpipe.simulation.render import save_png\n"
        "assert 'matplotlib' not in sys.modules\n"
        "line = Timeline(num_devices=1, end_us=5, spans=(), predicted=True)\n"
        "save_png(line, Path(sys.argv[1]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.png")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_trace_holds_every_span_with_its_thread_and_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace([TWO_STAGES, replace(TWO_STAGES, predicted=False)], path)
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for process in (0, 1):
        found = [
            (e["tid"], e["ts"], e["ts"] + e["dur"], e["name"], e["cat"])
            for e in complete
            if e["pid"] == process
        ]
        assert found == [
            (s.device, s.start_us, s.end_us, s.label, s.activity.value) for s in TWO_STAGES.spans
        ]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert names == {(p, d): f"device {d}" for p in (0, 1) for d in (0, 1)}
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(",")[0] for name in processes] == ["predicted", "measured"]


@pytest.mark.parametrize("name", ["picture.txt", "picture"])
def test_a_format_that_nothing_can_draw_is_refused(name: str, tmp_path: Path) -> None:
    timeline = Timeline(num_devices=1, end_us=1, spans=(), predicted=True)
    with pytest.raises(DPipeError, match=rf"{name} is not named after .* use one of .*png"):
        save_png(timeline, tmp_path / name)
