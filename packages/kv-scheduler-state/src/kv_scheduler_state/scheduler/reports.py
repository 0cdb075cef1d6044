"""Reports of the workers after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state.errors import SchedulerStateError, UnknownRequest
from kv_scheduler_state.records import UNRESERVED, find_request, forget_if_ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.records import Request
    from kv_scheduler_state.scheduler.consumer import Consumers
    from kv_scheduler_state.scheduler.producer import Producers

__all__ = ["Reports"]


@final
class Reports:
    """Applies reports one by one; an illegal one is refused alone."""

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
            self._producers.outbox.orders.put("failures", request_id)

    def apply(self, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None:
        """Apply the reports of a step, see `SchedulerState.report`."""
        refusals: list[SchedulerStateError] = []
        if self.unread:
            unread = self._give_up_unread([*failed, *received])
            failed = [request_id for request_id in failed if request_id not in unread]
            received = [request_id for request_id in received if request_id not in unread]
        if failed:
            broken = set(failed)
            received = [request_id for request_id in received if request_id not in broken]
        events = ("sent", sent), (self._consumers.failure_event, failed), ("done", received)
        for event, request_ids in events:
            for request_id in request_ids:
                try:
                    self._ended(request_id, event)
                except SchedulerStateError as error:
                    refusals.append(error)
        if refusals:
            raise refusals[0]

    def _ended(self, request_id: str, event: str) -> None:
        request = find_request(self._requests, request_id, event)
        producer, consumer, at_s = request.producer, request.consumer, self._clock.observed_s
        if event == "sent" and producer is not None:
            row = self._producers.table.find(request_id, producer.state, event)
            self._producers.sent(request_id, producer, row, at_s)
        elif event != "sent" and consumer is not None:
            row = self._consumers.table.find(request_id, consumer.state, event)
            self._consumers.settle(request_id, consumer, row, at_s)
        else:
            raise UnknownRequest(request_id, event)
        forget_if_ended(self._requests, request_id, request)

    def _give_up_unread(self, request_ids: Sequence[str]) -> list[str]:
        """Give up the tickets whose refused read is reported now; return their requests."""
        known = [request_id for request_id in request_ids if type(request_id) is str and request_id in self.unread]
        self.unread.difference_update(known)
        for request_id in known:
            request = self._requests.get(request_id)
            consumer = None if request is None else request.consumer
            if consumer is not None and (consumer.state == "queued" or consumer.state in UNRESERVED):
                self._consumers.give_up(request_id, consumer, self._clock.observed_s)
        return known
