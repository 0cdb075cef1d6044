"""Write the figures of a run into `docs/performance.md`: tables between marks, and pictures beside the recorded JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvdev.marks import with_tables
from kvdev.pairs.figures import described
from kvdev.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FIGURES", "PAGE", "publish", "read_figures", "tables"]

PAGE: Final = ROOT / "docs" / "performance.md"
FIGURES: Final = ROOT / "docs" / "performance" / "figures.json"
_BY_CASE: Final = ("hand-over", "first token", "early bytes", "saved")
_PICTURES: Final = {"hand-over.svg": "hand-over", "first-token.svg": "first token"}
"""File beside the figures -> the measure that it shows."""
_NAMES: Final = {
    "vllm": "vLLM's own",
    "alone": "no connector",
    "usual gap": "the usual gap",
    "gap beside a prefill": "the worst gap beside a prefill that nobody reads",
    "plain less floor": "what plain takes beyond the floor",
}


def read_figures() -> dict[str, Any] | None:
    """Return the recorded run; None as long as none was published."""
    if not FIGURES.exists():
        return None
    report: dict[str, Any] = json.loads(FIGURES.read_text())
    return report


def publish(report: Mapping[str, Any]) -> None:
    """Record the report of a run and write page and pictures from it."""
    from kvdev.pairs.drawing import draw

    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, measure in _PICTURES.items():
        draw(report["results"], measure, FIGURES.with_name(name))
    PAGE.write_text(with_tables(PAGE.read_text(), tables(report)))


def tables(report: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what stands between the page's marks, by their name; nothing without a recorded run."""
    if report is None:
        return {"connector hand-overs": "", "connector engines": ""}
    rows: Sequence[Mapping[str, Any]] = report["results"]
    machine = report["machine"]
    taken = f"Commit `{report['commit']}` on {machine['cpus']} cores ({machine['cpu']}), kernel {machine['kernel']}."
    pictures = [f"![{measure}, ms over tokens](performance/{name})" for name, measure in _PICTURES.items()]
    return {
        "connector hand-overs": "\n\n".join(
            [taken, *pictures, _table(row for row in rows if row["measure"] in _BY_CASE)]
        ),
        "connector engines": _table(row for row in rows if row["measure"] not in _BY_CASE),
    }


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    head = [
        "| measure | where | medians (quartiles) | compared with | ratio | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_line, rows)])


def _line(row: Mapping[str, Any]) -> str:
    unit, spread = row["unit"], row.get("spread")
    ours, beside = f"{row['ours']:g} {unit}", f"{row['baseline']:g} {_named(row['beside'])}"
    if spread:
        ours = f"{row['ours']:g} {unit} ({spread[0]:g} to {spread[1]:g})"
        beside = f"{row['baseline']:g} ({spread[2]:g} to {spread[3]:g}), {_named(row['beside'])}"
    is_judged = row["target"] != "context"
    target, met = (row["target"], "yes" if row["met"] else "**no**") if is_judged else ("", "")
    cells = [
        f"{row['measure']}, {_named(row['kind'])}",
        described(row["where"]) if row["where"] else "not measured",
        ours,
        beside,
        f"{row['ratio']:g}",
        target,
        met,
    ]
    return f"| {' | '.join(cells)} |"


def _named(kind: str) -> str:
    return _NAMES.get(kind, kind)
