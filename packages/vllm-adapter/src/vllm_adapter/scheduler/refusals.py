"""Hooks of the scheduler that never raise."""

from __future__ import annotations

import logging
from typing import final

__all__ = ["Refusals"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")


@final
class Refusals:
    """A `with` block that turns an exception into one log line; its `__exit__` returns a bool, so that type checkers know."""

    __slots__ = ("_event", "_request_id")

    def __init__(self, event: str, request_id: str) -> None:
        self._event = event
        self._request_id = request_id

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Log an exception, and let only those through that end the process."""
        if not isinstance(error, Exception):
            return False
        _logger.error(
            "request %s: %s was refused; it goes on without a hand-over", self._request_id, self._event, exc_info=error
        )
        return True
