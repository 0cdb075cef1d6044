"""Streamed hand-overs in the workers: words of a producer, reading behind them, and what a consumer's worker reports.

`SchedulerState` orders streams in `StepPlan.streams`; these three carry the orders out. Nothing here moves bytes.
"""

from kv_scheduler_state._stream_ends import StreamEnds
from kv_scheduler_state._stream_reader import StreamReaders
from kv_scheduler_state._stream_worker import StreamWorker

__all__ = ["StreamEnds", "StreamReaders", "StreamWorker"]
