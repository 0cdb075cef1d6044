"""Registration of a rank's memory, and the parts that live as long as it: agent, peers, reads and leases."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from vllm_adapter.cache.geometry import registration_ranges
from vllm_adapter.errors import AdapterError
from vllm_adapter.steps import ASLEEP, ASLEEP_MESSAGE
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.planner import PeerPlanner
from vllm_adapter.worker.transfer.reads import ReadCoordinator
from vllm_adapter.worker.transfer.records import TransferParts
from vllm_adapter.worker.transfer.stream_records import StreamShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import HandshakeClient, MemoryKind, StepPlan, StreamWorker, TransferThread
    from vllm_adapter.steps import ReadEnd
    from vllm_adapter.wiring import WorkerParts

__all__ = ["Registration", "RegistrationEvents", "open_registration", "stream_shape"]

_logger = logging.getLogger("vllm.vllm_adapter")
_TICK_S = 0.05
_LOOK_AFTER_S = 1.0
_ORDERLY_S = 10.0
"""Longest time for the transfer thread to end all reads and leases; the thread has nothing else to do then."""
_QUIET_S = 2.0
"""Longest wait for cancelled reads to leave the wire; after that the agent is closed in spite of them."""
_POLL_S = 0.005


class RegistrationEvents(NamedTuple):
    """Callbacks of a registration, invoked on its transfer thread; cheap and thread-safe."""

    read_ended: Callable[[ReadEnd], None]
    """A read has ended; called once per read."""
    sent: Callable[[str], None]
    """A request's blocks are free."""
    stream_ended: Callable[[ReadEnd], None]
    """A stream has ended; called once per stream. The blocks of a failed stream may be read into again."""
    thread_started: Callable[[], None] | None = None
    """The transfer thread has started and touched nothing yet; it can select its device here."""


@final
@dataclass(frozen=True, slots=True)
class Registration:
    """A registration and the parts that work with it.

    Attributes:
        agent: The transfer thread, which owns the memory's registration.
        handshakes: Client that asks peers for their metadata.
        reads: This rank as a consumer.
        leases: This rank as a producer.
        recorder: Receives log lines about failures.
        envelope: Bytes that the side channel serves for this rank.
        stream_worker: Writes the words of streamed prompts, on the engine thread; None where nothing is streamed.
        ended: Set once all reads and leases have ended.
    """

    agent: TransferThread
    handshakes: HandshakeClient
    reads: ReadCoordinator
    leases: LeaseKeeper
    recorder: Recorder
    envelope: bytes
    stream_worker: StreamWorker | None = None
    ended: threading.Event = field(default_factory=lambda: threading.Event())  # noqa: PLW0108  (simulations replace `threading`)

    def apply(self, plan: StepPlan) -> None:
        """Carry out the part of a step's orders that concerns this rank; transfer thread."""
        with self.recorder.guarded("the producer's part of a step"):
            self.leases.apply(plan)
        self.reads.apply(plan)

    def close(self) -> None:
        """Stop both threads and deregister the memory; idempotent."""
        self.handshakes.close()
        self.agent.close()

    def end(self, code: str = ASLEEP, message: str = ASLEEP_MESSAGE) -> None:
        """End all reads and leases, then deregister the memory; when this returns, none of our threads touches it any more.

        All ends have been reported by then. This takes up to two seconds if a peer keeps a cancelled read on the wire, and longer
        only if the transfer thread hangs.

        Raises:
            AdapterError: `memory-in-use`: the transfer thread did not end; the memory must stay mapped. The call may be repeated.
        """
        with self.recorder.guarded("orderly end of the transfers"):  # `close` ends them in any case
            if self.agent.is_alive:
                self.agent.call_soon(lambda: self._end_all(code, message))
                self.ended.wait(_ORDERLY_S)
                self._wait_for_quiet()
        self.close()
        if not self.agent.has_ended:
            raise AdapterError(
                "the transfer thread did not end, so this rank's cache memory may still be read and written and must stay "
                "mapped; try again, or restart this engine",
                code="memory-in-use",
                fault="local",
                is_retry_safe=True,
            )
        with self.recorder.guarded("end of the transfers of a dead thread"):
            self._end_all(code, message, has_fences=False)  # unless it has: the closed agent has voided all fence words

    def _end_all(self, code: str, message: str, *, has_fences: bool = True) -> None:
        if self.ended.is_set():
            return
        try:
            self.reads.end_all(code, message)
        finally:
            self.leases.end_all(has_fences=has_fences)
            self.ended.set()

    def _wait_for_quiet(self) -> None:
        until_s = time.monotonic() + _QUIET_S
        while self.reads.snapshot()["transfers"] and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        left = self.reads.snapshot()["transfers"]
        if left:
            entries = self.agent.quarantine()
            at_risk_bytes = sum(entry.bytes_at_risk for entry in entries)
            _logger.error(
                "%d reads are still on the wire after %g s (%d in quarantine, %d bytes at risk): the agent is closed under them, "
                "which ends them, and only then is the memory given back",
                left,
                _QUIET_S,
                len(entries),
                at_risk_bytes,
            )


