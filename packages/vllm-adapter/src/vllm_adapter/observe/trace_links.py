"""Trace links of live requests, kept in the scheduler's process and sent along with read orders.

An engine that does not trace has none of this; a request without trace headers has no link.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from vllm_adapter.steps import TraceLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm_adapter.ports import StepPlan

__all__ = ["TraceLinks"]


@final
class TraceLinks:
    """Links of live requests and of leases.

    Args:
        lease_ended: Called with (link, request id, Unix time in nanoseconds of the grant) when a prompt's blocks are freed.
    """

    def __init__(self, lease_ended: Callable[[TraceLink, str, int], None]) -> None:
        self._lease_ended = lease_ended
        self._live: dict[str, TraceLink] = {}
        self._leased: dict[str, tuple[TraceLink, int]] = {}

    def arrived(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        """Keep a traced request's link."""
        if headers:
            self._live[request_id] = TraceLink(dict(headers), time.time_ns())

    def of_reads(self, plan: StepPlan) -> dict[str, TraceLink]:
        """Return the links of the requests whose reads a step orders and the workers report."""
        if not self._live:
            return {}
        return {
            order.request_id: self._live[order.request_id]
            for order in (*plan.reads, *(stream.read for stream in plan.streams.watches))
            if order.is_reported and order.request_id in self._live
        }

    def finished(self, request_id: str, *, keeps_blocks: bool) -> None:
        """Forget a request's link, or keep it until its lease ends."""
        link = self._live.pop(request_id, None)
        if link is not None and keeps_blocks:
            self._leased[request_id] = (link, time.time_ns())

    def sent(self, request_ids: Iterable[str]) -> None:
        """Report the leases that have ended."""
        for request_id in request_ids:
            leased = self._leased.pop(request_id, None)
            if leased is not None:
                self._lease_ended(leased[0], request_id, leased[1])
