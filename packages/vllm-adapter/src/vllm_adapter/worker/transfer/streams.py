"""Streamed reads: from a peer's progress words to parts, to one verified end. Transfer thread only.

Each producer rank of a stream is followed separately: its progress, its parts, and, once all of them have arrived, its fence
word. A part is read once the table has listed all of its blocks. A stream is done when every rank's fence held. When one rank
breaks, the others are stopped, and the stream ends as torn once none of its transfers is on the wire any more: its blocks may
then be read into again. "Read complete" is sent only after all ranks are done, since a torn stream is read once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, final

import numpy as np

from vllm_adapter.errors import code_of, message_of
from vllm_adapter.steps import STREAM_STOPPED
from vllm_adapter.worker.transfer.stream_parts import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.observe.answers import Answer, Entry
    from vllm_adapter.ports import (
        Indices,
        StreamOrder,
        StreamPart,
        StreamReaders,
        StreamReport,
        StreamWatch,
        TransferResult,
    )
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.peers import PeerDirectory
    from vllm_adapter.worker.transfer.records import PeerEngine, Read, TransferParts
    from vllm_adapter.worker.transfer.stream_parts import StreamShape

__all__ = ["FollowedRank", "StreamCoordinator"]

_NO_INDICES: Final = np.empty(0, dtype=np.int32)
_BROKEN: Final[Mapping[str, tuple[str, str]]] = {
    "changed": ("stream-restarted", "the prefill engine preempted the prompt, started it again or gave it up"),
    "stall": ("stream-stalled", "the prefill engine finished no further block within read_timeout_s"),
    "slow": ("stream-slow", "the prefill engine computes the prompt too slowly for blocks to be reserved for it"),
    "lost": ("stream-void", "the fence word has changed since, or could not be read"),
}
"""Event that broke a stream -> code and reason. Lost parts have the code of their transfer."""
_BROKE_OFF: Final = ("stream-broken", "it broke off")


@final
@dataclass(slots=True, eq=False)
class FollowedRank:
    """A producer rank of a stream: it receives what the watch of its words finds, and posts its parts.

    Attributes:
        coordinator: The coordinator of the stream.
        read: The stream.
        engine: The producer's engine.
        rank: (pp, tp) rank of the producer.
        name: Its name among all that are followed.
        watch: The agent's watch of its words; None before it begins.
        parts: Parts that are not posted yet, the oldest first.
        ids: The producer's block ids of these parts, by place in the table.
        finished_tokens: Tokens of the prompt that it has finished, by its latest progress word.
        arrived: Results of the parts that have arrived.
        fence_read: Name of the transfer that reads its fence word; empty before.
        fence: The generation that the word showed; None before, or if it could not be read or differs.
    """

    coordinator: StreamCoordinator
    read: Read
    engine: PeerEngine
    rank: Rank
    name: str
    watch: StreamWatch | None = None
    parts: list[Part] = field(default_factory=list[Part])
    ids: dict[int, int] = field(default_factory=dict[int, int])
    finished_tokens: int = 0
    arrived: list[TransferResult] = field(default_factory=list["TransferResult"])
    fence_read: str = ""
    fence: int | None = None

    def progress(self, tag: int, tokens: int) -> None:
        """Process its progress."""
        now_s = self.coordinator.parts.now_s()
        part = self.coordinator.readers.observed(self.name, tag, tokens, now_s)
        if part is not None:
            self.finished_tokens = tokens
            if part.is_last and self.read.times.whole_s is None:
                self.read.times.whole_s, self.read.times.early_bytes = now_s, self.read.times.bytes_moved
            try:
                self._request(tag, part)
            except Exception as error:  # noqa: BLE001  (what a peer's words provoke ends its stream, never this thread)
                self.coordinator.give_up(self.read, code_of(error), message_of(error))
        self.coordinator.settle()

    def _request(self, tag: int, part: StreamPart) -> None:
        """Request the table's entries of a part, or post it if it needs none."""
        shape, tokens = self.coordinator.shape, self.read.order.tokens
        span = shape.entry_tokens
        stop = min(part.stop * span, tokens)
        asked = Part(shape.parts(tokens, part.first * span, stop, is_last=part.is_last), stop)
        self.parts.append(asked)
        if self.watch is None:
            return
        for blocks in asked.blocks:
            if blocks.length:
                self.watch.read_table(tag, blocks.place, blocks.place + blocks.length)
        if asked.is_listed({}):
            self._post(asked)

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:  # noqa: ARG002  (the watch asked under one tag)
        """Process entries of its table; read the part whose entries are now complete."""
        self.ids.update(enumerate(ids, first))
        part = next((each for each in self.parts if each.is_listed(self.ids)), None)
        if part is not None:
            self._post(part)
            self.coordinator.settle()

    def broken(self, code: str, message: str) -> None:
        """Process the end of its watch."""
        self.coordinator.give_up(self.read, code, message)
        if self.engine.phase == "ready":
            self.coordinator.peers.drop(self.engine, f"a streamed read failed: {message} ({code})")
        self.coordinator.settle()

    def _post(self, part: Part) -> None:
        coordinator, order, now_s = self.coordinator, self.read.order, self.coordinator.parts.now_s()
        self.parts.remove(part)
        try:
            local = coordinator.shape.local_blocks(part.blocks, order.local_blocks)
            peer = coordinator.shape.peer_blocks(part.blocks, self.ids, order.ticket.peer_blocks)
            indices = self.engine.plan.indices(self.rank, local, peer, tokens=part.tokens)
            if len(indices[0]):
                self.read.times.posted_s = self.read.times.posted_s or now_s
                coordinator.post(self, indices, None)
                return
        except Exception as error:  # noqa: BLE001  (block ids come from the peer: one stream can only end itself)
            coordinator.give_up(self.read, code_of(error), message_of(error))
        coordinator.readers.landed(self.name, is_good=not self.read.code, now_s=now_s)


