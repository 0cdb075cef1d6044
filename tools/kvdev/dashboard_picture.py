"""Pictures of the Grafana dashboard: every panel of its file, drawn from what a real Prometheus answered.

A picture is a row of the dashboard. Places, kinds, units, thresholds, legends and expressions are those of
`deploy/grafana/kv-transfer.json`; Grafana itself is not asked.
"""

from __future__ import annotations

import io
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvdev.paths import ROOT
from kvdev.recording import dashboard_panels, read_recording
from kvdev.scales import scale_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from kvdev.recording import Curve, Recording

__all__ = ["FOLDER", "RECORDED", "picture_texts", "write_pictures"]

FOLDER: Final = ROOT / "docs" / "operate" / "dashboard"
RECORDED: Final = ROOT / "docs" / "operate" / "recorded" / "dashboard.json"

_DPI: Final = 72
_COLUMN: Final = 48
"""Pixels of a column of Grafana's grid, which has 24."""
_LINE: Final = 34
"""Pixels of a line of that grid."""
_GAP: Final = 8
_HEAD: Final = 30
_FOOT: Final = 20
_GROUND, _PANEL, _EDGE, _INK, _FAINT = "#f1f3f5", "#ffffff", "#d5dae0", "#1f2933", "#5b6570"
_NAMED: Final = {"green": "#2f7d43", "red": "#c4262e"}
_COLOURS: Final = ("#2f6fb5", "#d1651a", "#2f8f5b", "#a3399b", "#8a6d00", "#c4262e", "#3a8fa3", "#6b5bd0")
_MOST_NAMED: Final = 6
_LONG: Final = re.compile(r"-?\d+\.\d{3,}")
_STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "kv-transfer",
    "text.color": _INK,
    "axes.edgecolor": _EDGE,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
}


def write_pictures(folder: Path = FOLDER, recorded: Path = RECORDED) -> int:
    """Write a picture of each row of the dashboard into a folder; return the exit code 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in picture_texts(read_recording(recorded)).items():
        (folder / name).write_text(text)
        print(f"{folder / name}: {len(text) >> 10} KiB")
    return 0


def picture_texts(recording: Recording, *titles: str) -> dict[str, str]:
    """Return the pictures of all rows, or of those with these titles, as SVG by file name, e.g. `hand-overs.svg`."""
    with mpl.rc_context(_STYLE):
        return {
            re.sub(r"\W+", "-", title.lower()) + ".svg": _row_picture(title, panels, recording)
            for title, panels in _rows()
            if title in titles or not titles
        }


def _rows() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each row of the dashboard: its heading, and the panels below it."""
    title, panels = "", list[dict[str, Any]]()
    for panel in dashboard_panels():
        if panel["type"] != "row":
            panels.append(panel)
            continue
        if panels:
            yield title, panels
        title, panels = panel["title"], []
    yield title, panels


def _row_picture(title: str, panels: Sequence[dict[str, Any]], recording: Recording) -> str:
    top = min(panel["gridPos"]["y"] for panel in panels)
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - top
    notes = [f"{letter}: {phase.text}" for letter, phase in zip("ABCDEFGH", recording.phases, strict=False)]
    caption = textwrap.wrap(f"{recording.about} {'; '.join(notes)}.", 190)
    width, height = 24 * _COLUMN + _GAP, lines * _LINE + _HEAD + len(caption) * _FOOT + _GAP
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_GROUND)
    FigureCanvasSVG(figure)
    figure.text(_GAP * 2 / width, 1 - 20 / height, title, size=14, weight="bold")
    for number, line in enumerate(reversed(caption)):
        figure.text(_GAP * 2 / width, (_GAP + number * _FOOT) / height, line, size=11, color=_FAINT)
    for panel in panels:
        at = panel["gridPos"]
        box = _Box(
            at["x"] * _COLUMN + _GAP, _HEAD + (at["y"] - top) * _LINE, at["w"] * _COLUMN - _GAP, at["h"] * _LINE - _GAP
        )
        _KINDS[panel["type"]](figure, box, panel, recording)
    sink = io.StringIO()
    figure.savefig(
        sink, format="svg", dpi=_DPI, facecolor=_GROUND, metadata={"Date": None, "Title": f"Dashboard: {title}"}
    )
    return _tidied(sink.getvalue())


