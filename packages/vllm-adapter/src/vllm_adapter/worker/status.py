"""Current state of a rank as plain values, for `vllm-adapter status`. Callable on any thread.

Leases, reads and peers belong to the transfer thread, so it is asked to describe them. If it does not answer in time, only its
health is shown.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.answers import Answer, ThreadHealth
    from vllm_adapter.ports import TransferThread
    from vllm_adapter.worker.registration import Registration

__all__ = ["MOST_ENTRIES", "worker_status"]

MOST_ENTRIES = 50
"""Most leases, reads and peers that are described, the oldest of each; all of them are counted."""
_ANSWER_S = 1.0
_FIGURES = (
    "transfers_done",
    "transfers_failed",
    "transfers_fence_rejected",
    "transfers_timed_out",
    "transfers_cancelled",
    "bytes_moved",
    "recent_count",
    "recent_bytes_per_s",
    "recent_wire_s_p50",
    "recent_wire_s_p99",
)


def worker_status(
    facts: EngineFacts, registration: Registration | None, *, is_registered: bool, is_asleep: bool
) -> Answer:
    """Return health, leases, reads, peers, quarantine and stalls of a rank."""
    status: Answer = {
        "part": f"{facts.pp_rank}.{facts.tp_rank}",
        "engine_id": facts.engine_id,
        "is_asleep": is_asleep,
        "is_registered": is_registered,
    }
    if registration is None:
        return status
    agent = registration.agent
    described = _described(registration)
    held, stalls = agent.quarantine(), agent.stalls()
    figures = agent.statistics()
    return {
        **status,
        "thread": _health(agent),
        "quarantined_transfers": len(held),
        "quarantined_bytes": sum(entry.bytes_at_risk for entry in held),
        "stalled_transfers": len(stalls),
        "stalled_bytes": sum(entry.bytes_left for entry in stalls),
        "figures": {name: figures[name] for name in _FIGURES if name in figures},
        **described,
    }


def _health(agent: TransferThread) -> ThreadHealth:
    health = agent.health()
    return {
        "state": health.state,
        "calls_waiting": health.calls_waiting,
        "errors": health.callback_errors + health.loop_errors,
        "last_error": health.last_error,
        "ucx_requests": health.ucx_requests,
    }


def _described(registration: Registration) -> Answer:
    """Return the transfer thread's description of its leases, reads and peers; empty if it does not answer."""
    box: list[Answer] = []
    is_done = threading.Event()

    def describe() -> None:
        try:
            leases = registration.leases
            box.append(
                {
                    "leases": leases.live_count(),
                    "oldest_leases": leases.describe(MOST_ENTRIES),
                    **registration.reads.describe(MOST_ENTRIES),
                }
            )
        finally:
            is_done.set()

    with suppress(Exception):  # a dead or closed thread accepts no calls
        registration.agent.call_soon(describe)
        is_done.wait(_ANSWER_S)
    return box[0] if box else {"is_silent": True}
