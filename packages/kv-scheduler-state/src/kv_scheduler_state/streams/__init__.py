"""Streamed hand-overs: what the workers' machines do, and the values that they and the scheduler process exchange.

`SchedulerState` orders streams in `StepPlan.streams`; `StreamWorker` and `StreamReaders` carry the orders out.
Nothing here moves bytes.
"""

from kv_scheduler_state.plan import (
    StreamAnswer,
    StreamChunk,
    StreamOpen,
    StreamOrder,
    StreamOutcome,
    StreamPart,
    StreamPlan,
    StreamQuestion,
    StreamRun,
    StreamStanding,
    StreamVoid,
)
from kv_scheduler_state.streams.reader import StreamReaders, StreamReport
from kv_scheduler_state.worker.state import StreamWords, StreamWorker

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
