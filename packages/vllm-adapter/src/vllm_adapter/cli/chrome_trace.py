"""A timeline as trace events that Chrome (`chrome://tracing`) and Perfetto read: JSON, complete events, microseconds.

Source: the Trace Event Format. Its processes are the engines, and `outside` for the way between them; its threads are an engine's
processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_adapter.observe.plain_text import plain_text

if TYPE_CHECKING:
    from vllm_adapter.cli.timeline import Span, Timeline

__all__ = ["trace_events"]

_MICROSECONDS = 1e6


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Return the trace file's content. Example: a span of 1.5 ms from 2 ms on has `"ts": 2000.0, "dur": 1500.0`."""
    values = timeline.as_values()
    ids = {side: values[side]["engine_id"] for side in ("prefill", "decode")}
    spans = [("way to the first token", span) for span in timeline.spans]
    spans += [("beside it", span) for span in timeline.side_spans]
    places = list(dict.fromkeys(_place(span) for _, span in spans))
    engines = list(dict.fromkeys(engine for engine, _ in places))
    process = {engine: number for number, engine in enumerate(engines, 1)}
    thread = {place: number for number, place in enumerate(places, 1)}
    events: list[dict[str, Any]] = [
        _name("process_name", process[engine], 0, f"{engine} {ids.get(engine, '')}".strip()) for engine in engines
    ]
    events += [_name("thread_name", process[engine], thread[engine, part], part) for engine, part in places]
    events += [
        {
            "name": plain_text(span.name),
            "cat": category,
            "ph": "X",
            # Spans of the lease may begin before the prompt's way does, by no more than the clocks' uncertainty.
            "ts": round(max(0.0, span.begin_s) * _MICROSECONDS, 3),
            "dur": round(span.duration_s * _MICROSECONDS, 3),
            "pid": process[_place(span)[0]],
            "tid": thread[_place(span)],
            "args": {"named": span.is_named},
        }
        for category, span in spans
    ]
    told = {name: value for name, value in values.items() if name not in {"spans", "side_spans"}}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _place(span: Span) -> tuple[str, str]:
    engine, _, part = span.where.rpartition(" ")
    return (engine, part) if engine else (span.where, "network")


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": plain_text(name)}}
