"""`kv-nixl doctor`: everything that decides whether transfers work, and how fast, in one report."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.nixl.binding import loaded_build
from kv_nixl_agent.nixl.side_effects import POOL
from kv_nixl_agent.tools.machine import Finding, Severity, check_builds, check_environment, check_nixl
from kv_nixl_agent.tools.remote import measure_peer
from kv_nixl_agent.tools.selftest import Bandwidth, ReadPath, SelfTest, is_tcp, run_selftest, silenced
from kv_nixl_agent.tools.transports import Transport, judge_peer_deaths, try_transports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXIT_CODES", "Report", "examine", "report_lines"]

EXIT_CODES: Final[Mapping[Severity, int]] = {"ok": 0, "warning": 1, "error": 3}
"""Exit code by worst severity; 2 is wrong usage."""

_SLOW_RATIO: Final = 0.05


@final
@dataclass(frozen=True)
class Report:
    """All findings and measurements."""

    findings: Sequence[Finding]
    bandwidth: Sequence[Bandwidth]
    paths: Sequence[ReadPath]
    peer_bandwidth: Bandwidth | None = None
    transports: Sequence[Transport] = ()

    @property
    def severity(self) -> Severity:
        """Worst severity of all findings."""
        found = {finding.severity for finding in self.findings}
        return "error" if "error" in found else "warning" if "warning" in found else "ok"

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return EXIT_CODES[self.severity]

    def as_json(self) -> dict[str, object]:
        """Return plain values for `--json`."""
        return {"severity": self.severity, "exit_code": self.exit_code, **asdict(self)}


def examine(peer: tuple[str, int] | None = None) -> Report:
    """Look at NIXL, the machine, and real reads between two processes (and from a peer); never raises, prints nothing.

    NIXL logs a traceback per missing plugin; the report lists those already.
    """
    with silenced():
        return _examine(peer)


def _examine(peer: tuple[str, int] | None) -> Report:
    findings = list(check_nixl())
    findings += [*check_builds(loaded_build()), *check_environment()]
    test, transports = SelfTest(is_ok=False, message="not run, NIXL does not start"), list[Transport]()
    if findings[0].severity != "error":
        test = run_selftest()
    findings.append(Finding("two-process-read", "ok" if test.is_ok else "error", test.message))
    if test.is_ok:
        findings.append(_judge_paths(test.paths))
        if test.paths:
            findings.append(judge_peer_deaths(test.paths, POOL.state))
        findings.append(_judge_speed(test.bandwidth))
        transports += try_transports(test.paths)
    peer_bandwidth = None
    if peer is not None:
        peer_bandwidth, finding = _try_peer(*peer)
        findings.append(finding)
    return Report(findings, test.bandwidth, test.paths, peer_bandwidth, transports)


def _judge_paths(paths: Sequence[ReadPath]) -> Finding:
    if not paths:
        return Finding("transports", "warning", "UCX printed no protocol table: the transports are not known")
    shown = "; ".join(f"{path.into} from {path.source} {path.sizes}: {path.method} {path.config}" for path in paths)
    over_tcp = [path for path in paths if is_tcp(path)]
    if over_tcp:
        return Finding(
            "transports",
            "warning",
            f"READS GO OVER TCP, even within this host: {shown}; below is why each faster transport was not used",
        )
    return Finding("transports", "ok", shown)


def _judge_speed(bandwidth: Sequence[Bandwidth]) -> Finding:
    largest = bandwidth[-1]
    ratio = largest.read_gb_s / largest.memcpy_gb_s
    text = f"{largest.read_gb_s:.2f} GB/s at {largest.page_bytes >> 10} KiB pages, {ratio:.0%} of memcpy"
    return Finding("bandwidth", "warning" if ratio < _SLOW_RATIO else "ok", text)


def _try_peer(host: str, port: int) -> tuple[Bandwidth | None, Finding]:
    try:
        measured = measure_peer(host, port)
    except Exception as error:  # noqa: BLE001  (whatever another machine's answer brings about is the finding)
        return None, Finding("peer", "error", f"{host}:{port}: {type(error).__name__}: {error}")
    text = f"{host}:{port}: {measured.read_gb_s:.2f} GB/s at {measured.page_bytes >> 10} KiB pages, content compared"
    return measured, Finding("peer", "ok", text)


_SIGNS: Final[Mapping[str, str]] = {"ok": "ok", "warning": "WARN", "error": "ERROR"}
_VERDICTS: Final[Mapping[str, str]] = {
    "ok": "All is well",
    "warning": "Works, with warnings",
    "error": "It does not work",
}
_WIDTH: Final = 110
_SPEEDS: Final = "{:>9}  {:>9}  {:>11}  {:>9}  {:>8}"


def report_lines(report: Report) -> Sequence[str]:
    """Return a report for people: findings, speeds, transports, and the verdict as the last line."""
    lines: list[str] = []
    for finding in report.findings:
        lines += _wrapped(f"{_SIGNS[finding.severity]:>5}  ", f"{finding.name}: {finding.message}")
    if report.bandwidth:
        lines += ["", _SPEEDS.format("page KiB", "read GB/s", "memcpy GB/s", "of memcpy", "fence us")]
    for row in report.bandwidth:
        share = f"{row.read_gb_s / row.memcpy_gb_s:.0%}"
        speeds = (f"{row.read_gb_s:.2f}", f"{row.memcpy_gb_s:.2f}", share, f"{row.fence_us:.0f}")
        lines.append(_SPEEDS.format(row.page_bytes >> 10, *speeds))
    if report.transports:
        lines += ["", f"{'transport':<10}{'for':<28}GB/s at 1 MiB"]
    for each in report.transports:
        speed = each.state if each.read_gb_s is None else f"{each.read_gb_s:.2f}, {each.state}"
        lines += _wrapped(f"{each.name:<10}{each.carries:<28}", f"{speed}{': ' * bool(each.reason)}{each.reason}")
    return [*lines, "", verdict(report)]


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def verdict(report: Report) -> str:
    """Return the last line: the worst severity in words, how many findings need attention, and the exit code."""
    counts = [
        f"{count} {word}{'s' * (count > 1)}"
        for word in ("error", "warning")
        if (count := sum(finding.severity == word for finding in report.findings))
    ]
    listed = f" ({', '.join(counts)})" if counts else ""
    return f"{_VERDICTS[report.severity]}{listed}. Exit code {report.exit_code}."
