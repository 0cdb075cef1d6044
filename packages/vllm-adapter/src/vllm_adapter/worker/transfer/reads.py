"""Consumer side of a worker: turns read orders into transfers, and into one end per request. Transfer thread only.

A request's read is one transfer per producer rank. It ends once: when the last transfer has ended and no peer can write into
its pages any more. After the first failure nothing more is posted for it. `peers.py` manages the peers; `streams.py` decides what
a streamed read posts, and this module carries its transfers like all others.

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

from vllm_adapter.cache.names import peer_text
from vllm_adapter.errors import code_of, message_of
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.worker.transfer.peers import PeerDirectory
from vllm_adapter.worker.transfer.records import Read
from vllm_adapter.worker.transfer.streams import StreamCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.cache.vllm_peer import PeerPlanner
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import (
        HeartbeatOrder,
        Indices,
        ReadOrder,
        StallEntry,
        StreamOrder,
        StreamReaders,
        TransferResult,
    )
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.records import PeerEngine, TransferParts
    from vllm_adapter.worker.transfer.stream_parts import StreamShape

__all__ = ["ReadCoordinator", "refusal"]

_NAMED = 4
"""Most requests that one log line names."""


@final
class ReadCoordinator:
    """Turns read orders into transfers and their results into one end per request.

    Args:
        parts: The registration's threads, codec, recorder and clock.
        planner: Plans against peers.
        ended: Called once with the end of every read, plain or streamed; cheap and thread-safe.
        readers: The state machine that decides what streams read next.
        shape: Groups of both engines.
    """

    def __init__(
        self,
        parts: TransferParts,
        planner: PeerPlanner,
        ended: Callable[[ReadEnd], None],
        readers: StreamReaders,
        shape: StreamShape,
    ) -> None:
        self._parts = parts
        self._ended = ended
        self._transfers: dict[str, Read] = {}
        # Reads that have not ended, by request: an id may come again while pages of its former read are quarantined.
        self._open: dict[str, list[Read]] = {}
        self._peers = PeerDirectory(parts, planner, ready=self._begin, failed=self._fail)
        self._stalled: set[str] = set()
        self._streams = StreamCoordinator(parts, readers, shape, self._peers, self._transfers, self._end)

    def maintain(self) -> None:
        """End waits that are too long, drop dead and unused engines, and report reads without progress."""
        with self._parts.recorder.guarded("upkeep of peers"):
            self._peers.maintain()
        with self._parts.recorder.guarded("search for stalled reads"):
            self._check_stalls()
        with self._parts.recorder.guarded("upkeep of streams"):
            self._streams.maintain()

    def _check_stalls(self) -> None:
        """Report what has stalled since the last call: each transfer is counted once, each request logged once, by engine."""
        reads, recorder = self._transfers, self._parts.recorder
        stalls = {entry.transfer_id: entry for entry in self._parts.thread.stalls() if entry.transfer_id in reads}
        known_requests = {reads[known].order.request_id for known in self._stalled if known in reads}
        fresh: dict[str, list[StallEntry]] = {}
        for transfer_id in stalls.keys() - self._stalled:
            recorder.count("num_stalled_reads")
            order = reads[transfer_id].order
            if order.request_id not in known_requests:
                fresh.setdefault(peer_text(order.ticket.peer), []).append(stalls[transfer_id])
        self._stalled = set(stalls)
        for peer, entries in fresh.items():
            since_s = self._parts.now_s() - min(entry.since_s for entry in entries)
            bytes_left = sum(entry.bytes_left for entry in entries)
            requests = sorted({reads[entry.transfer_id].order.request_id for entry in entries})
            names = ", ".join(requests[:_NAMED]) + (" and others" if len(requests) > _NAMED else "")
            recorder.warning(
                "stalled",
                f"{peer} is stopped, slow or unreachable: no read from it has made progress for {since_s:.1f} s "
                f"(reads: {len(entries)}, bytes left: {bytes_left}, requests: {names}); each is given up after "
                f"{self._parts.settings.read_timeout_s:g} s",
            )

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of engines and transfers, for diagnosis."""
        return {"engines": len(self._peers.engines), "transfers": len(self._transfers)}

    def describe(self, most: int) -> Answer:
        """Return an operator's view: the number of reads by stage, and descriptions of at most `most` reads and peers each."""
        now_s, engines = self._parts.now_s(), self._peers.engines.values()
        waiting = [read for engine in engines for read in engine.waiting]
        reads = [*self._posted(), *waiting]
        return {
            "reads": len(reads),
            "reads_waiting_for_a_peer": len(waiting),
            "oldest_reads": [read.describe(now_s) for read in reads[:most]],
            **self._streams.describe(most),
            "peers": len(engines),
            "peer_engines": [engine.describe(now_s) for engine in islice(engines, most)],
        }

    def _posted(self) -> list[Read]:
        """Return the plain reads that have transfers, each once."""
        return [read for read in dict.fromkeys(self._transfers.values()) if read.stream is None]

    # ---------------------------------------------------------------------------------------------- orders

    def read(self, *orders: ReadOrder, stream: StreamOrder | None = None) -> None:
        """Start the reads of a step, or queue them until their engines are ready.

        Args:
            orders: The orders.
            stream: The order of the stream, if the read follows a peer's progress.
        """
        ready: dict[PeerEngine, list[Read]] = {}
        for order in orders:
            read = Read(order, ReadTimes(self._parts.now_s()), stream)
            self._open.setdefault(order.request_id, []).append(read)
            try:
                engine = self._peers.admit(read)
            except Exception as error:  # noqa: BLE001  (one order can only fail itself)
                self._abandon(read, "read order", error)
                continue
            if engine is not None:
                ready.setdefault(engine, []).append(read)
        for engine, reads in ready.items():
            self._begin(reads, engine)

    def are_ready(self, orders: Sequence[ReadOrder]) -> bool:
        """Return whether the engines of all these reads are ready, so that posting them takes no time; any thread."""
        return all(self._peers.is_ready(order.ticket.peer) for order in orders)

    def stop(self, request_id: str) -> None:
        """Stop a stream; its end is reported, as failed, once all its transfers are quiet."""
        self._streams.stop(request_id, list(self._open.get(request_id, ())))

    def cancel(self, request_id: str, *, is_passed_on: bool = False) -> None:
        """Give up a plain read that is no longer needed; it still ends once, when its pages are quiet.

        Args:
            request_id: The request.
            is_passed_on: Whether another request reads the same hand-over: the producer is not notified of this end.
        """
        for read in [each for each in self._open.get(request_id, ()) if each.stream is None]:
            read.is_passed_on = is_passed_on
            if read.transfers:
                read.is_cancelled, read.may_retry = True, False
                self._parts.cancel(read)
            else:  # the read keeps waiting, but only to tell its producer that the blocks are not needed
                self._fail(read, "cancelled", "the request was aborted before its read began")

    def end_all(self, code: str, message: str) -> None:
        """Fail every read, including those whose data has arrived unverified; each ends once its pages are quiet."""
        self._streams.break_all(code, message)
        for read in self._peers.take_waiting():
            read.was_connected = False
            self._fail(read, code, message)
        for read in self._posted():
            self._note_failure(read, code, message)
            self._parts.cancel(read)

    def heartbeat(self, order: HeartbeatOrder) -> None:
        """Renew leases at a peer engine; the set-up of an unknown engine is started first."""
        engine, renewed = self._peers.renew(order)
        renewed_until_s = self._parts.now_s() + self._parts.settings.renewed_s
        for read in engine.reads if engine is not None else ():
            if read.order.ticket.peer_request_id in renewed:
                read.trusted_until_s = max(read.trusted_until_s, renewed_until_s)

    # ---------------------------------------------------------------------------------------------- posting

    def _begin(self, reads: Sequence[Read], engine: PeerEngine) -> None:
        """Read from an engine that is ready; raises nothing.

        All are planned before the first is posted: code that runs again at once is still in the processor's caches. Ordering 16
        reads in one step takes 6.1 instead of 6.7 ms on two cores.
        """
        planned = [(read, indices) for read in reads if (indices := self._plan(read, engine)) is not None]
        for read, indices in planned:
            try:
                self._post(read, engine, indices)
            except Exception as error:  # noqa: BLE001  (one order can only fail itself)
                self._give_up(read, engine, error)

    def _plan(self, read: Read, engine: PeerEngine) -> Mapping[Rank, tuple[Indices, Indices]] | None:
        """Return the (local, peer) descriptor indices of a plain read by rank; None for a read that is posted or over."""
        order = read.order
        try:
            if read.is_ended or (read.stream is None and order.is_notify_only):
                self._peers.release(read, engine)
                self._end(read)
                return None
            reason = refusal(order, engine)
            if reason is None and read.attempt:
                reason = self._refused_retry(read, engine)
            if reason is not None:
                self._fail(read, *reason)
            elif read.stream is not None:
                if not self._streams.begin(read, read.stream, engine):
                    self._forget(read)
            else:
                # All ranks' indices first: nothing must be posted for a request that a later rank would refuse.
                indices, read.staged = engine.plan.route(
                    order.local_blocks, order.ticket.peer_blocks, tokens=order.tokens
                )
                return indices
        except Exception as error:  # noqa: BLE001  (block ids come from the client, plans from a peer's documents)
            self._give_up(read, engine, error)
        return None

    def _give_up(self, read: Read, engine: PeerEngine, error: Exception) -> None:
        """End a read that could not begin, and release its producer unless transfers of it are on the wire."""
        if not read.transfers and read.stream is None:
            self._peers.release(read, engine)
        self._abandon(read, "" if hasattr(error, "code") else "start of a read", error)

    def _post(self, read: Read, engine: PeerEngine, indices: Mapping[Rank, tuple[Indices, Indices]]) -> None:
        """Post an attempt; its transfers are named e.g. `r1/0.1`, and `r1/0.1+` at the second one."""
        order, ticket, now_s, settings = read.order, read.order.ticket, self._parts.now_s(), self._parts.settings
        plan = engine.plan
        if not read.attempt:
            read.times.posted_s = now_s
            read.deadline_s = now_s + settings.read_timeout_s
            read.trusted_until_s = now_s + (ticket.lease_s or settings.kv_lease_duration)
        mark = "+" * read.attempt
        ranks = [rank for rank in plan.producer_ranks if rank not in read.done_ranks]
        read.transfers = {f"{order.request_id}/{pp}.{tp}{mark}": (pp, tp) for pp, tp in ranks}
        read.attempt += 1
        read.engine = engine
        self._transfers.update(dict.fromkeys(read.transfers, read))
        engine.reads.add(read)
        for transfer_id, rank in list(read.transfers.items()):
            try:
                if not read.code:  # else an earlier rank's post was refused
                    self._parts.thread.agent.post_read(
                        transfer_id,
                        engine.keys[rank],
                        *indices[rank],
                        notification=self._peers.read_complete(read, plan, rank),
                        deadline_s=read.deadline_s - self._parts.now_s(),
                        fence=ticket.fence if engine.is_fenced else None,
                    )
                    continue
            except Exception as error:  # noqa: BLE001  (posting is refused: the request fails, the thread goes on)
                self._note_failure(read, code_of(error), message_of(error))
            self._close_transfer(read, transfer_id)

    # ---------------------------------------------------------------------------------------------- results

    def transfer_ended(self, result: TransferResult) -> None:
        """Process the end of one rank's transfer, of a part of a stream, or of a probe."""
        read, recorder = self._transfers.get(result.transfer_id), self._parts.recorder
        if read is None or read.engine is None:
            with recorder.guarded("end of a probe"):
                self._peers.probe_ended(result)
            return
        try:
            if result.outcome != "done":
                self._note_lost(read, read.engine, result)
            elif read.stream is not None:
                self._streams.arrived(read, result)
            else:
                now_s = self._parts.now_s()
                read.times.data_s = now_s - result.fence_s
                read.times.queue_s = result.queue_s
                read.times.fence_s = max(read.times.fence_s, result.fence_s)
                read.times.bytes_moved += result.bytes_moved
                read.done_ranks.add(read.transfers[result.transfer_id])
                read.engine.last_answer_s = now_s
                recorder.read_done(result)
        except Exception as error:  # noqa: BLE001  (the read ends all the same)
            recorder.trouble("end of a transfer", error)
            self._note_failure(read, code_of(error), message_of(error))
        if result.is_memory_quiet:
            self._close_transfer(read, result.transfer_id)
            return
        recorder.count("num_quarantined_reads")
        if not read.unquiet:
            recorder.warning(
                "quarantine",
                f"request {read.order.request_id}: its pages stay quarantined until the transfers from "
                f"{peer_text(read.order.ticket.peer)} are known to be over ({result.code})",
            )
        read.unquiet.add(result.transfer_id)

    def _note_lost(self, read: Read, engine: PeerEngine, result: TransferResult) -> None:
        # Failures that come from this rank's own agent (`queue-full`, `bad-indices`) say nothing about the peer.
        is_peer_at_fault = result.outcome == "failed" and result.fault != "local"
        if read.stream is not None:
            self._streams.lost(read, result)
        else:
            # Setting the engine up again also helps where the agent has removed the peer (`peer-removed`), as when another
            # engine proved that the name is its own.
            may_retry = is_peer_at_fault or result.code == "peer-removed"
            self._note_failure(read, result.code, result.message, may_retry=may_retry)
            if result.outcome == "fence-rejected":
                self._parts.recorder.count("num_fence_rejections")
        if is_peer_at_fault and engine.phase == "ready":
            self._peers.drop(engine, f"a read failed: {result.message} ({result.code})")

    def memory_quiet(self, transfer_id: str) -> None:
        """Note that nothing can write into the pages of an ended transfer any more."""
        read = self._transfers.get(transfer_id)
        if read is not None and transfer_id in read.unquiet:
            read.unquiet.discard(transfer_id)
            self._close_transfer(read, transfer_id)

    def _note_failure(self, read: Read, code: str, message: str, *, may_retry: bool = False) -> None:
        is_plain = read.stream is None  # a stream that broke off is read once more, as a whole
        if read.fail(code, message, may_retry=may_retry) and is_plain and not read.is_cancelled:
            self._parts.recorder.count("num_failed_transfers")

    # ---------------------------------------------------------------------------------------------- ends

    def _close_transfer(self, read: Read, transfer_id: str) -> None:
        rank, engine = read.transfers.pop(transfer_id), read.engine
        self._transfers.pop(transfer_id, None)
        if read.stream is not None:
            self._streams.landed(read, rank, transfer_id)
            return
        if read.transfers or engine is None:
            return
        try:
            late_s = self._parts.now_s() - read.trusted_until_s
            is_proved = engine.is_fenced and read.order.ticket.fence is not None
            if late_s > 0 and not (read.code or is_proved):
                # Without a fence, the only proof that the pages still held this prompt is that the lease had not ended.
                message = f"the read ended {late_s:.1f} s after the peer's lease on the pages"
                self._note_failure(read, "read-after-expiry", message)
            if read.code and self._may_retry(read, engine):
                self._parts.recorder.count("num_retried_reads")
                self._parts.recorder.info(
                    "second-attempt",
                    f"request {read.order.request_id}: its read from {engine.text} is tried again ({read.code})",
                )
                read.code = read.message = ""
                read.engine = None
                self._peers.submit(read)
            else:
                if read.done_ranks != engine.keys.keys() and (engine.phase == "ready" or not read.code):
                    self._peers.release(read, engine)
                self._end(read)
        except Exception as error:  # noqa: BLE001  (whatever else fails, the read ends)
            self._abandon(read, "end of a read", error)
        finally:
            self._peers.read_ended(read, engine)

    def _may_retry(self, read: Read, engine: PeerEngine) -> bool:
        """Return whether to retry a read that has failed: its peer caused the failure, and time and attempts remain.

        Both attempts share one deadline. A rank whose part has arrived is neither read nor notified again, so a second attempt is
        made only where a restart of the peer would be noticed, and only while the peer keeps its pages as before.
        """
        if not read.may_retry or read.attempt > self._parts.settings.read_retries:
            return False
        is_in_time = self._parts.now_s() < min(read.deadline_s, read.trusted_until_s)
        return is_in_time and _notices_restart(read.order, engine)

    def _refused_retry(self, read: Read, engine: PeerEngine) -> tuple[str, str] | None:
        """Return why a second attempt cannot continue where the first one ended, as (code, message); None if it can."""
        if self._parts.now_s() >= read.deadline_s:
            wait_s = self._parts.settings.read_timeout_s
            return "transfer-timed-out", f"the engine was connected again only after {wait_s:g} s"
        is_same_plan = read.done_ranks <= set(engine.plan.producer_ranks) and bool(read.staged) == engine.plan.is_staged
        if not is_same_plan or not _notices_restart(read.order, engine):
            return "peer-changed", "the engine lays out its pages differently since it was connected again"
        return None

    def _abandon(self, read: Read, action: str, error: Exception) -> None:
        """Fail a read because of an exception; its transfers on the wire end first."""
        if action:
            self._parts.recorder.trouble(action, error)
        self._note_failure(read, code_of(error), message_of(error))
        if read.transfers:
            self._parts.cancel(read)
        else:
            self._end(read)

    def _fail(self, read: Read, code: str, message: str) -> None:
        read.fail(code, message)
        self._end(read)

    def _forget(self, read: Read) -> None:
        read.is_ended = True
        request_id = read.order.request_id
        self._open[request_id].remove(read)
        if not self._open[request_id]:
            del self._open[request_id]

    def _end(self, read: Read) -> None:
        if read.is_ended:
            return
        self._forget(read)
        if read.order.is_reported or read.code:
            staged, is_streamed, now_s = () if read.code else read.staged, read.stream is not None, self._parts.now_s()
            end = ReadEnd(
                read.order, read.code, read.message, read.times, now_s, read.was_connected, staged, is_streamed
            )
            self._ended(end)


