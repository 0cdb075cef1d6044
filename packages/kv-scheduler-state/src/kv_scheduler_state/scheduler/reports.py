"""Reports of the workers after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state.errors import SchedulerStateError, UnknownRequest
from kv_scheduler_state.records import UNRESERVED, forget_if_ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.records import Request
    from kv_scheduler_state.scheduler.consumer import Consumers
    from kv_scheduler_state.scheduler.producer import Producers

__all__ = ["Reports"]


@final
class Reports:
    """Applies reports one by one; an illegal report is refused alone, and its error added to a list."""

    def __init__(
        self, requests: dict[str, Request], clock: ObservedClock, consumers: Consumers, producers: Producers
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._consumers = consumers
        self._producers = producers
        # Requests that the engine parked for a read that was refused; the workers report them as failed, once.
        self.unread: set[str] = set()

    def fail_parked(self, request_id: object, external_tokens: object) -> None:
        """Order and expect the failure of a request that is parked for a refused read; a read under way is reported anyway."""
        if type(request_id) is not str or type(external_tokens) is not int or external_tokens <= 0:
            return
        request = self._requests.get(request_id)
        consumer = None if request is None else request.consumer
        if consumer is None or consumer.state not in {"reading", "draining"}:
            self.unread.add(request_id)
            self._producers.outbox.failures[request_id] = None

    def sent(self, request_ids: Sequence[str], refusals: list[SchedulerStateError]) -> None:
        """End producer requests whose lease has ended on every worker."""
        producers, at_s = self._producers, self._clock.observed_s
        for request_id in request_ids:
            try:
                request = self._find(request_id, "sent")
                producer = request.producer
                if producer is None:
                    raise UnknownRequest(request_id, "sent")
                row = producers.table.find(request_id, producer.state, "sent")
            except SchedulerStateError as error:
                refusals.append(error)
            else:
                producers.sent(request_id, producer, row, at_s)
                forget_if_ended(self._requests, request_id, request)

    def without_unread(self, request_ids: Sequence[str]) -> Sequence[str]:
        """Return the ids of real reads; a ticket whose read was refused is given up when its failure comes back."""
        unread, at_s = self.unread, self._clock.observed_s
        if not unread:
            return request_ids
        known = [request_id for request_id in request_ids if type(request_id) is str and request_id in unread]
        for request_id in known:
            unread.discard(request_id)
            request = self._requests.get(request_id)
            consumer = None if request is None else request.consumer
            if consumer is not None and (consumer.state == "queued" or consumer.state in UNRESERVED):
                self._consumers.give_up(request_id, consumer, at_s)
        return [request_id for request_id in request_ids if request_id not in known]

    def reads_ended(self, request_ids: Sequence[str], event: str, refusals: list[SchedulerStateError]) -> None:
        """End the reads of consumer requests."""
        consumers, at_s = self._consumers, self._clock.observed_s
        for request_id in request_ids:
            try:
                request = self._find(request_id, event)
                consumer = request.consumer
                if consumer is None:
                    raise UnknownRequest(request_id, event)
                row = consumers.table.find(request_id, consumer.state, event)
            except SchedulerStateError as error:
                refusals.append(error)
            else:
                consumers.settle(request_id, consumer, row, at_s)
                forget_if_ended(self._requests, request_id, request)

    def _find(self, request_id: str, event: str) -> Request:
        try:
            return self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, event) from None
