"""Quarantine: local memory that the wire may still write, although the transfer's result is out.

NIXL's release of an active transfer is best effort. Over TCP, data of a released transfer was seen to land seconds
later, even after the peer had been removed. So the handle of an unfinished transfer is kept and polled until NIXL
says done or disconnected, and only then are the pages reported quiet. Nothing else ends a quarantine, except the
closing of the agent (no worker is left that could write), and the removal of the peer where the caller promised
`is_quiet_on_release`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ._errors import AgentError
from ._values import QuarantineEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._peers import Peer
    from ._port import NixlPort
    from ._transfer import Part, Transfer

__all__ = ["Quarantine"]


@final
class Quarantine:
    """Unfinished handles of ended transfers."""

    def __init__(self, port: NixlPort, *, is_quiet_on_release: bool) -> None:
        self._port = port
        self._is_quiet_on_release = is_quiet_on_release
        self._held: dict[str, tuple[Transfer, float]] = {}
        self._by_peer: dict[Peer, int] = {}

    def __contains__(self, transfer_id: object) -> bool:
        return transfer_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_pollable(self) -> bool:
        """Whether anything is held that NIXL can still tell the end of."""
        return any(not transfer.peer.is_lost for transfer, _ in self._held.values())

    def count_of(self, peer: Peer) -> int:
        """Return how many transfers of `peer` are held."""
        return self._by_peer.get(peer, 0)

    def hold(self, transfer: Transfer, *, now_s: float) -> None:
        """Watch a transfer's active parts."""
        self._held[transfer.order.transfer_id] = (transfer, now_s)
        self._by_peer[transfer.peer] = self.count_of(transfer.peer) + 1

    def entries(self) -> Sequence[QuarantineEntry]:
        """Return what is held, oldest first."""
        return [
            QuarantineEntry(
                transfer_id,
                transfer.peer.key,
                since_s,
                sum(part.payload_bytes for part in transfer.active),
                next((part.last_error for part in transfer.active if part.last_error), ""),
            )
            for transfer_id, (transfer, since_s) in self._held.items()
        ]

    def poll(self, on_part_end: Callable[[Transfer, Part], None]) -> Sequence[Transfer]:
        """Ask for every held part; `on_part_end` releases one that ended. Returns transfers that are quiet now."""
        quiet: list[Transfer] = []
        for transfer_id, (transfer, _) in list(self._held.items()):
            for part in list(transfer.active):
                if self._has_ended(transfer, part):
                    transfer.active.remove(part)
                    on_part_end(transfer, part)
            if not transfer.active:
                self._let_go(transfer_id, transfer)
                quiet.append(transfer)
        return quiet

    def abandon(self, on_part_end: Callable[[Transfer, Part], None]) -> Sequence[Transfer]:
        """Let go of everything, for an agent that is being closed."""
        everything = [transfer for transfer, _ in self._held.values()]
        for transfer in everything:
            for part in transfer.active:
                on_part_end(transfer, part)
            transfer.active.clear()
        self._held.clear()
        self._by_peer.clear()
        return everything

    def declare_quiet(self, transfer_id: str, on_part_end: Callable[[Transfer, Part], None]) -> Transfer | None:
        """Let go of one transfer on the caller's word; None if it is not held."""
        held = self._held.get(transfer_id)
        if held is None:
            return None
        transfer = held[0]
        for part in transfer.active:
            on_part_end(transfer, part)
        transfer.active.clear()
        self._let_go(transfer_id, transfer)
        return transfer

    def _has_ended(self, transfer: Transfer, part: Part) -> bool:
        if transfer.peer.is_lost:
            part.last_error = "NIXL lost track of it when another agent of its peer's name was added"
            return self._is_quiet_on_release
        try:
            if self._port.check(part.handle) == "done":
                return True
        except AgentError as error:
            # Never posted: the error came before anything reached the wire.
            if error.code in ("nixl-disconnected", "nixl-not-posted"):
                return True
            part.last_error = f"{error.code}: {error}"
        return self._is_quiet_on_release and transfer.peer.is_removed

    def _let_go(self, transfer_id: str, transfer: Transfer) -> None:
        del self._held[transfer_id]
        left = self._by_peer[transfer.peer] - 1
        if left:
            self._by_peer[transfer.peer] = left
        else:
            del self._by_peer[transfer.peer]
