"""Streamed hand-overs as the scheduler's hooks use them. Without a channel every method does nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.hook_guards import HookGuards
    from vllm_adapter.scheduler.stream_channel import StreamChannel
    from vllm_adapter.scheduler.values import Arrival
    from vllm_adapter.steps import Rank

__all__ = ["Streaming"]

_logger = logging.getLogger("vllm.vllm_adapter")

_GOES_ON = "the prefill engine was asked for more than one token, and the model keeps a state, which would run on"
_WINDOW_GOES_ON = (
    "the prefill engine was asked for more than one token, and would free blocks of the prompt's last window"
)
_NOT_SHORTENED = "its last tokens are the decode engine's to compute, and could not be left out here"


@final
class Streaming:
    """Passes questions, answers and ends of streams between the request machines and the rest. Scheduler's thread only.

    Args:
        facts: This engine.
        state: The request machines.
        channel: Passes questions and answers on; None where nothing is streamed.
        guards: Turns an exception of the machines into a log line.
    """

    def __init__(
        self, facts: EngineFacts, state: SchedulerState, channel: StreamChannel | None, guards: HookGuards
    ) -> None:
        self._facts = facts
        self._state = state
        self._channel = channel
        self._guards = guards
        self._logged: set[str] = set()
        self._is_router_known = False

    def arrived(self, arrival: Arrival, *, tail: int, is_shortened: bool) -> None:
        """Check a producer's request that a peer wants to read early; hand it over whole if it cannot be streamed.

        Args:
            arrival: The request.
            tail: Tokens that were to be dropped from the end of its prompt.
            is_shortened: Whether they were dropped; the request then generates one token, whatever it was asked for.
        """
        reason = self._why_whole(arrival, tail=tail, is_shortened=is_shortened)
        if not reason:
            return
        with self._guards("hand-over in one piece", arrival.request_id):
            self._state.stream_whole(arrival.request_id)
        if reason not in self._logged:
            self._logged.add(reason)
            _logger.warning("prompts such as that of request %s are handed over whole: %s", arrival.request_id, reason)

    def taken(self, arrival: Arrival) -> None:
        """Log once, at the first hand-over, if this engine streams but its router does not."""
        if self._channel is None or self._is_router_known:
            return
        self._is_router_known = True
        params = arrival.params
        if isinstance(params, Mapping) and "kv_stream" not in params:
            _logger.info(
                "prompts are handed over whole, not streamed: request %s came without an early ticket, so its router asks "
                "the decode engine when the prefill engine has answered",
                arrival.request_id,
            )

    def _why_whole(self, arrival: Arrival, *, tail: int, is_shortened: bool) -> str:
        if self._facts.whole_reason:
            return self._facts.whole_reason
        if tail and not is_shortened:
            return _NOT_SHORTENED
        if is_shortened or arrival.max_tokens == 1:
            return ""
        if self._facts.has_state:
            return _GOES_ON
        return _WINDOW_GOES_ON if any(group.window_tokens for group in self._facts.groups) else ""

    @property
    def is_asking(self) -> bool:
        """Whether a question to a peer is still unanswered."""
        return self._channel is not None and self._channel.is_asking

    def receive(self, now_s: float) -> None:
        """Pass the questions and answers that peers have sent since the last call to the machines."""
        if self._channel is not None and self._channel.has_received:
            with self._guards.of_engine(
                "receipt of questions and answers", "prompts are read early later, or not at all"
            ):
                self._channel.receive(now_s)

    def send(self) -> None:
        """Send the machines' questions and answers; once a step, after its plan was taken."""
        if self._channel is not None:
            with self._guards.of_engine(
                "sending of questions and answers", "prompts are read early later, or not at all"
            ):
                self._channel.send()

    def publish(self) -> None:
        """Publish the answers that changed when a request ended, whether or not another step follows."""
        if self._channel is not None:
            with self._guards.of_engine("standing answers", "peers are answered a step later"):
                self._channel.publish()

    def ended(self, ends: Iterable[tuple[str, Rank, bool]]) -> None:
        """Record the streams that have ended on a rank, and whether their fence held there."""
        for request_id, rank, is_done in ends:
            with self._guards("end of a stream", request_id):
                self._state.stream_ended(request_id, rank, is_done=is_done)

    def bind_free_blocks(self, free_blocks: Callable[[], int]) -> None:
        """Let the machines query the number of free blocks in the host's pool."""
        if self._channel is not None:
            self._state.bind_free_blocks(free_blocks)

    def close(self) -> None:
        """Stop asking questions; idempotent."""
        if self._channel is not None:
            self._channel.close()
