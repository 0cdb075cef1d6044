"""Records of streamed reads: a stream, the producer ranks that it follows, and the parts that it asks the table for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.ports import PeerPlan, StreamOrder, StreamWatch, TransferResult
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.records import PeerEngine, Read
    from vllm_adapter.worker.transfer.stream_parts import PartBlocks

__all__ = ["FollowedRank", "Part", "Stream", "StreamEvents", "as_one_read"]


class StreamEvents(Protocol):
    """Events of a followed rank's watch."""

    def on_progress(self, following: FollowedRank, tag: int, tokens: int) -> None:
        """Process a progress word."""
        ...

    def on_table(self, following: FollowedRank, first: int, ids: tuple[int, ...]) -> None:
        """Process block ids, of the table entries from `first` on."""
        ...

    def on_broken(self, following: FollowedRank, code: str, message: str) -> None:
        """Process the end of the watch."""
        ...


@final
class Part:
    """A part of which the table is asked for the block ids.

    Attributes:
        blocks: Its blocks, run by run.
        tokens: Tokens of the prompt that are read once it has landed.
        missing: First table entry of each run whose ids have not come yet.
        ids: The producer's block ids by table entry.
    """

    __slots__ = ("blocks", "ids", "missing", "tokens")

    def __init__(self, blocks: list[PartBlocks], tokens: int) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.missing = {each.place for each in blocks if each.length}
        self.ids: dict[int, int] = {}


@final
class Stream:
    """A stream of a request: its order, its engine, and the ranks that have not reported.

    Attributes:
        plan: Plan against the producer's engine.
        read: The read that it is.
        order: The scheduler's order.
        engine: The producer's engine.
        open_ranks: Producer ranks that have not reported, by name.
        whole_ranks: The reads from the ranks whose fence held.
        is_torn: Whether a rank broke, so that nothing of it counts.
        is_stopped: Whether the scheduler has given it up.
        reason: Code and sentence of the first thing that went wrong; empty while all is well.
    """

    __slots__ = ("engine", "is_stopped", "is_torn", "open_ranks", "order", "plan", "read", "reason", "whole_ranks")

    def __init__(self, read: Read, order: StreamOrder, engine: PeerEngine, plan: PeerPlan) -> None:
        self.plan = plan
        self.read = read
        self.order = order
        self.engine = engine
        self.open_ranks: dict[str, FollowedRank] = {}
        self.whole_ranks: list[TransferResult] = []
        self.is_torn = False
        self.is_stopped = False
        self.reason: tuple[str, str] = ("", "")

    def note_whole(self, now_s: float) -> None:
        """Keep when the first rank was seen to be whole, and how many bytes had arrived by then."""
        times = self.read.times
        if times.whole_s is None:
            times.whole_s = now_s
            times.early_bytes = times.bytes_moved

    def note_arrival(self, result: TransferResult, now_s: float, *, is_fence: bool) -> None:
        """Keep when the latest bytes arrived, and for how long after them the fence word was read."""
        times = self.read.times
        times.bytes_moved += result.bytes_moved
        if is_fence and times.data_s is not None:
            times.fence_s = now_s - times.data_s
        else:
            times.data_s, times.fence_s = now_s, 0.0


def as_one_read(parts: Sequence[TransferResult]) -> TransferResult:
    """Return the results of a streamed read's parts from one producer rank as those of one read; its fence is read apart."""
    return replace(
        parts[0],
        wire_s=sum(part.wire_s for part in parts),
        post_s=sum(part.post_s for part in parts),
        queue_s=max(part.queue_s for part in parts),
        bytes_moved=sum(part.bytes_moved for part in parts),
        descriptor_count=sum(part.descriptor_count for part in parts),
        fence_s=0.0,
        bytes_by_path=tuple(entry for part in parts for entry in part.bytes_by_path),
    )


@final
class FollowedRank:
    """A producer rank of a stream. It hands what its watch tells on to the coordinator.

    Attributes:
        stream: The stream.
        rank: (pp, tp) rank of the producer.
        name: Its name among all that are followed.
        watch: The agent's watch of its words; None before it begins.
        parts: Parts that are not posted yet, the oldest first.
        finished_tokens: Tokens of the prompt that it has finished, as its progress word last said.
        arrived: Results of the parts that have arrived.
    """

    __slots__ = ("_events", "arrived", "finished_tokens", "name", "parts", "rank", "stream", "watch")

    def __init__(self, events: StreamEvents, stream: Stream, rank: Rank) -> None:
        self._events = events
        self.stream = stream
        self.rank = rank
        self.name = f"{stream.read.order.request_id}/{rank[0]}.{rank[1]}"
        self.watch: StreamWatch | None = None
        self.parts: list[Part] = []
        self.finished_tokens = 0
        self.arrived: list[TransferResult] = []

    def progress(self, tag: int, tokens: int) -> None:
        """Pass a progress word on."""
        self._events.on_progress(self, tag, tokens)

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:  # noqa: ARG002  (the watch asked under one tag)
        """Pass block ids on."""
        self._events.on_table(self, first, ids)

    def broken(self, code: str, message: str) -> None:
        """Pass the end of the watch on."""
        self._events.on_broken(self, code, message)
