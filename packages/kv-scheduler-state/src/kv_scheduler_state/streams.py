"""Streamed hand-overs: what the workers' machines do, and the values that they and the scheduler process exchange.

`SchedulerState` orders streams in `StepPlan.streams`; `StreamWorker`, `StreamReaders` and `StreamEnds` carry the orders out.
Nothing here moves bytes.
"""

from kv_scheduler_state._plan import StreamChunk, StreamOpen, StreamOrder, StreamPlan, StreamRun, StreamVoid
from kv_scheduler_state._stream_ends import EndReport, StreamEnds
from kv_scheduler_state._stream_reader import StreamReaders, StreamReport
from kv_scheduler_state._stream_values import (
    StreamAnswer,
    StreamOutcome,
    StreamPart,
    StreamQuestion,
    StreamStanding,
)
from kv_scheduler_state._stream_worker import StreamWords, StreamWorker

__all__ = [
    "EndReport",
    "StreamAnswer",
    "StreamChunk",
    "StreamEnds",
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
