"""Registration of a rank's memory, and the parts that live as long as it: agent, peers, reads and leases."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from vllm_adapter.errors import AdapterError
from vllm_adapter.steps import ASLEEP, ASLEEP_MESSAGE
from vllm_adapter.worker.transfer.parts import PeerLimits, ReadLimits
from vllm_adapter.worker.transfer.stream_records import StreamGroup, StreamShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.config import Settings
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import HandshakeClient, MemoryKind, StepPlan, StreamWorker, TransferThread
    from vllm_adapter.worker.pages import FinishedRead
    from vllm_adapter.worker.transfer.leases import LeaseKeeper
    from vllm_adapter.worker.transfer.reads import ReadCoordinator

__all__ = ["Registration", "RegistrationEvents", "memory_kind", "read_limits", "stream_shape"]

_logger = logging.getLogger("vllm.vllm_adapter")
_ORDERLY_S = 10.0
"""Longest time for the transfer thread to end all reads and leases; the thread has nothing else to do then."""
_MOST_PROBE_S = 10.0
_QUIET_S = 2.0
"""Longest wait for cancelled reads to leave the wire; after that the agent is closed in spite of them."""
_POLL_S = 0.005


@final
@dataclass(frozen=True, slots=True)
class RegistrationEvents:
    """Callbacks of a registration, invoked on its transfer thread; cheap and thread-safe."""

    read_ended: Callable[[FinishedRead], None]
    """A read has ended; called once per read."""
    sent: Callable[[str], None]
    """A request's blocks are free."""
    stream_ended: Callable[[FinishedRead], None]
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
    """

    agent: TransferThread
    handshakes: HandshakeClient
    reads: ReadCoordinator
    leases: LeaseKeeper
    recorder: Recorder
    envelope: bytes
    stream_worker: StreamWorker | None = None

    def order(self, plan: StepPlan, void_grants: Sequence[str] = ()) -> None:
        """Pass a step's orders to the transfer thread; the steps of a long prompt do not wake that thread. Engine thread.

        Args:
            plan: The orders that concern this rank.
            void_grants: Requests among its grants whose KV is lost.
        """
        if not plan.is_local:
            self.agent.call_soon(partial(self._apply, plan, void_grants))

    def _apply(self, plan: StepPlan, void_grants: Sequence[str]) -> None:
        with self.recorder.guarded("the producer's part of a step"):
            self.leases.apply(plan, void_grants)
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
        ended = threading.Event()

        def end_everything(*, has_fences: bool = True) -> None:
            if ended.is_set():
                return
            try:
                self.reads.end_all(code, message)
            finally:
                self.leases.end_all(has_fences=has_fences)
                ended.set()

        with self.recorder.guarded("orderly end of the transfers"):  # `close` ends them in any case
            if self.agent.is_alive:
                self.agent.call_soon(end_everything)
                ended.wait(_ORDERLY_S)
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
        if not ended.is_set():  # the thread had already died: its agent is closed, so all fence words are void
            with self.recorder.guarded("end of the transfers of a dead thread"):
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
            StreamGroup(0)
            if group.kind == "state"
            else StreamGroup(group.block_tokens * facts.deal_of(group)[0], group.window_tokens)
            for group in facts.groups
        ]
    )


def read_limits(facts: EngineFacts, settings: Settings) -> ReadLimits:
    """Return the configured limits of reads and peers."""
    return ReadLimits(
        read_timeout_s=settings.read_timeout_s,
        lease_s=settings.kv_lease_duration,
        renewed_s=settings.renewed_s,
        retries=settings.read_retries,
        peers=PeerLimits(
            handshake_s=settings.handshake_timeout_s * (settings.handshake_attempts + 1),
            engine_ttl_s=settings.engine_ttl or math.inf,
            dialect=settings.ticket_dialect or facts.connector_version,
            probe_s=min(_MOST_PROBE_S, settings.kv_lease_duration / 3),
            only_ours=settings.requires_seals,
        ),
    )
