"""A request that the scheduler process knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._machine import GONE
from kv_scheduler_state._prompt import MEDIA_MISSING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state._consumer import ConsumerRecord, Consumers
    from kv_scheduler_state._producer import Producers
    from kv_scheduler_state._producer_record import ProducerRecord

__all__ = ["Request", "forget_if_ended", "preempt", "void_all"]


@final
class Request:
    """A live request with its producer and consumer records; without either, it is the engine's own business."""

    __slots__ = ("born_s", "consumer", "is_finished", "producer", "prompt_tokens", "rejected_code")

    def __init__(self, prompt_tokens: int, born_s: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.born_s = born_s
        self.consumer: ConsumerRecord | None = None
        self.producer: ProducerRecord | None = None
        self.is_finished = False
        # Code of the reason why its ticket was refused; empty otherwise.
        self.rejected_code = ""

    @property
    def must_fail(self) -> bool:
        """Whether the engine must not compute the prompt itself, as it lacks a part of it."""
        return self.rejected_code == MEDIA_MISSING


def forget_if_ended(requests: dict[str, Request], request_id: str, request: Request) -> None:
    """Drop the records that are gone, and with the last one a request that has finished."""
    consumer, producer = request.consumer, request.producer
    if consumer is not None and consumer.state == GONE:
        request.consumer = consumer = None
    if producer is not None and producer.state == GONE:
        request.producer = producer = None
    if consumer is None and producer is None and request.is_finished:
        del requests[request_id]


def preempt(request_id: str, request: Request, consumers: Consumers, producers: Producers, at_s: float) -> None:
    """Apply a preemption to both records of a request, or to none.

    Raises:
        IllegalTransition: `illegal-transition`.
    """
    consumer, producer = request.consumer, request.producer
    if producer is not None and producer.is_preemption_due:
        producer.is_preemption_due = False  # the allocation has reported it already, see `Producers.allocate`
        return
    consumer_row = consumer and consumers.table.find(request_id, consumer.state, "preempt")
    producer_row = producer and producers.table.find(request_id, producer.state, "preempt")
    if consumer is not None and consumer_row is not None:
        consumers.settle(request_id, consumer, consumer_row, at_s)
    if producer is not None and producer_row is not None:
        producers.preempt(request_id, producer, producer_row, at_s)


def void_all(requests: Mapping[str, Request], consumers: Consumers, producers: Producers, at_s: float) -> None:
    """Void all KV that was computed or promised for any request before now."""
    for request_id, request in requests.items():
        if request.producer is not None:
            producers.void(request_id, request.producer, at_s)
        if request.consumer is not None:
            consumers.void(request_id, request.consumer, at_s)
