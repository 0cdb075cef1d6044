"""The consumer's part of a worker: from read orders to transfers, and to one end per request. Transfer thread only.

A request's read is one transfer per producer rank. It ends once: when the last of them has ended and no peer can write
into its pages any more. After the first failure nothing more is posted for it. Peers are `peers.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from vllm_adapter.worker.conversion import conversion_steps, page_ranges
from vllm_adapter.worker.transfer.peers import PeerDirectory, PeerEngine, PeerLimits, PeerObserver, code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.cache.peer_geometry import PeerGeometry
    from vllm_adapter.ports import (
        HandshakeClient,
        HeartbeatOrder,
        Indices,
        Planner,
        ReadOrder,
        StallEntry,
        TransferResult,
        TransferThread,
        WireCodec,
    )
    from vllm_adapter.worker.conversion import ConversionStep
    from vllm_adapter.worker.transfer.peers import Rank

__all__ = ["ReadCoordinator", "ReadEnd", "ReadLimits", "ReadObserver", "ReadTimes"]

_FAULTS_OF_THE_READ = frozenset({"fence-rejected", "timed-out", "cancelled"})
_RENEWED_PART = 2 / 3
"""A heartbeat renews a lease to this part of its length from now. Source: vLLM's lease renewal."""
_NAMED = 4
"""Requests that a log line about several names."""


@dataclass(slots=True)
class ReadTimes:
    """When a read's stages were reached (seconds, the coordinator's clock); None where one never was."""

    ordered_s: float
    posted_s: float | None = None
    """Its engine was met and the transfers posted."""
    data_s: float | None = None
    """The last byte had arrived."""
    fence_s: float = 0.0
    """Seconds that the verification of the slowest fence took after that."""
    bytes_moved: int = 0


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The one end of a request's read, for the engine thread.

    Attributes:
        order: What was to be read.
        code: Why it failed; empty if it did not.
        message: The same as a sentence.
        times: When its stages were reached.
        ended_s: When it ended.
        conversion: What is left to do to the pages of a good read.
    """

    order: ReadOrder
    code: str
    message: str
    times: ReadTimes
    ended_s: float
    conversion: tuple[ConversionStep, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether every page arrived and the lease held."""
        return not self.code


@dataclass(frozen=True, slots=True)
class ReadObserver:
    """Where the coordinator reports; all callables are cheap and thread-safe."""

    ended: Callable[[ReadEnd], None]
    transferred: Callable[[TransferResult], None]
    count: Callable[[str], None]
    observe: Callable[[str, float], None]
    log: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How long a read may take, how long a lease is believed, and the limits of peers."""

    read_timeout_s: float
    lease_s: float
    peers: PeerLimits
    whole_block_tokens: tuple[int, ...] = ()
    """Tokens per block of each group, if all groups hold whole prompts; empty with windows, states or context ranks."""


@dataclass(slots=True)
class _Read:
    """One request's read in progress."""

    order: ReadOrder
    engine: PeerEngine
    open_transfers: set[str]
    unquiet: set[str]
    trusted_until_s: float
    conversion: tuple[ConversionStep, ...] = ()
    code: str = ""
    message: str = ""


