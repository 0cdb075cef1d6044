"""State of a rank beside its reads: asleep (vLLM's sleep mode), its transfer thread dead or stalled, and its `status`.

Theory of operation. Before the host unmaps the memory, the registration is closed. Every read ends with the code `asleep`, even
if its data has just arrived, because its pages are about to be lost. Every lease ends with its fence void. Then the agent is
closed, which ends the transfers on the wire (no transfer worker is left that could write) and deregisters the memory. Only then
may the host go on. Steps that run meanwhile get an answer to every order: reads fail, leases end.

Once the memory is mapped again, at the same addresses but empty, everything is registered again under another agent name and
generation. Requests outlive the sleep: a request that was announced to this worker before has a word in the old fence array and
KV in the lost memory. Such a request is *lost* until the host restarts it: then its new word is written into the new array, and
KV computed from there on may be handed over. If a lost request is granted a lease all the same, the lease ends at once, and
without a fence word no reader accepts its pages as valid (`ports.WorkerState`).

After the transfer thread has died, the engine goes on without hand-overs. The next step voids the words of all requests, and
from then on every order is answered; once the thread has closed its agent, its remaining reads and leases end. A sleep and
wake-up register the memory again.

For `status`, leases, reads and peers belong to the transfer thread, so it is asked to describe them. If it does not answer in
time, only its health is shown.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, final

from vllm_adapter.steps import ReadEnd, ReadTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import ReadOrder, TransferThread
    from vllm_adapter.worker.registration import Registration

__all__ = ["MOST_ENTRIES", "ThreadWatch", "fail_reads", "worker_status"]


def fail_reads(reads: Iterable[ReadOrder], code: str, message: str) -> list[ReadEnd]:
    """Return failed ends for reads that are ordered while nothing is registered."""
    now_s = time.monotonic()
    return [ReadEnd(order, code, message, ReadTimes(now_s), now_s) for order in reads]


@final
class ThreadWatch:
    """Reports death, stuck turns, callback errors and quarantine of a rank's transfer thread. Engine thread only.

    Args:
        recorder: Records observations and log lines.
        engine_id: This engine, for log lines.
    """

    def __init__(self, recorder: Recorder, engine_id: str) -> None:
        self._recorder = recorder
        self._thread = f"the transfer thread of engine {engine_id}"
        self._agent: TransferThread | None = None
        self._errors = 0
        self._state = ""

    def check(self, agent: TransferThread | None) -> None:
        """Report changes since the last call; None while nothing is registered."""
        recorder = self._recorder
        if agent is not self._agent:
            self._agent, self._errors, self._state = agent, 0, ""
        if agent is None:
            recorder.level("quarantined_bytes", 0)
            recorder.level("stuck_threads", 0)
            return
        recorder.level("quarantined_bytes", sum(entry.bytes_at_risk for entry in agent.quarantine()))
        health = agent.health()
        errors = health.callback_errors + health.loop_errors - self._errors
        if errors > 0:  # each increase is logged once, with the traceback of the latest error
            self._errors += errors
            recorder.count("num_callback_errors", errors)
            text = f"{self._thread} caught {errors} unexpected errors; the latest: {health.last_error}"
            recorder.error("thread-errors", text, health.last_traceback)
        recorder.level("stuck_threads", int(health.state in {"stuck", "dead"}))
        if health.state != self._state:
            self._state = health.state
            if health.state == "stuck":
                text = f"{self._thread} is stuck in one turn: no read and no lease of this rank makes progress"
                recorder.error("thread-stuck", text)
            elif health.state == "dead":
                recorder.error("thread-dead", f"{self._thread} has died; restart this engine")


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
    held, stalls, health, figures = agent.quarantine(), agent.stalls(), agent.health(), agent.statistics()
    return {
        **status,
        "thread": {
            "state": health.state,
            "calls_waiting": health.calls_waiting,
            "errors": health.callback_errors + health.loop_errors,
            "last_error": health.last_error,
            "ucx_requests": health.ucx_requests,
        },
        "quarantined_transfers": len(held),
        "quarantined_bytes": sum(entry.bytes_at_risk for entry in held),
        "stalled_transfers": len(stalls),
        "stalled_bytes": sum(entry.bytes_left for entry in stalls),
        "figures": {name: figures[name] for name in _FIGURES if name in figures},
        **described,
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
