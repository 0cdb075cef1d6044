"""Finding about consumers that die while they read: whether they can take the process that they read from with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_nixl_agent._doctor._environment import Finding
from kv_nixl_agent._doctor._transports import is_tcp
from kv_nixl_agent._request_pool import SWITCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_nixl_agent._doctor._transports import ReadPath
    from kv_nixl_agent._request_pool import State

__all__ = ["judge_peer_deaths"]

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