def open_registration(
    parts: WorkerParts,
    caches: Sequence[LayerCache],
    document: GeometryDocument,
    recorder: Recorder,
    events: RegistrationEvents,
    *,
    generation: int,
    can_convert: bool,
) -> Registration:
    """Register this rank's memory, start its transfer thread and make its side-channel envelope.

    Args:
        parts: Makes the concrete parts.
        caches: This rank's layers, as peers are to read and write them.
        document: Geometry document of the caches.
        recorder: Takes observations and log lines.
        events: Callbacks for the ends of reads, leases and streams, invoked on the transfer thread.
        generation: Number of this registration.
        can_convert: Whether received pages can be permuted.

    Raises:
        AdapterError: `mixed-memory-kinds`.
    """
    facts, settings = parts.facts, parts.settings
    kind = _memory_kind(caches)
    planner = PeerPlanner(document, parts.peer_geometry, parts.make_planner(kind, can_convert=can_convert), kind)
    agent = parts.make_transfer_thread(
        registration_ranges(caches),
        # The thread calls these only after it was started, when both coordinators exist.
        on_result=lambda result: reads.transfer_ended(result),  # noqa: PLW0108
        on_quiet=lambda transfer_id: reads.memory_quiet(transfer_id),  # noqa: PLW0108
        on_notification=lambda agent_name, payload: leases.notified(agent_name, payload),  # noqa: PLW0108
        on_start=events.thread_started,
    )
    handshakes = parts.make_handshake_client()
    shared = TransferParts(
        agent,
        handshakes,
        parts.codec,
        recorder,
        time.monotonic,
        facts.engine_id,
        parts.peer_spec,
        settings,
        settings.ticket_dialect or facts.connector_version,
    )
    reads = ReadCoordinator(shared, planner, events.read_ended)
    if settings.streaming:
        readers = parts.make_stream_readers(settings.read_timeout_s)
        reads.use_streams(readers, stream_shape(facts), events.stream_ended)
    leases = LeaseKeeper(shared, parts.make_lease_table(), events.sent)
    try:
        agent.start()
        words = agent.stream_words
        stream_worker = None if words is None else parts.make_stream_worker(words)
        if stream_worker is not None:
            leases.use_streams(stream_worker, settings.stream_slots)
        agent.call_every(_TICK_S, leases.tick)
        agent.call_every(_LOOK_AFTER_S, reads.look_after)
        envelope = parts.encode_envelope(caches, document, agent, generation=generation)
    except BaseException:
        handshakes.close()
        agent.close()
        raise
    recorder.info(
        "registered",
        f"engine {facts.engine_id} rank {facts.tp_rank}: {len(caches)} layers registered for hand-over, "
        f"fence of {agent.fence[2]} words",
    )
    return Registration(agent, handshakes, reads, leases, recorder, envelope, stream_worker)


def _memory_kind(caches: Sequence[LayerCache]) -> MemoryKind:
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
