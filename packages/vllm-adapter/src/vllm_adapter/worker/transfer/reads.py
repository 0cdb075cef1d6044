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

from itertools import islice
from typing import TYPE_CHECKING, final

from vllm_adapter.errors import code_of
from vllm_adapter.steps import ReadTimes
from vllm_adapter.worker.transfer.peers import PEER_DRAINING, PeerDirectory
from vllm_adapter.worker.transfer.records import (
    Read,
    is_peer_at_fault,
    may_be_mended,
    may_retry,
    note_quarantine,
    refusal,
    refused_retry,
)
from vllm_adapter.worker.transfer.streams import StreamCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import HeartbeatOrder, ReadOrder, StallEntry, StepPlan, StreamReaders, TransferResult
    from vllm_adapter.steps import ReadEnd
    from vllm_adapter.worker.transfer.planner import PeerPlanner
    from vllm_adapter.worker.transfer.records import PeerEngine, TransferParts
    from vllm_adapter.worker.transfer.stream_records import StreamShape

__all__ = ["ReadCoordinator"]

_NAMED = 4
"""Most requests that one log line names."""


@final
class ReadCoordinator:
    """Turns read orders into transfers and their results into one end per request.

    Args:
        parts: The registration's threads, codec, recorder and clock.
        planner: Plans against peers.
        ended: Called once with the end of every read; cheap and thread-safe.
    """

    def __init__(self, parts: TransferParts, planner: PeerPlanner, ended: Callable[[ReadEnd], None]) -> None:
        self._parts = parts
        self._ended = ended
        self._transfers: dict[str, Read] = {}
        self._peers = PeerDirectory(parts, planner, ready=self._ready, failed=self._not_met)
        self._stalled: set[str] = set()
        self._streams: StreamCoordinator | None = None

    def use_streams(self, readers: StreamReaders, shape: StreamShape, ended: Callable[[ReadEnd], None]) -> None:
        """Read streams as well; call before the first order.

        Args:
            readers: The state machine that decides what to read next.
            shape: Groups of both engines.
            ended: Called once with the end of every stream; the blocks of a failed one may be read into again.
        """
        self._streams = StreamCoordinator(self._parts, readers, shape, self._peers, ended)

    def look_after(self) -> None:
        """End waits that are too long, drop dead and unused engines, and report reads without progress."""
        with self._parts.recorder.guarded("looking after peers"):
            self._peers.look_after()
        with self._parts.recorder.guarded("looking after stalled reads"):
            streamed = self._streams.reads() if self._streams is not None else {}
            self._check_stalls({**self._transfers, **streamed})
        if self._streams is not None:
            with self._parts.recorder.guarded("looking after streams"):
                self._streams.look_after()

    def _check_stalls(self, reads: Mapping[str, Read]) -> None:
        """Report what has stalled since the last call: each transfer is counted once, each request logged once, by engine."""
        stalls = {entry.transfer_id: entry for entry in self._parts.thread.stalls() if entry.transfer_id in reads}
        known_requests = {reads[known].order.request_id for known in self._stalled if known in reads}
        fresh: dict[str, list[StallEntry]] = {}
        for transfer_id in stalls.keys() - self._stalled:
            self._parts.recorder.count("num_stalled_reads")
            order = reads[transfer_id].order
            if order.request_id not in known_requests:
                fresh.setdefault(order.ticket.peer.engine_id, []).append(stalls[transfer_id])
        self._stalled = set(stalls)
        for engine_id, entries in fresh.items():
            since_s = self._parts.now_s() - min(entry.since_s for entry in entries)
            bytes_left = sum(entry.bytes_left for entry in entries)
            requests = sorted({reads[entry.transfer_id].order.request_id for entry in entries})
            names = ", ".join(requests[:_NAMED]) + (" and others" if len(requests) > _NAMED else "")
            self._parts.recorder.warn(
                "stalled",
                f"engine {engine_id} is stopped, slow or unreachable: no part of {len(entries)} reads has ended for "
                f"{since_s:.1f} s, {bytes_left} bytes are left (requests {names}); each is given up after "
                f"{self._parts.settings.read_timeout_s:g} s",
            )

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of engines and transfers, for diagnosis."""
        streamed = len(self._streams.reads()) if self._streams is not None else 0
        return {"engines": len(self._peers), "transfers": len(self._transfers) + streamed}

    def describe(self, most: int) -> Answer:
        """Return an operator's view: the number of reads by stage, and descriptions of at most `most` reads and peers each."""
        now_s, engines = self._parts.now_s(), self._peers.engines()
        waiting = [read for engine in engines for read in engine.waiting]
        reads = [*dict.fromkeys(self._transfers.values()), *waiting]
        streams: Answer = self._streams.describe(most) if self._streams is not None else {}
        return {
            "reads": len(reads),
            "reads_waiting_for_a_peer": len(waiting),
            "oldest_reads": [read.describe(now_s) for read in reads[:most]],
            **streams,
            "peers": len(engines),
            "peer_engines": [engine.describe(now_s) for engine in islice(engines, most)],
        }

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
        engine, renewed = self._peers.renew(order)
        renewed_until_s = self._parts.now_s() + self._parts.settings.renewed_s
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
                self._peers.release(read, engine, engine.ranks)
            self._abandon(read, "" if hasattr(error, "code") else "start of a read", error)

    def _post(self, read: Read, engine: PeerEngine) -> None:
        plan, order, ticket, now_s = engine.plan, read.order, read.order.ticket, self._parts.now_s()
        if plan is None or read.is_ended or order.is_notify_only:
            self._peers.release(read, engine, engine.ranks)
            self._end(read)
            return
        reason = refusal(order, engine)
        if reason is None and read.attempt:
            reason = refused_retry(read, plan, engine, now_s, self._parts.settings)
        if reason is not None:
            read.fail(*reason)
            self._end(read)
            return
        # Compute all ranks' indices first: nothing must be posted for a request that a later rank would refuse.
        ranks = [rank for rank in plan.producer_ranks if rank not in read.done_ranks]
        indices, read.staged = plan.route(order.local_blocks, ticket.peer_blocks, tokens=order.tokens)
        read.begin_attempt(engine, ranks, now_s, self._parts.settings)
        self._transfers.update(dict.fromkeys(read.transfers, read))
        engine.reads_in_flight += 1
        for transfer_id, rank in list(read.transfers.items()):
            try:
                if not read.code:  # else an earlier rank's post was refused
                    self._parts.thread.agent.post_read(
                        transfer_id,
                        engine.key(rank),
                        *indices[rank],
                        notification=self._peers.read_complete(read, engine, rank),
                        deadline_s=read.deadline_s - self._parts.now_s(),
                        fence=ticket.fence if engine.is_fenced else None,
                    )
                    continue
            except Exception as error:  # noqa: BLE001  (posting is refused: the request fails, the thread goes on)
                self._note_failure(read, code_of(error), str(error))
            self._close_transfer(read, transfer_id)

    # ---------------------------------------------------------------------------------------------- results

    def transfer_ended(self, result: TransferResult) -> None:
        """Process the end of one rank's transfer, of a part of a stream, or of a probe."""
        if self._streams is not None and self._streams.transfer_ended(result):
            return
        read, recorder = self._transfers.get(result.transfer_id), self._parts.recorder
        if read is None:
            with recorder.guarded("end of a probe"):
                self._peers.probe_ended(result)
            return
        try:
            if result.outcome == "done":
                now_s = self._parts.now_s()
                read.note_arrived(result, now_s)
                if read.engine is not None:
                    read.engine.last_answer_s = now_s
                recorder.read_done(result)
            else:
                self._note_lost(read, result)
        except Exception as error:  # noqa: BLE001  (the read ends all the same)
            recorder.trouble("end of a transfer", error)
            self._note_failure(read, code_of(error), str(error))
        if result.is_memory_quiet:
            self._close_transfer(read, result.transfer_id)
        else:
            note_quarantine(self._parts, read, result)

    def _note_lost(self, read: Read, result: TransferResult) -> None:
        self._note_failure(read, result.code, result.message, may_retry=may_be_mended(result))
        engine = read.engine
        if result.outcome == "fence-rejected":
            self._parts.recorder.count("num_fence_rejections")
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
            if read.code and may_retry(read, self._parts.now_s(), self._parts.settings):
                self._retry(read, engine)
            else:
                self._conclude(read, engine)
        except Exception as error:  # noqa: BLE001  (whatever else fails, the read ends)
            self._abandon(read, "end of a read", error)
        finally:
            self._peers.read_ended(engine)

    def _retry(self, read: Read, engine: PeerEngine) -> None:
        self._parts.recorder.count("num_retried_reads")
        self._parts.recorder.info(
            "second-attempt",
            f"request {read.order.request_id}: its read failed ({read.code}: {read.message}); engine {engine.engine_id} is "
            "met anew and read once more",
        )
        read.code = read.message = ""
        read.engine = None
        self._peers.submit(read)

    def _conclude(self, read: Read, engine: PeerEngine) -> None:
        late_s = self._parts.now_s() - read.trusted_until_s
        if not read.code and not (engine.is_fenced and read.order.ticket.fence is not None) and late_s > 0:
            # Without a fence, the only proof that the pages still held this prompt is that the lease had not ended.
            message = f"the read ended {late_s:.1f} s after the peer's lease on the pages"
            self._note_failure(read, "read-after-expiry", message)
        if engine.plan is not None and (engine.phase == "ready" or not read.code):
            self._peers.release(read, engine, engine.ranks if read.code else engine.plan.notify_only_ranks)
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
            self._ended(read.ended(self._parts.now_s()))
