"""An episode as a picture: one lane per engine, time downwards, messages as arrows; one HTML file without scripts."""

from __future__ import annotations

import html
from pathlib import Path
from string import Template

from episode import Outcome
from world import Note

__all__ = ["write_picture"]

_LANE, _ROW, _LEFT, _TOP = 300, 16, 90, 60
_MOST_ROWS = 2000
_LETTERS = 42
"""Letters of a text that fit into a lane."""

_PAGE = Template("""<!doctype html>
<meta charset="utf-8"><title>$title</title>
<style>body{font:13px sans-serif;margin:16px}.check{font-weight:bold}.fault,.check{fill:#b00}
text{font:11px monospace;paint-order:stroke;stroke:#fff;stroke-width:4px}
line.lane{stroke:#bbb}line.message{stroke:#36c}.time{fill:#888}</style>
<h1>$title</h1><p>$summary</p><p>$setting</p>
<svg width="$width" height="$height" xmlns="http://www.w3.org/2000/svg">
<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0L6 3L0 6z" fill="#36c"/></marker></defs>
$body
</svg>
""")


def write_picture(outcome: Outcome, path: Path) -> None:
    """Write the picture of an episode."""
    notes = outcome.notes[-_MOST_ROWS:]
    lanes: dict[str, int] = {}
    for note in notes:
        for name in (note.lane, note.target):
            if name:
                lanes.setdefault(name, len(lanes))
    lanes.pop("CHECK", None)
    order = sorted(lanes, key=lambda name: (name != "router", name))
    x_of = {name: _LEFT + _LANE * at + 10 for at, name in enumerate(order)}
    times = [note.at_s for note in notes]
    height = _TOP + _ROW * (len(notes) + 2)
    body = [f'<line class="lane" x1="{x}" y1="{_TOP - 20}" x2="{x}" y2="{height}"/>' for x in x_of.values()]
    body += [f'<text x="{x}" y="{_TOP - 26}">{html.escape(name)}</text>' for name, x in x_of.items()]
    labels: list[str] = []  # over all arrows
    for row, note in enumerate(notes):
        y = _TOP + _ROW * row
        body.append(f'<text class="time" x="4" y="{y}">{note.at_s:.4f}</text>')
        if note.target:
            arrives = next((at for at in range(row, len(times)) if times[at] >= note.until_s), len(times))
            y_end = _TOP + _ROW * max(row + 0.5, arrives - 0.5)
            body.append(
                f'<line class="message" marker-end="url(#tip)" x1="{x_of[note.lane]}" y1="{y - 4}" '
                f'x2="{x_of[note.target]}" y2="{y_end - 4}"/>'
            )
        labels.append(_label(note, x_of, y))
    broken = "; ".join(f"{one.kind}: {one.text}" for one in outcome.violations) or "no promise is broken"
    path.write_text(
        _PAGE.substitute(
            title=f"seed {outcome.plan.seed}",
            setting=html.escape(_setting(outcome)),
            summary=html.escape(broken),
            width=_LEFT + _LANE * len(order),
            height=height,
            body="\n".join([*body, *labels]),
        ),
        encoding="utf-8",
    )


def _label(note: Note, x_of: dict[str, int], y: int) -> str:
    """Return a line's text: a check's over the whole width, others within their lane, whole under the pointer."""
    if note.lane == "CHECK":
        return f'<text class="check" x="{_LEFT + 14}" y="{y}">{html.escape(note.text)}</text>'
    kind = "fault" if note.text.startswith("FAULT") else "note"
    shown = note.text if len(note.text) <= _LETTERS else f"{note.text[: _LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
    whole = f"<title>{html.escape(note.text)}</title>" if shown != note.text else ""
    return f'<text class="{kind}" x="{x_of[note.lane] + 4}" y="{y}">{whole}{html.escape(shown)}</text>'


def _setting(outcome: Outcome) -> str:
    """Return what of the configuration a reader of the picture needs."""
    plan, fleet = outcome.plan, outcome.plan.fleet
    return (
        f"{len(plan.requests)} requests, {len(plan.faults)} faults, which end at {fleet.faults_end_s:.1f} s; leases of "
        f"{fleet.lease_s:g} s, reads of {fleet.read_timeout_s:g} s at most, {fleet.fence_slots} fence slots, a policy of "
        f"{fleet.policy}; engines: {fleet.shape}"
    )
