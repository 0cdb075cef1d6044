"""Handles that nobody waits for: strays are polled to their end, refused releases are tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ._errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._peers import Peer, PeerTable
    from ._port import Handle, NixlPort
    from ._statistics import Statistics

__all__ = ["Custody", "Stray"]


@final
class Stray:
    """A posted handle that touches no caller's memory: a warm-up, or a fence read of an ended transfer.

    `on_end` gets None when NIXL said done, or the error that ended it.
    """

    __slots__ = ("handle", "on_end", "peer")

    def __init__(self, peer: Peer, handle: Handle, on_end: Callable[[AgentError | None], None]) -> None:
        self.peer = peer
        self.handle = handle
        self.on_end = on_end


@final
class Custody:
    """Releases handles, and counts what is outstanding per peer."""

    def __init__(self, port: NixlPort, peers: PeerTable, statistics: Statistics) -> None:
        self._port = port
        self._peers = peers
        self._statistics = statistics
        self._strays: list[Stray] = []
        self._unreleased: list[Handle] = []

    @property
    def stray_count(self) -> int:
        """Strays that are still polled."""
        return len(self._strays)

    @property
    def unreleased_count(self) -> int:
        """Handles whose release NIXL refused so far."""
        return len(self._unreleased)

    def posted(self, peer: Peer) -> None:
        """Note that a handle was made for `peer`."""
        peer.outstanding += 1

    def over(self, peer: Peer, handle: Handle) -> None:
        """Release a handle that has ended; a refusal is kept and tried again."""
        if not self._is_released(handle):
            self._statistics.count("release_failures")
            self._unreleased.append(handle)
        peer.outstanding -= 1
        self._peers.retire(peer)

    def watch(self, stray: Stray) -> None:
        """Poll a handle, already counted by `posted`, to its end."""
        self._strays.append(stray)

    def poll(self) -> bool:
        """Ask for every stray; True if one ended."""
        ended = False
        for stray in list(self._strays):
            failure: AgentError | None = None
            try:
                if self._port.check(stray.handle) != "done":
                    continue
            except AgentError as error:
                failure = error
            self._strays.remove(stray)
            stray.on_end(failure)
            self.over(stray.peer, stray.handle)
            ended = True
        return ended

    def retry_releases(self) -> None:
        """Try the refused releases again."""
        if self._unreleased:
            self._unreleased = [handle for handle in self._unreleased if not self._is_released(handle)]

    def close(self) -> None:
        """Release everything, ended or not."""
        for stray in self._strays:
            stray.on_end(AgentError("agent-closed", "the agent was closed"))
            self.over(stray.peer, stray.handle)
        self._strays.clear()
        self.retry_releases()
        self._unreleased.clear()

    def _is_released(self, handle: Handle) -> bool:
        try:
            self._port.release(handle)
        except AgentError:
            return False
        return True