def _tidied(picture: str) -> str:
    """Return a picture in pixels instead of points, hundredths of them at most: `x="12.345678"` becomes `x="12.35"`."""
    picture = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', re.sub(r"<!-- .*? -->\n *", "", picture))
    picture = re.sub(r"<[^>]*>", lambda tag: _LONG.sub(lambda number: f"{float(number[0]):.2f}", tag[0]), picture)
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


class _Box:
    """Rectangle of a picture in pixels, from its upper left."""

    def __init__(self, left: float, top: float, width: float, height: float) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height

    def axes(self, figure: Figure) -> Axes:
        """Return axes that fill it."""
        width, height = figure.get_size_inches() * _DPI
        at = (self.left / width, 1 - (self.top + self.height) / height, self.width / width, self.height / height)
        return figure.add_axes(at)


def _ground(figure: Figure, box: _Box, panel: dict[str, Any], colour: str = _PANEL) -> Axes:
    """Draw a panel's ground and title; return axes in pixels from its upper left."""
    ground = box.axes(figure)
    ground.set_axis_off()
    ground.set(xlim=(0, box.width), ylim=(box.height, 0))
    ground.add_patch(Rectangle((0.5, 0.5), box.width - 1, box.height - 1, facecolor=colour, edgecolor=_EDGE))
    title = textwrap.shorten(panel["title"], round(box.width / 7.4), placeholder=" ...")
    ground.text(10, 20, title, size=12, weight="bold", color=_INK if colour == _PANEL else "white")
    return ground


