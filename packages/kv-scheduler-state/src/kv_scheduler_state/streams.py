"""Streamed hand-overs in the workers: words of a producer, reading behind them, and what a consumer's worker reports.

`SchedulerState` orders streams in `StepPlan.streams`; these three carry the orders out. Nothing here moves bytes.
"""

from kv_scheduler_state._stream_ends import StreamEnds
from kv_scheduler_state._stream_reader import StreamFacts, StreamReaders, StreamReport
from kv_scheduler_state._stream_values import (
    StreamAnswer,
    StreamChunk,
    StreamOpen,
    StreamOrder,
    StreamOutcome,
    StreamPart,
    StreamPlan,
    StreamQuestion,
    StreamStanding,
)
from kv_scheduler_state._stream_worker import StreamWorker

__all__ = [
    "StreamAnswer",
    "StreamChunk",
    "StreamEnds",
    "StreamFacts",
    "StreamOpen",
    "StreamOrder",
    "StreamOutcome",
    "StreamPart",
    "StreamPlan",
    "StreamQuestion",
    "StreamReaders",
    "StreamReport",
    "StreamStanding",
    "StreamWorker",
]
