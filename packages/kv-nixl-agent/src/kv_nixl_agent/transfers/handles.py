"""Owner of NIXL's transfer handles: counts them per peer, releases them, and keeps those that no transfer waits for.

NIXL's release of an active transfer is best effort. Over TCP, data of a released transfer was seen to land seconds later, even
after the peer had been removed. So a handle whose transfer has ended early is kept and polled, under one policy for all:

1. A handle is kept until nothing of it can reach the wire any more: NIXL reports done or disconnected, or it was never posted.
2. While it may write to the *caller's pages*, only the closing of the agent ends it otherwise (no worker is left that could
   write). That is *quarantine*; it is bounded and counted per peer key.
3. A handle that lands in *one of our own words* (a warm-up, or the fence read of a transfer that has ended) also ends after
   several errors in a row, since NIXL repeats an error for ever. Its word is marked as suspect and reused last.
4. It is released once. A release that NIXL refuses is tried again.

Quarantine, and a handle of the third kind once it is older than a second, is polled every millisecond at most, and does not keep
the thread awake: its peer is probably stopped, for minutes or for ever, and nobody waits for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.values import QuarantineEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, NixlPort
    from kv_nixl_agent.transfers.parts import Part

__all__ = ["Handles", "QUARANTINE_POLL_S", "has_left_the_wire", "was_rejected"]

QUARANTINE_POLL_S: Final = 1e-3
"""Shortest time between two polls of a handle that nobody waits for."""

_LATE_AFTER_S: Final = 1.0
_MAX_ERRORS_IN_A_ROW: Final = 8
_LAST_LOOK_S: Final = 20e-3

_REJECTIONS: Final = frozenset(
    {
        "nixl-disconnected",
        "nixl-invalid-param",
        "nixl-not-found",
        "nixl-mismatch",
        "nixl-not-allowed",
        "nixl-not-supported",
        "nixl-not-posted",
    }
)


def was_rejected(error: AgentError) -> bool:
    """Return whether an error of `make` or `post` was raised before anything reached the wire."""
    return error.code in _REJECTIONS


def has_left_the_wire(error: AgentError) -> bool:
    """Return whether this error of `check` means that the handle can write nothing any more."""
    return error.code in {"nixl-disconnected", "nixl-not-posted"}


@final
class _Watched:
    """A posted handle that lands in one of our own words. `on_end` gets None on success, or the error that ended the handle."""

    __slots__ = ("errors", "handle", "is_late", "on_end", "peer", "since_s")

    def __init__(self, peer: Peer, handle: Handle, on_end: Callable[[AgentError | None], None]) -> None:
        self.peer = peer
        self.handle = handle
        self.on_end = on_end
        self.errors = 0
        self.since_s: float | None = None
        self.is_late = False

    def note_poll(self, now_s: float) -> None:
        if self.since_s is None:
            self.since_s = now_s
        self.is_late = now_s - self.since_s > _LATE_AFTER_S


@final
class _Held:
    """A transfer that has ended with parts on the wire."""

    __slots__ = ("on_quiet", "parts", "peer", "since_s", "transfer_id")

    def __init__(
        self, transfer_id: str, peer: Peer, parts: list[Part], since_s: float, on_quiet: Callable[[], None]
    ) -> None:
        self.transfer_id = transfer_id
        self.peer = peer
        self.parts = parts
        self.since_s = since_s
        self.on_quiet = on_quiet


@final
class Handles:
    """All handles of one agent, from creation to release.

    Args:
        port: The NIXL agent.
        on_idle: Called with a removed peer once its last handle is released.
    """

    def __init__(self, port: NixlPort, *, on_idle: Callable[[Peer], None]) -> None:
        self._port = port
        self._on_idle = on_idle
        self._watched: list[_Watched] = []
        self._held: dict[str, _Held] = {}
        self._unreleased: list[Handle] = []
        self._next_poll_s = 0.0

    def release(self, peer: Peer, handle: Handle) -> None:
        """Release a handle that can write nothing any more."""
        if not self._is_released(handle):
            self._unreleased.append(handle)
        peer.outstanding -= 1
        if peer.is_removed and not peer.outstanding:
            self._on_idle(peer)

    def _is_released(self, handle: Handle) -> bool:
        try:
            self._port.release(handle)
        except AgentError:
            return False
        return True

    # --------------------------------------------------------------------------------------------------------- keeping

    def watch(self, peer: Peer, handle: Handle, on_end: Callable[[AgentError | None], None]) -> None:
        """Keep a handle that lands in one of our own words; when it has ended, call `on_end` and release it."""
        self._watched.append(_Watched(peer, handle, on_end))

    def hold(
        self, transfer_id: str, peer: Peer, parts: Sequence[Part], now_s: float, on_quiet: Callable[[], None]
    ) -> None:
        """Keep the handles of a transfer's active parts: its pages are in quarantine until `on_quiet` is called."""
        self._held[transfer_id] = _Held(transfer_id, peer, list(parts), now_s, on_quiet)

    def holds(self, transfer_id: str) -> bool:
        """Return whether the pages of a transfer are in quarantine."""
        return transfer_id in self._held

    def held_for(self, key: str) -> int:
        """Return the number of transfers in quarantine of the peer under `key`, or of an earlier peer with that key."""
        return sum([held.peer.key == key for held in self._held.values()])

    @property
    def held_count(self) -> int:
        """Number of transfers in quarantine."""
        return len(self._held)

    @property
    def watched_count(self) -> int:
        """Number of watched handles that land in our own words."""
        return len(self._watched)

    @property
    def has_awaited(self) -> bool:
        """Whether a watched handle is not older than a second, and so should end soon."""
        return any(not one.is_late for one in self._watched)

    @property
    def has_late(self) -> bool:
        """Whether a watched handle is older than a second."""
        return any(one.is_late for one in self._watched)

    def entries(self) -> Sequence[QuarantineEntry]:
        """Return the transfers in quarantine, oldest first."""
        return [
            QuarantineEntry(
                held.transfer_id,
                held.peer.key,
                held.since_s,
                sum(part.payload_bytes for part in held.parts),
                next((part.last_error for part in held.parts if part.last_error), ""),
            )
            for held in self._held.values()
        ]

    # --------------------------------------------------------------------------------------------------------- polling

    def poll(self, now_s: float, *, at_once: bool = False) -> bool:
        """Poll watched handles, and held and late ones every millisecond or `at_once`; return True if one ended."""
        is_due = at_once or now_s >= self._next_poll_s
        moved = self._poll_watched(now_s, is_due=is_due) if self._watched else False
        if not is_due or not (self._held or self._unreleased or self.has_late):
            return moved
        self._next_poll_s = now_s + QUARANTINE_POLL_S
        for held in list(self._held.values()):
            moved = self._poll_held(held) or moved
        if self._unreleased:
            self._unreleased = [handle for handle in self._unreleased if not self._is_released(handle)]
        return moved

    def last_look(self, peers: Sequence[Peer]) -> None:
        """Poll held handles of these peers for up to 20 ms, before NIXL forgets their process."""
        until_s = time.monotonic() + _LAST_LOOK_S
        left = [held for held in self._held.values() if held.peer in peers]
        while left:
            left = [held for held in left if not self._poll_held(held)]
            if not left or time.monotonic() > until_s:
                return
            time.sleep(1e-3)

    def _poll_watched(self, now_s: float, *, is_due: bool) -> bool:
        moved = False
        for one in list(self._watched):
            if one.is_late and not is_due:
                continue
            one.note_poll(now_s)
            failure: AgentError | None = None
            try:
                if self._port.check(one.handle) != "done":
                    one.errors = 0
                    continue
            except AgentError as error:
                one.errors += 1
                if not has_left_the_wire(error) and one.errors < _MAX_ERRORS_IN_A_ROW:
                    continue
                failure = error
            self._watched.remove(one)
            self._end_watched(one, failure)
            moved = True
        return moved

    def _end_watched(self, one: _Watched, failure: AgentError | None) -> None:
        try:
            one.on_end(failure)
        finally:
            self.release(one.peer, one.handle)

    def _poll_held(self, held: _Held) -> bool:
        for part in list(held.parts):
            if self._has_ended(held.peer, part):
                held.parts.remove(part)
                self.release(held.peer, part.handle)
        if held.parts:
            return False
        self._let_go(held)
        return True

    def _has_ended(self, peer: Peer, part: Part) -> bool:
        if peer.is_lost:
            part.last_error = "NIXL lost track of it when another process took the name of its peer"
            return False
        try:
            if self._port.check(part.handle) == "done":
                return True
        except AgentError as error:
            if error.code == "nixl-disconnected":
                peer.is_connected = False
            if has_left_the_wire(error):
                return True
            part.last_error = f"{error.code}: {error}"
        return False

    # ----------------------------------------------------------------------------------------------------- letting go

    def close(self, wait_s: float) -> None:
        """Poll handles for up to `wait_s`, then release all, ended or not, since the agent is about to be destroyed."""
        until_s = time.monotonic() + wait_s
        while self._may_end() and time.monotonic() < until_s:
            if not self.poll(0.0, at_once=True):
                time.sleep(1e-3)
        for held in list(self._held.values()):
            self._give_up(held)
        watched, self._watched = self._watched, []
        for one in watched:
            self._end_watched(one, AgentError("agent-closed", "the agent was closed"))
        self._unreleased = [handle for handle in self._unreleased if not self._is_released(handle)]
        self._unreleased.clear()

    def _may_end(self) -> bool:
        """Return whether NIXL can still report the end of a kept handle."""
        return bool(self._watched) or any(not held.peer.is_lost for held in self._held.values())

    def _give_up(self, held: _Held) -> None:
        for part in held.parts:
            self.release(held.peer, part.handle)
        self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        del self._held[held.transfer_id]
        held.on_quiet()
