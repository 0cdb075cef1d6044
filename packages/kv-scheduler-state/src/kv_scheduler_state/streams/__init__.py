"""Streamed hand-overs: what the workers' machines do, and the values that they and the scheduler process exchange.

`SchedulerState` orders streams in `StepPlan.streams`; `StreamWorker` and `StreamReaders` carry the orders out.
Nothing here moves bytes.
"""

from kv_scheduler_state.plan import StreamChunk, StreamOpen, StreamOrder, StreamPlan, StreamRun, StreamVoid
from kv_scheduler_state.streams.reader import StreamReaders, StreamReport
from kv_scheduler_state.streams.values import (
    StreamAnswer,
    StreamOutcome,
    StreamPart,
    StreamQuestion,
    StreamStanding,
)
from kv_scheduler_state.streams.worker import StreamWords, StreamWorker

__all__ = [
    "StreamAnswer",
    "StreamChunk",
    "StreamOpen",
    "StreamOrder",
    "StreamOutcome",
    "StreamPart",
    "StreamPlan",
    "StreamQuestion",
    "StreamReaders",
    "StreamReport",
    "StreamRun",
    "StreamStanding",
    "StreamVoid",
    "StreamWorker",
    "StreamWords",
]
