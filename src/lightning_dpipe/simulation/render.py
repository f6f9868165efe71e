"""Pictures of a Timeline, predicted or measured: text, PNG, and a trace for Perfetto.

Every function draws the same spans with the same colours, so that a prediction and a measurement
can be laid side by side. matplotlib is imported on use only, without its global state.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.timeline import Activity, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FILL = {
    Activity.FORWARD: "-",
    Activity.BACKWARD: "=",
    Activity.SELF_CONDITIONING: "~",
    Activity.FROZEN: "+",
    Activity.TRANSFER: ">",
    Activity.SYNC: "%",
    Activity.OPTIMIZER: "o",
    Activity.DATA: "d",
    Activity.HOST: "h",
}
_COLOUR = {
    Activity.FORWARD: "#4C8BC9",
    Activity.BACKWARD: "#2F4B7C",
    Activity.SELF_CONDITIONING: "#8E7CC3",
    Activity.FROZEN: "#F2A541",
    Activity.TRANSFER: "#B8C4D0",
    Activity.SYNC: "#D1605E",
    Activity.OPTIMIZER: "#6BA368",
    Activity.DATA: "#9C755F",
    Activity.HOST: "#7F7F7F",
}
_DARK_TEXT = {Activity.FROZEN, Activity.TRANSFER}
_BUBBLE = "#F3F4F6"
_INK = "#30363D"
_WIDTH, _LEFT, _SPAN = 12.0, 0.78, 10.9  # inches: picture, left margin, time axis
_LANE, _PANEL_TITLE, _FOOT = 0.42, 0.36, 0.72
_NAMES = {Activity.SELF_CONDITIONING: "self-conditioning"}


def ascii_chart(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline as text, one row a device, `width` columns for the time axis.

    Ops are named where their span is wide enough (``F0``; ``1F0`` where a device has several
    stages); dots are bubbles. A span narrower than a column may vanish.
    """
    width = max(width, 20)
    lines = [", ".join(_facts(timeline))]
    for device in range(timeline.num_devices):
        row = ["."] * width
        spans = [s for s in timeline.spans if s.device == device]
        for span in spans:
            first, last = (
                t * width // max(timeline.end_us, 1) for t in (span.start_us, span.end_us)
            )
            named = span.op is not None or span.activity is Activity.FROZEN
            # One fill character at least after a word, so that it does not run into the next op.
            columns = last - first - (span.op is None)
            text = _label(span, spans, columns) if named else ""
            row[first:last] = text.ljust(last - first, _FILL[span.activity])
        lines.append(f"device {device:<2} |{''.join(row)}|")
    lines.append(" " * 11 + "0" + _time(timeline.end_us).rjust(width - 1))
    legend = [f"{_FILL[a]} {_NAMES.get(a, a.value)}" for a in _used([timeline])]
    lines.append(" " * 11 + "   ".join([*legend, ". bubble"]))
    return "\n".join(lines)


