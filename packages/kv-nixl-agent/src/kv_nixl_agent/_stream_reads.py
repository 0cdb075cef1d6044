"""Strips: repeatable reads of a run of a peer's words into our scratch memory.

A strip is one descriptor on either side, whatever its length, so reading the progress of 256 streams costs as much as reading
that of one. Its handle is posted again for every poll, once the previous one has ended.

The rules are those of fence reads: scratch memory is freed when nothing can write into it any more. A strip that is released
while it is on the wire stays with `Handles` until then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np

from ._errors import AgentError
from ._handles import has_left_the_wire, was_rejected
from ._stream_layout import row_of
from ._stream_words import aligned_words

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._handles import Handles
    from ._peer import Peer
    from ._port import Handle, NixlPort
    from ._values import StreamLocation

    Words = npt.NDArray[np.uint64]

__all__ = ["LOOK_PADS", "PAD_COUNT", "PAD_WORDS", "LandingPads", "Strip", "StripReader"]

PAD_WORDS: Final = 1024
PAD_COUNT: Final = 256
LOOK_PADS: Final = 128
"""The first pads serve polls of progress words, the others reads of tables, so that neither waits for the other."""

Use = Literal["look", "table"]
_FIRST: Final = np.zeros(1, dtype=np.int32)
_NOTHING: Final = np.uint64((1 << 64) - 1)


@final
class LandingPads:
    """Scratch memory for reads of streams: pads of 1024 words each."""

    __slots__ = ("_free", "_memory")

    def __init__(self) -> None:
        self._memory = aligned_words(PAD_COUNT * PAD_WORDS)
        self._free: dict[Use, deque[int]] = {
            "look": deque(range(LOOK_PADS)),
            "table": deque(range(LOOK_PADS, PAD_COUNT)),
        }

    @property
    def address(self) -> int:
        """Address of the first pad."""
        return int(self._memory.ctypes.data)

    @property
    def total_bytes(self) -> int:
        """Bytes to register."""
        return int(self._memory.nbytes)

    @property
    def free_count(self) -> int:
        """Number of pads not in use."""
        return sum(map(len, self._free.values()))

    def take(self, use: Use) -> int | None:
        """Return a free pad for this use, filled with words that no stream contains; None if all are in use."""
        if not self._free[use]:
            return None
        pad = self._free[use].popleft()
        self.words(pad, PAD_WORDS)[:] = _NOTHING
        return pad

    def give_back(self, pad: int, *, is_suspect: bool = False) -> None:
        """Free a pad. A suspect pad, whose read ended in an error, is reused only after all others."""
        free = self._free["look" if pad < LOOK_PADS else "table"]
        if is_suspect:
            free.append(pad)
        else:
            free.appendleft(pad)

    def words(self, pad: int, count: int) -> Words:
        """Return the first words of a pad, without copying."""
        return self._memory[pad * PAD_WORDS : pad * PAD_WORDS + count]

    def row(self, pad: int, count: int) -> Words:
        """Return the first words of a pad as one strided row of one descriptor."""
        return np.array([[self.address + 8 * pad * PAD_WORDS, 8 * count, 0, 8 * count, 1]], dtype=np.uint64)


@final
class Strip:
    """Repeatable read of a run of words."""

    __slots__ = ("count", "handle", "is_on_wire", "lists", "pad", "peer")

    def __init__(self, peer: Peer, pad: int, count: int, handle: Handle, lists: tuple[Handle, ...]) -> None:
        self.peer = peer
        self.pad = pad
        self.count = count
        self.handle = handle
        self.lists = lists
        self.is_on_wire = False


@final
class StripReader:
    """Creates, posts and ends strips. A strip's pad is freed when the strip ends, however it ends."""

    def __init__(self, port: NixlPort, pads: LandingPads, handles: Handles[Any]) -> None:
        self._port = port
        self._handles = handles
        self.pads = pads

    def demand_registered(self, peer: Peer, location: StreamLocation, words: int) -> None:
        """Refuse stream memory that the peer did not register, before any of it is read.

        Raises:
            AgentError: `peer-rows-unregistered`.
        """
        self._port.release_prepared(self._prepare(peer, location, 0, words))

    def _prepare(self, peer: Peer, location: StreamLocation, first: int, count: int) -> Handle:
        try:
            return self._port.prepare(peer.agent_name, "DRAM", row_of(location, first, count))
        except AgentError as error:
            raise AgentError(
                "peer-rows-unregistered",
                f"NIXL cannot prepare {count} words of the stream memory {location} of peer {peer.key!r}: {error}; it must lie "
                "in memory that the peer's metadata registers",
                peer=peer.key,
            ) from error

    def make(self, peer: Peer, location: StreamLocation, first: int, count: int, use: Use) -> Strip | None:
        """Create the read of `count` words from word `first` on, at most 1024; None while all pads for this use are taken.

        Raises:
            AgentError: Raised while lists were prepared or the handle was made.
        """
        pad = self.pads.take(use)
        if pad is None:
            return None
        lists: list[Handle] = []
        try:
            lists.append(self._port.prepare(None, "DRAM", self.pads.row(pad, count)))
            lists.append(self._prepare(peer, location, first, count))
            handle = self._port.make(lists[0], _FIRST, lists[1], _FIRST, b"")
        except AgentError:
            self._give_back(pad, lists)
            raise
        self._handles.made(peer)
        return Strip(peer, pad, count, handle, tuple(lists))

    def post(self, strip: Strip) -> bool:
        """Post a strip, the first time or again; return True if the read has already completed.

        Raises:
            AgentError: as the port.
        """
        strip.is_on_wire = True
        try:
            strip.is_on_wire = self._port.post(strip.handle) != "done"
        except AgentError as error:
            strip.is_on_wire = not was_rejected(error)
            raise
        return not strip.is_on_wire

    def is_done(self, strip: Strip) -> bool:
        """Poll a strip that is on the wire.

        Raises:
            AgentError: as the port.
        """
        try:
            strip.is_on_wire = self._port.check(strip.handle) != "done"
        except AgentError as error:
            strip.is_on_wire = not has_left_the_wire(error)
            raise
        return not strip.is_on_wire

    def words(self, strip: Strip) -> Words:
        """Return the words that a completed strip read, without copying."""
        return self.pads.words(strip.pad, strip.count)

    def let_go(self, strip: Strip) -> None:
        """Release a strip, at once or when it is off the wire."""
        if not strip.is_on_wire:
            self._give_back(strip.pad, strip.lists)
            self._handles.release(strip.peer, strip.handle)
            return

        def on_end(failure: AgentError | None) -> None:
            is_suspect = failure is not None and failure.code != "nixl-disconnected"
            self._give_back(strip.pad, strip.lists, is_suspect=is_suspect)

        self._handles.watch(strip.peer, strip.handle, on_end)

    def _give_back(self, pad: int, lists: list[Handle] | tuple[Handle, ...], *, is_suspect: bool = False) -> None:
        self.pads.give_back(pad, is_suspect=is_suspect)
        for prepared in lists:
            with contextlib.suppress(AgentError):
                self._port.release_prepared(prepared)
