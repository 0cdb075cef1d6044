"""Records of streamed reads: a stream, the producer ranks that it follows, and the parts that it asks the table for.

Parts of a streamed read: the places of the peer's table that they need, and the blocks that they move.

The table holds the groups one after the other, each with a place for every block that the prompt's tokens need; a group of
states has one place.

Worked example. 100 tokens; groups with blocks of 16 and of 32 tokens and one of states: 7 + 4 + 1 = 12 places; the groups begin
at 0, 7 and 11. Parts are whole multiples of 32 tokens. The part of tokens 32 to 64 needs places 2, 3 and 8. The last part, from
token 96 on, needs 6, 10 and 11. With a window of 20 tokens in the first group, only its blocks from token 80 on are needed:
places 5 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports import BlockList, PeerPlan, StreamOrder, StreamWatch, TransferResult
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.records import PeerEngine, Read
    from vllm_adapter.worker.transfer.streams import StreamCoordinator

__all__ = ["FollowedRank", "Part", "PartBlocks", "Stream", "StreamShape", "as_one_read"]


class PartBlocks(NamedTuple):
    """Blocks of one group that a part moves: `length` blocks from the prompt's block `first`, listed from `place` on."""

    first: int
    length: int
    place: int


@final
class StreamShape:
    """Groups of an engine and its peer, whose blocks stand for equal numbers of tokens.

    Args:
        groups: (tokens per block, window in tokens) of each group; 0 tokens for states, window 0 for none.
    """

    __slots__ = ("_groups", "entry_tokens")

    def __init__(self, groups: Sequence[tuple[int, int]]) -> None:
        self._groups = tuple(groups)
        self.entry_tokens = lcm(*(span for span, _ in groups if span))
        """Tokens that become complete together; 1 for states alone."""

    def parts(self, tokens: int, first_token: int, stop_token: int, *, is_last: bool) -> list[PartBlocks]:
        """Return the blocks per group that tokens `first_token` to `stop_token - 1` need; states come with the last part."""
        found: list[PartBlocks] = []
        place = 0
        for span, window_tokens in self._groups:
            if not span:
                found.append(PartBlocks(0, int(is_last), place))
                place += 1
                continue
            earliest = max(0, tokens - window_tokens) if window_tokens else 0
            first = max(first_token, earliest) // span
            stop = max(first, -(-stop_token // span))
            found.append(PartBlocks(first, stop - first, place + first))
            place += -(-tokens // span)
        return found

    def peer_blocks(
        self, parts: Sequence[PartBlocks], ids: Mapping[int, int], offered: Sequence[BlockList]
    ) -> list[BlockList]:
        """Return the peer's blocks of a part; `ids` maps places to block ids, `offered` are the offer's lists without ids."""
        return [
            blocks._replace(
                ids=tuple(ids[part.place + number] for number in range(part.length)),
                first_token=part.first * span,
                null=None,
            )
            for (span, _), part, blocks in zip(self._groups, parts, offered, strict=True)
        ]

    def local_blocks(self, parts: Sequence[PartBlocks], whole: Sequence[BlockList]) -> list[BlockList]:
        """Return our blocks of a part, taken from those of the whole read.

        Example: blocks of 16, the read begins at token 32 (`first_token`): block 3 of the prompt is the read's second block.
        """
        found: list[BlockList] = []
        for (span, _), part, blocks in zip(self._groups, parts, whole, strict=True):
            ahead = blocks.first_token // span if span else 0
            first = max(part.first - ahead, 0)
            stop = max(part.first + part.length - ahead, first)
            found.append(blocks._replace(ids=blocks.ids[first:stop], first_token=(first + ahead) * span))
        return found


class Part(NamedTuple):
    """A part of a stream: its blocks by group, and the tokens of the prompt that are read once it has landed."""

    blocks: list[PartBlocks]
    tokens: int

    def is_listed(self, ids: Mapping[int, int]) -> bool:
        """Return whether the table has listed all its blocks; `ids` maps places to block ids."""
        return all(each.place + each.length - 1 in ids for each in self.blocks if each.length)


@final
@dataclass(slots=True, eq=False)
class Stream:
    """A stream of a request: its order, its engine, and the ranks that have not reported.

    Attributes:
        read: The read that it is, with the code and message of the first thing that went wrong.
        order: The scheduler's order.
        engine: The producer's engine.
        plan: Plan against the producer's engine.
        open_ranks: Producer ranks that have not reported, by name.
        whole_ranks: The reads from the ranks whose fence held.
    """

    read: Read
    order: StreamOrder
    engine: PeerEngine
    plan: PeerPlan
    open_ranks: dict[str, FollowedRank] = field(default_factory=dict[str, "FollowedRank"])
    whole_ranks: list[TransferResult] = field(default_factory=list["TransferResult"])

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
@dataclass(slots=True, eq=False)
class FollowedRank:
    """A producer rank of a stream. It passes what its watch reports on to the coordinator.

    Attributes:
        coordinator: The coordinator of the stream.
        stream: The stream.
        rank: (pp, tp) rank of the producer.
        watch: The agent's watch of its words; None before it begins.
        parts: Parts that are not posted yet, the oldest first.
        ids: The producer's block ids of these parts, by place in the table.
        finished_tokens: Tokens of the prompt that it has finished, by its latest progress word.
        arrived: Results of the parts that have arrived.
    """

    coordinator: StreamCoordinator
    stream: Stream
    rank: Rank
    watch: StreamWatch | None = None
    parts: list[Part] = field(default_factory=list[Part])
    ids: dict[int, int] = field(default_factory=dict[int, int])
    finished_tokens: int = 0
    arrived: list[TransferResult] = field(default_factory=list["TransferResult"])

    @property
    def name(self) -> str:
        """Its name among all that are followed."""
        return f"{self.stream.read.order.request_id}/{self.rank[0]}.{self.rank[1]}"

    def progress(self, tag: int, tokens: int) -> None:
        """Pass a progress word on."""
        self.coordinator.progress(self, tag, tokens)

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:  # noqa: ARG002  (the watch asked under one tag)
        """Pass block ids on."""
        self.coordinator.table(self, first, ids)

    def broken(self, code: str, message: str) -> None:
        """Pass the end of the watch on."""
        self.coordinator.broken(self, code, message)
