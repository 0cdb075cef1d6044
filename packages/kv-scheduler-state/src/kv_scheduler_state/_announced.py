"""Fence words of producer requests between their announcement and their grant, on one worker's engine thread.

Words are written on the engine thread, as soon as a plan arrives: they must be there before the step's end can make a ticket
known. When a worker loses its memory (sleep), the words and the KV of announced requests are lost. Such a request
becomes whole again when the engine computes it from the beginning: its new word is among the plan's fences. A lost request
that is granted a lease all the same must end at once; without its word no reader accepts its pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kv_scheduler_state._plan import StepPlan

__all__ = ["AnnouncedFences"]


@final
class AnnouncedFences:
    """Keeps the words of announced requests; writes nothing itself. Not thread-safe."""

    __slots__ = ("_lost", "_words")

    def __init__(self) -> None:
        self._words: dict[str, tuple[int, int] | None] = {}
        self._lost: set[str] = set()

    def apply(self, plan: StepPlan) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
        """Take in a plan.

        Returns:
            The (slot, generation) words to write now, and the requests that are granted a lease although their KV is lost:
            pass these to `LeaseTable.apply` as `void`.
        """
        self._words.update(dict.fromkeys(plan.expects))
        self._lost.difference_update(plan.restarts)
        words = tuple([(order.slot, order.generation) for order in plan.fences])
        for order, word in zip(plan.fences, words, strict=True):
            self._words[order.request_id] = word
        granted = [order.request_id for order in plan.grants]
        void = tuple([request_id for request_id in granted if request_id in self._lost])
        for request_id in (*plan.releases, *granted):
            self._words.pop(request_id, None)
            self._lost.discard(request_id)
        return words, void

    def slot(self, request_id: str) -> int | None:
        """Return the request's fence slot, None if it has none."""
        word = self._words.get(request_id)
        return word[0] if word is not None else None

    @property
    def ids(self) -> tuple[str, ...]:
        """All announced requests, oldest first."""
        return tuple(self._words)

    def lose(self) -> None:
        """Note that memory and fence words of all announced requests are gone."""
        self._lost.update(self._words)
