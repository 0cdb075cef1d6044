"""Write the figures of a run into the documents: the judged ones into `docs/performance.md`, all into a page of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvdev.marks import with_tables
from kvdev.pairs.figures import described
from kvdev.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ALL_FIGURES", "FIGURES", "PAGE", "judged_tables", "publish", "read_figures", "tables"]

PAGE: Final = ROOT / "docs" / "performance.md"
ALL_FIGURES: Final = ROOT / "docs" / "performance" / "connector.md"
FIGURES: Final = ALL_FIGURES.with_name("figures.json")
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
    """Record the report of a run and write pages and pictures from it."""
    from kvdev.pairs.drawing import draw

    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, measure in _PICTURES.items():
        draw(report["results"], measure, FIGURES.with_name(name))
    for page, made in ((PAGE, judged_tables(report)), (ALL_FIGURES, tables(report))):
        page.write_text(with_tables(page.read_text(), made))


def judged_tables(report: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the table of the figures that a bound is about, without those that count answers and tokens."""
    if report is None:
        return {"connector bounds": ""}
    judged = [row for row in report["results"] if row["target"] not in {"context", "0"}]
    return {"connector bounds": "\n\n".join([_taken(report), _table(judged)])}


def tables(report: Mapping[str, Any] | None) -> dict[str, str]:
    """Return all figures by the names of their marks; nothing without a recorded run."""
    if report is None:
        return {"connector hand-overs": "", "connector engines": ""}
    rows: Sequence[Mapping[str, Any]] = report["results"]
    pictures = [f"![{measure}, ms over tokens]({name})" for name, measure in _PICTURES.items()]
    return {
        "connector hand-overs": "\n\n".join(
            [_taken(report), *pictures, _table(row for row in rows if row["measure"] in _BY_CASE)]
        ),
        "connector engines": _table(row for row in rows if row["measure"] not in _BY_CASE),
    }


def _taken(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    return f"Commit `{report['commit']}` on {machine['cpus']} cores ({machine['cpu']}), kernel {machine['kernel']}."


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    head = [
        "| measure | where | medians (quartiles) | compared with | ratio | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_line, rows)])


def _line(row: Mapping[str, Any]) -> str:
    unit, spread = row["unit"], row.get("spread")
    ours, beside = f"{_rounded(row['ours'])} {unit}", f"{_rounded(row['baseline'])} {_named(row['beside'])}"
    if spread:
        own, other = (" to ".join(map(_rounded, each)) for each in (spread[:2], spread[2:]))
        ours = f"{ours} ({own})"
        beside = f"{_rounded(row['baseline'])} ({other}), {_named(row['beside'])}"
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


def _rounded(figure: float) -> str:
    """Return four digits, or all before the point. Example: 89.258 is `89.26`, 12345.6 is `12346`."""
    return f"{figure:.4g}" if abs(figure) < 10_000 else f"{figure:.0f}"


def _named(kind: str) -> str:
    return _NAMES.get(kind, kind)
