"""Spans as an OpenTelemetry SDK sees them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from vllm_adapter.observe.hand_overs import SpanWriter
from vllm_adapter.steps import ReadEnd, ReadTimes, TraceLink

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LINK = TraceLink({"traceparent": f"00-{TRACE}-{PARENT}-01"}, time.time_ns() - 10**9)
ORDER: Any = SimpleNamespace(
    request_id="r",
    ticket=SimpleNamespace(
        peer_request_id="p", peer=SimpleNamespace(engine_id="prefill-0", host="127.0.0.1", port=5600)
    ),
)
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)


def written(end: ReadEnd | None = None) -> dict[str, Any]:
    exporter.clear()
    writer = SpanWriter("decode-0", (0, 1))
    if end is not None:
        writer.read_ended(LINK, end)
    else:
        writer.lease_ended(LINK, "r", LINK.arrived_ns)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_good_read_has_a_span_per_stage_inside_one_that_joins_the_requests_trace() -> None:
    now = time.monotonic()
    stages = ReadTimes(now - 0.5, now - 0.4, now - 0.1, 0.05, 4096)
    spans = written(ReadEnd(ORDER, "", "", stages, now))
    assert list(spans) == [f"kv_transfer.{name}" for name in ("queue", "handshake", "wire", "fence", "read")]
    whole = spans["kv_transfer.read"]
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent.span_id == int(PARENT, 16)
    assert whole.attributes["kv_transfer.bytes"] == 4096
    assert whole.attributes["kv_transfer.tp_rank"] == 1
    assert whole.status.is_ok
    last = LINK.arrived_ns
    for name, seconds in (("queue", None), ("handshake", 0.1), ("wire", 0.3), ("fence", 0.05)):
        span = spans[f"kv_transfer.{name}"]
        assert span.parent.span_id == whole.context.span_id
        assert span.start_time == last
        # The queue began by another clock: only its order is certain.
        assert span.end_time > span.start_time
        if seconds is not None:
            assert abs((span.end_time - span.start_time) / 1e9 - seconds) < 1e-6
        last = span.end_time


def test_a_streamed_read_tells_the_wait_for_the_prompt_from_the_last_read() -> None:
    """Its first part is posted long before the prompt is whole; 3000 of its 4096 bytes had arrived by then."""
    now = time.monotonic()
    stages = ReadTimes(now - 0.9, now - 0.8, now - 0.1, 0.05, 4096, whole_s=now - 0.2, early_bytes=3000)
    spans = written(ReadEnd(ORDER, "", "", stages, now))
    assert list(spans) == [f"kv_transfer.{name}" for name in ("queue", "handshake", "stream", "wire", "fence", "read")]
    for name, seconds in (("stream", 0.6), ("wire", 0.1), ("fence", 0.05)):
        span = spans[f"kv_transfer.{name}"]
        assert abs((span.end_time - span.start_time) / 1e9 - seconds) < 1e-6
    assert spans["kv_transfer.read"].attributes["kv_transfer.early_bytes"] == 3000


def test_a_read_that_failed_says_why_and_ends_with_the_stage_that_it_reached() -> None:
    spans = written(ReadEnd(ORDER, "timed-out", "no answer within 5 s", ReadTimes(time.monotonic()), time.monotonic()))
    assert list(spans) == ["kv_transfer.queue", "kv_transfer.read"]
    whole = spans["kv_transfer.read"]
    assert not whole.status.is_ok
    assert whole.status.description == "no answer within 5 s"
    assert whole.attributes["kv_transfer.code"] == "timed-out"


def test_a_lease_is_one_span() -> None:
    (span,) = written().values()
    assert span.name == "kv_transfer.lease"
    assert span.context.trace_id == int(TRACE, 16)
    assert span.start_time == LINK.arrived_ns
