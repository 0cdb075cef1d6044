"""Fence checks and probes: reads of a peer's words on behalf of transfers whose data has arrived.

The data read and the fence read are two operations without any order between them on the wire, so the fence is read only after
the data was seen to be complete. The producer writes the new generation before it reports the blocks free. So a word that still
shows the lease's generation proves that the blocks were still leased when the last byte was read.

One read covers a run of 512 words. Its handle is kept and posted again and again. It serves all transfers whose data was complete
before it was posted; those whose data ends later wait for the next read.

Worked example. A peer has 4096 fence words, and the data of transfers with the slots 3, 700 and 5 ends in one turn. Slots 3 and
5 lie in the words 0 to 511, slot 700 is word 188 of the words 512 to 1023: two reads are posted at the end of the turn.

Over TCP UCX ends the first read behind a notification only once the peer has answered it, and the peer answers when it polls:
0.3 ms later. So the words are read once more after a notification, for nothing, and the next read of data does not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.fences import CLOSED_GENERATION, PAD_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_nixl_agent.memory.fences import Scratch
    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.transfers.handles import WordRead
    from kv_nixl_agent.transfers.reader import WordReader
    from kv_nixl_agent.transfers.transfer import Transfer

__all__ = ["WordChecks"]

_SPIN_S: Final = 100e-6


@final
@dataclass(slots=True, eq=False)
class _Check:
    """Reads of one run of a peer's words.

    Attributes:
        peer: The peer.
        run: Number of the run among those of the fence array; 0 for a probe, which reads pages of a peer without the array.
        read: Its handle; on the wire without a transfer that asks, it follows a notification.
        waiting: Transfers whose data is complete, for the next read.
        asking: Transfers whose data was complete when the read on the wire was posted.
    """

    peer: Peer
    run: int
    read: WordRead | None = None
    waiting: dict[Transfer, None] = field(default_factory=dict["Transfer", None])
    asking: dict[Transfer, None] = field(default_factory=dict["Transfer", None])


@final
class WordChecks:
    """Lets transfers judge the words of their peers.

    Args:
        words: Makes, posts and polls reads.
        pads: Pads of `PAD_WORDS` in which the words land.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, words: WordReader, pads: Scratch, clock: Callable[[], float]) -> None:
        self._words = words
        self._pads = pads
        self._clock = clock
        self._kept: dict[tuple[Peer, int], _Check] = {}
        """All checks by peer and run, the one that was needed last at the end."""
        self._active: dict[_Check, None] = {}
        """Those of them that a transfer waits for."""
        self._of: dict[Transfer, _Check] = {}
        self._is_full = False
        """Whether no pad was found in this turn."""

    @property
    def kept_count(self) -> int:
        """Number of handles that are kept for the next read."""
        return len(self._kept) - len(self._active)

    def ask(self, transfer: Transfer) -> None:
        """Let a transfer whose data is complete judge the next read of its fence word, or of any word for a probe."""
        peer, fence = transfer.peer, transfer.order.fence
        run = 0 if fence is None else fence[0] // PAD_WORDS
        check = self._kept.pop((peer, run), None) or _Check(peer, run)
        self._kept[peer, run] = self._of[transfer] = check
        self._active[check] = check.waiting[transfer] = None

    def forget(self, transfer: Transfer) -> None:
        """Let a transfer that ends early, if it asked, wait no more; the read is released if no other waits for it."""
        check = self._of.pop(transfer, None)
        if check is None:
            return
        check.waiting.pop(transfer, None)
        check.asking.pop(transfer, None)
        if check in self._active and not check.waiting and not check.asking:
            del self._active[check]
            if check.read is None or check.read.is_on_wire:
                self._drop(check)

    def advance(self) -> bool:
        """Post and poll the reads that transfers wait for; return True if one was posted or has ended.

        A read that was posted here is waited for up to 0.1 ms, which on a fast wire is cheaper than polling it in a later turn.
        """
        if not self._active:
            return False
        self._is_full = False
        left = [check for check in list(self._active) if self._was_posted(check)]
        moved, until_s = bool(left), self._clock() + _SPIN_S
        for check in list(self._active):
            moved = self._has_ended(check) or moved
        while (left := [check for check in left if check.asking]) and self._clock() < until_s:
            for check in left:
                self._has_ended(check)
        return moved

    def _was_posted(self, check: _Check) -> bool:
        """Post the read of a check; return False if it is on the wire, or if all pads are in use: the next turn retries."""
        if check.asking or not self._is_free(check):
            return False
        try:
            read = check.read = check.read or self._make(check)
            if read is None:
                return False
            check.asking, check.waiting = check.waiting, {}
            for transfer in check.asking:
                transfer.note_posted()
            read.words[:] = CLOSED_GENERATION  # a word that no lease has, should the read end without any
            self._words.post(read)
        except AgentError as error:
            self._fail(check, error)
        return True

    def _is_free(self, check: _Check) -> bool:
        """Return whether the handle of a check may be posted: the read behind the last notification has ended."""
        read = check.read
        try:
            return read is None or not read.is_on_wire or self._words.is_done(read)
        except AgentError as error:  # the next read, by another handle, finds out whether the peer can be read
            check.peer.note_failure(error)
            self._let_go(check)
            return True

    def _has_ended(self, check: _Check) -> bool:
        """Poll the read of a check; True if it has ended, and its transfers with it."""
        read = check.read
        if read is None or not check.asking:
            return False
        try:
            if read.is_on_wire and not self._words.is_done(read):
                return False
        except AgentError as error:
            self._fail(check, error)
            return True
        first, has_notified = check.run * PAD_WORDS, False
        found: list[int] = read.words.tolist()
        for transfer in list(check.asking):
            del check.asking[transfer], self._of[transfer]
            if not check.asking and not check.waiting:
                del self._active[check]
            has_notified = has_notified or bool(transfer.order.notification)
            fence = transfer.order.fence
            transfer.judge(0 if fence is None else found[fence[0] - first])
        if has_notified and check not in self._active:  # the read behind a notification
            try:
                self._words.post(read)
            except AgentError as error:
                check.peer.note_failure(error)
                self._drop(check)
        return True

    def _fail(self, check: _Check, error: AgentError) -> None:
        """End the transfers of a read that has failed, or that could not be made."""
        check.peer.note_failure(error)
        failed = check.asking or check.waiting
        if check.asking:
            check.asking = {}
        else:
            check.waiting = {}
        self._let_go(check)
        if not check.waiting:
            del self._active[check]
            self._drop(check)
        for transfer in failed:
            del self._of[transfer]
            transfer.fail_check(error)

    def _make(self, check: _Check) -> WordRead | None:
        """Create the read of a check, if necessary in the pad of one that no transfer waits for; None without a pad."""
        if self._is_full:
            return None
        if not self._pads.free and self.kept_count:
            others = (other for other in self._kept.values() if other not in self._active and self._is_free(other))
            if (idle := next(others, None)) is not None:
                self._drop(idle)
        if not self._pads.free_count:
            self._is_full = True
            return None
        peer = check.peer
        if peer.fence is None:
            if peer.touch is None:
                raise AssertionError(f"peer {peer.key!r} has neither rows nor a fence")
            return self._words.make(peer, *peer.touch, self._pads)
        address, device, words = peer.fence
        first = check.run * PAD_WORDS
        length_bytes = 8 * min(PAD_WORDS, words - first)
        row = np.array([[address + 8 * first, length_bytes, device, length_bytes, 1]], dtype=np.uint64)
        return self._words.make(peer, "DRAM", row, self._pads)

    def _drop(self, check: _Check) -> None:
        del self._kept[check.peer, check.run]
        self._let_go(check)

    def _let_go(self, check: _Check) -> None:
        read, check.read = check.read, None
        if read is not None:
            self._words.let_go(read)

    def close(self, peer: Peer | None = None) -> None:
        """Release the handles that are kept for a peer, or for all peers; no transfer of theirs is in progress."""
        for check in [check for check in self._kept.values() if peer in (None, check.peer)]:
            self._is_free(check)  # a last look: NIXL may forget the peer's process next
            self._drop(check)
