"""Read of a peer's word for one order: its fence, or any word for a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ._errors import AgentError

if TYPE_CHECKING:
    from ._peer import Peer
    from ._values import TransferOrder
    from ._word_reads import WordRead, WordReader

__all__ = ["WordCheck"]


@final
class WordCheck:
    """Makes, posts and judges the read, in the steps that `Transfer` takes."""

    __slots__ = ("_order", "_peer", "_read", "_words")

    def __init__(self, order: TransferOrder, peer: Peer, words: WordReader) -> None:
        self._order = order
        self._peer = peer
        self._words = words
        self._read: WordRead | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the order needs the read."""
        return self._order.fence is not None or self._order.operation == "probe"

    def make_early(self) -> None:
        """Create the read of a fence ahead of time; an error counts only if the read is still needed and fails again."""
        try:
            self.make(is_early=True)
        except AgentError:
            return

    def make(self, *, is_early: bool = False) -> bool:
        """Create the read, unless it exists; return False if all scratch words are in use.

        Raises:
            AgentError: as `WordReader.make_fence_read`.
        """
        if self._read is None:
            if self._order.fence is None:
                self._read = self._words.make_probe(self._peer)
            else:
                slot, generation = self._order.fence
                self._read = self._words.make_fence_read(self._peer, slot, generation, is_early=is_early)
        return self._read is not None

    def post(self) -> bool:
        """Post the created read; return True if it has already completed.

        Raises:
            AgentError: as the port.
        """
        return self._words.post(self._made()) == "done"

    def is_done(self) -> bool:
        """Poll the posted read.

        Raises:
            AgentError: as the port.
        """
        return self._words.check(self._made()) == "done"

    def _made(self) -> WordRead:
        if self._read is None:
            raise AssertionError("a word is read that was not asked for")
        return self._read

    def judge(self) -> tuple[int, str]:
        """Return the word that the completed read found, and the reason why it voids the data, if it does."""
        found = self._words.found(self._made())
        if self._order.fence is None or found == self._order.fence[1]:
            return found, ""
        slot, generation = self._order.fence
        return found, (
            f"fence slot {slot} of peer {self._peer.key!r} shows generation {found}, the lease had {generation}: "
            "the producer gave the blocks away before they were read"
        )

    def release(self) -> None:
        """Release the completed read."""
        read, self._read = self._made(), None
        self._words.discard(read)

    def drop(self, *, is_posted: bool) -> None:
        """Release the read, if there is one, because its transfer ends without it."""
        read, self._read = self._read, None
        if read is None:
            return
        if is_posted:
            self._words.abandon(read)
        else:
            self._words.discard(read)
