"""What the workers report after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._errors import SchedulerStateError, UnknownRequest
from kv_scheduler_state._live import forget_if_ended
from kv_scheduler_state._machine import GONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state._clock import ObservedClock
    from kv_scheduler_state._consumer import ConsumerDesk
    from kv_scheduler_state._live import Live
    from kv_scheduler_state._machine import Transition
    from kv_scheduler_state._producer import ProducerDesk

__all__ = ["ReportDesk"]


@final
class ReportDesk:
    """Applies reports one by one; what is not legal is refused alone, into a list."""

    __slots__ = ("_clock", "_consumers", "_live", "_producers")

    def __init__(
        self, live: dict[str, Live], clock: ObservedClock, consumers: ConsumerDesk, producers: ProducerDesk
    ) -> None:
        self._live = live
        self._clock = clock
        self._consumers = consumers
        self._producers = producers

    def sent(self, request_ids: Sequence[str], refusals: list[SchedulerStateError]) -> None:
        """End producer requests whose lease has ended on every worker."""
        producers, at_s = self._producers, self._clock.observed_s
        for request_id in request_ids:
            try:
                live = self._live[request_id]
                producer = live.producer
                if producer is None:
                    raise UnknownRequest(request_id, "sent")
                row = producers.on_sent.get(producer.state)
                row = row or producers.table.refuse(request_id, producer.state, "sent")
            except (KeyError, TypeError):
                refusals.append(UnknownRequest(request_id, "sent"))
            except SchedulerStateError as error:
                refusals.append(error)
            else:
                producers.sent(producer, row, at_s)
                forget_if_ended(self._live, request_id, live)

    def reads_ended(
        self,
        request_ids: Sequence[str],
        event: str,
        rows: Mapping[str, Transition],
        refusals: list[SchedulerStateError],
    ) -> None:
        """End the reads of consumer requests, by an event and its rows."""
        consumers, at_s = self._consumers, self._clock.observed_s
        for request_id in request_ids:
            try:
                live = self._live[request_id]
                consumer = live.consumer
                if consumer is None:
                    raise UnknownRequest(request_id, event)
                row = rows.get(consumer.state) or consumers.table.refuse(request_id, consumer.state, event)
            except (KeyError, TypeError):
                refusals.append(UnknownRequest(request_id, event))
            except SchedulerStateError as error:
                refusals.append(error)
            else:
                consumers.settle(request_id, consumer, row, at_s)
                if consumer.state == GONE:
                    forget_if_ended(self._live, request_id, live)
