"""Detection of requests that could start but find no free blocks while the engine computes nothing.

Leases keep blocks until their readers come, and normally a request just waits for that, as it does with vLLM's own connector.
But an engine that also reads may be in a circle: its blocks are leased to a peer whose requests wait for blocks there, which are
leased to requests that wait here. Each side renews the leases that keep the other from reading, so neither ends by itself. Such
an engine gives up its newest waiting read (`SchedulerState.give_way`): the prompt is computed here, and the peer gets its blocks
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Shortage"]

_PATIENCE_S: Final = 1.0
"""Wait before a shortage counts, and between two reads that are given up: blocks that free themselves, as at the end of a read,
are free by then."""


@final
class Shortage:
    """Measures how long requests have been ready for blocks in steps that compute nothing. Scheduler's thread only.

    A request becomes ready when the host has been given the number of tokens to read for it, zero included, or when its read has
    ended. It stops being ready when the host allocates its blocks. Without a read, the host computes it in the same step.

    Example: from 2.0 s on, in empty steps, the host is given 48 tokens and allocates nothing: `lasts` is True at 3.0 s and, if
    nothing changes, about a second later again.
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

    def lasts(self, now_s: float, *, is_empty: bool, streams_lack_blocks: bool, is_roomy: bool = False) -> bool:
        """Return whether to give up a read; call once at the end of each step. The wait then begins anew.

        Args:
            now_s: The time.
            is_empty: Whether the step computes nothing.
            streams_lack_blocks: Whether an offer waits for blocks.
            is_roomy: Whether so many blocks are free that a prompt which was read cannot lack any. The host tells no connector
                that it is paused, and does not continue with such a prompt then.
        """
        has_loaded = bool(self._loaded) and not is_roomy
        is_short = is_empty and (self._is_told or has_loaded or streams_lack_blocks)
        self._is_told = False
        if not is_short:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _PATIENCE_S:
            return False
        self._since_s = None
        return True
