"""A request that the scheduler process knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kv_scheduler_state._consumer import ConsumerHalf
    from kv_scheduler_state._producer import ProducerHalf

__all__ = ["Live"]


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
