"""Detection of requests that could start but find no free blocks while the engine computes nothing.

The host asks for leased blocks back when a *running* request needs some. A waiting request without blocks only ends its round.
If nothing runs, and the leases belong to a peer that in turn waits for blocks of this engine, both engines would wait for
ever, each renewing the leases that keep the other from reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Shortage"]

_PATIENCE_S: Final = 1.0
"""Wait before a shortage counts: blocks that free themselves, as at the end of a read, are free by then."""


@final
class Shortage:
    """Measures how long requests have been ready for blocks in steps that compute nothing. Scheduler's thread only.

    A request becomes ready when the host has been given the number of tokens to read for it, zero included, or when its read has
    ended. It stops being ready when the host allocates its blocks. Without a read, the host computes it in the same step.

    Example: from 2.0 s on, in empty steps, the host is given 48 tokens and allocates nothing: `lasts` is True at 3.0 s.
    """

    def __init__(self) -> None:
        self._is_told = False
        self._loaded: set[str] = set()
        self._since_s: float | None = None

    def told(self, tokens: int | None) -> None:
        """Record the answer given to the host about a request; None: the request is not ready."""
        self._is_told = tokens is not None

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Record requests whose read succeeded: the host continues with them without asking again."""
        self._loaded.update(request_ids)

    def allocated(self, request_id: str) -> None:
        """Record that a request has its blocks."""
        self._is_told = False
        self._loaded.discard(request_id)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._loaded.discard(request_id)

    def lasts(self, now_s: float, *, is_empty: bool, streams_lack_blocks: bool) -> bool:
        """Return whether to ask for leased blocks back; call once at the end of each step."""
        is_short = is_empty and (self._is_told or bool(self._loaded) or streams_lack_blocks)
        self._is_told = False
        if not is_short:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= _PATIENCE_S