@final
class ReadCoordinator:
    """Turns read orders into transfers and their results into one end per request."""

    def __init__(
        self,
        geometry: Mapping[str, object],
        peer_geometry: PeerGeometry,
        planner: Planner,
        codec: WireCodec,
        observer: ReadObserver,
        limits: ReadLimits,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._ranges = page_ranges(geometry)
        self._codec = codec
        self._observer = observer
        self._limits = limits
        self._now_s = now_s
        self._reads: dict[str, _Read] = {}
        self._times: dict[str, ReadTimes] = {}
        self._withdrawn: dict[int, ReadOrder] = {}
        self._stalled: set[str] = set()
        self._agent: TransferThread | None = None
        self._peers = PeerDirectory(
            geometry,
            peer_geometry,
            planner,
            PeerObserver(self._post, self._not_met, observer.count, observer.observe, observer.log),
            limits.peers,
            now_s=now_s,
        )

    def attach(self, agent: TransferThread, handshakes: HandshakeClient) -> None:
        """Connect the two threads that this coordinator stands between; before the first order."""
        self._agent = agent
        self._peers.attach(agent, handshakes)

    def look_after(self) -> None:
        """Give up handshakes that never ended, forget unused engines, report reads that do not get on."""
        self._peers.look_after()
        self._report_stalls()

    def snapshot(self) -> dict[str, int]:
        """Return how many engines and reads there are, for diagnosis."""
        return {"engines": len(self._peers), "transfers": len(self._reads)}

    def _report_stalls(self) -> None:
        """Say once of every read that its engine lets it hang; its deadline ends it."""
        assert self._agent is not None  # noqa: S101
        stalls = {entry.transfer_id: entry for entry in self._agent.stalls() if entry.transfer_id in self._reads}
        fresh: dict[str, list[StallEntry]] = {}
        for transfer_id in stalls.keys() - self._stalled:
            fresh.setdefault(self._reads[transfer_id].engine.engine_id, []).append(stalls[transfer_id])
        self._stalled = set(stalls)
        for engine_id, entries in fresh.items():
            for _ in entries:
                self._observer.count("num_stalled_reads")
            requests = sorted({self._reads[entry.transfer_id].order.request_id for entry in entries})
            self._observer.log(
                f"engine {engine_id} is stopped, slow or unreachable: no part of {len(entries)} reads has ended for "
                f"{self._now_s() - min(entry.since_s for entry in entries):.1f} s, "
                f"{sum(entry.bytes_left for entry in entries)} bytes are left (requests {', '.join(requests[:_NAMED])}"
                f"{' and others' if len(requests) > _NAMED else ''}); each is given up after "
                f"{self._limits.read_timeout_s:g} s"
            )

    # ---------------------------------------------------------------------------------------------- orders

    def read(self, order: ReadOrder) -> None:
        """Start a request's read, or let it wait for its engine."""
        self._times[order.request_id] = ReadTimes(self._now_s())
        self._peers.submit(order)

    def cancel(self, request_id: str) -> None:
        """Give up a read that nobody wants any more; it still ends, once, when its pages are quiet."""
        assert self._agent is not None  # noqa: S101
        for transfer_id, read in list(self._reads.items()):
            if read.order.request_id == request_id:
                self._agent.cancel(transfer_id)
        for order in self._peers.waiting(request_id):
            if id(order) in self._withdrawn:
                continue
            # The order goes on waiting, now only to tell its producer that the blocks are not needed.
            self._withdrawn[id(order)] = order
            self._end(order, "cancelled", "the request was aborted before its read began")

    def end_all(self, code: str, message: str) -> None:
        """Fail every read, also one whose data has arrived but is not verified; each ends once its pages are quiet."""
        assert self._agent is not None  # noqa: S101
        for order in self._peers.take_waiting():
            self._not_met(order, code, message)
        for transfer_id, read in list(self._reads.items()):
            self._note_failure(read, code, message)
            self._agent.cancel(transfer_id)

    def heartbeat(self, order: HeartbeatOrder) -> None:
        """Renew leases at a peer engine; an engine that is not known yet is met first."""
        engine = self._peers.find_or_meet(order)
        if engine is None:
            self._observer.count("num_unsent_heartbeats")
            return
        for rank in engine.ranks:
            for payload in self._codec.heartbeats(order.peer_request_ids):
                self._peers.notify(engine, rank, payload)
        renewed = set(order.peer_request_ids)
        for read in self._reads.values():
            if read.engine is engine and read.order.peer_request_id in renewed:
                renewed_until_s = self._now_s() + _RENEWED_PART * self._limits.lease_s
                read.trusted_until_s = max(read.trusted_until_s, renewed_until_s)

    # ---------------------------------------------------------------------------------------------- posting

    def _post(self, order: ReadOrder, engine: PeerEngine) -> None:
        plan = engine.plan
        assert plan is not None  # noqa: S101
        if self._withdrawn.pop(id(order), None) is not None:
            self._release_at_peer(order, engine, engine.ranks)
            return
        if not any(len(group) for group in order.local_block_ids):
            self._release_at_peer(order, engine, engine.ranks)
            self._end(order, "", "")
            return
        try:
            # All ranks' indices come first: nothing is posted for a request that a later rank would refuse.
            tokens, local_first = self._alignment(order)
            blocks = (order.local_block_ids, order.peer_block_ids)
            indices = {
                rank: plan.indices(rank, *blocks, tokens=tokens, local_first=local_first)
                for rank in plan.producer_ranks
            }
            conversion: tuple[ConversionStep, ...] = ()
            if plan.is_staged:
                staged = plan.staged_pages(*blocks, tokens=tokens, local_first=local_first)
                conversion = conversion_steps(staged, self._ranges)
        except Exception as error:  # noqa: BLE001  (block ids come from the client)
            self._release_at_peer(order, engine, engine.ranks)
            self._end(order, code_of(error), str(error))
            return
        transfers = {f"{order.request_id}/{rank[0]}.{rank[1]}": rank for rank in plan.producer_ranks}
        now_s = self._now_s()
        self._times[order.request_id].posted_s = now_s
        trusted_until_s = now_s + (order.lease_s or self._limits.lease_s)
        read = _Read(order, engine, set(transfers), set(), trusted_until_s, conversion)
        for transfer_id in transfers:
            self._reads[transfer_id] = read
        engine.reads_in_flight += 1
        for transfer_id, rank in transfers.items():
            self._post_one(read, transfer_id, rank, indices[rank])

    def _alignment(self, order: ReadOrder) -> tuple[int | None, Sequence[int] | None]:
        """Tell where the local lists begin in the prompt, where they are not clipped to a window or a state."""
        block_tokens = self._limits.whole_block_tokens
        covered = order.local_computed_blocks
        if not block_tokens or len(covered) != len(block_tokens):
            return None, None
        return covered[0] * block_tokens[0] + order.external_tokens, covered

    def _post_one(self, read: _Read, transfer_id: str, rank: Rank, indices: tuple[Indices, Indices]) -> None:
        plan = read.engine.plan
        assert plan is not None and self._agent is not None  # noqa: S101, PT018
        if read.code:
            self._close_transfer(read, transfer_id)
            return
        try:
            self._agent.post_read(
                transfer_id,
                read.engine.key(rank),
                *indices,
                notification=self._codec.read_complete(read.order.peer_request_id, plan.reader_count(rank)),
                deadline_s=self._limits.read_timeout_s,
                fence=read.order.fence if read.engine.is_fenced else None,
            )
        except Exception as error:  # noqa: BLE001  (posting is refused: the request fails, the thread goes on)
            self._note_failure(read, code_of(error), str(error))
            self._close_transfer(read, transfer_id)

    # ---------------------------------------------------------------------------------------------- ends

    def transfer_ended(self, result: TransferResult) -> None:
        """Take in the end of one rank's transfer."""
        read = self._reads.get(result.transfer_id)
        if read is None:
            return
        if result.outcome == "done":
            times = self._times[read.order.request_id]
            times.data_s = self._now_s() - result.fence_s
            times.fence_s = max(times.fence_s, result.fence_s)
            times.bytes_moved += result.bytes_moved
            self._observer.transferred(result)
        else:
            self._note_failure(read, result.code, result.message)
            if result.outcome == "fence-rejected":
                self._observer.count("num_fence_rejections")
            elif result.outcome not in _FAULTS_OF_THE_READ and read.engine.phase == "ready":
                self._peers.drop(read.engine, f"a read failed ({result.code}: {result.message})")
        if result.is_memory_quiet:
            self._close_transfer(read, result.transfer_id)
        else:
            read.unquiet.add(result.transfer_id)
            self._observer.count("num_quarantined_reads")
            self._observer.log(
                f"request {read.order.request_id}: its pages stay quarantined until the transfer from engine "
                f"{read.engine.engine_id} is known to be over ({result.code})"
            )

    def memory_quiet(self, transfer_id: str) -> None:
        """Take in that nothing can write into the pages of an ended transfer any more."""
        read = self._reads.get(transfer_id)
        if read is not None and transfer_id in read.unquiet:
            self._close_transfer(read, transfer_id)

    def _note_failure(self, read: _Read, code: str, message: str) -> None:
        if not read.code:
            read.code, read.message = code or "transfer-failed", message
            self._observer.count("num_failed_transfers")

    def _close_transfer(self, read: _Read, transfer_id: str) -> None:
        read.open_transfers.discard(transfer_id)
        self._reads.pop(transfer_id, None)
        if read.open_transfers:
            return
        engine, order = read.engine, read.order
        late_s = self._now_s() - read.trusted_until_s
        if not read.code and not (engine.is_fenced and order.fence is not None) and late_s > 0:
            # Without a fence the only proof that the pages were still this prompt's is that the lease had not ended.
            message = f"the read ended {late_s:.1f} s after the peer's lease on the pages"
            self._note_failure(read, "read-after-expiry", message)
        if engine.plan is not None and engine.phase == "ready":
            self._release_at_peer(order, engine, engine.ranks if read.code else engine.plan.notify_only_ranks)
        self._end(order, read.code, read.message, read.conversion)
        self._peers.read_ended(engine)

    def _not_met(self, order: ReadOrder, code: str, message: str) -> None:
        """End an order whose engine cannot be read from, unless it has been withdrawn meanwhile."""
        if self._withdrawn.pop(id(order), None) is None:
            self._end(order, code, message)

    def _release_at_peer(self, order: ReadOrder, engine: PeerEngine, ranks: Sequence[Rank]) -> None:
        """Tell ranks that this request needs nothing of them any more."""
        assert engine.plan is not None  # noqa: S101
        for rank in ranks:
            payload = self._codec.read_complete(order.peer_request_id, engine.plan.reader_count(rank))
            self._peers.notify(engine, rank, payload)

    def _end(self, order: ReadOrder, code: str, message: str, conversion: tuple[ConversionStep, ...] = ()) -> None:
        now_s = self._now_s()
        times = self._times.pop(order.request_id, None) or ReadTimes(now_s)
        if order.is_reported or code:
            self._observer.ended(ReadEnd(order, code, message, times, now_s, conversion))
