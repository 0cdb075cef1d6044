"""Draw medians and quartiles of a measure over the length of the prompt, as an SVG."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Curve", "curves_of", "draw"]

_STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "kv-transfer",
}

Curve = list[tuple[int, float, float, float]]
"""Points of a line: tokens, median, first and third quartile."""


def curves_of(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, dict[str, Curve]]:
    """Return panel -> kind -> its curve; a kind that stands on both sides of rows is taken once."""
    panels: defaultdict[str, defaultdict[str, dict[int, tuple[float, float, float]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        if row["measure"] != measure or not row["where"] or row["where"].get("prefix") == "held":
            continue  # also bounds that nothing was measured for
        where, spread = row["where"], row["spread"]
        panel = panels[f"{where['at_once']} at once, {where['pool']}, {where['transport']}, steps of {where['chunk']}"]
        panel[row["kind"]][where["tokens"]] = (row["ours"], spread[0], spread[1])
        panel[row["beside"]][where["tokens"]] = (row["baseline"], spread[2], spread[3])
    return {
        title: {kind: [(tokens, *points[tokens]) for tokens in sorted(points)] for kind, points in lines.items()}
        for title, lines in panels.items()
    }


def draw(rows: Sequence[Mapping[str, Any]], measure: str, file: Path) -> None:
    """Write a panel for each number of prompts at once, pool, transport and step size."""
    panels = curves_of(rows, measure)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.4 * columns, 2.6 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).flat
        for panel, (title, curves) in zip(axes, panels.items(), strict=False):
            for kind, curve in curves.items():
                tokens, middle, low, high = zip(*curve, strict=True)
                panel.plot(tokens, middle, marker="o", markersize=3, linewidth=1, label=kind)
                panel.vlines(tokens, low, high, alpha=0.5)
                panel.fill_between(tokens, low, high, alpha=0.2)
            panel.set_title(title, loc="left", fontsize=7)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)
        for panel in list(axes)[len(panels) :]:
            panel.set_visible(False)
        figure.supxlabel("prompt tokens", fontsize=8)
        figure.supylabel(f"{measure}, ms", fontsize=8)
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None})
