"""Draw the levels of a soak as an SVG: `python drawing.py SAMPLES.json OUT.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

__all__ = ["draw"]

_PANELS = (
    ("resident_mb", "resident memory, MB"),
    ("descriptors", "open descriptors"),
    ("sockets", "sockets"),
    ("threads", "threads"),
    ("leased_blocks", "leased blocks"),
)
_STEP = 5
"""Each fifth sample is drawn, so that the file stays small."""


def draw(data: dict[str, Any], file: Path) -> None:
    """Write one panel per level, one line per engine, over minutes since the start."""
    mpl.rcParams.update({"svg.hashsalt": "chaos", "svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"})
    figure, axes = plt.subplots(len(_PANELS), 1, figsize=(8, 9), sharex=True, layout="constrained")
    start_s = min(samples[0]["at_s"] for samples in data["samples"].values())
    for panel, (level, title) in zip(axes, _PANELS, strict=True):
        lines = data["samples"] if level in next(iter(data["samples"].values()))[0] else data["holdings"]
        for name, samples in sorted(lines.items()):
            kept = samples[::_STEP]
            # A gap is drawn where an engine was dead: its process had no levels then.
            minutes = [(sample["at_s"] - start_s) / 60 for sample in kept]
            panel.plot(minutes, [sample[level] for sample in kept], linewidth=0.8, label=name)
        panel.set_title(title, loc="left", fontsize=8)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0].legend(ncols=4, fontsize=7, loc="lower right")
    axes[-1].set_xlabel("minutes")
    figure.savefig(file, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
