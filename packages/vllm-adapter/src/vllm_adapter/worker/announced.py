"""A worker whose cache memory goes away and comes back (vLLM's sleep mode, from 0.33 on).

Theory of operation. Before the host unmaps the memory, the registration is closed: every read ends with the code `asleep`, also
one whose data has just arrived, because its pages are about to be lost; every lease ends with its fence void; then the agent is
closed, which ends whatever is still on the wire (no transfer worker is left that could write) and deregisters the memory.
Only then may the host go on. Steps that run meanwhile get an answer to every order: reads fail, leases end.

Once the memory is mapped again, at the same addresses and with nothing in it, everything is registered anew under another agent
name and generation. Requests outlive that: one that was announced to this worker before has a word in the old fence array and
KV in the lost memory. It is *lost* until the host starts it again: then its word is written into the new array, and what is
computed from there on may be handed over. A lost request that is granted a lease all the same ends at once, and without a
word nobody can take its pages for good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from vllm_adapter.worker.transfer.reads import ReadEnd, ReadTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_adapter.ports import StepPlan

__all__ = ["ASLEEP", "ASLEEP_MESSAGE", "Announced", "fail_reads", "unusable"]

ASLEEP = "asleep"
ASLEEP_MESSAGE = "this engine's cache memory was given back (sleep mode)"


@final
class Announced:
    """Requests whose readers may come: announced by the scheduler, neither granted nor released yet. Engine thread only."""

    def __init__(self) -> None:
        self._words: dict[str, tuple[int, int] | None] = {}
        self._lost: set[str] = set()

    def slot(self, request_id: str) -> int | None:
        """Return the request's slot of the fence array, None if it has none."""
        word = self._words.get(request_id)
        return word[0] if word is not None else None

    @property
    def ids(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._words)

    def start_again(self, request_ids: Iterable[str]) -> list[tuple[int, int]]:
        """Note that the host computes these from the beginning; return the (slot, generation) words to write again."""
        lost = [request_id for request_id in request_ids if request_id in self._lost]
        self._lost.difference_update(lost)
        words = [self._words.get(request_id) for request_id in lost]
        return [word for word in words if word is not None]

    def apply(self, plan: StepPlan) -> list[str]:
        """Take in a step's orders; return the requests that are granted a lease although their KV is lost."""
        self._words.update(dict.fromkeys(plan.expects))
        self._words.update((fence.request_id, (fence.slot, fence.generation)) for fence in plan.fences)
        granted = [grant.request_id for grant in plan.grants]
        void = [request_id for request_id in granted if request_id in self._lost]
        for request_id in (*plan.releases, *granted):
            self._words.pop(request_id, None)
            self._lost.discard(request_id)
        return void

    def lose(self) -> None:
        """Note that the memory, and the fence array, of all of them are gone."""
        self._lost.update(self._words)


def unusable(end: ReadEnd, code: str = ASLEEP, message: str = ASLEEP_MESSAGE) -> ReadEnd:
    """Return a read's end as a failure if it is none; what it read must not be used."""
    return replace(end, code=code, message=message, conversion=()) if end.is_ok else end


def fail_reads(plan: StepPlan, now_s: float) -> list[ReadEnd]:
    """Return the ends of all reads that a step orders while nothing is registered."""
    return [ReadEnd(order, ASLEEP, ASLEEP_MESSAGE, ReadTimes(now_s), now_s) for order in plan.reads]
