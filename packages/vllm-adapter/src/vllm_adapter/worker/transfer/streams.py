"""Streamed reads: from a peer's progress words to parts, to one verified end. Transfer thread only.

Each producer rank of a stream is followed separately: its progress, its parts, and, once all of them have arrived, its fence
word. A part is read once the table has listed all of its blocks. A stream is done when every rank's fence held. When one rank
breaks, the others are stopped, and the stream is reported as torn once none of its transfers is on the wire any more: its blocks
may then be read into again. "Read complete" is sent only after all ranks are done, since a torn stream is read once more.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, final

import numpy as np

from vllm_adapter.errors import AdapterError, code_of
from vllm_adapter.steps import STREAM_STOPPED, ReadTimes
from vllm_adapter.worker.transfer.records import Read, is_peer_at_fault, note_quarantine, refusal
from vllm_adapter.worker.transfer.stream_records import FollowedRank, Part, Stream, as_one_read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_adapter.observe.answers import Answer, Entry
    from vllm_adapter.ports import (
        Indices,
        StreamOrder,
        StreamPart,
        StreamPlan,
        StreamReaders,
        StreamReport,
        TransferResult,
    )
    from vllm_adapter.steps import Rank, ReadEnd
    from vllm_adapter.worker.transfer.peers import PeerDirectory
    from vllm_adapter.worker.transfer.records import PeerEngine, TransferParts
    from vllm_adapter.worker.transfer.stream_records import StreamShape

__all__ = ["StreamCoordinator"]

_NO_INDICES: Final = np.empty(0, dtype=np.int32)
_BROKEN: Final[Mapping[str, tuple[str, str]]] = {
    "changed": ("stream-restarted", "the prefill engine preempted the prompt, started it again or gave it up"),
    "stall": ("stream-stalled", "the prefill engine finished no further block within read_timeout_s"),
    "slow": ("stream-slow", "the prefill engine computes the prompt too slowly for blocks to be reserved for it"),
    "lost": ("stream-void", "the fence word has changed since, or could not be read"),
}
"""Event that broke a stream -> code and reason. Lost parts have the code of their transfer."""
_BROKE_OFF: Final = ("stream-broken", "it broke off")


def _why(cause: str, rank: Rank) -> tuple[str, str]:
    """Return the code and reason of a broken stream."""
    code, reason = _BROKEN.get(cause, _BROKE_OFF)
    return code, f"rank {rank}: {reason}"


def _wants_data(read: Read) -> bool:
    return not (read.is_ended or read.order.is_notify_only)


@final
class StreamCoordinator:
    """Follows streams, orders their parts, and reports one end per stream.

    Args:
        parts: The registration's threads, codec, recorder and clock.
        readers: The state machine that decides what to read next.
        shape: Groups of both engines.
        peers: Directory of peer engines, which is notified of each stream's end and of failing engines.
        ended: Called once with the end of every stream, when it is quiet; the blocks of a failed stream may be read into again.
    """

    def __init__(
        self,
        parts: TransferParts,
        readers: StreamReaders,
        shape: StreamShape,
        peers: PeerDirectory,
        ended: Callable[[ReadEnd], None],
    ) -> None:
        self._parts = parts
        self._readers = readers
        self._shape = shape
        self._peers = peers
        self._ended = ended
        self._ranks: dict[str, FollowedRank] = {}
        self._streams: dict[str, Stream] = {}
        self._transfers: dict[str, tuple[FollowedRank, bool]] = {}
        """(rank, whether it reads the fence word) of each transfer that has not ended."""
        self._count = 0

    # ---------------------------------------------------------------------------------------------- orders

    def apply(self, plan: StreamPlan) -> None:
        """Follow and stop streams as a step orders; each order fails alone."""
        for order in plan.watches:
            read = Read(order.read, ReadTimes(self._parts.now_s()), stream=order)
            try:
                self._peers.submit(read)  # followed at once or when its engine is ready
            except Exception as error:  # noqa: BLE001  (one order can only fail itself)
                self._parts.recorder.trouble("order of a stream", error)
                self.not_met(read, code_of(error), str(error))
        for request_id in plan.stops:
            with self._parts.recorder.guarded("end of a stream"):
                self.stop(request_id)

    def ready(self, read: Read, order: StreamOrder, engine: PeerEngine) -> None:
        """Begin a stream whose engine is ready; if it cannot begin, end it."""
        read.stream = None
        try:
            reason = refusal(order.read, engine)
            if reason is None:
                self.begin(read, order, engine)
                return
        except Exception as error:  # noqa: BLE001  (one order can only fail itself)
            self._parts.recorder.trouble("start of a stream", error)
            reason = code_of(error), str(error)
        self._end(read, *reason)

    def not_met(self, read: Read, code: str, message: str) -> None:
        """End a stream whose engine cannot be read from."""
        if read.stream is not None:
            read.was_met = False
            self._end(read, code, message)

    def _end(self, read: Read, code: str = "", message: str = "") -> None:
        read.stream, read.is_ended = None, True
        if code:
            read.fail(code, message)
        self._ended(read.ended(self._parts.now_s()))

    def begin(self, read: Read, order: StreamOrder, engine: PeerEngine) -> None:
        """Follow a stream of an engine that is ready; ignore a second stream of a request, since the end of the first one stands.

        Raises:
            AdapterError: `no-plan`: nothing of this engine can be read. The stream has then not begun.
        """
        plan, fence, request_id = engine.plan, read.order.ticket.fence, read.order.request_id
        if request_id in self._streams:
            self._parts.recorder.warn(
                "stream-twice", f"request {request_id} is streamed already; its second order is left"
            )
            return
        if plan is None:
            raise AdapterError(f"engine {engine.engine_id} has pages for no rank of this one", code="no-plan")
        engine.reads_in_flight += 1
        stream = self._streams[request_id] = Stream(read, order, engine, plan)
        if fence is None or not engine.can_stream or order.start % self._shape.entry_tokens:
            read.fail("not-streamed", "its pages cannot be read in parts")
        else:
            try:
                self._follow(stream, fence)
            except Exception as error:  # noqa: BLE001  (it has begun, so it ends as any other)
                self._give_up(stream, code_of(error), str(error))
        if not stream.open_ranks:
            self._report(stream)
        self._settle()

    def _follow(self, stream: Stream, fence: tuple[int, int]) -> None:
        order, entry_tokens, (slot, generation) = stream.order, self._shape.entry_tokens, fence
        for rank in stream.plan.producer_ranks:
            following = FollowedRank(self, stream, rank)
            self._readers.watch(
                following.name,
                generation=generation,
                tag=order.tag,
                prompt_tokens=order.read.tokens,
                entry_tokens=entry_tokens,
                first_entry=order.start // entry_tokens,
                now_s=self._parts.now_s(),
            )
            stream.open_ranks[following.name] = self._ranks[following.name] = following
        for following in list(stream.open_ranks.values()):
            key = stream.engine.key(following.rank)
            following.watch = self._parts.thread.agent.watch_stream(key, slot, following, tokens=order.read.tokens)

    def stop(self, request_id: str) -> None:
        """Stop a stream; its end is reported, as failed, once all its transfers are quiet."""
        for read in self._peers.waiting(request_id):
            # The read keeps waiting as one that has ended, to notify its producer that the blocks are not needed.
            if read.stream is not None:
                self._end(read, STREAM_STOPPED, "the stream was given up before it began")
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.read.is_cancelled = True
        self._break(stream, STREAM_STOPPED, "the stream was given up")
        self._settle()

    def break_all(self, code: str, message: str) -> None:
        """Stop all streams that have begun; each is reported once it is quiet."""
        for stream in list(self._streams.values()):
            self._break(stream, code, message)
        self._settle()

    def _break(self, stream: Stream, code: str, message: str) -> None:
        self._give_up(stream, code, message)
        for transfer_id, (following, _) in list(self._transfers.items()):
            if following.stream is stream:
                with self._parts.recorder.guarded("cancellation"):
                    self._parts.thread.agent.cancel(transfer_id)

    def reads(self) -> dict[str, Read]:
        """Return the read that each transfer of a stream belongs to, by transfer id."""
        return {transfer_id: following.stream.read for transfer_id, (following, _) in self._transfers.items()}

    def describe(self, most: int) -> Answer:
        """Return an operator's view: the number of streams, and the oldest `most` of them."""
        return {
            "streams": len(self._streams),
            "oldest_streams": [self._entry(stream) for stream in islice(self._streams.values(), most)],
        }

    def _entry(self, stream: Stream) -> Entry:
        """Describe a stream; the rank that is furthest behind determines its progress."""
        order, times = stream.read.order, stream.read.times
        behind = min(stream.open_ranks.values(), key=lambda rank: rank.finished_tokens, default=None)
        return {
            "request_id": order.request_id,
            "peer_request_id": order.ticket.peer_request_id,
            "peer_engine_id": stream.engine.engine_id,
            "stage": "over" if behind is None else self._readers.state_of(behind.name),
            "tokens": order.tokens,
            "tokens_finished": order.tokens if behind is None else behind.finished_tokens,
            "bytes": times.bytes_moved,
            "ranks_left": len(stream.open_ranks),
            "age_s": self._parts.now_s() - times.ordered_s,
        }

    def look_after(self) -> None:
        """Give up streams without progress, and those that keep a draining engine from being set up again for other reads."""
        self._readers.tick(self._parts.now_s())
        for stream in list(self._streams.values()):
            engine = stream.engine
            if engine.phase == "draining" and not stream.read.code and any(map(_wants_data, engine.waiting)):
                self._give_up(stream, "stream-broken", "its engine is to be met anew, and other reads wait for that")
        self._settle()

    # ---------------------------------------------------------------------------------------------- what watches tell

    def progress(self, following: FollowedRank, tag: int, tokens: int) -> None:
        """Process a rank's progress."""
        part = self._readers.observed(following.name, tag, tokens, self._parts.now_s())
        if part is not None:
            following.finished_tokens = tokens
            try:
                self._order(following, part)
            except Exception as error:  # noqa: BLE001  (what a peer's words provoke ends its stream, never this thread)
                self._give_up(following.stream, code_of(error), str(error))
        self._settle()

    def _order(self, following: FollowedRank, part: StreamPart) -> None:
        tokens, span = following.stream.read.order.tokens, self._shape.entry_tokens
        stop = min(part.stop * span, tokens)
        if part.is_last:
            following.stream.note_whole(self._parts.now_s())
        asked = Part(self._shape.parts(tokens, part.first * span, stop, is_last=part.is_last), stop)
        following.parts.append(asked)
        if following.watch is None:
            return
        for blocks in asked.blocks:
            if blocks.length:
                tag = following.stream.order.tag
                following.watch.read_table(tag, blocks.place, blocks.place + blocks.length)
        if asked.is_listed({}):  # it needs no blocks
            self._post(following, asked)

    def table(self, following: FollowedRank, first: int, ids: tuple[int, ...]) -> None:
        """Process entries of a rank's table; read the part whose entries are now complete."""
        following.ids.update(enumerate(ids, first))
        part = next((each for each in following.parts if each.is_listed(following.ids)), None)
        if part is not None:
            self._post(following, part)
            self._settle()

    def broken(self, following: FollowedRank, code: str, message: str) -> None:
        """Process the end of a rank's watch."""
        self._give_up(following.stream, code, message)
        self._drop(following.stream, code, message)
        self._settle()

    # ---------------------------------------------------------------------------------------------- transfers

    def _post(self, following: FollowedRank, part: Part) -> None:
        following.parts.remove(part)
        try:
            read = following.stream.read
            local = self._shape.local_blocks(part.blocks, read.order.local_blocks)
            peer = self._shape.peer_blocks(part.blocks, following.ids, read.order.ticket.peer_blocks)
            indices = following.stream.plan.indices(following.rank, local, peer, tokens=part.tokens)
            if len(indices[0]):
                read.times.posted_s = read.times.posted_s or self._parts.now_s()
                self._start(following, indices, None)
                return
            is_good = True
        except Exception as error:  # noqa: BLE001  (block ids come from the peer: one stream can only end itself)
            is_good = False
            self._give_up(following.stream, code_of(error), str(error))
        self._readers.landed(following.name, is_good=is_good, now_s=self._parts.now_s())

    def _start(self, following: FollowedRank, indices: tuple[Indices, Indices], fence: tuple[int, int] | None) -> None:
        self._count += 1
        transfer_id = f"{following.name}#{self._count}"
        key = following.stream.engine.key(following.rank)
        self._parts.thread.agent.post_read(
            transfer_id, key, *indices, notification=b"", deadline_s=self._parts.settings.read_timeout_s, fence=fence
        )
        self._transfers[transfer_id] = (following, fence is not None)

    def transfer_ended(self, result: TransferResult) -> bool:
        """Process the end of a part or of a fence word's read; return False for a transfer that is not a stream's."""
        found = self._transfers.get(result.transfer_id)
        if found is None:
            return False
        following, is_fence = found
        is_good = result.outcome == "done"
        if is_good:
            now_s = self._parts.now_s()
            following.stream.note_arrival(result, now_s, is_fence=is_fence)
            following.stream.engine.last_answer_s = now_s
            if not is_fence:
                following.arrived.append(result)
        else:
            self._note_failure(following.stream, result, is_fence=is_fence)
        if result.is_memory_quiet:
            self._landed(result.transfer_id, is_good=is_good)
        return True

    def _note_failure(self, stream: Stream, result: TransferResult, *, is_fence: bool) -> None:
        if not is_fence:
            self._give_up(stream, result.code, result.message)
        if is_peer_at_fault(result):
            self._drop(stream, result.code, result.message)
        if not result.is_memory_quiet:
            note_quarantine(self._parts, stream.read, result)

    def _drop(self, stream: Stream, code: str, message: str) -> None:
        if stream.engine.phase == "ready":
            self._peers.drop(stream.engine, f"a streamed read failed ({code}: {message})")

    def memory_quiet(self, transfer_id: str) -> bool:
        """Note that nothing can write into an ended part's pages any more; return False for a transfer that is not a stream's."""
        found = self._transfers.get(transfer_id)
        if found is None:
            return False
        found[0].stream.read.unquiet.discard(transfer_id)
        self._landed(transfer_id, is_good=False)
        return True

    def _landed(self, transfer_id: str, *, is_good: bool) -> None:
        following, is_fence = self._transfers.pop(transfer_id)
        if is_fence and self._ranks.get(following.name) is not following:
            return  # a fence read of an earlier attempt: it says nothing about the data of the next one
        if is_fence:
            fence = following.stream.read.order.ticket.fence
            self._readers.fence_found(following.name, fence[1] if is_good and fence is not None else None)
        else:
            self._readers.landed(following.name, is_good=is_good, now_s=self._parts.now_s())
        self._settle()

    # ---------------------------------------------------------------------------------------------- ends

    def _give_up(self, stream: Stream, code: str, message: str) -> None:
        """Stop all ranks of a stream; each reports once it is quiet."""
        stream.read.fail(code, message)
        for following in list(stream.open_ranks.values()):
            if following.watch is not None:
                following.watch.end()
            self._readers.cancel(following.name)
            # These parts were never posted: the table never listed their blocks.
            unposted, following.parts = following.parts, []
            for _ in unposted:
                self._readers.landed(following.name, is_good=False, now_s=self._parts.now_s())

    def _settle(self) -> None:
        """Carry out the state machine's requests until it has none left."""
        for following in list(self._ranks.values()):
            # The blocks of a broken stream's parts are listed too late or never.
            if following.parts and self._readers.state_of(following.name) == "breaking":
                self._give_up(following.stream, *_why(self._readers.cause_of(following.name), following.rank))
        while True:
            fences, reports = self._readers.take_fences(), self._readers.take_reports()
            for name in fences:
                self._read_fence(self._ranks[name])
            for report in reports:
                self._rank_ended(self._ranks.pop(report.stream_id), report)
            if not fences and not reports:
                return

    def _read_fence(self, following: FollowedRank) -> None:
        if following.watch is not None:
            following.watch.end()
        try:
            self._start(following, (_NO_INDICES, _NO_INDICES), following.stream.read.order.ticket.fence)
        except Exception as error:  # noqa: BLE001  (a word that cannot be asked for ends its stream)
            self._parts.recorder.info("stream-fence", f"{following.name}: its fence could not be read: {error}")
            self._readers.fence_found(following.name, None)

    def _rank_ended(self, following: FollowedRank, report: StreamReport) -> None:
        stream = following.stream
        del stream.open_ranks[following.name]
        if following.watch is not None:
            following.watch.end()
        if not report.is_done:
            self._give_up(stream, *_why(report.cause, following.rank))
        elif following.arrived:
            stream.whole_ranks.append(as_one_read(following.arrived))
        if not stream.open_ranks:
            self._report(stream)

    def _report(self, stream: Stream) -> None:
        """Report the end of a stream whose pages are quiet."""
        read, engine = stream.read, stream.engine
        del self._streams[read.order.request_id]
        for arrived in () if read.code else stream.whole_ranks:
            self._parts.recorder.read_done(arrived)
        if not read.code or (read.is_cancelled and engine.phase == "ready"):
            self._peers.release(read, engine, engine.ranks)
        self._end(read)
        self._peers.read_ended(engine)
