"""One registration of a rank's memory, and everything that lives as long as it: agent, peers, reads and leases."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from vllm_adapter.cache.geometry import local_document, registration_ranges
from vllm_adapter.errors import AdapterError
from vllm_adapter.worker.announced import ASLEEP, ASLEEP_MESSAGE
from vllm_adapter.worker.transfer.leases import HoldCoordinator, HoldObserver
from vllm_adapter.worker.transfer.peers import PeerLimits
from vllm_adapter.worker.transfer.reads import ReadCoordinator, ReadEnd, ReadLimits, ReadObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.cache.facts import LayerCache
    from vllm_adapter.observe.recorder import StatsBuffer
    from vllm_adapter.ports import HandshakeClient, StepPlan, TransferThread
    from vllm_adapter.wiring import WorkerParts

__all__ = ["Registration", "open_registration"]

_logger = logging.getLogger("vllm.vllm_adapter")
_TICK_S = 0.05
_LOOK_AFTER_S = 1.0
_ORDERLY_S = 10.0
"""How long the transfer thread may take to end all reads and leases; it has nothing else to do then."""
_QUIET_S = 2.0
"""How long cancelled reads may take to leave the wire before the agent is closed under them."""
_POLL_S = 0.005


@final
@dataclass(frozen=True, slots=True)
class Registration:
    """What works on one registration.

    Attributes:
        agent: The transfer thread, which holds the memory.
        handshakes: Asks peers for their metadata.
        reads: This rank as a consumer.
        holds: This rank as a producer.
        envelope: What the side channel serves for this rank.
    """

    agent: TransferThread
    handshakes: HandshakeClient
    reads: ReadCoordinator
    holds: HoldCoordinator
    envelope: bytes

    def perform(self, plan: StepPlan, void_grants: Sequence[str], void_reads: Sequence[str]) -> None:
        """Perform a step's orders; transfer thread only.

        Args:
            plan: The orders.
            void_grants: Requests among its grants whose KV is lost.
            void_reads: Requests whose read is to be given up, ordered in this step or earlier.
        """
        self.holds.apply(plan, void_grants)
        for order in plan.reads:
            self.reads.read(order)
        for request_id in (*plan.cancels, *void_reads):
            self.reads.cancel(request_id)
        for heartbeat in plan.heartbeats:
            self.reads.heartbeat(heartbeat)

    def close(self) -> None:
        """Stop both threads and give the memory back; idempotent."""
        self.handshakes.close()
        self.agent.close()

    def end(self) -> None:
        """End all reads and leases, then give the memory back; when this returns, nothing of ours touches it any more.

        All ends have been reported by then. Takes up to two seconds if a peer keeps a cancelled read on the wire, longer only if
        the transfer thread hangs.

        Raises:
            AdapterError: `memory-in-use`: the transfer thread did not end; the memory must not be unmapped. May be tried again.
        """
        ended = threading.Event()

        def end_everything(*, has_fences: bool = True) -> None:
            if ended.is_set():
                return
            try:
                self.reads.end_all(ASLEEP, ASLEEP_MESSAGE)
            finally:
                self.holds.end_all(has_fences=has_fences)
                ended.set()

        with suppress(Exception):  # a dead or closed thread takes no orders: see below
            self.agent.call_soon(end_everything)
            ended.wait(_ORDERLY_S)
            self._wait_for_quiet()
        self.close()
        if self.agent.is_alive:
            raise AdapterError(
                "the transfer thread did not end, so this rank's cache memory may still be read and written and must stay "
                "mapped; try again, or restart this engine",
                code="memory-in-use",
                fault="local",
                is_retry_safe=True,
            )
        if not ended.is_set():  # the thread had died before: its agent is closed, so all fence words are void already
            with suppress(Exception):
                end_everything(has_fences=False)

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
    *,
    generation: int,
    can_convert: bool,
    stats: StatsBuffer,
    read_ended: Callable[[ReadEnd], None],
    sent: Callable[[str], None],
) -> Registration:
    """Register this rank's memory, start its transfer thread and make its side-channel envelope.

    Args:
        parts: Makes the concrete parts.
        caches: This rank's layers, as peers are to read and write them.
        generation: Number of this registration.
        can_convert: Whether pages that are read can be put in order.
        stats: Takes observations.
        read_ended: Called on the transfer thread with the one end of every read.
        sent: Called on the transfer thread with every request whose blocks are free.
    """
    facts, settings = parts.facts, parts.settings
    document = local_document(facts, caches)
    reads = ReadCoordinator(
        document,
        parts.peer_geometry,
        parts.make_planner(caches[0].memory_kind, can_convert=can_convert),
        parts.codec,
        ReadObserver(read_ended, stats.transfer, stats.count, stats.observe, _logger.info),
        ReadLimits(
            read_timeout_s=settings.read_timeout_s,
            lease_s=settings.kv_lease_duration,
            peers=PeerLimits(
                handshake_s=settings.handshake_timeout_s * (settings.handshake_attempts + 1),
                engine_ttl_s=settings.engine_ttl,
                dialect=settings.ticket_dialect or facts.connector_version,
            ),
            whole_block_tokens=facts.whole_block_tokens,
        ),
        now_s=time.monotonic,
    )
    holds = HoldCoordinator(
        parts.make_lease_table(),
        parts.codec,
        HoldObserver(sent, stats.count, stats.observe, _logger.info),
        heartbeat_s=settings.heartbeat_s,
        now_s=time.monotonic,
    )
    agent = parts.make_transfer_thread(
        registration_ranges(caches),
        on_result=reads.transfer_ended,
        on_quiet=reads.memory_quiet,
        on_notification=holds.notified,
    )
    handshakes = parts.make_handshake_client()
    try:
        reads.attach(agent, handshakes)
        holds.attach(agent)
        agent.start()
        agent.call_every(_TICK_S, holds.tick)
        agent.call_every(_LOOK_AFTER_S, reads.look_after)
        envelope = parts.encode_envelope(caches, document, agent, generation=generation)
    except BaseException:
        handshakes.close()
        agent.close()
        raise
    _logger.info(
        "engine %s rank %d: %d layers registered for hand-over, fence of %d words",
        facts.engine_id,
        facts.tp_rank,
        len(caches),
        agent.fence[2],
    )
    return Registration(agent, handshakes, reads, holds, envelope)
