"""Polls of progress words of watched peers, and reads of their tables.

One read of all progress words of a peer serves all watches of its slots. Its pace follows the peer, between `stream_poll_s` and
`stream_slow_poll_s`: rarely in the middle of a prompt, closely where the last step should end (`StreamWatch.pause_s`). Nothing
is read of a peer without watches.

Each watched peer has a pad for its polls, while there are enough pads. When they run out, a peer that is due takes the pad of
the peer whose next poll is furthest away; only polls on the wire keep theirs. Reads of tables have their own pads.

A table read reports the ids of entries once all of them carry the requested tag; until then it is repeated at the same pace. It
never ends because the slot has lost the tag: the progress word shows that first, and the watch is ended.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from ._errors import AgentError, transfer_code
from ._handles import QUARANTINE_POLL_S
from ._stream_layout import LOW_HALF, TAG_SHIFT
from ._stream_watches import PeerPolls, StreamWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from ._options import AgentOptions
    from ._peer import Peer
    from ._statistics import Statistics
    from ._stream_reads import Strip, StripReader
    from ._stream_watches import StreamListener, TableRead

__all__ = ["StreamPoller"]


@final
class StreamPoller:
    """Watches of one agent.

    Args:
        reader: Reads strips; None for an agent without stream slots, which cannot watch streams either.
        options: Options with the pace.
        statistics: Counts polls, changes, tables and failures.
        find_peer: Returns the peer under a key, or raises `unknown-peer`.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        reader: StripReader | None,
        options: AgentOptions,
        statistics: Statistics,
        find_peer: Callable[[str], Peer],
        clock: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._find_peer = find_peer
        self._clock = clock
        self._fast_s, self._slow_s = options.stream_poll_s, options.stream_slow_poll_s
        self._statistics = statistics
        self._peers: dict[Peer, PeerPolls] = {}
        self._news: list[Callable[[], None]] = []

    def gauges(self) -> Mapping[str, float]:
        """Return the numbers of watches and of free pads."""
        return {
            "streams_watched": float(sum(len(polls.watches) for polls in self._peers.values())),
            "stream_pads_free": float(0 if self._reader is None else self._reader.pads.free_count),
        }

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

    def watch(self, key: str, slot: int, listener: StreamListener, *, tokens: int = 0) -> StreamWatch:
        """Start polling a slot of a peer.

        Args:
            key: The peer.
            slot: The peer's slot.
            listener: Receives progress, table entries and the end of the watch.
            tokens: Progress that the peer will reach, which sets the pace of polls; 0 if unknown.

        Raises:
            AgentError: `unknown-peer`; `bad-streams` for a peer or an agent without stream memory, or a slot that does not exist;
                `peer-rows-unregistered`.
        """
        peer = self._find_peer(key)
        polls = self._peers.get(peer) or self._begin(peer)
        if not 0 <= slot < polls.layout.slots:
            raise AgentError(
                "bad-streams", f"peer {key!r} has the stream slots 0 to {polls.layout.slots - 1}, not {slot}", peer=key
            )
        self._peers[peer] = polls
        polls.due_s = self._clock()
        watch = StreamWatch(polls, slot, listener, tokens=tokens, now_s=polls.due_s)
        polls.watches.append(watch)
        return watch

    def _begin(self, peer: Peer) -> PeerPolls:
        if peer.streams is None or self._reader is None:
            lacking = f"peer {peer.key!r}" if peer.streams is None else "this agent (option stream_slots)"
            raise AgentError("bad-streams", f"{lacking} has no stream memory", peer=peer.key)
        polls = PeerPolls(peer, peer.streams)
        self._reader.demand_registered(peer, polls.location, polls.layout.words)
        return polls

    def take_news(self) -> list[Callable[[], None]]:
        """Return the listener calls that are due, each once."""
        news, self._news = self._news, []
        return news

    # ------------------------------------------------------------------------------------------------------------ turn

    def advance(self, now_s: float) -> bool:
        """Post and poll reads; return True if anything changed. A poll without news does not count, so that the thread rests."""
        reader = self._reader
        if not self._peers or reader is None:
            return False
        moved = False
        for polls in list(self._peers.values()):
            try:
                moved = self._look(reader, polls, now_s) or moved
                moved = self._read_tables(reader, polls, now_s) or moved
            except AgentError as error:
                moved = True
                self._fail(polls, transfer_code(error), f"the stream words of peer {polls.peer.key!r}: {error}")
                polls.peer.is_connected = polls.peer.is_connected and error.code != "nixl-disconnected"
            if polls.dropped or not polls.watches:
                self._tidy(reader, polls)
        return moved

    def _look(self, reader: StripReader, polls: PeerPolls, now_s: float) -> bool:
        if polls.strip is not None and polls.strip.is_on_wire:
            if not polls.watches:
                if now_s < polls.due_s:
                    return False
                polls.due_s = now_s + QUARANTINE_POLL_S
            if not reader.is_done(polls.strip):
                return False
        elif not polls.watches or now_s < polls.due_s or not self._post_look(reader, polls, now_s):
            return False
        return polls.strip is not None and self._tell_changes(polls, reader.words(polls.strip), now_s)

    def _post_look(self, reader: StripReader, polls: PeerPolls, now_s: float) -> bool:
        polls.due_s = now_s + self._pace_s(polls, now_s)
        if polls.strip is None:
            polls.strip = self._make_look(reader, polls)
        if polls.strip is None and self._release_a_look(reader):
            polls.strip = self._make_look(reader, polls)
        if polls.strip is None:
            return False  # the polls of all pads are on the wire
        self._statistics.count("stream_looks")
        return reader.post(polls.strip)

    def _make_look(self, reader: StripReader, polls: PeerPolls) -> Strip | None:
        return reader.make(polls.peer, polls.location, 0, polls.layout.slots, "look")

    def _release_a_look(self, reader: StripReader) -> bool:
        """Free the pad of the peer whose next poll is furthest away; return False if all polls are on the wire."""
        resting = [polls for polls in self._peers.values() if polls.strip is not None and not polls.strip.is_on_wire]
        furthest = max(resting, key=lambda polls: polls.due_s, default=None)
        if furthest is None or furthest.strip is None:
            return False
        reader.let_go(furthest.strip)
        furthest.strip = None
        return True

    def _pace_s(self, polls: PeerPolls, now_s: float) -> float:
        return min(max(self._fast_s, polls.pause_s(now_s)), self._slow_s)

    def _tell_changes(self, polls: PeerPolls, words: npt.NDArray[np.uint64], now_s: float) -> bool:
        found = words.tolist()
        has_changed = False
        for watch in polls.watches:
            word: int = found[watch.slot]
            if watch.saw(word, now_s):
                has_changed = True
                self._statistics.count("stream_changes")
                self._tell(watch, partial(watch.listener.progress, word >> TAG_SHIFT, word & LOW_HALF))
        if has_changed:
            polls.due_s = now_s + self._pace_s(polls, now_s)
        return has_changed

    def _tell(self, watch: StreamWatch, call: Callable[[], None]) -> None:
        self._news.append(lambda: call() if watch.is_wanted else None)

    # ---------------------------------------------------------------------------------------------------------- tables

    def _read_tables(self, reader: StripReader, polls: PeerPolls, now_s: float) -> bool:
        moved = False
        for table in polls.tables_in_turn:
            if table.strip is not None and table.strip.is_on_wire:
                is_done = reader.is_done(table.strip)
            elif now_s >= table.due_s:
                is_done = self._post_table(reader, polls, table, now_s)
                moved = True
            else:
                continue
            if is_done:
                moved = True
                self._judge(reader, polls, table, now_s)
        return moved

    def _post_table(self, reader: StripReader, polls: PeerPolls, table: TableRead, now_s: float) -> bool:
        if table.strip is None:
            entry, count = table.next_piece
            table.strip = reader.make(
                polls.peer, polls.location, polls.layout.entry(table.watch.slot, entry), count, "table"
            )
        if table.strip is None:
            table.due_s = now_s + self._fast_s  # all pads are in use
            return False
        return reader.post(table.strip)

    def _judge(self, reader: StripReader, polls: PeerPolls, table: TableRead, now_s: float) -> None:
        strip = table.strip
        if strip is None:
            return
        entries = reader.words(strip)
        tags, ids = entries >> np.uint64(TAG_SHIFT), entries & np.uint64(LOW_HALF)
        found: list[int] = ids.tolist()
        # Its pad is free for others from now on, even if the table is read again: a peer may never fill the table.
        table.strip = None
        reader.let_go(strip)
        if not bool(((tags == table.tag) & (ids != LOW_HALF)).all()):
            self._statistics.count("stream_tables_early")
            table.due_s = now_s + self._pace_s(polls, now_s)
            return
        table.ids += found
        if table.next_piece[1]:
            return
        polls.tables.remove(table)
        self._statistics.count("stream_tables")
        self._tell(table.watch, partial(table.watch.listener.table, table.tag, table.first, tuple(table.ids)))

    # ------------------------------------------------------------------------------------------------------------ ends

    def forget(self, peer: Peer, code: str, message: str) -> None:
        """End the watches of a peer that can no longer be read."""
        polls = self._peers.get(peer)
        if polls is not None and self._reader is not None:
            self._fail(polls, code, message)
            self._tidy(self._reader, polls)

    def end_all(self, code: str, message: str) -> None:
        """End all watches."""
        for peer in list(self._peers):
            self.forget(peer, code, message)

    def _fail(self, polls: PeerPolls, code: str, message: str) -> None:
        polls.dropped += polls.strips
        watches, polls.watches, polls.tables, polls.strip = polls.watches, [], [], None
        for watch in watches:
            watch.is_live = False
            self._statistics.count("streams_broken")
            self._tell(watch, partial(watch.listener.broken, code, message))

    def _tidy(self, reader: StripReader, polls: PeerPolls) -> None:
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
            reader.let_go(strip)
