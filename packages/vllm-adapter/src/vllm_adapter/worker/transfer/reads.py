"""Consumer side of a worker: turns read orders into transfers, and into one end per request. Transfer thread only.

A request's read is one transfer per producer rank. It ends once: when the last transfer has ended and no peer can write into
its pages any more. After the first failure nothing more is posted for it. `peers.py` manages the peers.

A read that failed because its peer was lost is made once more: the peer's engine is set up again, and the ranks whose part has
not arrived are read again within the same deadline, while the lease holds. A rank whose part has arrived was notified already,
so it is neither read nor notified again. Example: of ranks 0.0 and 0.1, 0.0 is done and 0.1 is lost: the second attempt reads
0.1 alone.

An order can only fail itself. Every entry point catches any exception that an order or a peer provokes, and the affected read
ends with a code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from vllm_adapter.errors import code_of
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.worker.pages import FinishedRead, conversion_steps, page_ranges
from vllm_adapter.worker.transfer.describing import StallWatch, describe_peers, describe_reads, note_quarantine
from vllm_adapter.worker.transfer.messages import ProducerMessages
from vllm_adapter.worker.transfer.peers import PEER_DRAINING, PeerDirectory
from vllm_adapter.worker.transfer.records import Read, is_peer_at_fault, may_be_mended
from vllm_adapter.worker.transfer.streams import StreamCoordinator
from vllm_adapter.worker.transfer.tickets import may_retry, refusal, refused_retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import (
        HeartbeatOrder,
        Indices,
        ReadOrder,
        StepPlan,
        StreamReaders,
        TransferResult,
    )
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.parts import PeerPlanner, ReadLimits, TransferParts
    from vllm_adapter.worker.transfer.records import PeerEngine
    from vllm_adapter.worker.transfer.stream_records import StreamShape

__all__ = ["ReadCoordinator", "StreamReading"]


class StreamReading(NamedTuple):
    """Parameters of stream reading: the state machine, the stall limit in seconds, the groups, and the callback for ends."""

    make_readers: Callable[[float], StreamReaders]
    shape: StreamShape
    ended: Callable[[FinishedRead], None]


@final
class ReadCoordinator:
    """Turns read orders into transfers and their results into one end per request.

    Args:
        parts: The registration's threads, codec, recorder and clock.
        planner: Plans against peers.
        limits: Durations and counts.
        ended: Called once with the end of every read; cheap and thread-safe.
        streaming: Parameters of stream reading; None where nothing is streamed.
    """

    def __init__(
        self,
        parts: TransferParts,
        planner: PeerPlanner,
        limits: ReadLimits,
        ended: Callable[[FinishedRead], None],
        streaming: StreamReading | None = None,
    ) -> None:
        self._parts = parts
        self._limits = limits
        self._ended = ended
        self._ranges = page_ranges(planner.document)
        self._transfers: dict[str, Read] = {}
        self._peers = PeerDirectory(parts, planner, limits.peers, ready=self._ready, failed=self._not_met)
        self._messages = ProducerMessages(parts, self._peers)
        self._stalls = StallWatch(parts, limits.read_timeout_s)
        self._streams: StreamCoordinator | None = None
        if streaming is not None:
            self._streams = StreamCoordinator(
                parts,
                streaming.make_readers(limits.read_timeout_s),
                streaming.shape,
                self._peers,
                self._messages,
                transfer_timeout_s=limits.read_timeout_s,
                ended=streaming.ended,
            )

    def look_after(self) -> None:
        """End waits that are too long, drop dead and unused engines, and report reads without progress."""
        with self._parts.recorder.guarded("looking after peers"):
            self._peers.look_after()
        with self._parts.recorder.guarded("looking after stalled reads"):
            streamed = self._streams.reads() if self._streams is not None else {}
            self._stalls.check({**self._transfers, **streamed})
        if self._streams is not None:
            with self._parts.recorder.guarded("looking after streams"):
                self._streams.look_after()

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of engines and transfers, for diagnosis."""
        streamed = self._streams.transfer_count if self._streams is not None else 0
        return {"engines": len(self._peers), "transfers": len(self._transfers) + streamed}

    def describe(self, most: int) -> Answer:
        """Return an operator's view: counts, and at most `most` reads and peers each."""
        now_s, engines = self._parts.now_s(), self._peers.engines()
        reads = describe_reads(dict.fromkeys(self._transfers.values()), engines, now_s, most)
        streams: Answer = self._streams.describe(most) if self._streams is not None else {}
        return {**reads, **streams, "peers": len(engines), "peer_engines": describe_peers(engines, now_s, most)}

    # ---------------------------------------------------------------------------------------------- orders

    def apply(self, plan: StepPlan) -> None:
        """Carry out the consumer's part of a step's orders; an order that raises fails alone."""
        for order in plan.reads:
            self.read(order)
        if self._streams is not None:
            self._streams.apply(plan.streams)
        for request_id in (*plan.cancels, *plan.voids):
            with self._parts.recorder.guarded("cancellation of a read"):
                self.cancel(request_id, is_passed_on=request_id in plan.passes)
        for heartbeat in plan.heartbeats:
            with self._parts.recorder.guarded("heartbeat"):
                self.heartbeat(heartbeat)

    def read(self, order: ReadOrder) -> None:
        """Start a request's read, or queue it until its engine is ready."""
        read = Read(order, ReadTimes(self._parts.now_s()))
        try:
            self._peers.submit(read)
        except Exception as error:  # noqa: BLE001  (one order can only fail itself)
            self._abandon(read, "read order", error)

    def cancel(self, request_id: str, *, is_passed_on: bool = False) -> None:
        """Give up a read that is no longer needed; it still ends once, when its pages are quiet.

        Args:
            request_id: The request.
            is_passed_on: Whether another request reads the same hand-over: the producer is not notified of this end.
        """
        for transfer_id, read in list(self._transfers.items()):
            if read.order.request_id == request_id:
                read.is_passed_on, read.is_cancelled, read.may_retry = is_passed_on, True, False
                self._parts.thread.agent.cancel(transfer_id)
        for read in self._peers.waiting(request_id):
            # The read keeps waiting, but only to tell its producer that the blocks are not needed.
            read.is_passed_on = is_passed_on
            read.fail("cancelled", "the request was aborted before its read began")
            self._end(read)

    def end_all(self, code: str, message: str) -> None:
        """Fail every read, including those whose data has arrived unverified; each ends once its pages are quiet."""
        if self._streams is not None:
            self._streams.break_all(code, message)
        for read in self._peers.take_waiting():
            self._not_met(read, code, message)
        for transfer_id, read in list(self._transfers.items()):
            self._note_failure(read, code, message)
            with self._parts.recorder.guarded("cancellation"):
                self._parts.thread.agent.cancel(transfer_id)

    def heartbeat(self, order: HeartbeatOrder) -> None:
        """Renew leases at a peer engine; the set-up of an unknown engine is started first."""
        engine, renewed = self._messages.renew(order)
        renewed_until_s = self._parts.now_s() + self._limits.renewed_s
        for read in self._transfers.values():
            if read.engine is engine and read.order.ticket.peer_request_id in renewed:
                read.trusted_until_s = max(read.trusted_until_s, renewed_until_s)

    # ---------------------------------------------------------------------------------------------- posting

    def _ready(self, read: Read, engine: PeerEngine) -> None:
        if self._streams is not None and read.stream is not None:
            self._streams.ready(read, read.stream, engine)  # raises nothing
            return
        try:
            self._post(read, engine)
        except Exception as error:  # noqa: BLE001  (block ids come from the client, plans from a peer's documents)
            if not read.transfers:
                self._messages.release(read, engine, engine.ranks)
            self._abandon(read, "" if hasattr(error, "code") else "start of a read", error)

    def _post(self, read: Read, engine: PeerEngine) -> None:
        plan, order = engine.plan, read.order
        if plan is None or read.is_ended or order.is_notify_only:
            self._messages.release(read, engine, engine.ranks)
            self._end(read)
            return
        reason = refusal(order, engine) or refused_retry(read, engine, self._parts.now_s(), self._limits)
        if reason is not None:
            read.fail(*reason)
            self._end(read)
            return
        # Compute all ranks' indices first: nothing must be posted for a request that a later rank would refuse.
        ranks = [rank for rank in plan.producer_ranks if rank not in read.done_ranks]
        indices, staged = plan.route(order.local_blocks, order.ticket.peer_blocks, tokens=order.tokens)
        read.conversion = conversion_steps(staged, self._ranges)
        read.begin_attempt(engine, ranks, self._parts.now_s(), self._limits)
        self._transfers.update(dict.fromkeys(read.transfers, read))
        engine.reads_in_flight += 1
        for rank in ranks:
            self._post_one(read, engine, rank, indices[rank])

    def _post_one(self, read: Read, engine: PeerEngine, rank: Rank, indices: tuple[Indices, Indices]) -> None:
        transfer_id = read.transfer_id(rank)
        if read.code:
            self._close_transfer(read, transfer_id)
            return
        try:
            self._parts.thread.agent.post_read(
                transfer_id,
                engine.key(rank),
                *indices,
                notification=self._messages.read_complete(read, engine, rank),
                deadline_s=read.deadline_s - self._parts.now_s(),
                fence=read.order.ticket.fence if engine.is_fenced else None,
            )
        except Exception as error:  # noqa: BLE001  (posting is refused: the request fails, the thread goes on)
            self._note_failure(read, code_of(error), str(error))
            self._close_transfer(read, transfer_id)

    # ---------------------------------------------------------------------------------------------- results

    def transfer_ended(self, result: TransferResult) -> None:
        """Process the end of one rank's transfer, of a part of a stream, or of a probe."""
        if self._streams is not None and self._streams.transfer_ended(result):
            return
        read = self._transfers.get(result.transfer_id)
        if read is None:
            with self._parts.recorder.guarded("end of a probe"):
                self._peers.probe_ended(result)
            return
        try:
            self._note_result(read, result)
        except Exception as error:  # noqa: BLE001  (the read ends all the same)
            self._parts.recorder.trouble("end of a transfer", error)
            self._note_failure(read, code_of(error), str(error))
        if result.is_memory_quiet:
            self._close_transfer(read, result.transfer_id)
        else:
            note_quarantine(self._parts, read, result)

    def _note_result(self, read: Read, result: TransferResult) -> None:
        engine, recorder = read.engine, self._parts.recorder
        if result.outcome == "done":
            now_s = self._parts.now_s()
            read.note_arrived(result, now_s)
            if engine is not None:
                engine.last_answer_s = now_s
            recorder.read_done(result)
            return
        self._note_failure(read, result.code, result.message, may_retry=may_be_mended(result))
        if result.outcome == "fence-rejected":
            recorder.count("num_fence_rejections")
        elif is_peer_at_fault(result) and engine is not None and engine.phase == "ready":
            self._peers.drop(engine, f"a read failed ({result.code}: {result.message})")

    def memory_quiet(self, transfer_id: str) -> None:
        """Note that nothing can write into the pages of an ended transfer any more."""
        if self._streams is not None and self._streams.memory_quiet(transfer_id):
            return
        read = self._transfers.get(transfer_id)
        if read is not None and transfer_id in read.unquiet:
            read.unquiet.discard(transfer_id)
            self._close_transfer(read, transfer_id)

    def _note_failure(self, read: Read, code: str, message: str, *, may_retry: bool = False) -> None:
        if read.fail(code, message, may_retry=may_retry) and not read.is_cancelled:
            self._parts.recorder.count("num_failed_transfers")

    # ---------------------------------------------------------------------------------------------- ends

    def _close_transfer(self, read: Read, transfer_id: str) -> None:
        read.transfers.pop(transfer_id, None)
        self._transfers.pop(transfer_id, None)
        if read.transfers or read.engine is None:
            return
        engine = read.engine
        try:
            if may_retry(read, self._parts.now_s(), self._limits):
                self._retry(read, engine)
            else:
                self._conclude(read, engine)
        except Exception as error:  # noqa: BLE001  (whatever else fails, the read ends)
            self._abandon(read, "end of a read", error)
        finally:
            self._peers.read_ended(engine)

    def _conclude(self, read: Read, engine: PeerEngine) -> None:
        order = read.order
        late_s = self._parts.now_s() - read.trusted_until_s
        if not read.code and not (engine.is_fenced and order.ticket.fence is not None) and late_s > 0:
            # Without a fence, the only proof that the pages still held this prompt is that the lease had not ended.
            message = f"the read ended {late_s:.1f} s after the peer's lease on the pages"
            self._note_failure(read, "read-after-expiry", message)
        if engine.plan is not None and (engine.phase == "ready" or not read.code):
            self._messages.release(read, engine, engine.ranks if read.code else engine.plan.notify_only_ranks)
        self._end(read)

    def _not_met(self, read: Read, code: str, message: str) -> None:
        """End a read whose engine cannot be read from."""
        if self._streams is not None and read.stream is not None:
            self._streams.not_met(read, code, message)
            return
        read.fail(code, message)
        read.was_met = code == PEER_DRAINING
        self._end(read)

    def _abandon(self, read: Read, action: str, error: Exception) -> None:
        """Fail a read because of an exception; its transfers on the wire end first."""
        if action:
            self._parts.recorder.trouble(action, error)
        self._note_failure(read, code_of(error), str(error))
        if not read.transfers:
            self._end(read)
            return
        for transfer_id in read.transfers:
            with self._parts.recorder.guarded("cancellation"):
                self._parts.thread.agent.cancel(transfer_id)

    def _end(self, read: Read) -> None:
        if read.is_ended:
            return
        read.is_ended = True
        if read.order.is_reported or read.code:
            conversion = () if read.code else read.conversion
            end = ReadEnd(read.order, read.code, read.message, read.times, self._parts.now_s(), read.was_met)
            self._ended(FinishedRead(end, conversion))

    # ---------------------------------------------------------------------------------------------- second attempt

    def _retry(self, read: Read, engine: PeerEngine) -> None:
        self._parts.recorder.count("num_retried_reads")
        self._parts.recorder.info(
            "second-attempt",
            f"request {read.order.request_id}: its read failed ({read.code}: {read.message}); engine {engine.engine_id} is "
            "met anew and read once more",
        )
        read.begin_again()
        self._peers.submit(read)
