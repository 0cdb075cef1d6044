"""Moments of hand-overs in the scheduler's process, for `vllm-adapter trace`. Scheduler's thread only.

The first token has no hook of its own. After each step vLLM asks for statistics; while a request that was taken over waits
for its first token, and only then, its tokens are counted there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from vllm_adapter.observe.hand_overs import short_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_adapter.observe.hand_overs import HandOverLog
    from vllm_adapter.ports import StepPlan
    from vllm_adapter.scheduler.hooks import Arrival

__all__ = ["Trail"]


def _is_started(count: Callable[[], int]) -> bool:
    """Return whether a request has its first token; a fault of the host's count loses a moment, and fails no step."""
    try:
        return count() > 0
    except Exception:  # noqa: BLE001 - the host's code
        return False


@final
class Trail:
    """Writes down when hand-overs reached their stages.

    Args:
        log: This process's ring.
        now_s: The monotonic clock.
    """

    def __init__(self, log: HandOverLog, now_s: Callable[[], float]) -> None:
        self._log = log
        self._now_s = now_s
        self._handed_over: set[str] = set()
        self._counts: dict[str, Callable[[], int]] = {}
        # Requests that wait for their first token, with what counts their tokens.
        self._starting: dict[str, Callable[[], int]] = {}

    def arrived(
        self, arrival: Arrival, role: Literal["producer", "consumer"], now_s: float, *, is_early: bool = False
    ) -> None:
        """Note a request that takes part in a hand-over; `is_early`: it came with an early ticket."""
        facts: dict[str, object] = {"frontend_s": arrival.frontend_s, "tokens": arrival.prompt_tokens}
        if is_early:
            facts["is_early"] = True
        self._log.begin(arrival.request_id, role, "arrived", now_s, facts)
        if role == "producer":
            self._handed_over.add(arrival.request_id)
        elif arrival.output_tokens is not None:
            self._counts[arrival.request_id] = arrival.output_tokens

    def allocated(self, request_id: str, *, external_tokens: int) -> None:
        """Note blocks that were allocated: for a read, or for the step that computes the rest."""
        if external_tokens:
            self._log.mark(request_id, "allocated", self._now_s())
            return
        count = self._counts.pop(request_id, None)
        if count is not None:
            self._starting[request_id] = count
        self._log.mark(request_id, "scheduled", self._now_s())

    def ordered(self, plan: StepPlan, now_s: float) -> None:
        """Note the reads that a step orders, and the streams of prompts that are still computed."""
        streamed = [(order.read, True) for order in plan.streams.watches]
        for order, is_streamed in [*((order, False) for order in plan.reads if order.is_reported), *streamed]:
            facts: dict[str, object] = {
                "peer_engine_id": order.ticket.peer.engine_id,
                "peer_request_id": short_id(order.ticket.peer_request_id),
                "is_streamed": is_streamed,
            }
            self._log.mark(order.request_id, "ordered", now_s, facts)

    def reported(self, request_ids: Iterable[str], stage: str) -> None:
        """Note what the workers have reported: reads that ended, or blocks that are free."""
        now_s = self._now_s()
        for request_id in request_ids:
            self._log.mark(request_id, stage, now_s)

    def step_ended(self) -> None:
        """Note first tokens; to be called after each step."""
        for request_id in [request_id for request_id, count in self._starting.items() if _is_started(count)]:
            del self._starting[request_id]
            self._log.mark(request_id, "first_token", self._now_s())

    def finished(self, request_id: str) -> None:
        """Note the answer of a request that is handed over, or that one which was taken over is done."""
        self._counts.pop(request_id, None)
        count = self._starting.pop(request_id, None)
        if request_id in self._handed_over:
            self._handed_over.discard(request_id)
            self._log.mark(request_id, "answered", self._now_s())
        elif count is not None and _is_started(count):
            self._log.mark(request_id, "first_token", self._now_s())
