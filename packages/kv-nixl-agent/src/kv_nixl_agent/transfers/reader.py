"""Reads of a peer's words into our own memory: runs of fence words, progress words and tables of streams, and warm-ups.

A read is one descriptor on either side, whatever its length, so reading 512 fence words or the progress of 256 streams costs as
much as reading one. Its handle may be posted again once the previous read has ended.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.transfers.handles import WordRead, has_left_the_wire, was_rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kv_nixl_agent.memory.fences import Scratch
    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort
    from kv_nixl_agent.transfers.handles import Handles

    Words = npt.NDArray[np.uint64]

__all__ = ["WordReader"]

_FIRST: Final = np.zeros(1, dtype=np.int32)


@final
class WordReader:
    """Creates, posts and ends reads of words. Scratch memory is freed when its read ends, however it ends.

    Args:
        port: The NIXL agent.
        handles: Keeps the handles of reads that are released while they are on the wire.
        warm_up_words: The word in which warm-up reads land.
    """

    def __init__(self, port: NixlPort, handles: Handles, warm_up_words: Words) -> None:
        self._port = port
        self._handles = handles
        self._warm_up_words = warm_up_words

    # ---------------------------------------------------------------------------------------------------------- making

    def make(self, peer: Peer, kind: MemoryKind, row: Words, pads: Scratch) -> WordRead | None:
        """Create the read of a row of one descriptor, no longer than a pad; None while all pads are taken.

        Raises:
            AgentError: Raised while lists were prepared or the handle was made.
        """
        pad = pads.take()
        if pad is None:
            return None
        words = pads.memory[pad : pad + -(-int(row[0, 1]) // 8)]
        return self._make_listed(peer, kind, row, words, lambda late: pads.give_back(pad, is_suspect=late))

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

    def warm_up(self, peer: Peer, touch: tuple[MemoryKind, Words]) -> None:
        """Connect to a peer with a tiny read of its memory; nothing else connects before the first transfer."""
        read: WordRead | None = None
        try:
            # Nothing is freed: all warm-ups land in one word, which is never read.
            read = self._make_listed(peer, *touch, self._warm_up_words, lambda _: None)
            self.post(read)
        except AgentError as error:
            peer.note_failure(error)
        if read is not None:
            self.let_go(read)
