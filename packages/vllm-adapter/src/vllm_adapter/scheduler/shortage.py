"""Requests that could begin and find no blocks while the engine computes nothing.

The host asks for blocks of leases where a *running* request needs some. A waiting request without blocks only ends its round: if
nothing runs and the leases are those of a peer that waits for blocks of this engine in turn, both would wait for ever, each
renewing the leases that keep the other from reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Shortage"]

_PATIENCE_S: Final = 1.0
"""Blocks that are about to come free by themselves, as at the end of a read, have come by then."""


@final
class Shortage:
    """Tells how long a request has been ready for blocks in steps that compute nothing. Scheduler's thread only.

    A request is ready once the host was told how many tokens to read for it, none among them, or once its read has ended; it is
    so no more when the host allocates. What the host allocates without a read it computes in that step.

    Example: in empty steps the host is told of 48 tokens and allocates nothing, at 2.0 s and ever since: it lasts at 3.0 s.
    """

    def __init__(self) -> None:
        self._is_told = False
        self._loaded: set[str] = set()
        self._since_s: float | None = None

    def told(self, tokens: int | None) -> None:
        """Note an answer about a request; None: it is not ready."""
        self._is_told = tokens is not None

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Note requests whose read has ended well: the host goes on with them without another question."""
        self._loaded.update(request_ids)

    def allocated(self, request_id: str) -> None:
        """Note that a request has its blocks."""
        self._is_told = False
        self._loaded.discard(request_id)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._loaded.discard(request_id)

    def lasts(self, now_s: float, *, is_empty: bool, streams_lack_blocks: bool) -> bool:
        """Return whether leases are to be asked back; once at the end of each step."""
        is_short = is_empty and (self._is_told or bool(self._loaded) or streams_lack_blocks)
        self._is_told = False
        if not is_short:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= _PATIENCE_S
