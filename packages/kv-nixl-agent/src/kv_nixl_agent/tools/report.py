"""`kv-nixl doctor`: everything that decides whether transfers work, and how fast, in one report.

Transports of UCX are tried one by one. One that the machine plainly lacks is not tried. The others are given to UCX alone
(`UCX_TLS`), with TCP for the first message where they have none of their own; a trial counts only if UCX's table says that the
transport carried the read.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal, final

from kv_nixl_agent.nixl.binding import loaded_build
from kv_nixl_agent.nixl.side_effects import POOL, SWITCH
from kv_nixl_agent.tools.machine import (
    Finding,
    Severity,
    check_builds,
    check_environment,
    check_nixl,
    forbidding_ptrace_scope,
    has_gpu,
    rdma_devices,
)
from kv_nixl_agent.tools.remote import measure_peer
from kv_nixl_agent.tools.selftest import PAGE_SIZES, Bandwidth, ReadPath, SelfTest, is_tcp, run_selftest, silenced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_nixl_agent.nixl.side_effects import State

__all__ = ["EXIT_CODES", "Report", "Transport", "examine", "judge_peer_deaths", "report_lines", "try_transports"]

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


@silenced()  # NIXL logs a traceback per missing plugin; the report lists those already
def examine(peer: tuple[str, int] | None = None, *, is_quick: bool = False) -> Report:
    """Look at NIXL, the machine, and real reads between two processes (and from a peer); never raises, prints nothing."""
    findings = list(check_nixl())
    findings += [*check_builds(loaded_build()), *check_environment()]
    test, transports = SelfTest(is_ok=False, message="not run, NIXL does not start"), list[Transport]()
    if findings[0].severity != "error":
        test = run_selftest(page_sizes=(_PAGE_BYTES,) if is_quick else PAGE_SIZES)
    findings.append(Finding("two-process-read", "ok" if test.is_ok else "error", test.message))
    if test.is_ok:
        findings.append(_judge_paths(test.paths))
        if test.paths:
            findings.append(judge_peer_deaths(test.paths, POOL.state))
        findings.append(_judge_speed(test.bandwidth))
        transports += [] if is_quick else try_transports(test.paths)
    if is_quick:
        findings.append(Finding("quick", "ok", "not measured: pages below 1 MiB, and each transport by itself"))
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


_PAGE_BYTES: Final = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Transport:
    """Transport of UCX on this machine.

    Attributes:
        name: UCX's name.
        carries: Purpose.
        state: `used` (UCX chooses it for reads between two processes), `usable`, `unusable`, or `untried`.
        read_gb_s: GB/s of pages of 1 MiB over it alone; None where it was not measured.
        reason: Why it cannot be used, or was not tried; "" otherwise.
    """

    name: str
    carries: str
    state: Literal["used", "usable", "unusable", "untried"]
    read_gb_s: float | None = None
    reason: str = ""


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    carries: str
    alone: str
    """`UCX_TLS` of its trial; "" for a transport that a read of host memory does not try."""
    aliases: frozenset[str]
    obstacle: Callable[[], str]


def _ptrace_obstacle() -> str:
    scope = forbidding_ptrace_scope()
    return f"ptrace_scope {scope} forbids it; set it to 0" if scope else ""


_CANDIDATES: Final = (
    _Candidate("cma", "host memory, within a host", "cma,tcp,self", frozenset({"cma", "sm", "shm"}), _ptrace_obstacle),
    _Candidate(
        "rc",
        "RDMA between hosts",
        "rc,self",
        frozenset({"rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ib"}),
        lambda: "" if rdma_devices() else "no RDMA device: /sys/class/infiniband is empty or missing",
    ),
    _Candidate(
        "cuda_ipc",
        "GPU memory, within a host",
        "",
        frozenset({"cuda_ipc", "cuda"}),
        lambda: "" if has_gpu() else "no NVIDIA GPU",
    ),
    _Candidate("tcp", "anything, slowly", "tcp,self", frozenset({"tcp"}), str),
)


def try_transports(used: Sequence[ReadPath], environment: Mapping[str, str] | None = None) -> Sequence[Transport]:
    """Return every transport that matters for KV, with its speed or the reason why it cannot be used; never raises.

    Args:
        used: Paths that UCX chose in this environment.
        environment: Variables; those of this process if None.
    """
    variables = os.environ if environment is None else environment
    return [_judge(each, used, variables) for each in _CANDIDATES]


def _judge(each: _Candidate, used: Sequence[ReadPath], variables: Mapping[str, str]) -> Transport:
    reason = each.obstacle() or _forbidden(each, variables.get("UCX_TLS", ""))
    if reason:
        return Transport(each.name, each.carries, "unusable", reason=reason)
    if not each.alone:
        return Transport(each.name, each.carries, "untried", reason="this test reads host memory")
    test = run_selftest(each.alone, page_sizes=(_PAGE_BYTES,))
    if not test.is_ok:
        return Transport(each.name, each.carries, "unusable", reason=test.message)
    carried = [path.config for path in test.paths]
    if not any(_is_by(each.name, config) for config in carried):
        return Transport(
            each.name, each.carries, "unusable", reason=f"UCX took {', '.join(carried) or 'another'} instead"
        )
    is_used = any(_is_by(each.name, path.config) for path in used)
    return Transport(each.name, each.carries, "used" if is_used else "usable", test.bandwidth[-1].read_gb_s)


def _is_by(name: str, config: str) -> bool:
    """Return whether a path goes by a transport: `rc_mlx5/mlx5_0:1` by `rc`, `cma/memory` by `cma`."""
    return config.lower().startswith(name) or f" {name}" in config.lower()


def _forbidden(each: _Candidate, ucx_tls: str) -> str:
    """Return why `UCX_TLS` forbids a transport, e.g. `tcp,self` forbids `cma`, and `^cma` too; "" if it does not."""
    names = {name.strip().lower().lstrip("\\") for name in ucx_tls.removeprefix("^").split(",") if name.strip()}
    if not names or "all" in names or bool(names & each.aliases) is not ucx_tls.startswith("^"):
        return ""
    return f"UCX_TLS={ucx_tls} {'excludes it' if ucx_tls.startswith('^') else 'leaves it out'}"


_REMEDIES: Final[dict[State, str]] = {
    "off": f"{SWITCH} turns the remedy off; unset it",
    "already-in-use": "UCX was loaded before this package, which therefore left it alone",
    "unknown-build": "this build of UCX is not known to the remedy",
    "not-loaded": "UCX is not loaded",
}


def judge_peer_deaths(paths: Sequence[ReadPath], state: State) -> Finding:
    """Judge the paths of reads, and the state of UCX's request pool in this process."""
    if not any(is_tcp(path) for path in paths):
        return Finding("peer-deaths", "ok", "reads are one-sided: a consumer that dies does its producer no harm")
    if state == "zeroed":
        return Finding(
            "peer-deaths",
            "ok",
            "the producer takes part in reads; UCX's request pool is zeroed, so a consumer that dies does not end it with "
            "SIGSEGV. A producer that stood still meanwhile may still abort: docs/upstream/consumer-death.md",
        )
    return Finding(
        "peer-deaths",
        "warning",
        "the producer takes part in reads, and a consumer that dies may end it with SIGSEGV "
        f"({_REMEDIES[state]}); RDMA or CMA avoid it, MALLOC_MMAP_THRESHOLD_=32768 does too: "
        "docs/upstream/consumer-death.md",
    )
