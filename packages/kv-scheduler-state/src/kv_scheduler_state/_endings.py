"""The end of a request in the engine: its blocks are handed over, or they are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state._blocks import new_tuple
from kv_scheduler_state._decisions import NOT_KEPT, FinishDecision, FinishReason
from kv_scheduler_state._errors import InvalidEvent, UnknownRequest, quote, refuse_count
from kv_scheduler_state._request import forget_if_ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._clock import ObservedClock
    from kv_scheduler_state._consumer import Consumers
    from kv_scheduler_state._producer import Producers
    from kv_scheduler_state._prompt import PromptIdentity
    from kv_scheduler_state._request import Request

__all__ = ["Endings"]

_HANDS_OVER: Final = {"length": True, "stop": True, "abort": False, "error": False}


@final
class Endings:
    """Ends requests: both records, or none if one of them refuses."""

    __slots__ = ("_clock", "_consumers", "_producers", "_requests")

    def __init__(
        self, requests: dict[str, Request], clock: ObservedClock, consumers: Consumers, producers: Producers
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._consumers = consumers
        self._producers = producers

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        withhold: bool,
        identity: PromptIdentity | None,
        now_s: float,
    ) -> FinishDecision:
        """Do what `SchedulerState.finish` says."""
        try:
            request = self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, "finish") from None
        hands_over = _HANDS_OVER.get(reason)
        if hands_over is None:
            raise InvalidEvent(f"reason is {quote(reason)}, must be one of {sorted(_HANDS_OVER)}")
        if type(computed_tokens) is not int or computed_tokens < 0:
            refuse_count("computed_tokens", computed_tokens)
        at_s = self._clock.observe(now_s)
        producers, producer, consumer = self._producers, request.producer, request.consumer
        if producer is None:
            if consumer is not None:
                self._consumers.finish(request_id, consumer, at_s)
            request.is_finished = True
            forget_if_ended(self._requests, request_id, request)
            return NOT_KEPT
        if hands_over:
            row, code = producers.ending(request_id, producer, block_ids, computed_tokens, withhold=withhold)
        else:
            row, code = producers.table.find(request_id, producer.state, "drop"), ""
        # May raise, for it asks the host for the prompt's digest; nothing has changed until then.
        params = producers.ticket(request_id, producer, row, block_ids, computed_tokens, identity)
        if consumer is not None:
            self._consumers.finish(request_id, consumer, at_s)
        request.is_finished = True
        producers.finish(request_id, producer, row, block_ids, params, at_s)
        if params is not None and consumer is None:
            return new_tuple(FinishDecision, (True, params, ""))  # the lease keeps the request
        forget_if_ended(self._requests, request_id, request)
        if params is not None:
            return FinishDecision(keep_blocks=True, params=params)
        return FinishDecision(keep_blocks=False, params=None, withheld_code=code) if code else NOT_KEPT
