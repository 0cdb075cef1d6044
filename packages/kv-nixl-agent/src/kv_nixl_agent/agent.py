"""`TransferAgent`: one NIXL agent with its memory, peers and transfers, driven by its owner.

Theory of operation. An order becomes a `Transfer` with one or more *parts*, each of which is one NIXL handle. The owner calls
`advance` repeatedly. Each call posts parts, polls everything on the wire, ends transfers past their deadline (`TransferQueue`),
and polls the handles that no transfer waits for (`Handles`).

The way of one read: `post_read` checks the order, cuts it into parts and queues it here; `Transfer` in
`transfers/transfer.py` posts the parts, verifies the fence, notifies the peer and reports the result.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError, demand, demand_ints
from kv_nixl_agent.memory.fences import CLOSED_GENERATION, FenceArray
from kv_nixl_agent.memory.peers import PeerTable, add_checksum
from kv_nixl_agent.memory.rows import MemoryTable
from kv_nixl_agent.nixl.binding import open_nixl
from kv_nixl_agent.options import AgentOptions
from kv_nixl_agent.streams.polls import StreamPoller, landing_pads
from kv_nixl_agent.streams.words import StreamWords
from kv_nixl_agent.transfers.checks import WordChecks
from kv_nixl_agent.transfers.handles import Handles
from kv_nixl_agent.transfers.queue import TransferQueue, split_into_parts
from kv_nixl_agent.transfers.reader import WordReader
from kv_nixl_agent.transfers.transfer import Transfer
from kv_nixl_agent.values import PeerSpec, TransferOrder, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import PortFactory
    from kv_nixl_agent.streams.polls import StreamListener, StreamWatch
    from kv_nixl_agent.values import (
        FenceLocation,
        Figures,
        MemoryRegion,
        Outcome,
        QuarantineEntry,
        StallEntry,
    )

    Indices = npt.NDArray[np.int32]

__all__ = ["TransferAgent"]

_NO_INDICES: Final = np.empty(0, dtype=np.int32)


def _region_of(words: npt.NDArray[np.uint64]) -> MemoryRegion:
    return int(words.ctypes.data), int(words.nbytes), 0, "DRAM"


@final
class TransferAgent:
    """NIXL endpoint of a rank. Not thread-safe: one thread owns it and calls `advance` repeatedly.

    Args:
        name: NIXL agent name, unique among agents that connect to each other.
        regions: Memory to register: (address, length_bytes, device, kind). The caller keeps it alive.
        options: See `AgentOptions`.
        port_factory: Creates the NIXL port; tests pass a fake.
        clock: Monotonic clock, in seconds.

    Raises:
        AgentError: `nixl-missing`, `backend-unavailable`, `bad-region`, `registration-failed`.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[MemoryRegion],
        options: AgentOptions | None = None,
        *,
        port_factory: PortFactory = open_nixl,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        demand("name", name, str)
        demand("regions", regions, list, tuple)
        demand("options", options, AgentOptions, NoneType)
        for region in regions:
            demand("each of regions", region, tuple)
            demand_ints("address, length_bytes and device of a region", region[:-1], 3)
        chosen = self._options = (options or AgentOptions()).for_regions(regions)
        self.name = name
        self.refusal: AgentError | None = None
        """Reason for which `post_read` and `probe` report every order as failed; None while orders are accepted."""
        self._is_closed = False
        self._clock = clock
        self._fences = FenceArray(chosen.fence_words)
        own: list[MemoryRegion] = [(self._fences.location[0], self._fences.total_bytes, 0, "DRAM")]
        own.append(_region_of(self._fences.pads.memory))
        self.stream_words: StreamWords | None = None
        """This rank's stream memory, writable from any thread; None without stream slots."""
        self.polls: StreamPoller | None = None
        """Watches of peers' streams; None without stream slots."""
        pads = landing_pads() if chosen.stream_slots else None
        if pads is not None:
            words = self.stream_words = StreamWords(
                self._fences, chosen.stream_slots, chosen.stream_capacity, is_alone=not chosen.progress_thread
            )
            own.append((words.location[0], words.total_bytes, 0, "DRAM"))
            own.append(_region_of(pads))
        backends = [(backend.name, backend.as_parameters()) for backend in chosen.backends]
        self._port = port_factory(name, backends, progress_thread=chosen.progress_thread)
        self._memory = MemoryTable(self._port)
        try:
            self._memory.register([*own, *regions])
        except AgentError:
            self._port.close()
            raise
        self._handles = Handles(self._port, on_idle=lambda peer: self._peers.retire(peer))  # noqa: PLW0108 - made below
        self._peers = PeerTable(self._port, self._memory, self._handles.last_look)
        self._words = WordReader(self._port, self._handles, self._fences.warm_up_words)
        self._checks = WordChecks(self._words, self._fences.pads, clock)
        self._transfers = TransferQueue(self._port, self._handles, self._checks, chosen, clock)
        self._shared_from = chosen.shared_from
        if pads is not None:
            self.polls = StreamPoller(self._port, self._words, pads, chosen, self._transfers.wiring.counts, clock)

    # ------------------------------------------------------------------------------------------------ this endpoint

    @property
    def fence(self) -> FenceLocation:
        """(address, device, word count) of this rank's fence array, for peers."""
        return self._fences.location

    def agent_metadata(self) -> bytes:
        """Return this agent's metadata for peers, with a checksum trailer that NIXL itself ignores."""
        self._refuse_closed()
        return add_checksum(self._port.agent_metadata())

    def write_fence(self, slot: int, generation: int) -> None:
        """Store `generation` in this rank's fence word `slot`; consumers see it at once. Any thread.

        Raises:
            AgentError: `bad-fence`; `agent-closed` once `close` has voided all words.
        """
        self._fences.write(slot, generation)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise AgentError("agent-closed", f"agent {self.name!r} was closed")

    # --------------------------------------------------------------------------------------------------------- peers

    def add_peer(self, spec: PeerSpec) -> None:
        """Register a peer rank and start connecting to it.

        Raises:
            AgentError: `peer-known`, `agent-name`, `metadata-damaged`, `metadata-rejected`, `bad-rows`, `rows-unregistered`,
                `peer-rows-unregistered`, `bad-fence`; nothing is kept then.
        """
        self._refuse_closed()
        demand("spec", spec, PeerSpec)
        for squatter in self._peers.squatters_of(spec):
            self.remove_peer(squatter)
        peer = self._peers.add(spec)
        if self._options.wire_up and peer.touch is not None:
            self._words.warm_up(peer, peer.touch)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; its waiting transfers fail with `peer-removed`, and posted ones go to quarantine.

        NIXL keeps the peer's agent loaded, in case the peer returns.

        Raises:
            AgentError: `unknown-peer`.
        """
        self._refuse_closed()
        known = self._peers.get(peer)
        self._transfers.end_peer(known)
        if self.polls is not None:
            self.polls.forget(known, "peer-removed", f"peer {peer!r} was removed or replaced")
        self._checks.close(known)
        self._peers.remove(known)

    def has_peer(self, peer: str) -> bool:
        """Return whether `peer` can be used."""
        demand("peer", peer, str)
        return peer in self._peers.by_key

    def peers(self) -> Mapping[str, Mapping[str, object]]:
        """Return the state of every peer: agent name, connected, outstanding handles."""
        names = ("agent_name", "is_connected", "outstanding")
        return {key: {name: getattr(peer, name) for name in names} for key, peer in self._peers.by_key.items()}

    def send_notification(self, peer: str, payload: bytes) -> bool:
        """Send `payload` to a peer; False if it cannot be sent.

        Raises:
            AgentError: `unknown-peer`.
        """
        self._refuse_closed()
        demand("payload", payload, bytes)
        name = self._peers.get(peer).agent_name
        try:
            self._port.send_notification(name, payload)
        except AgentError:
            return False
        return True

    # ----------------------------------------------------------------------------------------------------- transfers

    def post_read(
        self,
        transfer_id: str,
        peer: str,
        local_indices: Indices,
        peer_indices: Indices,
        *,
        notification: bytes = b"",
        deadline_s: float = 30.0,
        fence: tuple[int, int] | None = None,
    ) -> None:
        """Queue a read of a peer's rows into ours. A refusal, even for an index out of range, is a failed result.

        Args:
            transfer_id: Name of the transfer, unique among those that have not ended.
            peer: The peer's key.
            local_indices: Our rows to fill, int32 of shape (n,); see `PeerSpec` for the rows.
            peer_indices: The peer's rows to read, int32 of the same length: row `peer_indices[i]` goes to `local_indices[i]`.
            notification: Bytes for the peer once the data has arrived and its fence has held; none if empty.
            deadline_s: Seconds from now after which the read ends with `timed-out`.
            fence: (slot, generation) to verify after the data; None for data that needs no proof.

        Raises:
            AgentError: `duplicate-transfer`, `agent-closed`.
        """
        self.submit(TransferOrder(transfer_id, peer, local_indices, peer_indices, notification, deadline_s, fence))

    def probe(self, transfer_id: str, peer: str, *, deadline_s: float) -> None:
        """Read one word of a peer, whatever its value, to see whether the peer answers. A result reports the end.

        `done`: the peer's memory can be read. `failed` with `peer-disconnected`: its process is gone. `timed-out`: no answer in
        time. Over CMA the kernel answers even for a stopped process.

        Raises:
            AgentError: `duplicate-transfer`, `agent-closed`.
        """
        self.submit(
            TransferOrder(transfer_id, peer, _NO_INDICES, _NO_INDICES, deadline_s=deadline_s, operation="probe")
        )

    def submit(self, order: TransferOrder) -> None:
        """Accept a transfer, or report its refusal as a failed result; only a duplicate id raises.

        Raises:
            AgentError: `duplicate-transfer`, `agent-closed`.
        """
        demand("order", order, TransferOrder)
        try:
            if self.refusal is not None:
                raise self.refusal
            self.post(order)
        except AgentError as error:
            if error.code in ("duplicate-transfer", "agent-closed"):
                raise
            self._transfers.report(
                order, TransferResult(order.transfer_id, order.peer, "failed", error.code, error.message)
            )

    def post(self, order: TransferOrder) -> None:
        """Accept a transfer; `take_results` reports its end.

        Raises:
            AgentError: `unknown-peer`, `bad-indices`, `length-mismatch`, `bad-fence`, `bad-options`,
                `duplicate-transfer`, `queue-full`, `quarantine-full`; nothing is changed then.
        """
        self._refuse_closed()
        peer = self._peers.get(order.peer)
        self._admit(order, peer)
        parts = split_into_parts(
            peer,
            order.local_indices,
            order.peer_indices,
            chunk_rows=self._options.chunk_rows,
            shared_from=self._shared_from,
        )
        if len(parts) > 1:  # a long one: its parts hold sorted copies, of 8 MB for a million descriptors
            order = replace(order, local_indices=_NO_INDICES, peer_indices=_NO_INDICES)
        self._transfers.add(Transfer(order, peer, parts, self._transfers.wiring))

    def _admit(self, order: TransferOrder, peer: Peer) -> None:
        """Refuse an order that cannot be served now."""
        options, live, transfer_id = self._options, self._transfers.live, order.transfer_id
        if transfer_id in live or transfer_id in self._handles.held:
            raise AgentError("duplicate-transfer", f"transfer id {transfer_id!r} is in progress or in quarantine")
        if len(live) >= options.max_queued and (waiting := self._transfers.waiting_count) >= options.max_queued:
            raise AgentError("queue-full", f"{waiting} transfers wait already; let some end first")
        held_count = self._handles.held_of[peer.key]
        if held_count >= options.max_quarantined_per_peer:
            raise AgentError(
                "quarantine-full",
                f"{held_count} unfinished transfers of peer {peer.key!r}, or of a former peer under its key, are in "
                "quarantine; a process of it is probably stopped: wait until they end",
                peer=peer.key,
            )
        is_probe = order.operation == "probe"
        if not order.deadline_s > 0 or not (is_probe or order.operation == "read"):
            raise AgentError(
                "bad-options",
                f"transfer {transfer_id!r} has deadline {order.deadline_s} s and operation {order.operation!r}; "
                "needed are a positive time, and read or probe",
            )
        if is_probe and (len(order.local_indices) or len(order.peer_indices)):
            raise AgentError("bad-options", f"probe {transfer_id!r} names pages; it reads one word of its own choice")
        if is_probe and peer.touch is None:
            raise AgentError("bad-rows", f"peer {peer.key!r} has no rows and no fence, so there is nothing to read")
        if order.fence is None:
            return
        slot, generation = order.fence
        words = 0 if peer.fence is None else peer.fence[2]
        if is_probe or not 0 <= slot < words or not 0 <= generation < CLOSED_GENERATION:
            raise AgentError(
                "bad-fence",
                f"transfer {transfer_id!r} names fence slot {slot} and generation {generation}, peer {peer.key!r} has {words} "
                "words, generations are 0 to 2**64-2, and only reads are fenced",
                peer=peer.key,
            )

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer early; return False if it is not in progress. Parts on the wire go to quarantine."""
        demand("transfer_id", transfer_id, str)
        transfer = self._transfers.live.get(transfer_id)
        if transfer is None:
            return False
        transfer.end("cancelled", "cancelled", "cancelled by the caller")
        return True

    def watch_stream(self, peer: str, slot: int, listener: StreamListener, *, tokens: int = 0) -> StreamWatch:
        """Start polling a stream slot of a peer; `listener` receives its progress, and the tables that the watch requests.

        Args:
            peer: The peer's key.
            slot: The peer's slot.
            listener: Receives progress, table entries and the end of the watch.
            tokens: Progress that the peer will reach, 0 if unknown; near the expected end of its last step it is polled often.

        Raises:
            AgentError: `unknown-peer`; `bad-streams` without stream memory on either side, or for a slot that does not exist;
                `peer-rows-unregistered`.
        """
        demand_ints("slot and tokens", (slot, tokens), 2)
        known = self._peers.get(peer)
        if self.polls is None:
            raise AgentError("bad-streams", "this agent (option stream_slots) has no stream memory", peer=peer)
        return self.polls.watch(known, slot, listener, tokens=tokens)

    def advance(self) -> bool:
        """Do one turn of posting and polling; return True if anything progressed."""
        moved = self._transfers.advance()
        now_s = self._clock()
        if self.polls is not None:
            moved = self.polls.advance(now_s) or moved
        return self._handles.poll(now_s) or moved

    def take_results(self) -> list[TransferResult]:
        """Return the results since the last call, in the order in which the transfers ended."""
        taken, self._transfers.results = self._transfers.results, []
        return taken

    def take_quiet(self) -> list[str]:
        """Return ids of transfers whose local memory left quarantine since the last call."""
        taken, self._transfers.wiring.quiet = self._transfers.wiring.quiet, []
        return taken

    def take_notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return the notifications received since the last call, as (agent name of the peer, payload)."""
        try:
            return self._port.notifications()
        except AgentError:
            return ()  # the next call tries again

    # --------------------------------------------------------------------------------------------------- observation

    @property
    def is_busy(self) -> bool:
        """Whether something is queued or on the wire; quarantine does not count."""
        return bool(self._transfers.live or self._handles.watched)

    @property
    def has_work(self) -> bool:
        """Whether anything at all is to be polled, streams included, or to be taken."""
        transfers = self._transfers  # as `is_busy`, without its call: a step asks this for each read
        is_polled = transfers.live or self._handles.watched or self.has_leftovers
        has_watches = self.polls is not None and self.polls.watch_count > 0
        return bool(is_polled or has_watches or transfers.results or transfers.wiring.quiet)

    @property
    def waiting_rows(self) -> int:
        """Number of descriptors that are queued to be posted."""
        return self._transfers.waiting_rows

    @property
    def is_awaited(self) -> bool:
        """Whether something is queued or on the wire that is neither a probe nor a leftover."""
        return (
            any(transfer.order.operation != "probe" for transfer in self._transfers.live.values())
            or any(not read.is_late for read in self._handles.watched)
            or (self.polls is not None and self.polls.is_on_wire)
        )

    @property
    def has_leftovers(self) -> bool:
        """Whether something on the wire is to be polled although no caller waits for it.

        This is quarantine, a read into one of our own words that is older than a second, or a poll of a peer without watches.
        """
        return (
            bool(self._handles.held)
            or any(read.is_late for read in self._handles.watched)
            or (self.polls is not None and self.polls.has_strays)
        )

    def stalls(self) -> Sequence[StallEntry]:
        """Return the transfers on the wire without progress for `stall_after_s`."""
        return self._transfers.stalls()

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return the transfers in quarantine, oldest first."""
        return self._handles.entries()

    def statistics(self) -> Mapping[str, float]:
        """Return counters, recent times and gauges in one flat mapping."""
        return self.figures().summary()

    def figures(self) -> Figures:
        """Return counters, gauges and times of this moment, which another thread can summarise."""
        return self._transfers.figures(
            {
                **self._peers.gauges(),
                "fence_pads_free": self._fences.pads.free_count + self._checks.kept_count,
                "streams_watched": 0 if self.polls is None else self.polls.watch_count,
                "stream_pads_free": 0 if self.polls is None else self.polls.free_pads,
            }
        )

    # --------------------------------------------------------------------------------------------------------- close

    def end_all(self, code: str = "cancelled", message: str = "the agent is being closed") -> None:
        """End every transfer in progress; those on the wire go to quarantine."""
        outcome: Outcome = "cancelled" if code == "cancelled" else "failed"
        self._transfers.end_all(outcome, code, message)
        if self.polls is not None:
            self.polls.end_all("agent-closed" if code == "cancelled" else code, message)

    def close(self) -> None:
        """Close in order: transfers, prepared lists, peers, registrations. Idempotent.

        Every fence word is voided first, so that a consumer that is still reading rejects the data. Transfers on the wire get
        `close_wait_s` to end, since UCX may abort the process when it is destroyed in the middle of a copy.
        """
        if self._is_closed:
            return
        self._fences.void_all()
        if self.stream_words is not None:
            self.stream_words.void_all()
        self.end_all("cancelled", "the agent was closed")
        self._is_closed = True
        self._checks.close()
        self._handles.close(self._options.close_wait_s)
        self._peers.close()
        self._memory.close()
        self._port.close()