def _unit(panel: dict[str, Any]) -> str:
    return str(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short"))


def _stat(figure: Figure, box: _Box, panel: dict[str, Any], recording: Recording) -> None:
    """Draw one number on the colour of the highest threshold that it reaches."""
    curves = recording.answers[panel["targets"][0]["expr"]]
    value = (curves[0].last if curves else None) or 0.0
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    ground = _ground(figure, box, panel, _NAMED[reached[-1]])
    words = scale_for(_unit(panel), value).shown(round(value))
    ground.text(
        box.width / 2, box.height * 0.68, words, size=34, weight="bold", color="white", ha="center", va="center"
    )


def _table(figure: Figure, box: _Box, panel: dict[str, Any], recording: Recording) -> None:
    """Draw a row for each sample, without the columns that the panel leaves out."""
    ground = _ground(figure, box, panel)
    (organised,) = (one["options"] for one in panel["transformations"] if one["id"] == "organize")
    rows = [curve.labels for curve in recording.answers[panel["targets"][0]["expr"]]]
    order = dict.fromkeys(sorted({name for row in rows for name in row} - organised["excludeByName"].keys()), 99)
    order |= {name: place for name, place in organised["indexByName"].items() if name in order}
    names = sorted(order, key=lambda name: order[name])
    cells = [names, *([row.get(name, "") for name in names] for row in sorted(rows, key=lambda row: row["instance"]))]
    widths = [max(len(row[place]) for row in cells) + 2 for place in range(len(names))]
    for number, row in enumerate(cells):
        left = 10.0
        for word, width in zip(row, widths, strict=True):
            ground.text(left, 48 + 24 * number, word, size=11, color=_FAINT if number == 0 else _INK)
            left += (box.width - 20) * width / sum(widths)


def _curves(figure: Figure, box: _Box, panel: dict[str, Any], recording: Recording) -> None:
    """Draw the curves and a legend of means and maxima; curves that stay at 0 are counted in one line."""
    ground = _ground(figure, box, panel)
    drawn = [
        (_legend(target, curve), curve) for target in panel["targets"] for curve in recording.answers[target["expr"]]
    ]
    high = [(name, curve) for name, curve in drawn if any(curve.values)]
    low = [(name, curve) for name, curve in drawn if (name, curve) not in high and curve.last is not None]
    high.sort(key=lambda each: -max(filter(None, each[1].values)))
    highest = max((value for _, curve in high for value in curve.values if value), default=0.0)
    scale = scale_for(_unit(panel), highest)
    named = high[: _MOST_NAMED if len(high) + bool(low) <= _MOST_NAMED else _MOST_NAMED - 1]
    below = 17 * (len(named) + bool(low) + (len(high) > len(named))) + 14
    plot = _Box(box.left + 64, box.top + 34, box.width - 86, box.height - 34 - 26 - below).axes(figure)
    _frame(plot, recording, highest / scale.divisor, scale.word)
    for number, (_, curve) in reversed(list(enumerate([*high, *low]))):
        colour = _COLOURS[number % len(_COLOURS)] if number < len(high) else _FAINT
        times = [place * recording.step_s for place in range(len(curve.values))]
        values = [float("nan") if value is None else value / scale.divisor for value in curve.values]
        plot.plot(times, values, color=colour, linewidth=1.6, solid_joinstyle="round")
    line = box.height - below + 8
    for number, (name, curve) in enumerate(named):
        values = [value for value in curve.values if value is not None]
        figures = f"mean {scale.shown(sum(values) / len(values))}, max {scale.shown(max(values))}"
        _legend_line(ground, line, _COLOURS[number], name, figures, box.width)
        line += 17
    if len(high) > len(named):
        _legend_line(ground, line, _FAINT, f"{len(high) - len(named)} lower ones", "", box.width)
        line += 17
    if low:
        words = low[0][0] if len(low) == 1 else f"{len(low)} at 0: " + ", ".join(name for name, _ in low)
        _legend_line(ground, line, _FAINT, words, "0" if len(low) == 1 else "", box.width)
    if not (high or low):
        plot.text(0.5, 0.5, "No data", transform=plot.transAxes, ha="center", va="center", size=14, color=_FAINT)


def _frame(plot: Axes, recording: Recording, highest: float, word: str) -> None:
    """Draw axes in minutes and in a unit, and the load's phases as letters."""
    plot.set(xlim=(0, recording.span_s), ylim=(0, highest * 1.15 or 1.0), facecolor=_PANEL)
    plot.spines[["top", "right"]].set_visible(False)
    plot.grid(color=_EDGE, linewidth=0.6)
    plot.set_axisbelow(True)
    plot.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g} {word}".strip()))
    plot.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 3, 6]))
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value // 60:.0f}:{value % 60:02.0f}"))
    plot.tick_params(length=0, labelsize=10, pad=6)
    for letter, phase in zip("ABCDEFGH", recording.phases, strict=False):
        plot.axvline(phase.from_s, color=_FAINT, linewidth=0.7, linestyle=(0, (3, 3)))
        plot.text(
            phase.from_s + recording.span_s / 120, highest * 1.13 or 0.98, letter, size=10, color=_FAINT, va="top"
        )


def _legend(target: dict[str, Any], curve: Curve) -> str:
    """Return a curve's name, as Grafana fills `{{instance}} {{code}}`."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: curve.labels.get(match[1], ""), target["legendFormat"]).strip()


def _legend_line(ground: Axes, top: float, colour: str, name: str, figures: str, width: float) -> None:
    room = round((width - 40) / 5.9) - len(figures)
    ground.add_patch(Rectangle((10, top - 7), 12, 4, facecolor=colour))
    ground.text(28, top, textwrap.shorten(name, room, placeholder=" ..."), size=10)
    ground.text(width - 10, top, figures, size=10, ha="right", color=_FAINT)


_KINDS: Final = {"stat": _stat, "table": _table, "timeseries": _curves}
