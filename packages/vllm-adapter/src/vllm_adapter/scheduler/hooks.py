"""Plain values that the host passes to the scheduler side's hooks, and the guard that keeps the hooks from raising."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.ports import PromptIdentity

__all__ = ["Arrival", "Ending", "Guard"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has just arrived.

    Attributes:
        request_id: The request.
        params: Its `kv_transfer_params`, as the client sent them.
        prompt_tokens: Length of its prompt.
        identity: Computes the digest of its prompt.
        trace_headers: Trace headers of the request, if any.
        drop_tail: Drops the given number of tokens from the end of its prompt; returns False if that was not possible.
        frontend_s: Time since the host's frontend began to process it; None if that is not known.
        output_tokens: Returns the number of tokens generated so far.
        max_tokens: Most tokens that it may generate; None if that is not known.
        is_session: Whether its prompt comes in parts, each sent after the answer to the previous part.
        is_computed_whole: Whether the host computes all of its prompt, as for a client that wants the prompt's logprobs.
        end_with_error: Lets the host end it with an error, whatever its policy for failed reads is.
    """

    request_id: str
    params: object
    prompt_tokens: int
    identity: PromptIdentity | None = None
    trace_headers: Mapping[str, str] | None = None
    drop_tail: Callable[[int], bool] = lambda _tokens: False
    frontend_s: float | None = None
    output_tokens: Callable[[], int] = int
    max_tokens: int | None = None
    is_session: bool = False
    is_computed_whole: bool = False
    end_with_error: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request.

    The computed tokens that belong to the conversation are those of which a ticket may be given: tokens of a step that still runs
    may be rejected drafts, and those behind a stop token were accepted, but are not part of the answer. Example: 48 tokens are
    computed, 4 of them in flight, and the answer ends with token 42: 42 are kept.

    Attributes:
        request_id: The request.
        reason: Reason of its end.
        computed_tokens: Tokens computed so far, including those of steps that are still running.
        in_flight_tokens: Tokens of steps that are still running: it is not known yet whether they will be kept.
        identity: Computes the digest of its prompt.
        known_tokens: Tokens of the prompt and its answer; None if that is not known. More were computed if the answer ends inside
            an accepted draft.
    """

    request_id: str
    reason: Literal["length", "stop", "abort", "error"]
    computed_tokens: int
    in_flight_tokens: int = 0
    identity: PromptIdentity | None = None
    known_tokens: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """Context manager that turns an exception into a log line, unless lines of this event are rate-limited.

    Attributes:
        log: Rate-limits the lines of each event.
        event: Constant name of what the block does.
        request_id: The request that it is about; empty where it concerns no single request.
        consequence: What a failure means, for the log line.
    """

    log: CauseLog
    event: str
    request_id: str = ""
    consequence: str = "the request goes on without a hand-over"

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Log an exception and suppress it, unless it ends the process; a bool, so that type checkers know of that."""
        if not isinstance(error, Exception):
            return False
        subject = f"request {self.request_id}: " if self.request_id else ""
        line = "%s%s failed (traceback below): %s"
        self.log.error(self.event, line, subject, self.event, self.consequence, trace=error)
        return True
