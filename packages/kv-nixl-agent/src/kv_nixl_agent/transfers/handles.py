"""Owner of NIXL's transfer handles: counts them per peer, releases them, and keeps those that no transfer waits for.

NIXL's release of an active transfer is best effort. Over TCP, data of a released transfer was seen to land seconds later, even
after the peer had been removed. So a handle whose transfer has ended early is kept and polled, under one policy for all:

1. A handle is kept until nothing of it can reach the wire any more: NIXL reports done or disconnected, or it was never posted.
2. While it may write to the *caller's pages*, only the closing of the agent ends it otherwise (no worker is left that could
   write). That is *quarantine*; it is bounded and counted per peer key.
3. A handle that lands in *our own words* (a warm-up, or a read of fence words that no transfer waits for) also ends after
   several errors in a row, since NIXL repeats an error for ever. Its word is marked as suspect and reused last.
4. It is released once. A release that NIXL refuses is tried again.

Quarantine, and a handle of the third kind once it is older than a second, is polled every millisecond at most, and does not keep
the thread awake: its peer is probably stopped, for minutes or permanently, and no caller waits for it.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.values import QuarantineEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort

    Indices = npt.NDArray[np.int32]
    Words = npt.NDArray[np.uint64]

__all__ = ["Handles", "Hold", "Part", "QUARANTINE_POLL_S", "WordRead", "has_left_the_wire", "was_rejected"]

QUARANTINE_POLL_S: Final = 1e-3
"""Shortest time between two polls of a handle that no caller waits for."""

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
@dataclass(slots=True, eq=False)
class Part:
    """Descriptors of one local and one peer list that are posted at once."""

    local_kind: MemoryKind
    local_indices: Indices
    peer_kind: MemoryKind
    peer_indices: Indices
    payload_bytes: int
    handle: Handle | None = None
    last_error: str = ""


@final
@dataclass(slots=True, eq=False)
class WordRead:
    """Read of a run of a peer's words. It may be posted again once it has ended."""

    peer: Peer
    handle: Handle
    words: Words
    """Scratch words in which the read lands, without copying."""
    free: Callable[[bool], None]
    """Frees the scratch words, and lists of this read alone; True if a late write may still reach the words."""
    is_on_wire: bool = False
    released_s: float | None = None
    """Time of the first poll after its release, if it was on the wire then."""
    is_late: bool = False
    """Whether that is more than a second ago."""
    errors: int = 0
    """Errors in a row since its release."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Quarantine of a transfer that has ended with parts on the wire."""

    transfer_id: str
    peer: Peer
    parts: list[Part]
    since_s: float
    on_quiet: Callable[[], None]


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
        self.watched: list[WordRead] = []
        """Reads on the wire that land in our own words; a read is freed and released when it has ended."""
        self.held: dict[str, Hold] = {}
        """Transfers in quarantine by id, oldest first."""
        self.held_of: Counter[str] = Counter()
        """Number of transfers in quarantine by the key of their peer."""
        self._unreleased: list[Handle] = []
        self._next_poll_s = 0.0

    def release(self, peer: Peer, handle: Handle) -> None:
        """Release a handle that can write nothing any more."""
        try:
            self._port.release(handle)
        except AgentError:
            self._unreleased.append(handle)
        peer.outstanding -= 1
        if peer.is_removed and not peer.outstanding:
            self._on_idle(peer)

    def _release_again(self) -> None:
        handles, self._unreleased = self._unreleased, []
        for handle in handles:
            try:
                self._port.release(handle)
            except AgentError:
                self._unreleased.append(handle)

    def hold(self, hold: Hold) -> None:
        """Keep the handles of a transfer's active parts: its pages are in quarantine until `on_quiet` is called."""
        self.held[hold.transfer_id] = hold
        self.held_of[hold.peer.key] += 1

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
            for held in self.held.values()
        ]

    # --------------------------------------------------------------------------------------------------------- polling

    def poll(self, now_s: float, *, at_once: bool = False) -> bool:
        """Poll watched reads, and held and late ones every millisecond or `at_once`; return True if one ended."""
        is_due = at_once or now_s >= self._next_poll_s
        moved = self._poll_watched(now_s, is_due=is_due) if self.watched else False
        if not is_due or not (self.held or self._unreleased or self.watched):
            return moved
        self._next_poll_s = now_s + QUARANTINE_POLL_S
        for held in list(self.held.values()):
            moved = self._poll_held(held) or moved
        self._release_again()
        return moved

    def last_look(self, peers: Sequence[Peer]) -> None:
        """Poll held handles of these peers for up to 20 ms, before NIXL forgets their process."""
        until_s = time.monotonic() + _LAST_LOOK_S
        left = [held for held in self.held.values() if held.peer in peers]
        while left:
            left = [held for held in left if not self._poll_held(held)]
            if not left or time.monotonic() > until_s:
                return
            time.sleep(1e-3)

    def _poll_watched(self, now_s: float, *, is_due: bool) -> bool:
        moved = False
        for read in list(self.watched):
            if read.is_late and not is_due:
                continue
            if read.released_s is None:
                read.released_s = now_s
            read.is_late = now_s - read.released_s > _LATE_AFTER_S
            failure: AgentError | None = None
            try:
                if self._port.check(read.handle) != "done":
                    read.errors = 0
                    continue
            except AgentError as error:
                read.errors += 1
                if not has_left_the_wire(error) and read.errors < _MAX_ERRORS_IN_A_ROW:
                    continue
                failure = error
            self.watched.remove(read)
            self._end_watched(read, failure)
            moved = True
        return moved

    def _end_watched(self, read: WordRead, failure: AgentError | None) -> None:
        if failure is not None:
            read.peer.note_failure(failure)
        read.free(failure is not None and failure.code != "nixl-disconnected")
        self.release(read.peer, read.handle)

    def _poll_held(self, held: Hold) -> bool:
        for part in list(held.parts):
            if self._has_ended(held.peer, part):
                held.parts.remove(part)
                self.release(held.peer, part.handle)
        if not held.parts:
            self._end_quarantine(held)
        return not held.parts

    def _has_ended(self, peer: Peer, part: Part) -> bool:
        if peer.is_lost:
            part.last_error = "NIXL lost track of it when another process took the name of its peer"
            return False
        try:
            return self._port.check(part.handle) == "done"
        except AgentError as error:
            peer.note_failure(error)
            part.last_error = str(error)
            return has_left_the_wire(error)

    def _end_quarantine(self, held: Hold) -> None:
        del self.held[held.transfer_id]
        self.held_of[held.peer.key] -= 1
        if not self.held_of[held.peer.key]:
            del self.held_of[held.peer.key]
        held.on_quiet()

    def close(self, wait_s: float) -> None:
        """Poll handles for up to `wait_s`, then release all, ended or not, since the agent is about to be destroyed."""
        until_s = time.monotonic() + wait_s
        while self._may_end() and time.monotonic() < until_s:
            if not self.poll(0.0, at_once=True):
                time.sleep(1e-3)
        for held in list(self.held.values()):
            self.give_up(held)
        watched, self.watched = self.watched, []
        for read in watched:
            self._end_watched(read, AgentError("agent-closed", "the agent was closed"))
        self._release_again()

    def _may_end(self) -> bool:
        """Return whether NIXL can still report the end of a kept handle."""
        return bool(self.watched) or any(not held.peer.is_lost for held in self.held.values())

    def give_up(self, held: Hold) -> None:
        """End a quarantine although its parts have not ended."""
        for part in held.parts:
            self.release(held.peer, part.handle)
        self._end_quarantine(held)
