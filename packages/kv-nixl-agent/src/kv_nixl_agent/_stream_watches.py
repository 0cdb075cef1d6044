"""Records of watches: one listener's eye on a slot, the tables that it asked for, and all that is watched of a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from ._errors import AgentError
from ._stream_layout import layout_of
from ._stream_reads import PAD_WORDS

if TYPE_CHECKING:
    from ._peer import Peer
    from ._stream_reads import Strip
    from ._values import StreamLocation

__all__ = ["PeerPolls", "StreamListener", "StreamWatch", "TableRead"]

_TABLES_AT_ONCE = 4


class StreamListener(Protocol):
    """Takes what a watch finds; called on the owner thread, and not any more once the watch has ended."""

    def progress(self, tag: int, tokens: int) -> None:
        """Take the slot's progress word: the first one that was read, then every other one."""
        ...

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:
        """Take the ids of entries `first` and following, as asked for."""
        ...

    def broken(self, code: str, message: str) -> None:
        """Take the end of the watch: the peer's words cannot be read any more. Called once."""
        ...


@final
class StreamWatch:
    """Eye of one listener on one slot of a peer. Owner thread only."""

    __slots__ = ("_polls", "is_live", "is_wanted", "listener", "seen", "slot")

    def __init__(self, polls: PeerPolls, slot: int, listener: StreamListener) -> None:
        self._polls = polls
        self.slot = slot
        self.listener = listener
        self.seen: int | None = None
        """Progress word that the listener was told of last."""
        self.is_live = True
        """Whether the peer is looked at for it."""
        self.is_wanted = True
        """Whether the listener still wants to be told."""

    def read_table(self, tag: int, first: int, stop: int) -> None:
        """Read the entries `first` to `stop - 1` of the slot's table under a tag; `table` of the listener takes the ids.

        Raises:
            AgentError: `bad-streams` for entries that the table has no room for.
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
        """Stop looking; nothing is told any more. More than once is fine."""
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
        """(entry, count) of the piece that is read next. Example: 1500 entries are read as 1024 and 476."""
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
        self.changed_s = 0.0
        self.due_s = 0.0
        self.dropped: list[Strip] = []
        """Strips of watches that have ended, to be let go in the next turn."""

    def forget(self, watch: StreamWatch) -> None:
        self.watches.remove(watch)
        for table in self.tables:
            if table.watch is watch and table.strip is not None:
                self.dropped.append(table.strip)
        self.tables = [table for table in self.tables if table.watch is not watch]

    @property
    def tables_in_turn(self) -> list[TableRead]:
        """Tables that may be on the wire now."""
        return self.tables[:_TABLES_AT_ONCE]

    @property
    def strips(self) -> list[Strip]:
        """Strips that are in use."""
        own = [self.strip, *(table.strip for table in self.tables)]
        return [strip for strip in own if strip is not None]

    @property
    def next_look_s(self) -> float:
        """Time at which something is to be posted, if nothing is on the wire."""
        return min([self.due_s, *(table.due_s for table in self.tables_in_turn)])
