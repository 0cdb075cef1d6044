"""Reads of a peer's words into our own scratch memory: fence checks, probes, warm-ups, and strips of stream words.

The data read and the fence read are two operations without any order between them on the wire, so the fence is read only after
the data was seen to be complete. The producer writes the new generation before it reports the blocks free. So a word that still
shows the lease's generation proves that the blocks were still leased when the last byte was read.

The handle of a fence read is *created* beside that of the data, while NIXL's code and tables are in the processor's caches;
after some megabytes of copying the same call takes several times as long. It is *posted* only when the data is complete:
posting is what reads the word.

A strip is one descriptor on either side, whatever its length, so reading the progress of 256 streams costs as much as reading
that of one. Its handle is posted again for every poll, once the previous one has ended.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.transfers.handles import has_left_the_wire, was_rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort
    from kv_nixl_agent.transfers.handles import Handles
    from kv_nixl_agent.words.fences import FenceArray, LandingPads, PadUse

    Words = npt.NDArray[np.uint64]

__all__ = ["WordRead", "WordReader"]

_SPIN_S: Final = 100e-6
_FIRST: Final = np.zeros(1, dtype=np.int32)


@final
class WordRead:
    """Read of a run of a peer's words. It may be posted again once it has ended."""

    __slots__ = ("free", "handle", "is_on_wire", "peer", "words")

    def __init__(self, peer: Peer, handle: Handle, words: Words, free: Callable[[bool], None]) -> None:
        self.peer = peer
        self.handle = handle
        self.words = words
        """Scratch words in which the read lands, without copying."""
        self.free = free
        """Frees the scratch words, and lists of this read alone; True if a late write may still reach the words."""
        self.is_on_wire = False


