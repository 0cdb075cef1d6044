"""Warnings about reads without progress, and about pages that an ended read may still write into."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.ports import StallEntry, TransferResult
    from vllm_adapter.worker.transfer.parts import TransferParts
    from vllm_adapter.worker.transfer.records import Read

__all__ = ["StallWatch", "note_quarantine"]

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
