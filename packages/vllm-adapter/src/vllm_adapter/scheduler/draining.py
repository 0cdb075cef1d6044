"""Leases at the end of an engine's work: kept at a shutdown, which grants no new ones, and revoked at an operator's command."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import SchedulerState

__all__ = ["Draining"]

_logger = logging.getLogger("vllm.vllm_adapter")


@final
class Draining:
    """Lets the request machines drain once the host is shutting down, and counts leased blocks.

    The host keeps stepping while a finished request keeps blocks, so open leases need no action here.

    Args:
        facts: This engine.
        state: Its request machines.
        is_ending: Tells whether the host has been told to shut down.

    Attributes:
        is_revoking: Whether the next step is to revoke all leases; set on another thread.
    """

    def __init__(self, facts: EngineFacts, state: SchedulerState, is_ending: Callable[[], bool]) -> None:
        self._engine_id = facts.engine_id
        self._block_bytes = tuple(group.block_bytes for group in facts.groups)
        self._state = state
        self._is_ending = is_ending
        self._has_ended = False
        self.is_revoking = False

    @property
    def leased_blocks(self) -> int:
        """Blocks that finished requests keep for a reader; a block shared by two of them counts twice."""
        return sum(self._state.leased_blocks)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the leased blocks on each rank.

        Example: 3 blocks of 4096 bytes in the first group and 1 of 1024 in the second: 13312.
        """
        return sum(blocks * size for blocks, size in zip(self._state.leased_blocks, self._block_bytes, strict=True))

    def look(self) -> None:
        """Start to drain if the host is shutting down; the first time, log the tickets that are still to be read."""
        if self._state.is_draining or not self._is_ending():
            return
        self._state.drain()
        _logger.info(
            "engine %s drains: it gives no more tickets; %d requests keep %d blocks (%d bytes on each rank) until they are "
            "read, their lease expires or the host's --shutdown-timeout is over",
            self._engine_id,
            self._state.lease_count,
            self.leased_blocks,
            self.leased_bytes,
        )

    def ask_to_revoke(self) -> Answer:
        """Let the next step revoke all leases; return how many there are and what they keep. Any thread.

        The host steps as long as there is a lease.
        """
        count = self._state.lease_count
        self.is_revoking = count > 0
        return {"leases": count, "leased_blocks": self.leased_blocks, "leased_bytes": self.leased_bytes}

    def revoke(self, now_s: float) -> None:
        """Order the end of all leases, as an operator has asked."""
        self.is_revoking = False
        _logger.info(
            "engine %s revokes %d leases, which keep %d blocks, as an operator has asked",
            self._engine_id,
            self._state.lease_count,
            self.leased_blocks,
        )
        self._state.revoke_all(now_s=now_s)

    def end(self) -> None:
        """Warn about tickets that can no longer be read; idempotent."""
        if self._state.lease_count and not self._has_ended:
            _logger.warning(
                "engine %s ends with %d requests unread, which keep %d blocks: their readers will find it gone",
                self._engine_id,
                self._state.lease_count,
                self.leased_blocks,
            )
        self._has_ended = True
