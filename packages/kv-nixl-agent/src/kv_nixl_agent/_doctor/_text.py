"""The doctor's report as lines of text, in columns that rich draws. Loaded by the command line alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_nixl_agent._doctor._report import Report

__all__ = ["report_lines"]

_SIGNS: Final[Mapping[str, str]] = {"ok": "ok", "warning": "WARN", "error": "ERROR"}
_VERDICTS: Final[Mapping[str, str]] = {
    "ok": "All is well",
    "warning": "It works, but not as hoped",
    "error": "It does not work",
}
_WIDTH: Final = 110


def report_lines(report: Report) -> Sequence[str]:
    """Return a report for people: findings, speeds, transports, and the verdict as the last line."""
    tables = [_findings(report)]
    if report.bandwidth:
        tables.append(_speeds(report))
    if report.transports:
        tables.append(_transports(report))
    return [*(line for table in tables for line in _drawn(table)), verdict(report)]


def _findings(report: Report) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    for finding in report.findings:
        table.add_row(_SIGNS[finding.severity], Text(f"{finding.name}: {finding.message}"))
    return table


def _speeds(report: Report) -> Table:
    table = Table("page KiB", "read GB/s", "memcpy GB/s", "of memcpy", "fence us", box=box.SIMPLE)
    for column in table.columns:
        column.justify = "right"
    for row in report.bandwidth:
        table.add_row(
            f"{row.page_bytes >> 10}",
            f"{row.read_gb_s:.2f}",
            f"{row.memcpy_gb_s:.2f}",
            f"{row.read_gb_s / row.memcpy_gb_s:.0%}",
            f"{row.fence_us:.0f}",
        )
    return table


def _transports(report: Report) -> Table:
    table = Table("transport", "for", "GB/s at 1 MiB", box=box.SIMPLE)
    for each in report.transports:
        speed = each.state if each.read_gb_s is None else f"{each.read_gb_s:.2f}, {each.state}"
        table.add_row(each.name, each.carries, Text(f"{speed}{': ' * bool(each.reason)}{each.reason}"))
    return table


def _drawn(table: Table) -> list[str]:
    """Return a table's lines and an empty one."""
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as drawn:
        console.print(table)
    return [*(line.rstrip() for line in drawn.get().strip("\n").splitlines() if line.strip()), ""]


def verdict(report: Report) -> str:
    """Return the last line: the worst severity in words, how many findings want a look, and the exit code."""
    counts = [
        f"{count} {word}{'s' * (count > 1)}"
        for word in ("error", "warning")
        if (count := sum(finding.severity == word for finding in report.findings))
    ]
    listed = f" ({', '.join(counts)})" if counts else ""
    return f"{_VERDICTS[report.severity]}{listed}. Exit code {report.exit_code}."