def save_png(timeline: Timeline | Sequence[Timeline], path: Path, title: str = "") -> None:
    """Write one or several timelines as a PNG, stacked over one time axis.

    Args:
        timeline: What to draw, top to bottom; e.g. unfilled and filled, or predicted and measured.
        path: The file, named after its format; its folder is made.
        title: Headline of the picture. A line per timeline may follow, separated by newlines: the
            name of each panel.

    Raises:
        DPipeError: Nothing can write a picture of that format.
    """
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    figure = _figure(timelines, title)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise DPipeError(
            f"{path} is not named after a kind of picture; use one of {', '.join(known)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="white")


def save_trace(timeline: Timeline | Sequence[Timeline], path: Path) -> None:
    """Write a Chrome trace (JSON) for Perfetto: one process a timeline, one thread a device."""
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    events: list[dict[str, Any]] = []
    for process, current in enumerate(timelines):
        events.append(_metadata("process_name", process, 0, name=", ".join(_facts(current))))
        for device in range(current.num_devices):
            events.append(_metadata("thread_name", process, device, name=f"device {device}"))
            events.append(_metadata("thread_sort_index", process, device, sort_index=device))
        events.extend(_event(process, span) for span in current.spans)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _metadata(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _event(process: int, span: Span) -> dict[str, Any]:
    """A complete event; times are in microseconds, as the format wants them."""
    return {
        "ph": "X",
        "name": span.label or str(span.op or span.activity.value),
        "cat": span.activity.value,
        "pid": process,
        "tid": span.device,
        "ts": span.start_us,
        "dur": span.length_us,
        "args": {"op": str(span.op)} if span.op else {},
    }


def _figure(timelines: Sequence[Timeline], title: str) -> "Figure":
    """Lay panels out in inches, so that a lane has one height however many there are."""
    from matplotlib.figure import Figure

    headline, *names = title.split("\n")
    lanes = [_LANE * t.num_devices for t in timelines]
    top = 0.45 if headline else 0.05
    height = top + sum(lane + _PANEL_TITLE for lane in lanes) + _FOOT
    figure = Figure(figsize=(_WIDTH, height))
    end_us = max([t.end_us for t in timelines] + [1])
    edge = height - top
    for index, (current, lane) in enumerate(zip(timelines, lanes, strict=True)):
        edge -= _PANEL_TITLE + lane
        box = (_LEFT / _WIDTH, edge / height, _SPAN / _WIDTH, lane / height)
        axes = figure.add_axes(box)
        _draw_panel(axes, current, end_us)
        axes.tick_params(labelbottom=index == len(timelines) - 1)
        name = names[index] if index < len(names) else ""
        text = "  ·  ".join([name, *_facts(current)] if name else _facts(current))
        axes.set_title(text, loc="left", fontsize=10, color=_INK, pad=5)
    if headline:
        at = (_LEFT / _WIDTH, (height - 0.36) / height)
        figure.text(*at, headline, fontsize=14, weight="bold", color=_INK)
    _draw_legend(figure, timelines, height)
    return figure


def _draw_panel(axes: "Axes", timeline: Timeline, end_us: int) -> None:
    """One timeline: a lane per device, first device on top, bubbles in pale grey."""
    from matplotlib.ticker import FuncFormatter

    devices = range(timeline.num_devices)
    axes.set_xlim(0, end_us / 1000)
    axes.set_ylim(timeline.num_devices - 0.5, -0.5)
    axes.barh(devices, timeline.end_us / 1000, height=0.86, color=_BUBBLE, zorder=1)
    for device in devices:
        spans = [s for s in timeline.spans if s.device == device]
        points = [s.length_us / end_us * _SPAN * 72 for s in spans]
        axes.barh(
            [device] * len(spans),
            [s.length_us / 1000 for s in spans],
            left=[s.start_us / 1000 for s in spans],
            height=0.86,
            color=[_COLOUR[s.activity] for s in spans],
            edgecolor="white",
            linewidth=[min(0.8, 0.15 * width) for width in points],
            zorder=2,
        )
        for span, width in zip(spans, points, strict=True):
            text = _label(span, spans, int(width / 5.2 - 0.3))  # 5.2 points a character at size 8
            axes.text(
                (span.start_us + span.end_us) / 2000,
                device,
                text,
                ha="center",
                va="center_baseline",
                fontsize=8,
                color=_INK if span.activity in _DARK_TEXT else "white",
                zorder=3,
            )
    axes.set_yticks(devices, [f"device {d}" for d in devices])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} ms"))
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_legend(figure: "Figure", timelines: Sequence[Timeline], height: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=_COLOUR[a], label=_NAMES.get(a, a.value)) for a in _used(timelines)]
    patches.append(Patch(facecolor=_BUBBLE, edgecolor="#D0D7DE", label="bubble"))
    figure.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(_LEFT / _WIDTH - 0.007, 0.04 / height),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.6,
    )


def _used(timelines: Sequence[Timeline]) -> list[Activity]:
    found = {span.activity for timeline in timelines for span in timeline.spans}
    return [activity for activity in Activity if activity in found]


def _facts(timeline: Timeline) -> list[str]:
    facts = [
        "predicted" if timeline.predicted else "measured",
        _time(timeline.end_us),
        f"bubble ratio {timeline.bubble_ratio:.1%}",
    ]
    if timeline.total_us(Activity.FROZEN):
        facts.append(f"fill ratio {timeline.fill_ratio:.1%}")
    return facts


def _label(span: Span, spans: Sequence[Span], columns: int) -> str:
    """The longest name of a span that fits into `columns` characters; empty if none does.

    Ops are ``F0``, or ``1F0`` where the device has several stages; frozen work is named by its
    label (component, layers, samples), shortened from its end.
    """
    if span.op is None:
        choices = [span.label, span.label.split(" ")[0], re.split(r"[\[ ]", span.label)[0]]
    elif len({s.op.stage for s in spans if s.op is not None}) > 1:
        choices = [str(span.op)]
    else:
        choices = [f"{span.op.kind.value}{span.op.microbatch}"]
    return next((text for text in choices if len(text) <= columns), "")


def _time(time_us: int) -> str:
    return f"{time_us / 1000:.1f} ms" if time_us < 10_000_000 else f"{time_us / 1e6:.2f} s"
