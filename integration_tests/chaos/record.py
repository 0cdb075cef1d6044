"""Turn the reports of a long run into what is committed: `docs/chaos/` and the tables of `docs/chaos.md`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "chaos.md"
FIGURES = ROOT / "docs" / "chaos" / "figures.json"
PICTURE = ROOT / "docs" / "chaos" / "soak.svg"
REPORTS = ROOT / ".dev" / "reports" / "chaos"
_SIDES = ("prefill", "decode")
_TRANSPORTS = ("default", "tcp")
_LEVELS = (
    ("resident_mb", "memory, MB"),
    ("descriptors", "descriptors"),
    ("sockets", "sockets"),
    ("threads", "threads"),
)

__all__ = ["FIGURES", "PAGE", "PICTURE", "tables", "with_tables"]


def gathered(reports: Path) -> dict[str, Any]:
    """Return the figures of all reports, without the lines of single requests."""
    found: dict[str, Any] = {}
    for file in sorted(reports.glob("*.json")):
        if not file.name.endswith(".samples.json"):
            found[file.stem] = {name: value for name, value in json.loads(file.read_text()).items() if name != "bad"}
    return found


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    return {"kills": _kills(figures), "survivors": _survivors(figures), "soak": _soak(figures["soak"])}


def _kills(figures: dict[str, Any]) -> str:
    rows = [
        "| killed | transports | kills | requests | right | clean errors | else | survivors died | healthy pairs | start |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for side in _SIDES:
        for transport in _TRANSPORTS:
            report = figures.get(f"kills-{side}-{transport}")
            if report is None:
                continue
            verdicts = dict(report["verdicts"])
            right, errors = verdicts.pop("right", 0), verdicts.pop("clean error", 0)
            healthy = report["healthy_pairs"]
            rows.append(
                f"| {side} | {transport} | {report['kills']} | {report['requests']} | {right} | {errors} "
                f"| {sum(verdicts.values())} | {len(report['deaths_of_survivors'])} "
                f"| {healthy['right']} of {healthy['requests']} right | {report['restart_s']} s |"
            )
    return "\n".join(rows)


def _survivors(figures: dict[str, Any]) -> str:
    rows = [
        "| killed | transports | survivor | " + " | ".join(title for _, title in _LEVELS) + " |",
        "|---|---|---|" + "---|" * len(_LEVELS),
    ]
    for side in _SIDES:
        for transport in _TRANSPORTS:
            survivors = figures.get(f"kills-{side}-{transport}", {}).get("survivors", {})
            for name, levels in survivors.items():
                cells = [f"{levels[level][0]:g} → {levels[level][1]:g}" for level, _ in _LEVELS]
                rows.append(f"| {side} | {transport} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _soak(report: dict[str, Any]) -> str:
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(report["verdicts"].items()))
    faults = "; ".join(f"{count} times {name}" for name, count in sorted(report["faults"].items()))
    rows = [
        f"{report['requests']} requests in {report['seconds'] / 60:.0f} minutes: {verdicts}. Faults: {faults}.",
        "",
        "| engine that no fault touched | level | median | least | most | growth | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, levels in report["levels"].items():
        for level, title in _LEVELS:
            each = levels[level]
            cells = [f"{each[column]:g}" for column in ("median", "least", "most", "grew", "bound")]
            rows.append(f"| {name} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def with_tables(page: str, made: dict[str, str]) -> str:
    """Return the page with each table between its two marks."""
    for name, table in made.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        found = marks.search(page)
        if not found:
            raise ValueError(f"the page has no marks for the table {name!r}")
        page = f"{page[: found.start()]}{found[1]}{table}\n{found[2]}{page[found.end() :]}"
    return page


def main() -> None:
    """Write figures, picture and tables."""
    from drawing import draw

    FIGURES.parent.mkdir(exist_ok=True)
    figures = gathered(REPORTS)
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    draw(json.loads((REPORTS / "soak.samples.json").read_text()), PICTURE)
    PAGE.write_text(with_tables(PAGE.read_text(), tables(figures)))
    print(f"{FIGURES.relative_to(ROOT)}: {', '.join(figures)}", file=sys.stderr)


if __name__ == "__main__":
    main()
