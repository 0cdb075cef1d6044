"""Polls of progress words of watched peers, and reads of their tables.

One read of all progress words of a peer serves all watches of its slots. Its pace follows the peer, between `stream_poll_s` and
`stream_slow_poll_s`: rarely in the middle of a prompt, closely where the last step should end (`StreamWatch.pause_s`). Nothing
is read of a peer without watches.

Each watched peer has a pad for its polls, while there are enough pads. When they run out, a peer gives its pad back after each
poll; only polls on the wire keep theirs. Reads of tables have their own pads.

A table read reports the ids of entries once all of them carry the requested tag; until then it is repeated at the same pace. It
never ends because the slot has lost the tag: the progress word shows that first, and the watch is ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

import numpy as np

from kv_nixl_agent.errors import AgentError, transfer_code
from kv_nixl_agent.memory.fences import Scratch, aligned_words
from kv_nixl_agent.streams.words import LOW_HALF, TAG_SHIFT, layout_of, row_of
from kv_nixl_agent.transfers.handles import QUARANTINE_POLL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import NixlPort
    from kv_nixl_agent.options import AgentOptions
    from kv_nixl_agent.transfers.handles import WordRead
    from kv_nixl_agent.transfers.reader import WordReader
    from kv_nixl_agent.values import StreamLocation

__all__ = ["PAD_COUNT", "StreamListener", "StreamPoller", "StreamWatch", "landing_pads"]

PAD_COUNT: Final = 256
_PAD_WORDS: Final = 1024
_LOOK_PADS: Final = 128
"""The first pads serve polls of progress words, the others reads of tables, so that neither waits for the other."""


def landing_pads() -> npt.NDArray[np.uint64]:
    """Return memory for all pads, to be registered."""
    return aligned_words(PAD_COUNT * _PAD_WORDS)


@final
class StreamPoller:
    """Watches of one agent.

    Args:
        port: The NIXL agent.
        reader: Reads strips.
        pads: Registered memory in which strips land, uint64 (PAD_COUNT * _PAD_WORDS,).
        options: Options with the pace.
        counts: Counts polls, tables and failures, by name.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        port: NixlPort,
        reader: WordReader,
        pads: npt.NDArray[np.uint64],
        options: AgentOptions,
        counts: dict[str, int],
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._reader = reader
        self._look_pads = Scratch(pads, range(0, _LOOK_PADS * _PAD_WORDS, _PAD_WORDS))
        self._table_pads = Scratch(pads, range(_LOOK_PADS * _PAD_WORDS, PAD_COUNT * _PAD_WORDS, _PAD_WORDS))
        self._clock = clock
        self._fast_s, self._slow_s = options.stream_poll_s, options.stream_slow_poll_s
        self._counts = counts
        self._peers: dict[Peer, _PeerPolls] = {}
        self._news: list[Callable[[], None]] = []

    @property
    def watch_count(self) -> int:
        """Number of watches."""
        return sum(len(polls.watches) for polls in self._peers.values())

    @property
    def free_pads(self) -> int:
        """Number of pads not in use."""
        return self._look_pads.free_count + self._table_pads.free_count

    @property
    def is_on_wire(self) -> bool:
        """Whether a poll or a table read that a watch waits for is on the wire."""
        return any(strip.is_on_wire for polls in self._peers.values() if polls.watches for strip in polls.strips)

    @property
    def has_strays(self) -> bool:
        """Whether a peer without watches has not answered its last poll."""
        return any(not polls.watches for polls in self._peers.values())

    @property
    def next_look_s(self) -> float:
        """Time of the next poll; infinite when nothing is watched."""
        return min((polls.next_look_s for polls in self._peers.values() if polls.watches), default=float("inf"))

    def watch(self, peer: Peer, slot: int, listener: StreamListener, *, tokens: int = 0) -> StreamWatch:
        """Start polling a slot of a peer; see `TransferAgent.watch_stream`.

        Raises:
            AgentError: `bad-streams`, `peer-rows-unregistered`.
        """
        polls = self._peers.get(peer) or self._begin(peer)
        if not 0 <= slot < polls.layout.slots:
            raise AgentError(
                "bad-streams",
                f"peer {peer.key!r} has the stream slots 0 to {polls.layout.slots - 1}, not {slot}",
                peer=peer.key,
            )
        self._peers[peer] = polls
        polls.due_s = self._clock()
        watch = StreamWatch(polls, slot, listener, tokens=tokens, now_s=polls.due_s)
        polls.watches.append(watch)
        return watch

    def _begin(self, peer: Peer) -> _PeerPolls:
        if peer.streams is None:
            raise AgentError("bad-streams", f"peer {peer.key!r} has no stream memory", peer=peer.key)
        polls = _PeerPolls(peer, peer.streams)
        row = row_of(polls.location, 0, polls.layout.words)
        try:
            self._port.release_prepared(self._port.prepare(peer.agent_name, "DRAM", row))
        except AgentError as error:
            raise AgentError(
                "peer-rows-unregistered",
                f"NIXL cannot prepare the words {row[0].tolist()} of peer {peer.key!r}: {error.message}; they must lie in memory "
                "that the peer's metadata registers",
                peer=peer.key,
            ) from error
        return polls

    def take_news(self) -> list[Callable[[], None]]:
        """Return the listener calls that are due, each once."""
        news, self._news = self._news, []
        return news

    # ------------------------------------------------------------------------------------------------------------ turn

    def advance(self, now_s: float) -> bool:
        """Post and poll reads; return True if anything changed. A poll without news does not count, so that the thread rests."""
        moved = False
        for polls in list(self._peers.values()):
            try:
                moved = self._look(polls, now_s) or moved
                moved = self._read_tables(polls, now_s) or moved
            except AgentError as error:
                moved = True
                self._fail(polls, transfer_code(error), f"the stream words of peer {polls.peer.key!r}: {error.message}")
                polls.peer.note_failure(error)
            if polls.dropped or not polls.watches:
                self._tidy(polls)
        return moved

    def _look(self, polls: _PeerPolls, now_s: float) -> bool:
        if polls.strip is not None and polls.strip.is_on_wire:
            if not polls.watches:
                if now_s < polls.due_s:
                    return False
                polls.due_s = now_s + QUARANTINE_POLL_S
            if not self._reader.is_done(polls.strip):
                return False
        elif not polls.watches or now_s < polls.due_s or not self._post_look(polls, now_s):
            return False
        if polls.strip is None:
            return False
        has_changed = self._tell_changes(polls, polls.strip.words, now_s)
        if not self._look_pads.free_count:
            self._reader.let_go(polls.strip)
            polls.strip = None
        return has_changed

    def _post_look(self, polls: _PeerPolls, now_s: float) -> bool:
        polls.due_s = now_s + self._pace_s(polls, now_s)
        if polls.strip is None:
            row = row_of(polls.location, 0, polls.layout.slots)
            polls.strip = self._reader.make(polls.peer, "DRAM", row, self._look_pads)
        if polls.strip is None:
            return False  # all pads are in use
        self._counts["stream_looks"] += 1
        return self._reader.post(polls.strip)

    def _pace_s(self, polls: _PeerPolls, now_s: float) -> float:
        return min(max(self._fast_s, polls.pause_s(now_s)), self._slow_s)

    def _tell_changes(self, polls: _PeerPolls, words: npt.NDArray[np.uint64], now_s: float) -> bool:
        found = words.tolist()
        has_changed = False
        for watch in polls.watches:
            word: int = found[watch.slot]
            if watch.saw(word, now_s):
                has_changed = True
                self._tell(watch, partial(watch.listener.progress, word >> TAG_SHIFT, word & LOW_HALF))
        if has_changed:
            polls.due_s = now_s + self._pace_s(polls, now_s)
        return has_changed

    def _tell(self, watch: StreamWatch, call: Callable[[], None]) -> None:
        self._news.append(lambda: call() if watch.is_wanted else None)

    # ---------------------------------------------------------------------------------------------------------- tables

    def _read_tables(self, polls: _PeerPolls, now_s: float) -> bool:
        moved = False
        for table in polls.tables_in_turn:
            if table.strip is not None and table.strip.is_on_wire:
                is_done = self._reader.is_done(table.strip)
            elif now_s >= table.due_s:
                is_done = self._post_table(polls, table, now_s)
                moved = True
            else:
                continue
            if is_done:
                moved = True
                self._judge(polls, table, now_s)
        return moved

    def _post_table(self, polls: _PeerPolls, table: _TableRead, now_s: float) -> bool:
        if table.strip is None:
            entry, count = table.next_piece
            row = row_of(polls.location, polls.layout.entry(table.watch.slot, entry), count)
            table.strip = self._reader.make(polls.peer, "DRAM", row, self._table_pads)
        if table.strip is None:
            table.due_s = now_s + self._fast_s  # all pads are in use
            return False
        return self._reader.post(table.strip)

    def _judge(self, polls: _PeerPolls, table: _TableRead, now_s: float) -> None:
        strip = table.strip
        if strip is None:
            return
        entries = strip.words
        tags, ids = entries >> np.uint64(TAG_SHIFT), entries & np.uint64(LOW_HALF)
        found: list[int] = ids.tolist()
        # Its pad is free for others from now on, even if the table is read again: a peer may never fill the table.
        table.strip = None
        self._reader.let_go(strip)
        if not bool(((tags == table.tag) & (ids != LOW_HALF)).all()):
            self._counts["stream_tables_early"] += 1
            table.due_s = now_s + self._pace_s(polls, now_s)
            return
        table.ids += found
        if table.next_piece[1]:
            return
        polls.tables.remove(table)
        self._counts["stream_tables"] += 1
        self._tell(table.watch, partial(table.watch.listener.table, table.tag, table.first, tuple(table.ids)))

    # ------------------------------------------------------------------------------------------------------------ ends

    def forget(self, peer: Peer, code: str, message: str) -> None:
        """End the watches of a peer that can no longer be read."""
        polls = self._peers.get(peer)
        if polls is not None:
            self._fail(polls, code, message)
            self._tidy(polls)

    def end_all(self, code: str, message: str) -> None:
        """End all watches."""
        for peer in list(self._peers):
            self.forget(peer, code, message)

    def _fail(self, polls: _PeerPolls, code: str, message: str) -> None:
        polls.dropped += polls.strips
        watches, polls.watches, polls.tables, polls.strip = polls.watches, [], [], None
        for watch in watches:
            self._counts["streams_broken"] += 1
            self._tell(watch, partial(watch.listener.broken, code, message))

    def _tidy(self, polls: _PeerPolls) -> None:
        """Release strips that no watch needs, and the record of a peer without watches.

        A poll that a stopped peer does not answer stays with the peer's record, so however often watches begin and end, the peer
        uses one pad for polls. It is then polled as rarely as quarantine, and does not keep the thread awake.
        """
        dropped, polls.dropped = polls.dropped, []
        look = polls.strip
        if not polls.watches and (look is None or not look.is_on_wire):
            dropped += [] if look is None else [look]
            polls.strip = None
            self._peers.pop(polls.peer, None)
        for strip in dropped:
            self._reader.let_go(strip)


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

    def __init__(self, polls: _PeerPolls, slot: int, listener: StreamListener, *, tokens: int, now_s: float) -> None:
        self._polls = polls
        self._tokens = tokens
        self._changed_s = now_s
        self._step_s, self._step_tokens = 0.0, 0
        self.slot = slot
        self.listener = listener
        self.seen: int | None = None
        """Progress word that the listener received last."""
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
        if self in self._polls.watches:
            self._polls.tables.append(_TableRead(self, tag, first, stop))

    def end(self) -> None:
        """Stop watching; the listener gets no further calls. May be called more than once."""
        self.is_wanted = False
        if self in self._polls.watches:
            self._polls.forget(self)


