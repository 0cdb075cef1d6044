"""A request that the scheduler process knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._machine import GONE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state._consumer import ConsumerDesk, ConsumerHalf
    from kv_scheduler_state._producer import ProducerDesk, ProducerHalf

__all__ = ["Live", "forget_if_ended", "void_all"]


@final
class Live:
    """One live request with its halves; without any it is the engine's own business."""

    __slots__ = ("born_s", "consumer", "is_finished", "producer", "prompt_tokens", "rejected_code")

    def __init__(self, prompt_tokens: int, born_s: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.born_s = born_s
        self.consumer: ConsumerHalf | None = None
        self.producer: ProducerHalf | None = None
        self.is_finished = False
        self.rejected_code = ""


def forget_if_ended(requests: dict[str, Live], request_id: str, live: Live) -> None:
    """Drop the halves that are gone, and with the last one a request that has finished."""
    consumer, producer = live.consumer, live.producer
    if consumer is not None and consumer.state == GONE:
        live.consumer = consumer = None
    if producer is not None and producer.state == GONE:
        live.producer = producer = None
    if consumer is None and producer is None and live.is_finished:
        del requests[request_id]


def void_all(
    requests: Mapping[str, Live], consumers: ConsumerDesk, producers: ProducerDesk, at_s: float
) -> tuple[str, ...]:
    """Void what was computed or promised before now; return the requests whose read is under way."""
    reading: list[str] = []
    for request_id, live in requests.items():
        producer, consumer = live.producer, live.consumer
        if producer is not None:
            producers.void(request_id, producer, at_s)
        if consumer is not None:
            if consumer.state == "queued":
                consumers.give_up(request_id, consumer, at_s)
            elif consumer.state == "reading":
                reading.append(request_id)
    return tuple(reading)
