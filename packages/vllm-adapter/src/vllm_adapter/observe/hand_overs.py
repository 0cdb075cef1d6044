"""Moments of hand-overs in one process: a ring of the latest for `vllm-adapter trace`, and OpenTelemetry spans.

A moment is a reading of this process's own monotonic clock, in seconds; no clock of another process is ever written here, and
nothing of a prompt but its length. At rest nothing is done and nothing grows; a moment costs one append to a ring, and moments
are put together when somebody asks.

Stages of a prompt that is handed over: `arrived`, `scheduled`, `answered`, `freed` in the scheduler's process, `granted`, `read`,
`freed` in a rank's. Of one that is taken over: `arrived`, `allocated`, `ordered`, `reported`, `scheduled`, `first_token` in the
scheduler's process; `ordered`, `connected`, `planned`, `posted`, `started`, `whole` (streamed prompts only), `data`, `fence`,
`ended`, `taken`, `completed` in a rank's.

Spans are joined to the trace that the request came with. Without tracing the host gives requests no trace headers, so no link
is kept or sent, and OpenTelemetry is not imported.

A decode engine's ranks each emit one span per read with its stages as children; a prefill engine's scheduler emits one per
lease. vLLM sets the tracer provider of each of its processes up; this module only uses it.

| span | from | to |
|---|---|---|
| `kv_transfer.read` | the request's arrival at the scheduler | its pages are usable, or the reason why not |
| ... `kv_transfer.queue` | its arrival | this rank is ordered to read |
| ... `kv_transfer.handshake` | ordered to read | the peer is known and the transfers are posted |
| ... `kv_transfer.stream` | posted, of a streamed prompt | the prefill engine is seen to have finished the prompt |
| ... `kv_transfer.wire` | posted, or the end of `kv_transfer.stream` | the last byte is here |
| ... `kv_transfer.fence` | the last byte | the lease is known to have held |
| `kv_transfer.lease` | a finished prompt's blocks are kept | they are given back |
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Literal, cast, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.observe.answers import HandOverEntry
    from vllm_adapter.steps import ReadEnd, ReadTimes, TraceLink

__all__ = ["MOST_HAND_OVERS", "HandOverLog", "SpanWriter", "short_id"]

MOST_HAND_OVERS = 128
"""Hand-overs that a process remembers at least, at about 1 KiB each."""
_MOST_STAGES = 6
"""Moments that one hand-over takes in the ring; what a rank stamps of a read is one of them."""
_KEPT_CHARACTERS = 80
_Role = Literal["producer", "consumer"]
_Event = tuple[str, str, float, "_Role | None", "Mapping[str, object]", "tuple[ReadTimes, float, float] | None"]
"""(request id, stage, seconds, role at the beginning, facts, a rank's times of its read)."""


def short_id(request_id: str) -> str:
    """Return an id that costs bounded memory: its two ends, since clients choose the first and vLLM appends to the last."""
    if len(request_id) <= 2 * _KEPT_CHARACTERS:
        return request_id
    return f"{request_id[:_KEPT_CHARACTERS]}...{request_id[-_KEPT_CHARACTERS:]}"


@final
class HandOverLog:
    """Remembers when the latest hand-overs reached their stages in this process; any thread.

    Args:
        most: Hand-overs that are remembered at least; the oldest moments are forgotten first.
    """

    def __init__(self, most: int = MOST_HAND_OVERS) -> None:
        self._events: deque[_Event] = deque(maxlen=most * _MOST_STAGES)

    def mark(self, request_id: str, stage: str, at_s: float, *, role: _Role | None = None, **facts: object) -> None:
        """Note a moment of a hand-over; of a repeated stage the first one counts, and unknown requests are ignored.

        Args:
            request_id: This engine's request.
            stage: The stage that it has reached.
            at_s: Seconds of this process's clock.
            role: With the first moment of a hand-over: whether it is handed over from here or to here. An earlier one of the same
                id is forgotten.
            facts: Plain values to report along.
        """
        self._events.append((short_id(request_id), stage, at_s, role, facts, None))

    def read_ended(self, end: ReadEnd, taken_s: float, completed_s: float) -> None:
        """Remember one rank's read.

        Args:
            end: Its end, after completion.
            taken_s: Time at which the engine's thread took it up.
            completed_s: Time at which its pages were in order.
        """
        order, times = end.order, end.times
        facts = {
            "peer_engine_id": order.ticket.peer.engine_id,
            "peer_request_id": short_id(order.ticket.peer_request_id),
            "tokens": order.tokens,
            "bytes": times.bytes_moved,
            "code": end.code,
        }
        if times.early_bytes is not None:
            facts["early_bytes"] = times.early_bytes
        stamps = times, end.ended_s, taken_s
        self._events.append((short_id(order.request_id), "completed", completed_s, "consumer", facts, stamps))

    def describe(self) -> list[HandOverEntry]:
        """Return what is remembered, oldest first, as plain values."""
        found: dict[str, HandOverEntry] = {}
        for request_id, stage, at_s, role, facts, stamps in self._events.copy():
            if role is not None:
                found.pop(request_id, None)  # so that an id which is used again stands where it began anew
                moments: dict[str, float | None] = {} if stamps is None else _moments(*stamps)
                found[request_id] = {"request_id": request_id, "role": role, "moments": moments}
            entry = found.get(request_id)
            if entry is not None:
                entry["moments"].setdefault(stage, at_s)
                entry.update(cast("HandOverEntry", facts))
        return list(found.values())


def _moments(times: ReadTimes, ended_s: float, taken_s: float) -> dict[str, float | None]:
    """Return a rank's moments of a read by stage, without those that it did not reach."""
    stages = {
        "ordered": times.ordered_s,
        "connected": times.connected_s,
        "planned": times.planned_s,
        "posted": times.posted_s,
    }
    if times.posted_s is not None and times.data_s is not None:
        stages["started"] = times.posted_s + times.queue_s
        stages["whole"] = times.whole_s
        stages["data"] = times.data_s
        stages["fence"] = times.data_s + times.fence_s
    stages |= {"ended": ended_s, "taken": taken_s}
    return {stage: moment for stage, moment in stages.items() if moment is not None}


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
        ends = {"queue": times.ordered_s, "handshake": times.posted_s, "stream": times.whole_s, "wire": times.data_s}
        if times.data_s is not None and times.fence_s:
            ends["fence"] = times.data_s + times.fence_s
        start_ns = link.arrived_ns
        for stage, end_s in ends.items():
            if end_s is None:
                continue
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
