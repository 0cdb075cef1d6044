"""Records of stream watches: a listener's watch of one slot, the table reads that it requested, and all watches of a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, final

from ._errors import AgentError
from ._stream_layout import LOW_HALF, TAG_SHIFT, layout_of
from ._stream_reads import PAD_WORDS

if TYPE_CHECKING:
    from ._peer import Peer
    from ._stream_reads import Strip
    from ._values import StreamLocation

__all__ = ["PeerPolls", "StreamListener", "StreamWatch", "TableRead"]

_TABLES_AT_ONCE: Final = 4
_SLOWING: Final = 1 / 32
_SLOWING_AT_LAST: Final = 1 / 128
_LOOKS_A_STEP: Final = 4
_LOOKS_BEFORE_LAST: Final = 16
_EARLIEST: Final = 0.6
"""Fraction of the expected duration of the last step before which the step is not polled closely."""


class StreamListener(Protocol):
    """Receives the findings of a watch, on the owner thread; not called any more after the watch has ended."""

    def progress(self, tag: int, tokens: int) -> None:
        """Receive the slot's progress word: the first one read, then each one that differs from the previous one."""
        ...

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:
        """Receive the requested ids of entries `first` and following."""
        ...

    def broken(self, code: str, message: str) -> None:
        """Receive the end of the watch: the peer's words can no longer be read. Called once."""
        ...


@final
class StreamWatch:
    """A listener's subscription to a stream slot of a peer. Owner thread only."""

    __slots__ = (
        "_changed_s",
        "_polls",
        "_step_s",
        "_step_tokens",
        "_tokens",
        "is_live",
        "is_wanted",
        "listener",
        "seen",
        "slot",
    )

    def __init__(self, polls: PeerPolls, slot: int, listener: StreamListener, *, tokens: int, now_s: float) -> None:
        self._polls = polls
        self._tokens = tokens
        self._changed_s = now_s
        self._step_s, self._step_tokens = 0.0, 0
        self.slot = slot
        self.listener = listener
        self.seen: int | None = None
        """Progress word that the listener received last."""
        self.is_live = True
        """Whether the peer is polled for this watch."""
        self.is_wanted = True
        """Whether the listener still wants calls."""

    def saw(self, word: int, now_s: float) -> bool:
        """Record a progress word; return False if it equals the previous one."""
        before = self.seen
        if word == before:
            return False
        self.seen = word
        if before is not None and word > before and before >> TAG_SHIFT == word >> TAG_SHIFT:
            self._step_s, self._step_tokens = now_s - self._changed_s, word - before
        else:
            self._step_s, self._step_tokens = 0.0, 0
        self._changed_s = now_s
        return True

    def pause_s(self, now_s: float) -> float:
        """Return the time until the next poll, before the limits of the options apply.

        While a whole step follows, the end of a step is polled for 4 times per step: its blocks are read while the next step
        runs. The last step may be short, so the end of the one before it is polled for 16 times. The reader waits for the end of
        the last step: from three fifths of its expected duration, by its tokens, it is polled for at every 128th of the time
        since the previous step. Example: steps of 112 tokens and 128 ms. With 332 tokens left a poll every 32 ms; with 220 left a
        poll every 8 ms; with 108 left, which should take 123 ms, a poll after 74 ms, then one every 0.6 to 1 ms. Until a step has
        been seen, or if the number of tokens is unknown, the pause is a 32nd of the time since the last change.
        """
        quiet_s = now_s - self._changed_s
        seen = 0 if self.seen is None else self.seen & LOW_HALF
        left = self._tokens - seen
        if not self._tokens or not self._step_tokens or left <= 0:
            return quiet_s * _SLOWING
        if left > self._step_tokens:
            looks = _LOOKS_A_STEP if left > 2 * self._step_tokens else _LOOKS_BEFORE_LAST
            return max(self._step_s / looks, quiet_s * _SLOWING)
        earliest_s = _EARLIEST * self._step_s * left / self._step_tokens
        return max(earliest_s - quiet_s, quiet_s * _SLOWING_AT_LAST)

    def read_table(self, tag: int, first: int, stop: int) -> None:
        """Read entries `first` to `stop - 1` of the slot's table under a tag; the listener's `table` receives the ids.

        Raises:
            AgentError: `bad-streams` for entries beyond the table's capacity.
        """
        layout = self._polls.layout
        if not 0 <= first < stop <= layout.capacity:
            raise AgentError(
                "bad-streams",
                f"entries {first} to {stop - 1} of a table of peer {self._polls.peer.key!r}: it has room for {layout.capacity}",
                peer=self._polls.peer.key,
            )
        if self.is_live:
            self._polls.tables.append(TableRead(self, tag, first, stop))

    def end(self) -> None:
        """Stop watching; the listener gets no further calls. May be called more than once."""
        self.is_wanted = False
        if self.is_live:
            self.is_live = False
            self._polls.forget(self)


@final
class TableRead:
    __slots__ = ("count", "due_s", "first", "ids", "stop", "strip", "tag", "watch")

    def __init__(self, watch: StreamWatch, tag: int, first: int, stop: int) -> None:
        self.watch = watch
        self.tag = tag
        self.first = first
        self.stop = stop
        self.ids: list[int] = []
        self.strip: Strip | None = None
        self.due_s = 0.0

    @property
    def next_piece(self) -> tuple[int, int]:
        """(entry, count) of the next piece to read. Example: 1500 entries are read as 1024 and 476."""
        entry = self.first + len(self.ids)
        return entry, min(self.stop - entry, PAD_WORDS)


@final
class PeerPolls:
    """All watches of one peer."""

    def __init__(self, peer: Peer, location: StreamLocation) -> None:
        self.peer = peer
        self.location = location
        self.layout = layout_of(location)
        self.watches: list[StreamWatch] = []
        self.tables: list[TableRead] = []
        self.strip: Strip | None = None
        self.due_s = 0.0
        self.dropped: list[Strip] = []
        """Strips of watches that have ended, to be released in the next turn."""

    def forget(self, watch: StreamWatch) -> None:
        self.watches.remove(watch)
        for table in self.tables:
            if table.watch is watch and table.strip is not None:
                self.dropped.append(table.strip)
        self.tables = [table for table in self.tables if table.watch is not watch]

    def pause_s(self, now_s: float) -> float:
        """Return the time until the next poll of this peer, before the limits of the options apply."""
        return min((watch.pause_s(now_s) for watch in self.watches), default=0.0)

    @property
    def tables_in_turn(self) -> list[TableRead]:
        """Table reads that may be on the wire now."""
        return self.tables[:_TABLES_AT_ONCE]

    @property
    def strips(self) -> list[Strip]:
        """Strips that are in use."""
        own = [self.strip, *(table.strip for table in self.tables)]
        return [strip for strip in own if strip is not None]

    @property
    def next_look_s(self) -> float:
        """Time of the next post, if nothing is on the wire."""
        return min([self.due_s, *(table.due_s for table in self.tables_in_turn)])
