"""The consumer's side of the fence: read one word of the peer's array after the data, and judge.

The data read and the fence read are two operations without any order between them on the wire, so the fence is read
only after the data was seen to be complete. The producer writes the new generation before it reports the blocks
free. So a word that still shows the lease's generation proves that the blocks were still leased when the last byte
had been read.

The handle of the fence read is *made* beside that of the data, while NIXL's code and tables are in the processor's
caches; after some megabytes were copied the same call takes several times as long. It is *posted* only when the data is
done: posting is what reads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from ._custody import Custody, Stray
from ._errors import AgentError
from ._failures import code_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ._memory import FenceArray
    from ._port import Handle, NixlPort
    from ._transfer import Transfer
    from ._values import Outcome

__all__ = ["FenceReader", "Verdict"]

_SPIN_S: Final = 100e-6
_NO_FENCE: Final = (0, 0)


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What the fence says about a transfer."""

    outcome: Outcome
    code: str = ""
    message: str = ""
    detail: str = ""


@final
class FenceReader:
    """Reads fence words into scratch words of our own fence array."""

    def __init__(
        self,
        port: NixlPort,
        fences: FenceArray,
        clock: Callable[[], float],
        custody: Custody,
    ) -> None:
        self._port = port
        self._fences = fences
        self._clock = clock
        self._custody = custody
        self.scratch = port.prepare(None, "DRAM", fences.rows())
        """Prepared list of the whole local fence array."""
        self._words = np.arange(1 << 16, dtype=np.int32)  # index arrays of one word are views of this

    def make_ready(self, transfer: Transfer) -> None:
        """Make the fence read of a transfer ahead of its time, if that can be done; nothing is read yet."""
        # An error is not lost: the handle is made again when it is needed, and then it counts.
        with contextlib.suppress(AgentError):
            self._make(transfer, is_early=True)

    def advance(self, transfer: Transfer) -> Verdict | None:
        """Begin or continue to read the fence of a transfer whose data is there; None while there is no answer."""
        if not transfer.fence_posted_s:
            return self._begin(transfer)
        try:
            if self._port.check(transfer.fence_handle) != "done":
                return None
        except AgentError as error:
            return self._failed(transfer, error)
        return self._judge(transfer)

    def abandon(self, transfer: Transfer) -> None:
        """Detach a fence read, under way or not begun, from a transfer that ends without it."""
        handle, word = transfer.fence_handle, transfer.fence_word
        if handle is None:
            return
        if not transfer.fence_posted_s:
            self._over(transfer)
            return
        transfer.fence_handle = None

        def on_end(failure: AgentError | None) -> None:
            # After any other error the word might still be written: it is never used again.
            if failure is None or failure.code == "nixl-disconnected":
                self._fences.give_back(word)

        self._custody.watch(Stray(transfer.peer, handle, on_end))

    def _begin(self, transfer: Transfer) -> Verdict | None:
        if transfer.fence_handle is None:
            try:
                self._make(transfer)
            except AgentError as error:
                return Verdict(
                    "failed", "transfer-rejected", f"the fence of peer {transfer.peer.key!r} cannot be read: {error}"
                )
            if transfer.fence_handle is None:
                return None  # all scratch words are in use; the next turn tries again
        return self._post(transfer, transfer.fence_handle)

    def _make(self, transfer: Transfer, *, is_early: bool = False) -> None:
        slot, generation = transfer.order.fence or _NO_FENCE
        word = self._fences.take_scratch(generation, is_early=is_early)
        if word is None:
            return
        try:
            transfer.fence_handle = self._port.make(
                "read", self.scratch, self._index(word), transfer.peer.fence_list, self._index(slot), b""
            )
        except AgentError:
            self._fences.give_back(word)
            raise
        transfer.fence_word = word
        self._custody.posted(transfer.peer)

    def _post(self, transfer: Transfer, handle: Handle) -> Verdict | None:
        posted_s = transfer.fence_posted_s = self._clock()
        try:
            progress = self._port.post(handle)
            # It takes a few microseconds on a fast wire; giving up the turn would cost more than waiting.
            while progress != "done" and self._clock() - posted_s < _SPIN_S:
                progress = self._port.check(handle)
        except AgentError as error:
            return self._failed(transfer, error)
        return self._judge(transfer) if progress == "done" else None

    def _index(self, word: int) -> npt.NDArray[np.int32]:
        return self._words[word : word + 1] if word < len(self._words) else np.array([word], dtype=np.int32)

    def _judge(self, transfer: Transfer) -> Verdict:
        slot, generation = transfer.order.fence or _NO_FENCE
        found = self._fences.read(transfer.fence_word)
        transfer.fence_done_s = self._clock()
        self._over(transfer)
        if found == generation:
            return Verdict("done", detail=str(found))
        return Verdict(
            "fence-rejected",
            "fence-mismatch",
            f"fence slot {slot} of peer {transfer.peer.key!r} shows generation {found}, the lease had {generation}: "
            "the producer gave the blocks away before they were read",
            str(found),
        )

    def _failed(self, transfer: Transfer, error: AgentError) -> Verdict:
        """Void the data: it is there, but nothing vouches for it."""
        is_disconnect = error.code == "nixl-disconnected"
        if is_disconnect:
            transfer.peer.is_connected = False
            self._over(transfer)
        return Verdict("failed", code_of(error), f"the fence of peer {transfer.peer.key!r} could not be read: {error}")

    def _over(self, transfer: Transfer) -> None:
        handle = transfer.fence_handle
        transfer.fence_handle = None
        self._fences.give_back(transfer.fence_word)
        self._custody.over(transfer.peer, handle)
