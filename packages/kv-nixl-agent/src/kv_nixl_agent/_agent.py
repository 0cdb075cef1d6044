"""`TransferAgent`: one NIXL agent with its memory, peers and transfers, driven by whoever owns it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

import numpy as np

from ._bindings import open_nixl
from ._custody import Stray
from ._engine import TransferEngine
from ._errors import AgentError
from ._memory import MemoryTable
from ._metadata import seal_metadata
from ._options import AgentOptions
from ._peers import Peer, PeerTable
from ._rows import RowTable
from ._statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._port import MemoryKind, PortFactory, PortFeatures
    from ._statistics import Snapshot
    from ._values import MemoryRegion, QuarantineEntry, StallEntry, TransferOrder, TransferResult

__all__ = ["TransferAgent"]

_WARM_UP_BYTES = 8
_CLOSE_POLL_S = 1e-3


@final
class TransferAgent:
    """One rank's NIXL endpoint. Not thread-safe: one thread owns it and calls `advance` again and again.

    Args:
        name: NIXL agent name, unique among the agents that meet.
        regions: Memory to register: (address, length_bytes, device, kind). The caller keeps it alive.
        options: See `AgentOptions`.
        port_factory: Makes the NIXL port; a fake in tests.
        clock: Monotonic seconds.

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
        self._statistics = Statistics()
        backends = [(backend.name, backend.as_parameters()) for backend in self._options.backends]
        self._port = port_factory(
            name, backends, sync_mode=self._options.sync_mode, progress_thread=self._options.progress_thread
        )
        try:
            self._memory = MemoryTable(self._port, regions, fence_words=self._options.fence_words)
        except AgentError:
            self._port.close()
            raise
        self._peers = PeerTable(
            self._port,
            self._memory,
            max_prepared=self._options.max_prepared_peers,
            is_seal_required=self._options.is_seal_required,
        )
        self._engine = TransferEngine(self._port, self._memory, self._peers, self._options, self._statistics, clock)
        self._generation = 1

    # ------------------------------------------------------------------------------------------------ this endpoint

    @property
    def features(self) -> PortFeatures:
        """What the NIXL underneath can do."""
        self._refuse_closed()
        return self._port.features

    @property
    def fence(self) -> tuple[int, int, int]:
        """(address, device, word count) of this rank's fence array, for peers."""
        return self._memory.fences.location

    @property
    def generation(self) -> int:
        """Starts at 1 and grows whenever the registered memory changes, so that peers know to fetch metadata again."""
        return self._generation

    def agent_metadata(self) -> bytes:
        """Return the description of this agent for peers, with a checksum trailer that NIXL itself ignores."""
        self._refuse_closed()
        return seal_metadata(self._port.agent_metadata())

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register further memory; peers need fresh metadata afterwards.

        Raises:
            AgentError: `bad-region`, `registration-failed`; nothing is registered then.
        """
        self._refuse_closed()
        self._memory.register(regions)
        self._generation += 1

    def write_fence(self, slot: int, generation: int) -> None:
        """Store `generation` in this rank's fence word `slot`; consumers see it at once.

        Raises:
            AgentError: `bad-fence`.
        """
        self._refuse_closed()
        self._memory.fences.write(slot, generation)

    def read_fence(self, slot: int) -> int:
        """Return the generation in this rank's fence word `slot`."""
        return self._memory.fences.read(slot)

    # --------------------------------------------------------------------------------------------------------- peers

    def add_peer(
        self,
        peer: str,
        agent_metadata: bytes,
        *,
        local_rows: object,
        peer_rows: object,
        memory_kind: MemoryKind | Sequence[MemoryKind] = "DRAM",
        local_kind: MemoryKind | Sequence[MemoryKind] | None = None,
        fence: tuple[int, int, int] | None = None,
    ) -> None:
        """Know a peer rank under the key `peer` and begin to connect to it.

        Args:
            peer: Key of the peer in orders and results.
            agent_metadata: From the peer's `agent_metadata()`, or NIXL's own blob.
            local_rows: uint64 (n, 5) over registered local memory.
            peer_rows: uint64 (m, 5) over the peer's registered memory.
            memory_kind: Kind of the peer's rows, one for all or one per row.
            local_kind: Kind of the local rows; `memory_kind` if it is one for all and this is None.
            fence: (address, device, word count) of the peer's fence array; None for a peer without.

        Raises:
            AgentError: `peer-known`, `metadata-damaged`, `metadata-rejected`, `bad-rows`, `rows-unregistered`,
                `peer-rows-unregistered`, `bad-fence`; nothing is kept then.
        """
        self._refuse_closed()
        if local_kind is None:
            if not isinstance(memory_kind, str):
                raise AgentError("bad-rows", "with one memory kind per peer row, the local kinds must be given too")
            local_kind = memory_kind
        added = self._peers.add(
            peer, agent_metadata, RowTable(local_rows, local_kind), RowTable(peer_rows, memory_kind), fence
        )
        if self._options.wire_up:
            self._wire_up(added)

    def replace_peer(
        self,
        peer: str,
        agent_metadata: bytes,
        *,
        local_rows: object,
        peer_rows: object,
        memory_kind: MemoryKind | Sequence[MemoryKind] = "DRAM",
        local_kind: MemoryKind | Sequence[MemoryKind] | None = None,
        fence: tuple[int, int, int] | None = None,
    ) -> None:
        """Know a restarted or re-registered peer under its old key; its transfers on their way fail.

        Raises:
            AgentError: as `add_peer`; the old peer is gone then, too.
        """
        if peer in self._peers:
            self.remove_peer(peer)
        self.add_peer(
            peer,
            agent_metadata,
            local_rows=local_rows,
            peer_rows=peer_rows,
            memory_kind=memory_kind,
            local_kind=local_kind,
            fence=fence,
        )

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; its transfers on their way fail with `peer-removed`, and those posted go to quarantine.

        Raises:
            AgentError: `unknown-peer`.
        """
        self._refuse_closed()
        self._engine.peer_removed(self._peers.get(peer))
        self._peers.remove(peer)

    def has_peer(self, peer: str) -> bool:
        """Return whether `peer` can be used."""
        return peer in self._peers

    def peers(self) -> Mapping[str, Mapping[str, object]]:
        """Return a snapshot of every peer: agent name, wired, connected, prepared, outstanding handles."""
        return {
            one.key: {
                "agent_name": one.agent_name,
                "is_wired": one.is_wired,
                "is_connected": one.is_connected,
                "is_prepared": one.is_prepared,
                "outstanding": one.outstanding,
                "descriptors": one.rows.count,
                "has_fence": one.fence is not None,
            }
            for one in self._peers.all
        }

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

    # ----------------------------------------------------------------------------------------------------- transfers

    def post(self, order: TransferOrder) -> None:
        """Accept a transfer; its end comes with `take_results`.

        Raises:
            AgentError: `unknown-peer`, `bad-indices`, `length-mismatch`, `bad-fence`, `duplicate-transfer`,
                `queue-full`, `quarantine-full`; nothing is changed then.
        """
        self._refuse_closed()
        self._engine.post(order)

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
            self._engine.refuse(order, error)

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer early; False if it is not in progress. What is on the wire goes to quarantine."""
        return self._engine.cancel(transfer_id)

    def advance(self) -> bool:
        """Do one turn of posting and polling; True if anything moved."""
        self._refuse_closed()
        return self._engine.advance()

    def take_results(self) -> list[TransferResult]:
        """Return the results since the last call, in the order of their ends."""
        taken = list(self._engine.results)
        self._engine.results.clear()
        return taken

    def take_quiet(self) -> list[str]:
        """Return ids of transfers whose local memory left quarantine since the last call."""
        taken = list(self._engine.quiet)
        self._engine.quiet.clear()
        return taken

    def take_notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return the notifications that came in since the last call, as (agent name of the peer, payload)."""
        self._refuse_closed()
        try:
            arrived = self._port.notifications()
        except AgentError:
            self._statistics.count("notification_poll_errors")
            return ()
        if arrived:
            self._statistics.count("notifications_received", len(arrived))
        return arrived

    @property
    def is_busy(self) -> bool:
        """Whether something is queued or on the wire; quarantine does not count."""
        return self._engine.is_busy

    @property
    def has_quarantine(self) -> bool:
        """Whether quarantine holds anything."""
        return len(self._engine.quarantine) > 0

    def declare_quiet(self, transfer_id: str) -> bool:
        """End the quarantine of a transfer on the caller's word that nothing can write any more; False if not held.

        For a peer process that is known to be gone, where NIXL itself cannot tell: it loses track of a transfer when a
        second agent of the peer's name is added. `take_quiet` reports the transfer as usual.
        """
        self._refuse_closed()
        return self._engine.declare_quiet(transfer_id)

    def stalls(self) -> Sequence[StallEntry]:
        """Return the transfers on the wire that do not get on."""
        return self._engine.stalls.entries()

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return what quarantine holds, oldest first."""
        return self._engine.quarantine.entries()

    def statistics(self) -> Mapping[str, float]:
        """Return counters, recent times and gauges in one flat mapping."""
        return self.snapshot().summary()

    def snapshot(self) -> Snapshot:
        """Return the same for another thread to work out."""
        return self._statistics.snapshot({**self._engine.gauges(), **self._peers.statistics()})

    # --------------------------------------------------------------------------------------------------------- close

    def end_all(self, code: str = "cancelled", message: str = "the agent is being closed") -> None:
        """End every transfer in progress; those on the wire go to quarantine."""
        self._engine.end_all(code, message)

    def close(self) -> None:
        """Close in order: transfers, prepared lists, peers, registrations. Idempotent.

        Every fence word is voided first, so that a consumer that reads on cannot take its data for good. What is on the
        wire gets `close_wait_s` to end, since UCX may abort the process when it is destroyed in the middle of a copy.
        """
        if self._is_closed:
            return
        self._memory.fences.void_all()
        self._engine.end_all("cancelled", "the agent was closed")
        self._is_closed = True
        self._let_loose_ends_end()
        self._engine.close()
        self._peers.close()
        self._memory.deregister_all()
        self._port.close()

    def _let_loose_ends_end(self) -> None:
        engine, until_s = self._engine, time.monotonic() + self._options.close_wait_s
        while (engine.custody.stray_count or engine.quarantine.is_pollable) and time.monotonic() < until_s:
            if not engine.look_after(at_once=True):
                time.sleep(_CLOSE_POLL_S)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise AgentError("agent-closed", f"agent {self.name!r} was closed")

    def _wire_up(self, peer: Peer) -> None:
        """Connect by a tiny read, the only thing that does it ahead of the first transfer."""
        kind, group = next(iter(peer.rows.groups.items()))
        first = group[0]
        length = min(_WARM_UP_BYTES, int(first[1]))
        row = np.array([[first[0], length, first[2], length, 1]], dtype=np.uint64)
        mine = np.array([[self._memory.fences.warm_up_address, length, 0, length, 1]], dtype=np.uint64)
        zero = np.zeros(1, dtype=np.int32)
        lists: list[object] = []

        def on_end(failure: AgentError | None) -> None:
            peer.is_wired = failure is None
            peer.is_connected = failure is None or failure.code != "nixl-disconnected"
            self._statistics.count("warm_ups_done" if failure is None else "warm_ups_failed")
            for prepared in lists:
                self._port.release_prepared(prepared)

        try:
            lists.append(self._port.prepare(None, "DRAM", mine))
            lists.append(self._port.prepare(peer.agent_name, kind, row))
            handle = self._port.make("read", lists[0], zero, lists[1], zero, b"")
        except AgentError as error:
            on_end(error)
            return
        self._engine.custody.posted(peer)
        try:
            progress = self._port.post(handle)
        except AgentError as error:
            on_end(error)
            self._engine.custody.over(peer, handle)
            return
        if progress == "done":
            on_end(None)
            self._engine.custody.over(peer, handle)
        else:
            self._engine.custody.watch(Stray(peer, handle, on_end))
