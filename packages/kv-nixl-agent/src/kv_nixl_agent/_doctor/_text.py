"""The doctor's report as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_nixl_agent._doctor._report import Report

__all__ = ["report_lines"]

_SIGNS: Final[Mapping[str, str]] = {"ok": "  ok ", "warning": " WARN", "error": "ERROR"}
_VERDICTS: Final[Mapping[str, str]] = {
    "ok": "All is well",
    "warning": "It works, but not as hoped",
    "error": "It does not work",
}
_WIDTH: Final = 110
_INDENT: Final = 7


def report_lines(report: Report) -> Sequence[str]:
    """Return a report for people: findings, speeds, transports, and the verdict as the last line."""
    lines: list[str] = []
    for finding in report.findings:
        lines += _wrapped(f"{_SIGNS[finding.severity]}  {finding.name}: {finding.message}")
    if report.bandwidth:
        lines += ["", "  page KiB   read GB/s   memcpy GB/s   of memcpy   fence us"]
        lines += [
            f"  {row.page_bytes >> 10:8}   {row.read_gb_s:9.2f}   {row.memcpy_gb_s:11.2f}"
            f"   {row.read_gb_s / row.memcpy_gb_s:9.0%}   {row.fence_us:8.0f}"
            for row in report.bandwidth
        ]
    if report.transports:
        lines += ["", "  transport   for                          GB/s at 1 MiB"]
        for each in report.transports:
            speed = each.state if each.read_gb_s is None else f"{each.read_gb_s:.2f}, {each.state}"
            lines += _wrapped(f"  {each.name:9}   {each.carries:26}   {speed}{': ' * bool(each.reason)}{each.reason}")
    return [*lines, "", verdict(report)]


def verdict(report: Report) -> str:
    """Return the last line: the worst severity in words, how many findings want a look, and the exit code."""
    counts = [
        f"{count} {word}{'s' * (count > 1)}"
        for word in ("error", "warning")
        if (count := sum(finding.severity == word for finding in report.findings))
    ]
    listed = f" ({', '.join(counts)})" if counts else ""
    return f"{_VERDICTS[report.severity]}{listed}. Exit code {report.exit_code}."


def _wrapped(line: str) -> Sequence[str]:
    """Return a line in parts that a terminal shows, those after the first indented; a name is never divided."""
    parts: list[str] = []
    rest = line
    while len(rest) > _WIDTH and (cut := rest.rfind(" ", _INDENT + 1, _WIDTH)) > 0:
        parts.append(rest[:cut])
        rest = " " * _INDENT + rest[cut + 1 :]
    return [*parts, rest]
