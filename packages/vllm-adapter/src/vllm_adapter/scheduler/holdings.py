"""Holdings of this engine: its live requests and its leases, for the metrics, `vllm-adapter status`, drain and revocation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from vllm_adapter.observe.metric_tables import LIVE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.answers import Answer, Entry
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState

__all__ = ["MOST_REQUESTS", "Holdings"]

_logger = logging.getLogger("vllm.vllm_adapter")
MOST_REQUESTS = 50
"""Most requests that are described, oldest first; all requests are counted."""
_COUNT_EVERY_S = 1.0
"""Interval of counting live requests, which takes a scan and is too costly for every step."""


@final
class Holdings:
    """Counts requests and leases, and ends the leases when the host shuts down or an operator revokes them.

    The host keeps stepping while a finished request keeps blocks, so open leases need no action here during a drain.

    Args:
        facts: This engine.
        state: Its request machines.

    Attributes:
        is_revoking: Whether the next step is to revoke all leases; set on another thread.
    """

    def __init__(self, facts: EngineFacts, state: SchedulerState) -> None:
        self._facts = facts
        self._state = state
        self._has_ended = False
        self.is_revoking = False
        self._counted: Mapping[str, int] = {}
        self._counted_s = -_COUNT_EVERY_S

    @property
    def leases(self) -> tuple[int, int, int]:
        """Finished requests that wait for a reader, the blocks that they keep, and the bytes of these on each rank.

        A block that two of them share counts twice. Example: 3 blocks of 4096 bytes in the first group and 1 of 1024 in the
        second are 4 blocks and 13312 bytes.
        """
        counts = self._state.leased_blocks
        sizes = [group.block_bytes for group in self._facts.groups]
        size = sum(count * size for count, size in zip(counts, sizes, strict=True))
        return self._state.lease_count, sum(counts), size

    def drain(self) -> None:
        """Drain, because the host is shutting down; the first time, log the tickets that are still to be read."""
        if self._state.is_draining:
            return
        self._state.drain()
        _logger.info(
            "engine %s drains: it gives no more tickets; unread requests: %d, blocks: %d (%d bytes on each rank), until they are "
            "read, their lease expires or the host's --shutdown-timeout is over",
            self._facts.name,
            *self.leases,
        )

    def ask_to_revoke(self) -> Answer:
        """Let the next step revoke all leases; return how many there are and what they keep. Any thread.

        The host steps as long as there is a lease.
        """
        count, blocks, size = self.leases
        self.is_revoking = count > 0
        return {"leases": count, "leased_blocks": blocks, "leased_bytes": size}

    def revoke(self, now_s: float) -> None:
        """Order the end of all leases, as an operator has asked."""
        self.is_revoking = False
        _logger.info(
            "engine %s revokes all leases, as an operator asked (leases: %d, blocks: %d)",
            self._facts.name,
            *self.leases[:2],
        )
        self._state.revoke_all(now_s=now_s)

    def end(self) -> None:
        """Warn about tickets that can no longer be read; idempotent."""
        if self._state.lease_count and not self._has_ended:
            _logger.warning(
                "engine %s ends, and its unread tickets are lost (requests: %d, blocks: %d)",
                self._facts.name,
                *self.leases[:2],
            )
        self._has_ended = True

    def record(self, recorder: Recorder, now_s: float, *, has_moved: bool = True) -> None:
        """Record all levels when something has moved and once a second; those that need a scan only then or when nothing is live.

        Live requests are recorded by state, as the change since the previous count. Example: 3 requests wait and 1 is being read,
        then 2 wait and 2 are being read: the changes are -1 and +1.
        """
        is_due = now_s - self._counted_s >= _COUNT_EVERY_S
        if not (has_moved or is_due):
            return
        # An engine takes no step while it is idle, so the levels of its last one stay on the page.
        has_become_idle = bool(self._counted) and not self._state.live_count
        if has_become_idle or is_due:
            self._counted_s, before, counts = now_s, self._counted, self._state.state_counts()
            self._counted = counts
            for state in sorted({*before, *counts}):
                change = counts.get(state, 0) - before.get(state, 0)
                if change:
                    recorder.observe(LIVE_KEY, [state, change])
        recorder.level("fence_slots_used", self._state.fence_slots_used)
        _, blocks, size = self.leases
        recorder.level("leased_blocks", blocks)
        recorder.level("leased_bytes", size)

    def describe(self, now_s: float) -> Answer:
        """Return counts, leases and the oldest requests of a live engine, without changing anything; any thread.

        The request machines keep running on another thread, so figures that belong together may be a step apart.
        """
        state, (count, blocks, size) = self._state, self.leases
        return {
            "is_draining": state.is_draining,
            "leases": count,
            "leased_blocks": blocks,
            "leased_bytes": size,
            "fence_slots_used": state.fence_slots_used,
            "stream_slots_used": 0 if state.streams is None else state.streams.produced.slots_used,
            "stream_blocks_held": 0 if state.streams is None else state.streams.consumed.blocks_held,
            "requests_by_state": state.state_counts(),
            "oldest_requests": [_brief(entry) for entry in state.snapshot(now_s=now_s, most=MOST_REQUESTS)],
        }


def _brief(entry: Mapping[str, object]) -> Entry:
    """Return an operator's view of a request, without fences and nonces, which could be used to end a lease."""
    names = ("request_id", "role", "state", "age_s", "prompt_tokens", "waits_for", "rejected_code")
    brief: Entry = {name: entry[name] for name in names if entry.get(name) not in (None, "")}
    consumer = entry.get("consumer")
    if isinstance(consumer, dict):
        brief["peer_engine_id"] = consumer["peer_engine_id"]
    return brief
