"""Reads of a peer's words into our own scratch memory: fence checks, probes, warm-ups, and strips of stream words.

The data read and the fence read are two operations without any order between them on the wire, so the fence is read only after
the data was seen to be complete. The producer writes the new generation before it reports the blocks free. So a word that still
shows the lease's generation proves that the blocks were still leased when the last byte was read.

The handle of a fence read is *created* while the data is on the wire. It is *posted* only when the data is complete: posting is
what reads the word.

A strip is one descriptor on either side, whatever its length, so reading the progress of 256 streams costs as much as reading
that of one. Its handle is posted again for every poll, once the previous one has ended.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.fences import CLOSED_GENERATION, SCRATCH_WORDS
from kv_nixl_agent.transfers.handles import WordRead, has_left_the_wire, was_rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kv_nixl_agent.memory.fences import FenceArray, Scratch
    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort
    from kv_nixl_agent.transfers.handles import Handles

    Words = npt.NDArray[np.uint64]

__all__ = ["WordReader"]

_SPIN_S: Final = 100e-6
_FIRST: Final = np.zeros(1, dtype=np.int32)
_NOT_STORED: Final = (1 << 64) - 1
"""Word that no stream contains."""


@final
class WordReader:
    """Creates, posts and ends reads of words. Scratch memory is freed when its read ends, however it ends.

    Args:
        port: The NIXL agent.
        fences: Fence array, whose scratch words single words land in.
        handles: Keeps the handles of reads that are released while they are on the wire.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, port: NixlPort, fences: FenceArray, handles: Handles, clock: Callable[[], float]) -> None:
        self._port = port
        self._fences = fences
        self._handles = handles
        self._clock = clock
        row = np.array([[fences.location[0], 8, 0, 8, len(fences.scratch.memory)]], dtype=np.uint64)
        self._own_list = port.prepare(None, "DRAM", row)
        """Prepared list of the whole local fence array."""

    # ---------------------------------------------------------------------------------------------------------- making

    def make_check(self, peer: Peer, fence: tuple[int, int] | None, *, is_early: bool = False) -> WordRead | None:
        """Create the read of a fence word, given as (slot, generation), or of any word of the peer; None without scratch words.

        Early reads use only half of the scratch words. Reads of a stopped peer keep theirs until their deadline, so the other
        half stays free for healthy peers.

        Raises:
            AgentError: Raised while the handle was made.
        """
        slot, generation = fence or (0, 0)
        scratch = self._fences.scratch
        word = scratch.take(generation ^ CLOSED_GENERATION, reserve=SCRATCH_WORDS // 2 if is_early else 0)
        if word is None:
            return None
        words = scratch.memory[word : word + 1]

        def free(late: bool) -> None:
            scratch.give_back(word, is_suspect=late)

        if peer.fence_list is None:
            return self._make_touch(peer, words, free)
        mine, theirs = np.array([word], dtype=np.int32), np.array([slot], dtype=np.int32)
        try:
            handle = self._port.make(self._own_list, mine, peer.fence_list, theirs, b"")
        except AgentError:
            free(False)
            raise
        peer.outstanding += 1
        return WordRead(peer, handle, words, free)

    def make_strip(self, peer: Peer, row: Words, pads: Scratch) -> WordRead | None:
        """Create the read of a row of one descriptor, at most 1024 words; None while all pads are taken.

        Raises:
            AgentError: Raised while lists were prepared or the handle was made.
        """
        pad = pads.take(_NOT_STORED)
        if pad is None:
            return None
        words = pads.memory[pad : pad + int(row[0, 1]) // 8]
        return self._make_listed(peer, "DRAM", row, words, lambda late: pads.give_back(pad, is_suspect=late))

    def _make_touch(self, peer: Peer, words: Words, free: Callable[[bool], None]) -> WordRead:
        """Create the read of a few bytes of the peer's memory."""
        if peer.touch is None:
            raise AssertionError(f"peer {peer.key!r} has neither rows nor a fence")
        return self._make_listed(peer, *peer.touch, words, free)

    def _make_listed(
        self, peer: Peer, kind: MemoryKind, row: Words, words: Words, free: Callable[[bool], None]
    ) -> WordRead:
        """Create a read with lists of its own, which are released with it."""
        lists: list[Handle] = []

        def free_all(late: bool) -> None:
            free(late)
            for prepared in lists:
                with contextlib.suppress(AgentError):
                    self._port.release_prepared(prepared)

        mine = np.array([[words.ctypes.data, row[0, 1], 0, row[0, 1], 1]], dtype=np.uint64)
        try:
            lists.append(self._port.prepare(None, "DRAM", mine))
            lists.append(self._port.prepare(peer.agent_name, kind, row))
            handle = self._port.make(lists[0], _FIRST, lists[1], _FIRST, b"")
        except AgentError:
            free_all(False)
            raise
        peer.outstanding += 1
        return WordRead(peer, handle, words, free_all)

    # --------------------------------------------------------------------------------------------- posting and polling

    def post(self, read: WordRead, *, spin: bool = False) -> bool:
        """Post a read, the first time or again; return True if it has already completed.

        With `spin`, wait for it up to 0.1 ms, which on a fast wire is cheaper than polling it in a later turn.

        Raises:
            AgentError: as the port.
        """
        posted_s = self._clock()
        read.is_on_wire = True
        try:
            read.is_on_wire = self._port.post(read.handle) != "done"
        except AgentError as error:
            read.is_on_wire = not was_rejected(error)
            raise
        while spin and read.is_on_wire and self._clock() - posted_s < _SPIN_S:
            self.is_done(read)
        return not read.is_on_wire

    def is_done(self, read: WordRead) -> bool:
        """Poll a read that is on the wire.

        Raises:
            AgentError: as the port.
        """
        try:
            read.is_on_wire = self._port.check(read.handle) != "done"
        except AgentError as error:
            read.is_on_wire = not has_left_the_wire(error)
            raise
        return not read.is_on_wire

    def let_go(self, read: WordRead) -> None:
        """Release a read, at once or when it is off the wire."""
        if read.is_on_wire:
            self._handles.watched.append(read)
        else:
            read.free(False)
            self._handles.release(read.peer, read.handle)

    # --------------------------------------------------------------------------------------------------------- warm-up

    def warm_up(self, peer: Peer) -> None:
        """Connect to a peer with a tiny read; nothing else connects before the first transfer."""
        read: WordRead | None = None
        try:
            # Nothing is freed: all warm-ups land in one word, which is never read.
            read = self._make_touch(peer, self._fences.warm_up_words, lambda _: None)
            self.post(read)
        except AgentError as error:
            peer.note_failure(error)
        if read is not None:
            self.let_go(read)

    def close(self) -> None:
        """Release the prepared list of the fence array."""
        with contextlib.suppress(AgentError):
            self._port.release_prepared(self._own_list)
