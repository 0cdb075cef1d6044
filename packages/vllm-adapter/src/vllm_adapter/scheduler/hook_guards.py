"""Guards that keep the scheduler's hooks from raising.

An exception in a hook is a defect, or a call that the host should not make. The log line says what it means for the request or
for the whole engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm_adapter.observe.cause_log import CauseLog

__all__ = ["HookGuards"]


@final
class HookGuards:
    """Makes `with` blocks that turn an exception into a log line, unless lines of this event are rate-limited.

    Example: `with guards("arrival", request_id): ...`, or, where no single request is concerned,
    `with guards.of_engine("reset", "KV of before the reset may still be handed over; restart this engine"): ...`.

    Args:
        log: Rate-limits the lines of each event.
    """

    __slots__ = ("_log",)

    def __init__(self, log: CauseLog) -> None:
        self._log = log

    def __call__(self, event: str, request_id: str) -> _Guard:
        """Return a guard for a constant event and the request that it is about."""
        return _Guard(self._log, event, f"request {request_id}: ", "the request goes on without a hand-over")

    def of_engine(self, event: str, consequence: str) -> _Guard:
        """Return a guard for a constant event that concerns no single request; the line says the `consequence` of a failure."""
        return _Guard(self._log, event, "", consequence)


@final
class _Guard:
    """Context manager that logs exceptions; `__exit__` returns a bool, so that type checkers know that it may suppress them."""

    __slots__ = ("_consequence", "_event", "_log", "_whose")

    def __init__(self, log: CauseLog, event: str, whose: str, consequence: str) -> None:
        self._log = log
        self._event = event
        self._whose = whose
        self._consequence = consequence

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Log an exception and suppress it, unless it ends the process."""
        if not isinstance(error, Exception):
            return False
        self._log.error(
            self._event,
            "%s%s failed (traceback below): %s",
            self._whose,
            self._event,
            self._consequence,
            trace=error,
        )
        return True
