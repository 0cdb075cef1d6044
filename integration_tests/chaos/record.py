"""Turn the reports of a long run into what is committed: `docs/chaos/` and the tables of `docs/chaos.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "docs" / "upstream")]

from consumer_death import wilson  # noqa: E402  (the paths above lead to it and to the next)

from kvdev.marks import with_tables  # noqa: E402

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

_ORDER = (
    *("stop", "scheduler-kill", "delay", "drop", "drop-answers", "half-open", "cut-midway", "refuse"),
    *("descriptors-none", "descriptors-few", "full-log"),
    *("net-delay", "net-loss", "partition", "prefill-unheard", "decode-unheard"),
)
"""Faults in the order of the table."""

__all__ = ["FIGURES", "PAGE", "PICTURE", "tables"]


def gathered(reports: Path) -> dict[str, Any]:
    """Return the figures of all reports, without the lines of single requests."""
    found: dict[str, Any] = {}
    for file in sorted(reports.glob("*.json")):
        if not file.name.endswith(".samples.json"):
            found[file.stem] = {name: value for name, value in json.loads(file.read_text()).items() if name != "bad"}
    return found


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    return {
        "kills": _kills(figures),
        "survivors": _survivors(figures),
        "faults": _faults(figures),
        "soak": _soak(figures["soak"]),
    }


def _kills(figures: dict[str, Any]) -> str:
    rows = [
        "| killed | transports | kills | requests | right | clean errors | else | survivors died | per 100 | healthy | start |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for side in _SIDES:
        for transport in _TRANSPORTS:
            report = figures.get(f"kills-{side}-{transport}")
            if report is None:
                continue
            verdicts = dict(report["verdicts"])
            right, errors = verdicts.pop("right", 0), verdicts.pop("clean error", 0)
            healthy, deaths = report["healthy_pairs"], len(report["deaths_of_survivors"])
            rows.append(
                f"| {side} | {transport} | {report['kills']} | {report['requests']} | {right} | {errors} "
                f"| {sum(verdicts.values())} | {deaths} | {_per_100(deaths, report['kills'])} "
                f"| {healthy['right']} of {healthy['requests']} right | {report['restart_s']} s |"
            )
    return "\n".join(rows)


def _per_100(deaths: int, kills: int) -> str:
    """Return deaths per 100 kills with the 95 % interval of Wilson. Example: 0 of 10 is `0 (0 to 28)`."""
    least, most = wilson(deaths, kills)
    return f"{100 * deaths / max(1, kills):.0f} ({least:.0f} to {most:.0f})"


def _faults(figures: dict[str, Any]) -> str:
    rows = [
        "| fault | on for | requests | right | clean errors | else | slowest right one | others, meanwhile | restored after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reports = [report for name, report in figures.items() if name.startswith("fault-")]
    for report in sorted(reports, key=lambda each: (_ORDER.index(each["fault"]), each["what"])):
        verdicts, others = dict(report["verdicts"]), report["others"]
        right, errors = verdicts.pop("right", 0), verdicts.pop("clean error", 0)
        meanwhile = f"{others['right']} of {others['requests']} right, in {others['slowest_s']} s at most"
        rows.append(
            f"| {report['what']} (`{report['fault']}`) | {report['seconds_on']} s | {report['requests']} | {right} | {errors} "
            f"| {sum(verdicts.values())} | {report['slowest_s']} s | {meanwhile if others['requests'] else ''} "
            f"| {report['restored_s']} s |"
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


def main() -> None:
    """Write figures, picture and tables; figures of what was not run again stay."""
    from drawing import draw

    FIGURES.parent.mkdir(exist_ok=True)
    figures = {**json.loads(FIGURES.read_text()), **gathered(REPORTS)}
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    if (samples := REPORTS / "soak.samples.json").exists():
        draw(json.loads(samples.read_text()), PICTURE)
    PAGE.write_text(with_tables(PAGE.read_text(), tables(figures)))
    print(f"{FIGURES.relative_to(ROOT)}: {', '.join(figures)}", file=sys.stderr)


if __name__ == "__main__":
    main()
