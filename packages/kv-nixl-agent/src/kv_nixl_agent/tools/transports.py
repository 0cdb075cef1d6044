"""Transports of UCX one by one: the speed of those that carry a read here, and the reason for each that does not.

A transport that the machine plainly lacks is not tried. The others are given to UCX alone (`UCX_TLS`), with TCP for the first
message where they have none of their own; a trial counts only if UCX's table says that the transport carried the read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

from kv_nixl_agent.nixl.side_effects import SWITCH
from kv_nixl_agent.tools.machine import Finding, forbidding_ptrace_scope, has_gpu, rdma_devices
from kv_nixl_agent.tools.selftest import is_tcp, run_selftest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_nixl_agent.nixl.side_effects import State
    from kv_nixl_agent.tools.selftest import ReadPath

__all__ = ["Transport", "judge_peer_deaths", "try_transports"]

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


def _rdma_obstacle() -> str:
    return "" if rdma_devices() else "no RDMA device: /sys/class/infiniband is empty or missing"


def _gpu_obstacle() -> str:
    return "" if has_gpu() else "no NVIDIA GPU"


_CANDIDATES: Final = (
    _Candidate("cma", "host memory, within a host", "cma,tcp,self", frozenset({"cma", "sm", "shm"}), _ptrace_obstacle),
    _Candidate(
        "rc",
        "RDMA between hosts",
        "rc,self",
        frozenset({"rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ib"}),
        _rdma_obstacle,
    ),
    _Candidate("cuda_ipc", "GPU memory, within a host", "", frozenset({"cuda_ipc", "cuda"}), _gpu_obstacle),
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