@final
@dataclass(slots=True, eq=False)
class StreamCoordinator:
    """Follows streams, posts their parts, and ends each of them once.

    Attributes:
        parts: The registration's threads, codec, recorder and clock.
        readers: The state machine that decides what to read next.
        shape: Groups of both engines.
        peers: Directory of peer engines, which is notified of each stream's end and of failing engines.
        transfers: Read of each transfer that has not ended, plain or streamed; this class adds its own.
        end: Called with every stream that is over and quiet; the blocks of a failed one may be read into again.
    """

    parts: TransferParts
    readers: StreamReaders
    shape: StreamShape
    peers: PeerDirectory
    transfers: dict[str, Read]
    end: Callable[[Read], None]
    _ranks: dict[str, FollowedRank] = field(default_factory=dict[str, FollowedRank], init=False)
    _streams: dict[str, Read] = field(default_factory=dict[str, "Read"], init=False)
    _count: int = field(default=0, init=False)

    # ---------------------------------------------------------------------------------------------- orders

    def begin(self, read: Read, order: StreamOrder, engine: PeerEngine) -> bool:
        """Follow a stream of a ready engine; return False for a second one of a request: the end of the first one stands."""
        fence, request_id = order.read.ticket.fence, order.read.request_id
        if request_id in self._streams:
            self.parts.recorder.warning(
                "stream-twice", f"request {request_id} is streamed already; its second order is left"
            )
            return False
        engine.reads.add(read)
        read.engine = engine
        self._streams[request_id] = read
        if fence is None or not engine.can_stream or order.start % self.shape.entry_tokens:
            read.fail("not-streamed", "its pages cannot be read in parts")
        else:
            try:
                self._follow(read, order, engine, fence)
            except Exception as error:  # noqa: BLE001  (it has begun, so it ends as any other)
                self.give_up(read, code_of(error), message_of(error))
        if not read.open_ranks:
            self._report(read, engine)
        self.settle()
        return True

    def _follow(self, read: Read, order: StreamOrder, engine: PeerEngine, fence: tuple[int, int]) -> None:
        entry_tokens, (slot, generation), tokens = self.shape.entry_tokens, fence, order.read.tokens
        for rank in engine.plan.producer_ranks:
            name = f"{order.read.request_id}/{rank[0]}.{rank[1]}"
            self.readers.watch(
                name,
                generation=generation,
                tag=order.tag,
                prompt_tokens=tokens,
                entry_tokens=entry_tokens,
                first_entry=order.start // entry_tokens,
                now_s=self.parts.now_s(),
            )
            following = FollowedRank(self, read, engine, rank, name)
            self._ranks[name], read.open_ranks[rank] = following, name
            watch_stream = self.parts.thread.agent.watch_stream
            following.watch = watch_stream(engine.keys[rank], slot, following, tokens=tokens)

    def _open(self, read: Read) -> list[FollowedRank]:
        return [self._ranks[name] for name in read.open_ranks.values()]

    def stop(self, request_id: str, reads: Sequence[Read]) -> None:
        """Stop the streams among a request's open reads; each ends, as failed, once all its transfers are quiet."""
        for read in reads:
            # The read keeps waiting as one that has ended, to notify its producer that the blocks are not needed.
            if read.stream is not None and read.engine is None:
                read.fail(STREAM_STOPPED, "the stream was given up before it began")
                self.end(read)
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.is_cancelled = True
        self._break(stream, STREAM_STOPPED, "the stream was given up")
        self.settle()

    def break_all(self, code: str, message: str) -> None:
        """Stop all streams that have begun; each ends once it is quiet."""
        for read in list(self._streams.values()):
            self._break(read, code, message)
        self.settle()

    def _break(self, read: Read, code: str, message: str) -> None:
        self.give_up(read, code, message)
        self.parts.cancel(read)

    def describe(self, most: int) -> Answer:
        """Return an operator's view: the number of streams, and the oldest `most` of them."""
        return {
            "streams": len(self._streams),
            "oldest_streams": [self._entry(read) for read in islice(self._streams.values(), most)],
        }

    def _entry(self, read: Read) -> Entry:
        """Describe a stream; the rank that is furthest behind determines its progress."""
        behind = min(self._open(read), key=lambda rank: rank.finished_tokens, default=None)
        return {
            **read.describe(self.parts.now_s()),
            "stage": "over" if behind is None else self.readers.state_of(behind.name),
            "tokens_finished": read.order.tokens if behind is None else behind.finished_tokens,
            "bytes": read.times.bytes_moved,
            "ranks_left": len(read.open_ranks),
        }

    def maintain(self) -> None:
        """Give up streams without progress, and those that keep a draining engine from being set up again for other reads."""
        self.readers.tick(self.parts.now_s())
        for following in list(self._ranks.values()):
            engine, read = following.engine, following.read
            if engine.phase != "draining" or read.code:
                continue
            if any(not (each.is_ended or each.order.is_notify_only) for each in engine.waiting):
                self.give_up(read, "stream-broken", "its engine must be connected again, and other reads wait for that")
        self.settle()

    # ---------------------------------------------------------------------------------------------- transfers

    def post(self, following: FollowedRank, indices: tuple[Indices, Indices], fence: tuple[int, int] | None) -> str:
        """Post a transfer of a stream; return its name."""
        self._count += 1
        transfer_id = f"{following.name}#{self._count}"
        key, deadline_s = following.engine.keys[following.rank], self.parts.settings.read_timeout_s
        self.parts.thread.agent.post_read(
            transfer_id, key, *indices, notification=b"", deadline_s=deadline_s, fence=fence
        )
        self.transfers[transfer_id] = following.read
        following.read.transfers[transfer_id] = following.rank
        return transfer_id

    def arrived(self, read: Read, result: TransferResult) -> None:
        """Process a part that has arrived, or a fence word that holds."""
        following = self._ranks.get(read.open_ranks.get(read.transfers[result.transfer_id], ""))
        if following is None:
            return
        now_s, times = self.parts.now_s(), read.times
        following.engine.last_answer_s = now_s
        times.bytes_moved += result.bytes_moved
        if result.transfer_id != following.fence_read:
            following.arrived.append(result)
            times.data_s, times.fence_s = now_s, 0.0
            return
        ticket = read.order.ticket
        following.fence = ticket.fence[1] if ticket.fence is not None else None
        if times.data_s is not None:
            times.fence_s = now_s - times.data_s

    def lost(self, read: Read, result: TransferResult) -> None:
        """Process a transfer that failed: without one of its parts a stream is torn."""
        following = self._ranks.get(read.open_ranks.get(read.transfers[result.transfer_id], ""))
        if following is not None and result.transfer_id != following.fence_read:
            self.give_up(read, result.code, result.message)

    def landed(self, read: Read, rank: Rank, transfer_id: str) -> None:
        """Note that nothing writes into the pages of a transfer any more, well or badly."""
        following = self._ranks.get(read.open_ranks.get(rank, ""))
        if following is None:
            return
        if transfer_id == following.fence_read:
            self.readers.fence_found(following.name, following.fence)
        else:
            self.readers.landed(following.name, is_good=not read.code, now_s=self.parts.now_s())
        self.settle()

    # ---------------------------------------------------------------------------------------------- ends

    def give_up(self, read: Read, code: str, message: str) -> None:
        """Stop all ranks of a stream; each reports once it is quiet."""
        read.fail(code, message)
        for following in self._open(read):
            if following.watch is not None:
                following.watch.end()
            self.readers.cancel(following.name)
            # These parts were never posted: the table never listed their blocks.
            unposted, following.parts = following.parts, []
            for _ in unposted:
                self.readers.landed(following.name, is_good=False, now_s=self.parts.now_s())

    def settle(self) -> None:
        """Carry out the state machine's requests until it has none left."""
        for following in list(self._ranks.values()):
            # The blocks of a broken stream's parts are listed too late or never.
            if following.parts and self.readers.state_of(following.name) == "breaking":
                self._blame(following, self.readers.cause_of(following.name))
        while True:
            fences, reports = self.readers.take_fences(), self.readers.take_reports()
            for name in fences:
                self._read_fence(self._ranks[name])
            for report in reports:
                self._rank_ended(self._ranks.pop(report.stream_id), report)
            if not fences and not reports:
                return

    def _blame(self, following: FollowedRank, cause: str) -> None:
        """Give up a stream because of one rank."""
        code, reason = _BROKEN.get(cause, _BROKE_OFF)
        self.give_up(following.read, code, f"rank {following.rank}: {reason}")

    def _read_fence(self, following: FollowedRank) -> None:
        if following.watch is not None:
            following.watch.end()
        try:
            no_pages = _NO_INDICES, _NO_INDICES
            following.fence_read = self.post(following, no_pages, following.read.order.ticket.fence)
        except Exception as error:  # noqa: BLE001  (a word that cannot be asked for ends its stream)
            self.parts.recorder.info("stream-fence", f"{following.name}: its fence could not be read: {error}")
            self.readers.fence_found(following.name, None)

    def _rank_ended(self, following: FollowedRank, report: StreamReport) -> None:
        read = following.read
        del read.open_ranks[following.rank]
        if following.watch is not None:
            following.watch.end()
        if not report.is_done:
            self._blame(following, report.cause)
        elif following.arrived:
            read.whole_ranks.append(_as_one_read(following.arrived))
        if not read.open_ranks:
            self._report(read, following.engine)

    def _report(self, read: Read, engine: PeerEngine) -> None:
        """End a stream whose pages are quiet."""
        del self._streams[read.order.request_id]
        for arrived in () if read.code else read.whole_ranks:
            self.parts.recorder.read_done(arrived)
        if not read.code or (read.is_cancelled and engine.phase == "ready"):
            self.peers.release(read, engine)
        self.end(read)
        self.peers.read_ended(read, engine)


def _as_one_read(parts: Sequence[TransferResult]) -> TransferResult:
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
