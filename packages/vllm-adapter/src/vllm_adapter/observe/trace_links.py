"""Which trace a request belongs to, kept in the scheduler's process and sent along with the order to read it.

Without tracing the host gives requests no trace headers, nothing is kept and nothing is sent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm_adapter.ports import StepPlan

__all__ = ["TraceLink", "TraceLinks"]


@dataclass(frozen=True, slots=True)
class TraceLink:
    """Where a request's spans belong.

    Attributes:
        headers: The trace headers that the request came with (W3C `traceparent`, `tracestate`).
        arrived_ns: When it arrived, Unix time in nanoseconds.
    """

    headers: Mapping[str, str]
    arrived_ns: int


@final
class TraceLinks:
    """The links of live requests.

    Args:
        lease_ended: Told (link, request id, Unix time in nanoseconds of the grant) when a prompt's blocks are given back;
            None if nobody wants to know.
    """

    def __init__(self, lease_ended: Callable[[TraceLink, str, int], None] | None = None) -> None:
        self._lease_ended = lease_ended
        self._live: dict[str, TraceLink] = {}
        self._leased: dict[str, tuple[TraceLink, int]] = {}

    def arrived(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        """Keep a traced request's link."""
        if headers:
            self._live[request_id] = TraceLink(dict(headers), time.time_ns())

    def of_reads(self, plan: StepPlan) -> dict[str, TraceLink]:
        """Return the links of the requests whose reads a step orders and that the workers report."""
        if not self._live:
            return {}
        return {
            order.request_id: self._live[order.request_id]
            for order in plan.reads
            if order.is_reported and order.request_id in self._live
        }

    def finished(self, request_id: str, *, keeps_blocks: bool) -> None:
        """Forget a request, or follow its lease."""
        link = self._live.pop(request_id, None)
        if link is not None and keeps_blocks and self._lease_ended is not None:
            self._leased[request_id] = (link, time.time_ns())

    def sent(self, request_ids: Iterable[str]) -> None:
        """Tell the ends of leases."""
        for request_id in request_ids:
            leased = self._leased.pop(request_id, None)
            if leased is not None and self._lease_ended is not None:
                self._lease_ended(leased[0], request_id, leased[1])
