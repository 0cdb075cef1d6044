"""Registration of a rank's memory, the parts that live as long as it (agent, peers, reads and leases), and their health.

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

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from vllm_adapter.errors import AdapterError
from vllm_adapter.steps import ASLEEP
from vllm_adapter.worker.transfer.stream_parts import StreamShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import HandshakeClient, HeartbeatOrder, MemoryKind, StepPlan, TransferThread
    from vllm_adapter.steps import ReadEnd
    from vllm_adapter.worker.transfer.leases import LeaseKeeper
    from vllm_adapter.worker.transfer.reads import ReadCoordinator

__all__ = ["RankCaches", "Registration", "RegistrationEvents", "memory_kind", "stream_shape"]

_logger = logging.getLogger("vllm.vllm_adapter")
_ORDERLY_S = 10.0
"""Longest time for the transfer thread to end all reads and leases; the thread has nothing else to do then."""
_QUIET_S = 2.0
"""Longest wait for cancelled reads to leave the wire; after that the agent is closed in spite of them."""
_POLL_S = 0.005
_MOST_ENTRIES = 50
"""Most leases, reads and peers that are described, the oldest of each; all of them are counted."""
_ANSWER_S = 1.0
"""Longest wait for the transfer thread's own description."""


class RankCaches(NamedTuple):
    """This rank's layers, as peers are to read and write them, with their geometry and that of all pipeline stages."""

    layers: Sequence[LayerCache]
    document: GeometryDocument
    stages: Sequence[GeometryDocument]


class RegistrationEvents(NamedTuple):
    """Callbacks of a registration, invoked in turns of its transfer thread; cheap and thread-safe."""

    read_ended: Callable[[ReadEnd], None]
    """A read has ended, plain or streamed; called once per read. Its blocks may be read into again."""
    sent: Callable[[str], None]
    """A request's blocks are free."""
    thread_started: Callable[[], None] | None = None
    """The transfer thread has started and touched nothing yet; it can select its device here."""


