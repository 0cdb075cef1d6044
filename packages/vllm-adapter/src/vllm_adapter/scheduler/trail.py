"""Moments of hand-overs in the scheduler's process, for `vllm-adapter trace`. Scheduler's thread only.

The first token has no hook of its own. After each step vLLM asks for statistics; while a request that was taken over waits
for its first token, and only then, its tokens are counted there.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Literal, TypeVar, cast, final

from vllm_adapter.observe.hand_overs import short_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.observe.hand_overs import HandOverLog
    from vllm_adapter.ports import ReadOrder
    from vllm_adapter.scheduler.hooks import Arrival

__all__ = ["Trail"]

_logger = logging.getLogger("vllm.vllm_adapter")
_Method = TypeVar("_Method", bound="Callable[..., None]")


def _harmless(method: _Method) -> _Method:
    """Return the method so that a fault in it, or in the host's count, loses one moment of a trace and never fails a step."""

    @wraps(method)
    def call(trail: Trail, *words: object, **named: object) -> None:
        try:
            method(trail, *words, **named)
        except Exception:
            if not trail.faults:
                _logger.exception("a moment of a hand-over was not noted; the next such faults are only counted")
            trail.faults += 1

    return cast("_Method", call)


@final
class Trail:
    """Writes down when hand-overs reached their stages.

    Args:
        log: This process's ring.
        now_s: The monotonic clock.

    Attributes:
        starting: Requests that wait for their first token, with what counts their tokens.
        faults: Moments that were lost to an exception.
    """

    def __init__(self, log: HandOverLog, now_s: Callable[[], float]) -> None:
        self._log = log
        self._now_s = now_s
        self._handed_over: set[str] = set()
        self._counts: dict[str, Callable[[], int]] = {}
        self.starting: dict[str, Callable[[], int]] = {}
        self.faults = 0

    @_harmless
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

    @_harmless
    def allocated(self, request_id: str, *, external_tokens: int) -> None:
        """Note blocks that were allocated: for a read, or for the step that computes the rest."""
        if external_tokens:
            self._log.mark(request_id, "allocated", self._now_s())
            return
        count = self._counts.pop(request_id, None)
        if count is not None:
            self.starting[request_id] = count
        self._log.mark(request_id, "scheduled", self._now_s())

    @_harmless
    def ordered(self, reads: Sequence[ReadOrder], now_s: float, *, is_streamed: bool = False) -> None:
        """Note the reads that a step orders; `is_streamed`: they follow prompts that are still computed."""
        for order in reads:
            if order.is_reported:
                peer: dict[str, object] = {
                    "peer_engine_id": order.ticket.peer.engine_id,
                    "peer_request_id": short_id(order.ticket.peer_request_id),
                }
                self._log.mark(order.request_id, "ordered", now_s, {**peer, "is_streamed": is_streamed})

    @_harmless
    def reported(self, request_ids: Iterable[str], stage: str) -> None:
        """Note what the workers have reported: reads that ended, or blocks that are free."""
        now_s = self._now_s()
        for request_id in request_ids:
            self._log.mark(request_id, stage, now_s)

    @_harmless
    def step_ended(self) -> None:
        """Note first tokens; to be called after a step while requests are `starting`."""
        now_s = self._now_s()
        for request_id in [request_id for request_id, count in self.starting.items() if count()]:
            del self.starting[request_id]
            self._log.mark(request_id, "first_token", now_s)

    @_harmless
    def finished(self, request_id: str) -> None:
        """Note the answer of a request that is handed over, or that one which was taken over is done."""
        self._counts.pop(request_id, None)
        count = self.starting.pop(request_id, None)
        if request_id in self._handed_over:
            self._handed_over.discard(request_id)
            self._log.mark(request_id, "answered", self._now_s())
        elif count is not None and count():
            self._log.mark(request_id, "first_token", self._now_s())
