"""The last part of an engine's life: told to end, it gives no tickets, and those that are out go on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_adapter.scheduler.leased_blocks import LeasedBlocks

__all__ = ["Draining"]

_logger = logging.getLogger("vllm.vllm_adapter")


@final
class Draining:
    """Whether this engine drains.

    The host goes on stepping while a finished request keeps blocks, so nothing is to be done for open leases.

    Args:
        engine_id: Name of the engine in log lines.
        leased: Blocks that are leased.
        is_ending: Tells whether the host was told to end.
    """

    def __init__(self, engine_id: str, leased: LeasedBlocks, is_ending: Callable[[], bool]) -> None:
        self._engine_id = engine_id
        self._leased = leased
        self._is_ending = is_ending
        self._is_on = False

    def is_on(self) -> bool:
        """Return whether the host was told to end; the first time, log what is still to be read."""
        if not self._is_on and self._is_ending():
            self._is_on = True
            leased = self._leased
            _logger.info(
                "engine %s drains: it gives no more tickets; %d requests keep %d blocks (%d bytes on each rank) until they "
                "are read, their lease expires or the host's --shutdown-timeout is over",
                self._engine_id,
                len(leased.ids),
                leased.blocks,
                leased.block_bytes,
            )
        return self._is_on

    def end(self) -> None:
        """Warn of tickets that nobody will be able to read any more."""
        unread = self._leased.ids
        if unread:
            _logger.warning(
                "engine %s ends with %d requests unread, which keep %d blocks: their readers will find it gone",
                self._engine_id,
                len(unread),
                self._leased.blocks,
            )
            self._leased.end(unread)