@final
@dataclass(slots=True, eq=False)
class _TableRead:
    watch: StreamWatch
    tag: int
    first: int
    stop: int
    ids: list[int] = field(default_factory=list[int])
    strip: WordRead | None = None
    due_s: float = 0.0

    @property
    def next_piece(self) -> tuple[int, int]:
        """(entry, count) of the next piece to read. Example: 1500 entries are read as 1024 and 476."""
        entry = self.first + len(self.ids)
        return entry, min(self.stop - entry, _PAD_WORDS)


@final
class _PeerPolls:
    """All watches of one peer."""

    def __init__(self, peer: Peer, location: StreamLocation) -> None:
        self.peer = peer
        self.location = location
        self.layout = layout_of(location)
        self.watches: list[StreamWatch] = []
        self.tables: list[_TableRead] = []
        self.strip: WordRead | None = None
        self.due_s = 0.0
        self.dropped: list[WordRead] = []
        """Strips of watches that have ended, to be released in the next turn."""

    def forget(self, watch: StreamWatch) -> None:
        """Remove a watch and its table reads."""
        self.watches.remove(watch)
        for table in self.tables:
            if table.watch is watch and table.strip is not None:
                self.dropped.append(table.strip)
        self.tables = [table for table in self.tables if table.watch is not watch]

    def pause_s(self, now_s: float) -> float:
        """Return the time until the next poll of this peer, before the limits of the options apply."""
        return min((watch.pause_s(now_s) for watch in self.watches), default=0.0)

    @property
    def tables_in_turn(self) -> list[_TableRead]:
        """Table reads that may be on the wire now."""
        return self.tables[:_TABLES_AT_ONCE]

    @property
    def strips(self) -> list[WordRead]:
        """Strips that are in use."""
        own = [self.strip, *(table.strip for table in self.tables)]
        return [strip for strip in own if strip is not None]

    @property
    def next_look_s(self) -> float:
        """Time of the next post, if nothing is on the wire."""
        return min([self.due_s, *(table.due_s for table in self.tables_in_turn)])
