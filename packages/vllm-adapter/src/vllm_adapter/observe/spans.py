"""OpenTelemetry spans of hand-overs, joined to the trace that the request came with.

Without tracing the host gives requests no trace headers, so no link is kept or sent, and OpenTelemetry is not imported.

A decode engine's ranks each emit one span per read with its stages as children; a prefill engine's scheduler emits one per
lease. vLLM sets the tracer provider of each of its processes up; this module only uses it.

| span | from | to |
|---|---|---|
| `kv_transfer.read` | the request's arrival at the scheduler | its pages are usable, or the reason why not |
| ... `kv_transfer.queue` | its arrival | this rank is told to read |
| ... `kv_transfer.handshake` | told to read | the peer is known and the transfers are posted |
| ... `kv_transfer.stream` | posted, of a streamed prompt | the prefill engine is seen to have finished the prompt |
| ... `kv_transfer.wire` | posted, or the end of `kv_transfer.stream` | the last byte is here |
| ... `kv_transfer.fence` | the last byte | the lease is known to have held |
| `kv_transfer.lease` | a finished prompt's blocks are kept | they are given back |
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_adapter.steps import ReadEnd, ReadTimes, TraceLink

__all__ = ["SpanWriter"]


@final
class SpanWriter:
    """Writes spans after the fact, from times that were taken anyway.

    Args:
        engine_id: This engine.
        rank: (pp, tp) rank; None in the scheduler's process.
    """

    def __init__(self, engine_id: str, rank: tuple[int, int] | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = trace.get_tracer("vllm_adapter")
        self._context = TraceContextTextMapPropagator().extract
        self._attributes: dict[str, str | int] = {"kv_transfer.engine_id": engine_id}
        if rank is not None:
            self._attributes |= {"kv_transfer.pp_rank": rank[0], "kv_transfer.tp_rank": rank[1]}
        # Stages are timed by the monotonic clock, spans by Unix time.
        self._unix_ns = time.time_ns() - round(1e9 * time.monotonic())

    def read_ended(self, link: TraceLink, end: ReadEnd) -> None:
        """Write the span of a read and those of the stages that it reached."""
        order, times = end.order, end.times
        span = self._tracer.start_span(
            "kv_transfer.read",
            context=self._context(link.headers),
            start_time=link.arrived_ns,
            attributes={
                **self._attributes,
                "gen_ai.request.id": order.request_id,
                "kv_transfer.peer_engine_id": order.ticket.peer.engine_id,
                "kv_transfer.peer_request_id": order.ticket.peer_request_id,
                "kv_transfer.peer": f"{order.ticket.peer.host}:{order.ticket.peer.port}",
                "kv_transfer.bytes": times.bytes_moved,
                **({} if times.early_bytes is None else {"kv_transfer.early_bytes": times.early_bytes}),
                **({"kv_transfer.code": end.code} if end.code else {}),
            },
        )
        if end.code:
            span.set_status(self._api.StatusCode.ERROR, end.message)
        inside = self._api.set_span_in_context(span)
        start_ns = link.arrived_ns
        for stage, end_s in _stages(times):
            stop_ns = max(start_ns, self._at(end_s))
            self._tracer.start_span(f"kv_transfer.{stage}", context=inside, start_time=start_ns).end(stop_ns)
            start_ns = stop_ns
        span.end(self._at(end.ended_s))

    def lease_ended(self, link: TraceLink, request_id: str, granted_ns: int) -> None:
        """Write the span of a lease that is over now."""
        span = self._tracer.start_span(
            "kv_transfer.lease",
            context=self._context(link.headers),
            start_time=granted_ns,
            attributes={**self._attributes, "gen_ai.request.id": request_id},
        )
        span.end()

    def _at(self, moment_s: float) -> int:
        return self._unix_ns + round(1e9 * moment_s)


def _stages(times: ReadTimes) -> Iterator[tuple[str, float]]:
    """Yield (stage, moment of its end, by the monotonic clock) of the stages that a read reached."""
    yield "queue", times.ordered_s
    if times.posted_s is not None:
        yield "handshake", times.posted_s
    if times.whole_s is not None:
        yield "stream", times.whole_s
    if times.data_s is not None:
        yield "wire", times.data_s
        if times.fence_s:
            yield "fence", times.data_s + times.fence_s