@final
@dataclass(slots=True, eq=False)
class Registration:
    """A registration and the parts that work with it.

    Attributes:
        agent: The transfer thread, which owns the memory's registration.
        handshakes: Client that asks peers for their metadata.
        reads: This rank as a consumer.
        leases: This rank as a producer.
        recorder: Receives log lines about failures.
        envelope: Bytes that the side channel serves for this rank.
        ended: Set once all reads and leases have ended.
        known_errors: Errors of the thread that have been reported.
        known_state: State of the thread that has been reported.
    """

    agent: TransferThread
    handshakes: HandshakeClient
    reads: ReadCoordinator
    leases: LeaseKeeper
    recorder: Recorder
    envelope: bytes
    ended: threading.Event = field(default_factory=lambda: threading.Event())  # noqa: PLW0108  (simulations replace `threading`)
    known_errors: int = 0
    known_state: str = ""

    def apply(self, plan: StepPlan) -> None:
        """Carry out the part of a step's orders that concerns this rank; each order fails alone. Within a turn."""
        if plan.expects or plan.grants or plan.releases or plan.revokes:
            with self.recorder.guarded("the producer's part of a step"):
                self.leases.apply(plan)
        self.reads.read(*plan.reads)
        for watch in plan.streams.watches:
            self.reads.read(watch.read, stream=watch)
        for request_id in plan.streams.stops:
            with self.recorder.guarded("end of a stream"):
                self.reads.stop(request_id)
        for request_id in (*plan.cancels, *plan.voids):
            with self.recorder.guarded("cancellation of a read"):
                self.reads.cancel(request_id, is_passed_on=request_id in plan.passes)
        self.renew(plan.heartbeats)

    def renew(self, heartbeats: Iterable[HeartbeatOrder]) -> None:
        """Renew leases at peers. Within a turn."""
        for heartbeat in heartbeats:
            with self.recorder.guarded("heartbeat"):
                self.reads.heartbeat(heartbeat)

    def close(self) -> None:
        """Stop both threads and deregister the memory; idempotent."""
        self.handshakes.close()
        self.agent.close()

    def end(self, cause: tuple[str, str] = ASLEEP) -> None:
        """End all reads and leases, then deregister the memory; when this returns, none of our threads touches it any more.

        All ends have been reported by then, those of reads with the code and message in `cause`. This takes up to two seconds if
        a peer keeps a cancelled read on the wire, and longer only if the transfer thread hangs.

        Raises:
            AdapterError: `memory-in-use`: the transfer thread did not end; the memory must stay mapped. The call may be repeated.
        """
        with self.recorder.guarded("orderly end of the transfers"):  # `close` ends them in any case
            if self.agent.is_alive:
                self.agent.call_soon(lambda: self._end_all(cause))
                self.ended.wait(_ORDERLY_S)
                self._wait_for_quiet()
        self.close()
        if not self.agent.has_ended:
            raise AdapterError(
                "the transfer thread did not end, so this rank's cache memory may still be read and written and must stay "
                "mapped; sleep again before you wake this engine up, or restart it",
                code="memory-in-use",
                fault="local",
                is_retry_safe=True,
            )
        with self.recorder.guarded("end of the transfers of a dead thread"):
            self._end_all(cause, has_fences=False)  # unless it has: the closed agent has voided all fence words

    def _end_all(self, cause: tuple[str, str], *, has_fences: bool = True) -> None:
        if self.ended.is_set():
            return
        try:
            self.reads.end_all(*cause)
        finally:
            self.leases.end_all(has_fences=has_fences)
            self.ended.set()

    def _wait_for_quiet(self) -> None:
        until_s = time.monotonic() + _QUIET_S
        while (left := self.reads.snapshot()["transfers"]) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if left:
            held = self.agent.quarantine()
            _logger.error(
                "reads still on the wire after %g s: %d (in quarantine: %d, bytes at risk: %d); the agent is closed under them, "
                "which ends them, and only then is the memory given back",
                _QUIET_S,
                left,
                len(held),
                sum(entry.bytes_at_risk for entry in held),
            )

    def check(self, engine: str) -> None:
        """Report death, stuck turns, callback errors and quarantine since the last call; engine thread.

        Args:
            engine: Name of this engine, for log lines.
        """
        recorder, health, thread = self.recorder, self.agent.health(), f"the transfer thread of engine {engine}"
        recorder.level("quarantined_bytes", sum(entry.bytes_at_risk for entry in self.agent.quarantine()))
        errors = health.callback_errors + health.loop_errors - self.known_errors
        if errors > 0:  # each increase is logged once, with the traceback of the latest error
            self.known_errors += errors
            recorder.count("num_callback_errors", errors)
            text = f"{thread} caught {errors} unexpected errors; the latest: {health.last_error}"
            recorder.error("thread-errors", text, trace=health.last_traceback)
        recorder.level("stuck_threads", int(health.state in {"stuck", "dead"}))
        if health.state != self.known_state:
            self.known_state = health.state
            if health.state == "stuck":
                text = f"{thread} is stuck in one turn: no read and no lease of this rank makes progress"
                recorder.error("thread-stuck", text)
            elif health.state == "dead":
                recorder.error("thread-dead", f"{thread} has died; restart this engine")

    def describe(self) -> Answer:
        """Return health, leases, reads, peers, quarantine and stalls; any thread."""
        held, stalls, health = self.agent.quarantine(), self.agent.stalls(), self.agent.health()
        return {
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
            "figures": dict(self.agent.statistics()),
            **self._describe_orders(),
        }

    def _describe_orders(self) -> Answer:
        """Return the transfer thread's description of its leases, reads and peers, or that it does not answer."""
        box: list[Answer] = []
        is_done = threading.Event()

        def describe() -> None:
            try:
                box.append({**self.leases.describe(_MOST_ENTRIES), **self.reads.describe(_MOST_ENTRIES)})
            finally:
                is_done.set()

        with suppress(Exception):  # a dead or closed thread accepts no calls
            self.agent.call_soon(describe)
            is_done.wait(_ANSWER_S)
        return box[0] if box else {"is_silent": True}


def memory_kind(caches: Sequence[LayerCache]) -> MemoryKind:
    """Return the one kind of memory of the caches.

    Raises:
        AdapterError: `mixed-memory-kinds`.
    """
    kinds = sorted({cache.memory_kind for cache in caches})
    if len(kinds) > 1:
        raise AdapterError(
            f"the caches of this engine's layers are in memory of {len(kinds)} kinds ({', '.join(kinds)}), and a peer reads one: "
            "keep all of them on the device, or use vLLM's own NixlConnector",
            code="mixed-memory-kinds",
            context={"kinds": kinds},
        )
    return caches[0].memory_kind


def stream_shape(facts: EngineFacts) -> StreamShape:
    """Return the groups of this engine as streams are read: a block stands for its tokens on all context-parallel ranks.

    Example: blocks of 16 tokens, context-parallel size 2: a block of a group that is split over the ranks stands for 32 tokens.
    """
    return StreamShape(
        [
            (0, 0) if group.kind == "state" else (group.block_tokens * facts.deal_of(group)[0], group.window_tokens)
            for group in facts.groups
        ]
    )