def _notices_restart(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a peer's restart would be noticed: by its fence words, or by the generation in the ticket."""
    return (engine.is_fenced and order.ticket.fence is not None) or order.ticket.peer.generation is not None


def refusal(order: ReadOrder, engine: PeerEngine) -> tuple[str, str] | None:
    """Return why a ticket contradicts its engine's announcements and must be refused; None if it does not."""
    ticket, is_bound = order.ticket, "prompt-digest" in engine.capabilities
    if engine.is_fenced and ticket.fence is None:
        return "fence-missing", f"{engine.text} has fences, but the ticket names none"
    if is_bound and not ticket.prompt:
        return "prompt-missing", f"{engine.text} binds tickets to prompts, but the ticket has no digest"
    # Tickets of vLLM's own connector, and of version 0.1 of this one, contain only ids. The scheduler, which does not know the
    # peer's block size, placed lists that do not begin with the prompt's first block as if it were ours.
    if not (is_bound or engine.has_our_blocks) and any(
        blocks.first_token or (blocks.null is not None and blocks.null in blocks.ids) for blocks in ticket.peer_blocks
    ):
        sizes = f"blocks of {engine.text} hold other numbers of tokens than ours"
        return "peer-blocks-unplaced", f"{sizes}, and its ticket does not say where its block lists begin"
    if "nonce" in engine.capabilities and not ticket.nonce:
        return "nonce-missing", f"{engine.text} gives each ticket a nonce, but this one has none"
    return None