@final
class WordReader:
    """Creates, posts and ends reads of words. Scratch memory is freed when its read ends, however it ends.

    Args:
        port: The NIXL agent.
        fences: Fence array, whose scratch words single words land in.
        pads: Scratch memory of strips; None for an agent without stream slots.
        handles: Keeps the handles of reads that are released while they are on the wire.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        port: NixlPort,
        fences: FenceArray,
        pads: LandingPads | None,
        handles: Handles,
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._fences = fences
        self.pads = pads
        self._handles = handles
        self._clock = clock
        self._scratch = port.prepare(None, "DRAM", fences.rows())
        """Prepared list of the whole local fence array."""
        self._numbers = np.arange(1 << 16, dtype=np.int32)  # index arrays of one word are views of this

    # ---------------------------------------------------------------------------------------------------------- making

    def make_fence_read(self, peer: Peer, slot: int, generation: int, *, is_early: bool = False) -> WordRead | None:
        """Create the read of a fence word; None while all scratch words are in use.

        Raises:
            AgentError: Raised while the handle was made.
        """
        word = self._fences.take_scratch(generation, is_early=is_early)
        if word is None:
            return None
        try:
            handle = self._port.make(self._scratch, self._index(word), peer.lists.fence, self._index(slot), b"")
        except AgentError:
            self._fences.give_back(word)
            raise
        return self._made(
            peer, handle, self._fences.words(word), lambda late: self._fences.give_back(word, is_suspect=late)
        )

    def make_probe(self, peer: Peer) -> WordRead | None:
        """Create the read of any word of the peer: of its fence array, else of its first page; None as above.

        Raises:
            AgentError: as `make_fence_read`; `bad-rows` for a peer with neither fence nor rows.
        """
        if peer.fence is not None:
            return self.make_fence_read(peer, 0, 0)
        word = self._fences.take_scratch(0)
        if word is None:
            return None
        return self._make_touch(peer, word, lambda late: self._fences.give_back(word, is_suspect=late))

    def make_strip(self, peer: Peer, row: Words, use: PadUse) -> WordRead | None:
        """Create the read of a row of one descriptor, at most 1024 words; None while all pads for this use are taken.

        Raises:
            AgentError: Raised while lists were prepared or the handle was made.
        """
        pads = self.pads
        pad = None if pads is None else pads.take(use)
        if pads is None or pad is None:
            return None
        count = int(row[0, 1]) // 8
        return self._make_listed(
            peer,
            pads.row(pad, count),
            "DRAM",
            row,
            pads.words(pad, count),
            lambda late: pads.give_back(pad, is_suspect=late),
        )

    def demand_registered(self, peer: Peer, row: Words) -> None:
        """Refuse words that the peer did not register, before any of them is read.

        Raises:
            AgentError: `peer-rows-unregistered`.
        """
        try:
            self._port.release_prepared(self._port.prepare(peer.agent_name, "DRAM", row))
        except AgentError as error:
            raise AgentError(
                "peer-rows-unregistered",
                f"NIXL cannot prepare the words {row[0].tolist()} of peer {peer.key!r}: {error}; they must lie in memory that "
                "the peer's metadata registers",
                peer=peer.key,
            ) from error

    def _make_touch(self, peer: Peer, word: int, free: Callable[[bool], None]) -> WordRead:
        """Create the read of a few bytes of the peer's memory, with its own prepared lists."""
        touch = peer.touch_row
        if touch is None:
            free(False)
            raise AgentError("bad-rows", f"peer {peer.key!r} has no rows and no fence, so there is nothing to read")
        kind, row = touch
        mine = np.array([[self._fences.address + 8 * word, row[0, 1], 0, row[0, 1], 1]], dtype=np.uint64)
        return self._make_listed(peer, mine, kind, row, self._fences.words(word), free)

    def _make_listed(
        self, peer: Peer, mine: Words, kind: MemoryKind, row: Words, words: Words, free: Callable[[bool], None]
    ) -> WordRead:
        """Create a read with lists of its own, which are released with it."""
        lists: list[Handle] = []

        def free_all(late: bool) -> None:
            free(late)
            for prepared in lists:
                with contextlib.suppress(AgentError):
                    self._port.release_prepared(prepared)

        try:
            lists.append(self._port.prepare(None, "DRAM", mine))
            lists.append(self._port.prepare(peer.agent_name, kind, row))
            handle = self._port.make(lists[0], _FIRST, lists[1], _FIRST, b"")
        except AgentError:
            free_all(False)
            raise
        return self._made(peer, handle, words, free_all)

    def _made(self, peer: Peer, handle: Handle, words: Words, free: Callable[[bool], None]) -> WordRead:
        peer.outstanding += 1
        return WordRead(peer, handle, words, free)

    def _index(self, word: int) -> npt.NDArray[np.int32]:
        return self._numbers[word : word + 1] if word < len(self._numbers) else np.array([word], dtype=np.int32)

    # --------------------------------------------------------------------------------------------- posting and polling

    def post(self, read: WordRead) -> bool:
        """Post a read, the first time or again; return True if it has already completed.

        Raises:
            AgentError: as the port.
        """
        read.is_on_wire = True
        try:
            read.is_on_wire = self._port.post(read.handle) != "done"
        except AgentError as error:
            read.is_on_wire = not was_rejected(error)
            raise
        return not read.is_on_wire

    def post_and_spin(self, read: WordRead) -> bool:
        """Post a read and wait for it up to 0.1 ms, which on a fast wire is cheaper than polling it in a later turn."""
        posted_s = self._clock()
        is_done = self.post(read)
        while not is_done and self._clock() - posted_s < _SPIN_S:
            is_done = self.is_done(read)
        return is_done

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

    def let_go(self, read: WordRead, on_end: Callable[[AgentError | None], None] | None = None) -> None:
        """Release a read, at once or when it is off the wire; `on_end` then gets None, or the error that ended it."""

        def ended(failure: AgentError | None) -> None:
            read.free(failure is not None and failure.code != "nixl-disconnected")
            if on_end is not None:
                on_end(failure)

        if read.is_on_wire:
            self._handles.watch(read.peer, read.handle, ended)
        else:
            ended(None)
            self._handles.release(read.peer, read.handle)

    # --------------------------------------------------------------------------------------------------------- warm-up

    def warm_up(self, peer: Peer) -> None:
        """Connect to a peer with a tiny read; nothing else connects before the first transfer."""

        def ended(failure: AgentError | None) -> None:
            peer.is_connected = failure is None or failure.code != "nixl-disconnected"

        try:
            read = self._make_touch(peer, self._fences.warm_up_word, _keep)
        except AgentError as error:
            ended(error)
            return
        try:
            self.post(read)
        except AgentError as error:
            ended(error)
            self.let_go(read)
            return
        self.let_go(read, ended)

    def close(self) -> None:
        """Release the prepared list of the fence array."""
        with contextlib.suppress(AgentError):
            self._port.release_prepared(self._scratch)


def _keep(_: bool) -> None:
    """Free nothing: all warm-ups land in one word, which is never read."""
