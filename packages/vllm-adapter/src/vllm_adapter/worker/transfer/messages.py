"""Notifications to a producer's ranks: a read is complete, or a lease is to be renewed. Transfer thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.worker.transfer.tickets import lacks_nonce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.ports import HeartbeatOrder
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.parts import TransferParts
    from vllm_adapter.worker.transfer.peers import PeerDirectory
    from vllm_adapter.worker.transfer.records import PeerEngine, Read

__all__ = ["ProducerMessages"]


@final
class ProducerMessages:
    """Encodes "read complete" notifications, sends those that no transfer carries, and sends heartbeats."""

    def __init__(self, parts: TransferParts, peers: PeerDirectory) -> None:
        self._parts = parts
        self._peers = peers

    def read_complete(self, read: Read, engine: PeerEngine, rank: Rank) -> bytes:
        """Return the "read complete" notification for one rank of the producer."""
        order, plan = read.order, engine.plan
        count = plan.reader_count(rank) if plan is not None else 1
        consumer = self._parts.engine_id if order.ticket.nonce else ""
        return self._parts.codec.read_complete(
            order.ticket.peer_request_id, count, nonce=order.ticket.nonce, consumer=consumer
        )

    def release(self, read: Read, engine: PeerEngine, ranks: Sequence[Rank]) -> None:
        """Notify ranks that this request needs nothing more from them, except those whose completion has been sent."""
        if read.is_passed_on or engine.plan is None or lacks_nonce(read.order, engine):
            return
        with self._parts.recorder.guarded("notification of a producer"):
            for rank in ranks:
                if rank not in read.done_ranks:
                    self._peers.notify(engine, rank, self.read_complete(read, engine, rank))

    def renew(self, order: HeartbeatOrder) -> tuple[PeerEngine | None, frozenset[str]]:
        """Send heartbeats; return the engine, and the ids of the requests whose leases they renew.

        Nothing is sent to an engine that is not ready (None, and no ids); the set-up of an unknown engine is started.
        """
        engine = self._peers.find_or_meet(order)
        if engine is None:
            self._parts.recorder.count("num_unsent_heartbeats")
            return None, frozenset()
        # A heartbeat without the nonce that its engine gives would renew the lease of the holder of that request's real ticket.
        has_nonces = "nonce" in engine.capabilities
        readers = [reader for reader in order.readers if reader[1] or not has_nonces]
        payloads = self._parts.codec.heartbeats(readers) if readers else ()
        for rank in engine.ranks:
            for payload in payloads:
                self._peers.notify(engine, rank, payload)
        return engine, frozenset(request_id for request_id, _ in readers)
