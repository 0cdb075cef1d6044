"""State of the owner thread, and the errors that it survived."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from ._request_pool import State

__all__ = ["ErrorLog", "ThreadHealth", "ThreadState"]

ThreadState = Literal["new", "running", "stuck", "dead", "closed"]


@final
@dataclass(frozen=True, slots=True)
class ThreadHealth:
    """State of the owner thread at one moment.

    Attributes:
        state: `new`, `running`, `stuck` (one turn takes longer than `stuck_after_s`), `dead` or `closed`.
        turn_age_s: Time since the current turn began.
        turns: Turns of the loop so far.
        calls_waiting: Calls and orders that are waiting to run.
        callback_errors: Number of callbacks and calls that have raised.
        loop_errors: Number of turns that have raised.
        last_error: Type and message of the latest error of either kind; empty if there was none.
        last_traceback: Traceback of that error as text; empty if there was none.
        ucx_requests: UCX's pool of requests in this process. Only with `zeroed`, a consumer that dies in the middle of a read
            over TCP cannot end this process with SIGSEGV; any other word is the reason why it can.
    """

    state: ThreadState
    turn_age_s: float
    turns: int
    calls_waiting: int
    callback_errors: int
    loop_errors: int
    last_error: str
    last_traceback: str
    ucx_requests: State


@final
class ErrorLog:
    """Counts errors by origin and keeps the text of the latest."""

    def __init__(self) -> None:
        self.callback_errors = 0
        self.loop_errors = 0
        self.last = ("", "")
        """(type and message, traceback) of the latest error."""

    def callback_raised(self, error: BaseException) -> None:
        """Count a callback or call that raised."""
        self.callback_errors += 1
        self._keep(error)

    def loop_raised(self, error: BaseException) -> None:
        """Count a turn of the loop that raised."""
        self.loop_errors += 1
        self._keep(error)

    def _keep(self, error: BaseException) -> None:
        self.last = (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
