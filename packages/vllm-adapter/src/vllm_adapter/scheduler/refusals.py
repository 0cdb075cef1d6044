"""Hooks of the scheduler that never raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm_adapter.observe.cause_log import CauseLog

__all__ = ["Refusals"]


@final
class Refusals:
    """Makes `with` blocks that turn an exception into a log line, as far as lines of this event are not held back.

    Example: `with refusals("arrival", request_id): ...`

    Args:
        log: Limits the lines of each event.
    """

    __slots__ = ("_log",)

    def __init__(self, log: CauseLog) -> None:
        self._log = log

    def __call__(self, event: str, request_id: str) -> _Refusal:
        """Return a block for a constant event and the request that it is about."""
        return _Refusal(self._log, event, request_id)


@final
class _Refusal:
    """Block of code that may be refused; its `__exit__` returns a bool, so that type checkers know."""

    __slots__ = ("_event", "_log", "_request_id")

    def __init__(self, log: CauseLog, event: str, request_id: str) -> None:
        self._log = log
        self._event = event
        self._request_id = request_id

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Log an exception, and let only those through that end the process."""
        if not isinstance(error, Exception):
            return False
        self._log.error(
            self._event,
            "request %s: %s was refused; it goes on without a hand-over",
            self._request_id,
            self._event,
            trace=error,
        )
        return True
