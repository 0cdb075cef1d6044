"""`TransferAgent`: one NIXL agent with its memory, peers and transfers, driven by its owner.

Theory of operation. An order becomes a `Transfer` with one or more *parts*, each of which is one NIXL handle. The owner calls
`advance` repeatedly. Each call posts parts, polls everything on the wire, ends transfers past their deadline (`TransferTable`),
and polls the handles that no transfer waits for (`Handles`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from ._admission import admit
from ._bindings import open_nixl
from ._errors import AgentError
from ._handles import Handles
from ._memory import MemoryTable
from ._metadata import add_checksum
from ._options import AgentOptions
from ._parts import split_into_parts
from ._peers import PeerTable
from ._statistics import Statistics, Tracer
from ._stream_polls import StreamPoller
from ._stream_reads import StripReader
from ._transfer import Transfer, Wiring
from ._transfer_table import TransferTable
from ._values import TransferResult
from ._word_reads import WordReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._peer import Peer
    from ._port import PortFactory, PortFeatures
    from ._statistics import Snapshot
    from ._stream_words import StreamWords
    from ._values import (
        FenceLocation,
        MemoryRegion,
        Outcome,
        PeerDescription,
        QuarantineEntry,
        StallEntry,
        TransferOrder,
    )

__all__ = ["TransferAgent"]


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
        self._options = (options or AgentOptions()).for_regions(regions)
        self.name = name
        self._is_closed = False
        self._clock = clock
        self._generation = 1
        self._statistics = Statistics()
        backends = [(backend.name, backend.as_parameters()) for backend in self._options.backends]
        self._port = port_factory(name, backends, progress_thread=self._options.progress_thread)
        try:
            self._memory = MemoryTable(self._port, regions, self._options)
        except AgentError:
            self._port.close()
            raise
        trace = Tracer(self._options.trace, self._statistics, clock)
        self._transfers = TransferTable(self._options, self._statistics, trace, clock)
        self._handles = Handles(
            self._port,
            self._statistics,
            on_idle=self._retire,
            on_quiet=self._transfers.note_quiet,
        )
        self._peers = PeerTable(self._port, self._memory, self._handles.last_look)
        self._words = WordReader(self._port, self._memory.fences, self._handles, clock)
        pads = self._memory.pads
        reader = None if pads is None else StripReader(self._port, pads, self._handles)
        self.polls = StreamPoller(reader, self._options, self._statistics, self._peers.get, clock)
        """Watches of peers' streams."""
        self._wiring = Wiring(
            self._port,
            self._handles,
            self._words,
            self._transfers.schedule,
            self._statistics,
            trace,
            clock,
            self._transfers.note_end,
        )

    # ------------------------------------------------------------------------------------------------ this endpoint

    @property
    def features(self) -> PortFeatures:
        """Features of the installed NIXL."""
        self._refuse_closed()
        return self._port.features

    @property
    def fence(self) -> FenceLocation:
        """(address, device, word count) of this rank's fence array, for peers."""
        return self._memory.fences.location

    @property
    def stream_words(self) -> StreamWords | None:
        """This rank's stream memory, writable from any thread; None without stream slots."""
        return self._memory.streams

    @property
    def generation(self) -> int:
        """Number that starts at 1 and grows whenever the regions change; peers then need fresh metadata."""
        return self._generation

    def agent_metadata(self) -> bytes:
        """Return this agent's metadata for peers, with a checksum trailer that NIXL itself ignores."""
        self._refuse_closed()
        return add_checksum(self._port.agent_metadata())

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register further memory; peers need fresh metadata afterwards.

        Raises:
            AgentError: `bad-region`, `registration-failed`; nothing is registered then.
        """
        self._refuse_closed()
        self._memory.register(regions)
        self._generation += 1

    def write_fence(self, slot: int, generation: int) -> None:
        """Store `generation` in this rank's fence word `slot`; consumers see it at once. Any thread.

        Raises:
            AgentError: `bad-fence`; `agent-closed` once `close` has voided all words.
        """
        self._memory.fences.write(slot, generation)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise AgentError("agent-closed", f"agent {self.name!r} was closed")

    # --------------------------------------------------------------------------------------------------------- peers

    def add_peer(self, spec: PeerDescription) -> None:
        """Register a peer rank and start connecting to it.

        Args:
            spec: A `PeerSpec`, or any value with its members.

        Raises:
            AgentError: `peer-known`, `agent-name`, `metadata-damaged`, `metadata-rejected`, `bad-rows`, `rows-unregistered`,
                `peer-rows-unregistered`, `bad-fence`; nothing is kept then.
        """
        self._refuse_closed()
        for squatter in self._peers.squatters_of(spec):
            self.remove_peer(squatter)
        peer = self._peers.add(spec)
        if self._options.wire_up and peer.touch_row is not None:
            self._words.warm_up(peer, lambda failure: self._note_warm_up(peer, failure))

    def replace_peer(self, spec: PeerDescription) -> None:
        """Register a restarted or re-registered peer whose key may be in use; transfers of the previous peer fail.

        Raises:
            AgentError: as `add_peer`; the previous peer is then removed, too.
        """
        if spec.key in self._peers:
            self.remove_peer(spec.key)
        self.add_peer(spec)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; its waiting transfers fail with `peer-removed`, and posted ones go to quarantine.

        NIXL keeps the peer's agent loaded, in case the peer returns.

        Raises:
            AgentError: `unknown-peer`.
        """
        self._refuse_closed()
        known = self._peers.get(peer)
        self._transfers.end_peer(known)
        self.polls.forget(known, "peer-removed", f"peer {peer!r} was removed or replaced")
        self._peers.remove(peer)

    def has_peer(self, peer: str) -> bool:
        """Return whether `peer` can be used."""
        return peer in self._peers

    def peers(self) -> Mapping[str, Mapping[str, object]]:
        """Return the state of every peer: agent name, wired, connected, prepared, outstanding handles."""
        return {one.key: one.describe() for one in self._peers.all}

    def send_notification(self, peer: str, payload: bytes) -> bool:
        """Send `payload` to a peer; False if it cannot be sent.

        Raises:
            AgentError: `unknown-peer`.
        """
        self._refuse_closed()
        known = self._peers.get(peer)
        try:
            self._port.send_notification(known.agent_name, payload)
        except AgentError:
            self._statistics.count("notifications_failed")
            return False
        self._statistics.count("notifications_sent")
        return True

    def _retire(self, peer: Peer) -> None:
        self._peers.retire(peer)

    def _note_warm_up(self, peer: Peer, failure: AgentError | None) -> None:
        peer.is_wired = failure is None
        peer.is_connected = failure is None or failure.code != "nixl-disconnected"
        self._statistics.count("warm_ups_done" if failure is None else "warm_ups_failed")

    # ----------------------------------------------------------------------------------------------------- transfers

    def post(self, order: TransferOrder) -> None:
        """Accept a transfer; `take_results` reports its end.

        Raises:
            AgentError: `unknown-peer`, `bad-indices`, `length-mismatch`, `bad-fence`, `bad-options`,
                `duplicate-transfer`, `queue-full`, `quarantine-full`; nothing is changed then.
        """
        self._refuse_closed()
        peer = self._peers.get(order.peer)
        transfer_id = order.transfer_id
        if self._transfers.get(transfer_id) is not None or self._handles.holds(transfer_id):
            raise AgentError("duplicate-transfer", f"transfer id {transfer_id!r} is in progress or in quarantine")
        waiting, held = self._transfers.schedule.count, self._handles.held_for(peer.key)
        admit(order, peer, self._options, waiting=waiting, held=held)
        parts = split_into_parts(peer, order.local_indices, order.peer_indices, self._options)
        self._transfers.add(Transfer(order, peer, parts, self._wiring))

    def submit(self, order: TransferOrder) -> None:
        """Accept a transfer, or report its refusal as a failed result; only a duplicate id raises.

        Raises:
            AgentError: `duplicate-transfer`, `agent-closed`.
        """
        try:
            self.post(order)
        except AgentError as error:
            if error.code in ("duplicate-transfer", "agent-closed"):
                raise
            self.refuse(order, error)

    def refuse(self, order: TransferOrder, error: AgentError) -> None:
        """Report a refused order as a failed transfer."""
        self._transfers.report(TransferResult(order.transfer_id, order.peer, "failed", error.code, str(error)))

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer early; return False if it is not in progress. Parts on the wire go to quarantine."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        transfer.end("cancelled", "cancelled", "cancelled by the caller")
        return True

    def advance(self) -> bool:
        """Do one turn of posting and polling; return True if anything progressed."""
        self._refuse_closed()
        moved = self._transfers.launch()
        moved = self._transfers.poll() or moved
        now_s = self._clock()
        self._transfers.end_late(now_s)
        moved = self.polls.advance(now_s) or moved
        return self._handles.poll(now_s) or moved

    def take_results(self) -> list[TransferResult]:
        """Return the results since the last call, in the order in which the transfers ended."""
        taken = list(self._transfers.results)
        self._transfers.results.clear()
        return taken

    def take_quiet(self) -> list[str]:
        """Return ids of transfers whose local memory left quarantine since the last call."""
        taken = list(self._transfers.quiet)
        self._transfers.quiet.clear()
        return taken

    def take_notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return the notifications received since the last call, as (agent name of the peer, payload)."""
        self._refuse_closed()
        try:
            arrived = self._port.notifications()
        except AgentError:
            self._statistics.count("notification_poll_errors")
            return ()
        if arrived:
            self._statistics.count("notifications_received", len(arrived))
        return arrived

    # --------------------------------------------------------------------------------------------------- observation

    @property
    def is_busy(self) -> bool:
        """Whether something is queued or on the wire; quarantine does not count."""
        return self._transfers.is_busy or self._handles.watched_count > 0

    @property
    def is_awaited(self) -> bool:
        """Whether something is queued or on the wire that is neither a probe nor a leftover."""
        is_on_wire = self._handles.awaited_count > 0 or self.polls.is_on_wire
        return not self._transfers.is_only_probing or is_on_wire

    @property
    def has_leftovers(self) -> bool:
        """Whether something on the wire is to be polled although nobody waits for it.

        This is quarantine, a read into one of our own words that is older than a second, or a poll of a peer without watches.
        """
        return self.has_quarantine or self._handles.has_late or self.polls.has_strays

    @property
    def has_quarantine(self) -> bool:
        """Whether any transfer is in quarantine."""
        return self._handles.held_count > 0

    def stalls(self) -> Sequence[StallEntry]:
        """Return the transfers on the wire without progress."""
        return self._transfers.stalls.entries()

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return the transfers in quarantine, oldest first."""
        return self._handles.entries()

    def statistics(self) -> Mapping[str, float]:
        """Return counters, recent times and gauges in one flat mapping."""
        return self.snapshot().summary()

    def snapshot(self) -> Snapshot:
        """Return counters and times as a snapshot, which another thread can summarise."""
        own = {"scratch_words_free": float(self._memory.fences.free_scratch_words), **self.polls.gauges()}
        return self._statistics.snapshot(
            {**self._transfers.gauges(), **self._handles.gauges(), **self._peers.statistics(), **own}
        )

    # --------------------------------------------------------------------------------------------------------- close

    def end_all(self, code: str = "cancelled", message: str = "the agent is being closed") -> None:
        """End every transfer in progress; those on the wire go to quarantine."""
        outcome: Outcome = "cancelled" if code == "cancelled" else "failed"
        self._transfers.end_all(outcome, code, message)
        self.polls.end_all("agent-closed" if code == "cancelled" else code, message)

    def close(self) -> None:
        """Close in order: transfers, prepared lists, peers, registrations. Idempotent.

        Every fence word is voided first, so that a consumer that is still reading rejects the data. Transfers on the wire get
        `close_wait_s` to end, since UCX may abort the process when it is destroyed in the middle of a copy.
        """
        if self._is_closed:
            return
        self._memory.fences.void_all()
        if self._memory.streams is not None:
            self._memory.streams.void_all()
        self.end_all("cancelled", "the agent was closed")
        self._is_closed = True
        self._handles.close(self._options.close_wait_s)
        self._words.close()
        self._peers.close()
        self._memory.deregister_all()
        self._port.close()
