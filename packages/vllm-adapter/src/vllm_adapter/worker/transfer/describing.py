"""Operator's view of reads, peers and leases: plain values without nonces and fence words, and warnings of stalled reads.

Transfer thread only.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm_adapter.observe.answers import Answer, Entry
    from vllm_adapter.ports import StallEntry, TransferResult
    from vllm_adapter.worker.transfer.parts import TransferParts
    from vllm_adapter.worker.transfer.records import PeerEngine, Read

__all__ = ["StallWatch", "describe_lease", "describe_peers", "describe_reads", "note_quarantine"]


def describe_reads(posted: Iterable[Read], engines: Iterable[PeerEngine], now_s: float, most: int) -> Answer:
    """Return the number of reads by stage, and a description of the first `most` of them.

    Args:
        posted: Reads with posted transfers, each once.
        engines: Engines for which the other reads wait.
        now_s: Current time of the clock that stamps reads.
        most: Most reads to describe.
    """
    waiting = [read for engine in engines for read in engine.waiting]
    reads = [*posted, *waiting]
    return {
        "reads": len(reads),
        "reads_waiting_for_a_peer": len(waiting),
        "oldest_reads": [_read(read, now_s) for read in reads[:most]],
    }


def _read(read: Read, now_s: float) -> Entry:
    order = read.order
    entry: Entry = {
        "request_id": order.request_id,
        "peer_request_id": order.ticket.peer_request_id,
        "peer_engine_id": order.ticket.peer.engine_id,
        "tokens": order.tokens,
        "stage": _stage(read),
        "age_s": now_s - read.times.ordered_s,
        "attempt": read.attempt,
        "transfers_left": len(read.transfers),
    }
    if read.attempt:
        entry["deadline_in_s"] = read.deadline_s - now_s
    if read.code:
        entry["code"], entry["message"] = read.code, read.message
    return entry


def _stage(read: Read) -> str:
    if not read.transfers:
        return "waits for its peer"
    return "in quarantine" if read.unquiet else "on the wire"


def describe_peers(engines: Iterable[PeerEngine], now_s: float, most: int) -> list[Entry]:
    """Return the first `most` engines that this rank reads from or is about to read from."""
    return [_peer(engine, now_s) for engine in islice(engines, most)]


def _peer(engine: PeerEngine, now_s: float) -> Entry:
    address, plan = engine.address, engine.plan
    return {
        "engine_id": engine.engine_id,
        "side_channel": f"{address.host}:{address.port}",
        "phase": engine.phase,
        "ranks_read": [f"{pp}.{tp}" for pp, tp in plan.producer_ranks] if plan is not None else [],
        "bytes_per_token": plan.bytes_per_token if plan is not None else None,
        "is_fenced": engine.is_fenced,
        "reads_in_flight": engine.reads_in_flight,
        "reads_waiting": len(engine.waiting),
        "unused_s": now_s - engine.last_used_s,
        "silent_s": now_s - engine.last_answer_s,
        "silent_probes": engine.silent_probes,
    }


def describe_lease(entry: Mapping[str, object], renewed_s: float | None, now_s: float) -> Entry:
    """Return a table's lease without the values that would let a reader of the description end it."""
    readers = cast("Sequence[object]", entry.get("readers") or ())
    lease: dict[str, object] = {
        "request_id": entry["request_id"],
        "state": entry["state"],
        "left_s": entry.get("left_s"),
        "readers_done": len(readers),
        "readers_needed": entry.get("readers_needed"),
        "last_heartbeat_s": None if renewed_s is None else now_s - renewed_s,
    }
    return lease


_NAMED = 4
"""Most requests that one log line names."""


@final
class StallWatch:
    """Counts and logs stalled reads: each transfer once, each request once, grouped by engine."""

    def __init__(self, parts: TransferParts, read_timeout_s: float) -> None:
        self._parts = parts
        self._read_timeout_s = read_timeout_s
        self._known: set[str] = set()

    def check(self, reads: Mapping[str, Read]) -> None:
        """Report what has stalled since the last call.

        Args:
            reads: Reads on the wire, plain and streamed, by transfer id.
        """
        stalls = {entry.transfer_id: entry for entry in self._parts.agent.stalls() if entry.transfer_id in reads}
        known_requests = {reads[known].order.request_id for known in self._known if known in reads}
        fresh: dict[str, list[StallEntry]] = {}
        for transfer_id in stalls.keys() - self._known:
            self._parts.recorder.count("num_stalled_reads")
            read = reads[transfer_id]
            if read.order.request_id not in known_requests:
                fresh.setdefault(read.order.ticket.peer.engine_id, []).append(stalls[transfer_id])
        self._known = set(stalls)
        for engine_id, entries in fresh.items():
            self._warn(engine_id, entries, {reads[entry.transfer_id].order.request_id for entry in entries})

    def _warn(self, engine_id: str, entries: list[StallEntry], requests: set[str]) -> None:
        since_s = self._parts.now_s() - min(entry.since_s for entry in entries)
        bytes_left = sum(entry.bytes_left for entry in entries)
        names = ", ".join(sorted(requests)[:_NAMED]) + (" and others" if len(requests) > _NAMED else "")
        self._parts.recorder.warn(
            "stalled",
            f"engine {engine_id} is stopped, slow or unreachable: no part of {len(entries)} reads has ended for "
            f"{since_s:.1f} s, {bytes_left} bytes are left (requests {names}); each is given up after "
            f"{self._read_timeout_s:g} s",
        )


def note_quarantine(parts: TransferParts, read: Read, result: TransferResult) -> None:
    """Count an ended transfer that may still write into its read's pages; the first one of a read is logged."""
    is_first = not read.unquiet
    read.unquiet.add(result.transfer_id)
    parts.recorder.count("num_quarantined_reads")
    if is_first:
        parts.recorder.warn(
            "quarantine",
            f"request {read.order.request_id}: its pages stay quarantined until the transfers from engine "
            f"{read.order.ticket.peer.engine_id} are known to be over ({result.code})",
        )
