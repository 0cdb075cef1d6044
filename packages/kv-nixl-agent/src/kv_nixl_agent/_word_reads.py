"""Reads of one word of a peer: fence checks, probes and warm-ups.

The data read and the fence read are two operations without any order between them on the wire, so the fence is read only after
the data was seen to be complete. The producer writes the new generation before it reports the blocks free. So a word that still
shows the lease's generation proves that the blocks were still leased when the last byte was read.

The handle of a fence read is *created* beside that of the data, while NIXL's code and tables are in the processor's caches;
after some megabytes of copying the same call takes several times as long. It is *posted* only when the data is complete:
posting is what reads the word.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from ._errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ._fences import FenceArray
    from ._handles import Handles
    from ._peer import Peer
    from ._port import Handle, NixlPort, Progress

__all__ = ["WordRead", "WordReader"]

_SPIN_S: Final = 100e-6
_FIRST: Final = np.zeros(1, dtype=np.int32)


@final
class WordRead:
    """Read of one word of a peer into a word of our fence array."""

    __slots__ = ("handle", "lists", "peer", "word")

    def __init__(self, peer: Peer, word: int, handle: Handle, lists: tuple[Handle, ...] = ()) -> None:
        self.peer = peer
        self.word = word
        self.handle = handle
        self.lists = lists
        """Prepared lists used by this read alone, released with it."""


@final
class WordReader:
    """Creates, posts and ends word reads. A read's scratch word is freed when the read ends, however it ends."""

    def __init__(
        self,
        port: NixlPort,
        fences: FenceArray,
        handles: Handles[Any],
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._fences = fences
        self._handles = handles
        self._clock = clock
        self._scratch = port.prepare(None, "DRAM", fences.rows())
        """Prepared list of the whole local fence array."""
        self._numbers = np.arange(1 << 16, dtype=np.int32)  # index arrays of one word are views of this

    # ---------------------------------------------------------------------------------------------------------- making

    def make_fence_read(self, peer: Peer, slot: int, generation: int, *, is_early: bool = False) -> WordRead | None:
        """Create the read of a fence word; None while all scratch words are in use.

        Raises:
            AgentError: Raised while the peer's lists were prepared or the handle was made.
        """
        word = self._fences.take_scratch(generation, is_early=is_early)
        if word is None:
            return None
        try:
            handle = self._port.make(self._scratch, self._index(word), peer.lists.fence, self._index(slot), b"")
        except AgentError:
            self._fences.give_back(word)
            raise
        self._handles.made(peer)
        return WordRead(peer, word, handle)

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
        try:
            return self._make_touch(peer, word)
        except AgentError:
            self._fences.give_back(word)
            raise

    def _make_touch(self, peer: Peer, word: int) -> WordRead:
        """Create the read of a few bytes of the peer's memory, with its own prepared lists."""
        touch = peer.touch_row
        if touch is None:
            raise AgentError("bad-rows", f"peer {peer.key!r} has neither rows nor a fence: nothing of it can be read")
        kind, row = touch
        mine = np.array([[self._fences.address + 8 * word, row[0, 1], 0, row[0, 1], 1]], dtype=np.uint64)
        lists: list[Handle] = []
        try:
            lists.append(self._port.prepare(None, "DRAM", mine))
            lists.append(self._port.prepare(peer.agent_name, kind, row))
            handle = self._port.make(lists[0], _FIRST, lists[1], _FIRST, b"")
        except AgentError:
            self._release_lists(tuple(lists))
            raise
        self._handles.made(peer)
        return WordRead(peer, word, handle, tuple(lists))

    def _index(self, word: int) -> npt.NDArray[np.int32]:
        return self._numbers[word : word + 1] if word < len(self._numbers) else np.array([word], dtype=np.int32)

    # --------------------------------------------------------------------------------------------- posting and polling

    def post(self, read: WordRead) -> Progress:
        """Post a read and wait for it up to 0.1 ms, which on a fast wire is cheaper than polling it in a later turn."""
        posted_s = self._clock()
        progress = self._port.post(read.handle)
        while progress != "done" and self._clock() - posted_s < _SPIN_S:
            progress = self._port.check(read.handle)
        return progress

    def check(self, read: WordRead) -> Progress:
        """Poll a posted read."""
        return self._port.check(read.handle)

    # ------------------------------------------------------------------------------------------------------------- end

    def found(self, read: WordRead) -> int:
        """Return the word that a completed read found; discard the read afterwards."""
        return self._fences.read(read.word)

    def discard(self, read: WordRead) -> None:
        """Release a read that is off the wire."""
        self._give_back(read, is_suspect=False)
        self._handles.release(read.peer, read.handle)

    def abandon(self, read: WordRead) -> None:
        """Detach a posted read from its transfer, which ends without it."""

        def on_end(failure: AgentError | None) -> None:
            self._give_back(read, is_suspect=failure is not None and failure.code != "nixl-disconnected")

        self._handles.watch(read.peer, read.handle, on_end)

    def _give_back(self, read: WordRead, *, is_suspect: bool) -> None:
        if read.word != self._fences.warm_up_word:
            self._fences.give_back(read.word, is_suspect=is_suspect)
        self._release_lists(read.lists)

    def _release_lists(self, lists: tuple[Handle, ...]) -> None:
        for prepared in lists:
            with contextlib.suppress(AgentError):
                self._port.release_prepared(prepared)

    # --------------------------------------------------------------------------------------------------------- warm-up

    def warm_up(self, peer: Peer, on_end: Callable[[AgentError | None], None]) -> None:
        """Connect to a peer with a tiny read; nothing else connects before the first transfer.

        `on_end` gets None, or the error that ended it.
        """
        try:
            read = self._make_touch(peer, self._fences.warm_up_word)
        except AgentError as error:
            on_end(error)
            return

        def finish(failure: AgentError | None) -> None:
            self._release_lists(read.lists)
            on_end(failure)

        try:
            progress = self._port.post(read.handle)
        except AgentError as error:
            finish(error)
            self._handles.release(peer, read.handle)
            return
        if progress != "done":
            self._handles.watch(peer, read.handle, finish)
            return
        finish(None)
        self._handles.release(peer, read.handle)

    def close(self) -> None:
        """Release the prepared list of the fence array."""
        with contextlib.suppress(AgentError):
            self._port.release_prepared(self._scratch)
