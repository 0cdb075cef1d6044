"""Checks of streams that any implementation of the port must pass: the same bodies on the fake and on real NIXL."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agent_checks.stage import expect, expect_error
from agent_checks.stream_rewriter import VOID_TOKENS, entries_of, entry_id, is_progress_of
from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.streams.polls import PAD_COUNT, StreamWatch
from kv_nixl_agent.values import PeerSpec, StreamLocation

_LIMIT_S: Final = 60.0
_REWRITE_S: Final = 1.0


class Listener:
    """Writes down what a watch tells; demands that nothing torn is among it."""

    def __init__(self) -> None:
        self.progressed: list[tuple[int, int]] = []
        self.tables: list[tuple[int, int, tuple[int, ...]]] = []
        self.ends: list[str] = []

    def progress(self, tag: int, tokens: int) -> None:
        """Take a progress word."""
        expect(is_progress_of(tag, tokens), f"progress {tokens} under tag {tag} was stored by nobody")
        expect(not self.progressed or tag >= self.progressed[-1][0], f"tag {tag} after {self.progressed[-1:]}")
        self.progressed.append((tag, tokens))

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:
        """Take entries."""
        right = tuple(entry_id(tag, first + place) for place in range(len(ids)))
        expect(ids == right, f"entries {first} to {first + len(ids) - 1} under tag {tag} are not all its own")
        self.tables.append((tag, first, ids))

    def broken(self, code: str, message: str) -> None:
        """Take the end."""
        expect(bool(message), "an end without a word")
        self.ends.append(code)


@dataclass
class StreamStage:
    """A consumer and a producer with stream slots.

    Attributes:
        consumer: Agent under test.
        producer: The other side.
        spec: Description of the producer, with another location of its streams if one is given.
        slots: Its stream slots.
    """

    consumer: TransferAgent
    producer: Any
    spec: Callable[[StreamLocation | None], PeerSpec]
    location: StreamLocation

    def connect(self) -> None:
        """Add the producer as a peer."""
        self.consumer.add_peer(self.spec(self.location))

    def watch(self, slot: int) -> tuple[Listener, StreamWatch]:
        """Begin to look at a slot."""
        listener = Listener()
        return listener, self.consumer.watch_stream("p", slot, listener)

    def turn(self) -> None:
        """Do one turn, and tell the news."""
        moved = self.consumer.advance()
        self.tell_news()
        if not moved:
            time.sleep(50e-6)

    def tell_news(self) -> None:
        """Call the listeners."""
        polls = self.consumer.polls
        for call in polls.take_news() if polls is not None else []:
            call()

    def run_until(self, condition: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> None:
        """Drive the consumer until `condition`."""
        end_s = time.monotonic() + limit_s
        while not condition():
            expect(time.monotonic() < end_s, f"{what} did not come within {limit_s} s")
            self.turn()

    def run_for(self, duration_s: float) -> None:
        """Drive the consumer for so long."""
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.turn()

    def statistic(self, name: str) -> float:
        """Return one of the consumer's figures."""
        return self.consumer.statistics()[name]


def _begin(stage: StreamStage, slot: int, tag: int, entries: int) -> None:
    stage.producer.stream("open", slot, tag, tag)
    _go_on(stage, slot, tag, 0, entries)


def _go_on(stage: StreamStage, slot: int, tag: int, first: int, stop: int) -> None:
    stage.producer.stream("put", slot, tag, first, [entry_id(tag, entry) for entry in range(first, stop)])
    stage.producer.stream("show", slot, tag, stop * 1000 + tag % 1000)


def check_progress_and_tables(stage: StreamStage) -> None:
    """A watch tells progress, restarts and voids of its slot alone; a table is read under its tag; an ended watch is silent."""
    stage.connect()
    listener, watch = stage.watch(3)
    stage.run_until(lambda: listener.progressed == [(0, 0)], "the first look")
    _begin(stage, 3, 7, 5)
    _begin(stage, 2, 8, 9)
    stage.run_until(lambda: (7, 5007) in listener.progressed, "progress")
    watch.read_table(7, 0, 5)
    stage.run_until(lambda: bool(listener.tables), "the table")
    _go_on(stage, 3, 7, 5, 1500)
    stage.run_until(lambda: listener.progressed[-1] == (7, 1500007), "more progress")
    watch.read_table(7, 5, 1500)
    watch.read_table(7, 1499, 1500)
    stage.run_until(lambda: len(listener.tables) == 3, "two more tables")
    expect(sorted(len(ids) for _, _, ids in listener.tables) == [1, 5, 1495], "as many ids as were asked for")
    stage.producer.stream("void", 3, 7 | 1 << 63, 7)
    stage.run_until(lambda: listener.progressed[-1] == (7, VOID_TOKENS), "the void")
    stage.producer.stream("show", 3, 7, 2000007)  # a chunk that ends late
    stage.producer.stream("open", 3, 11, 11)
    stage.run_until(lambda: listener.progressed[-1] == (11, 0), "the restart")
    expect((7, 2000007) not in listener.progressed, "progress of a stream that was voided is shown")
    watch.end()
    watch.end()
    _go_on(stage, 3, 11, 0, 1)
    reported, looks = len(listener.progressed), stage.statistic("stream_looks")
    stage.run_for(0.1)
    expect(len(listener.progressed) == reported and not listener.ends, "an ended watch gets news")
    expect(stage.statistic("stream_looks") == looks, "a peer that nobody watches is looked at")
    expect(stage.statistic("stream_pads_free") == PAD_COUNT, "a pad was not given back")


def check_entries_of_another_tag(stage: StreamStage) -> None:
    """Entries are taken under their own tag alone, once all of them are there."""
    stage.connect()
    _begin(stage, 0, 5, 8)
    listener, watch = stage.watch(0)
    watch.read_table(6, 0, 8)
    stage.run_until(lambda: stage.statistic("stream_tables_early") > 2, "looks that come to nothing")
    expect(not listener.tables, "entries of tag 5 were taken for those of tag 6")
    stage.producer.stream("open", 0, 6, 6)
    stage.producer.stream("put", 0, 6, 0, [entry_id(6, entry) for entry in range(7)])
    stage.run_for(0.05)
    expect(not listener.tables, "an entry of tag 5 among those of tag 6 was taken")
    stage.producer.stream("put", 0, 6, 7, [entry_id(6, 7)])
    stage.run_until(lambda: [tag for tag, _, _ in listener.tables] == [6], "the table of tag 6")


def check_many_watches_one_read(stage: StreamStage) -> None:
    """All slots of a peer, and a slot that two listeners watch, cost one read a look."""
    stage.connect()
    watched = [stage.watch(slot) for slot in (*range(stage.location[2]), 1)]
    for slot in range(stage.location[2]):
        _begin(stage, slot, slot + 1, 2)
    stage.run_until(
        lambda: all(each.progressed[-1:] == [(slot + 1, 2001 + slot)] for slot, (each, _) in enumerate(watched[:-1])),
        "progress of all slots",
    )
    looks = stage.statistic("stream_looks")
    expect(watched[-1][0].progressed[-1] == watched[1][0].progressed[-1] == (2, 2002), "both listeners of slot 1")
    expect(looks < stage.location[2] * 40, f"{looks} looks for {stage.location[2]} slots")
    watched[1][1].end()
    _go_on(stage, 1, 2, 2, 3)
    stage.run_until(lambda: watched[-1][0].progressed[-1] == (2, 3002), "the listener that is left")
    expect(watched[1][0].progressed[-1] == (2, 2002), "the one that ended gets no news")


def check_no_torn_look(stage: StreamStage) -> None:
    """While a producer restarts all of its slots as fast as it can, nothing is accepted that it never stored."""
    stage.connect()
    slots = stage.location[2]
    chance = random.Random(slots)
    watched = {slot: stage.watch(slot) for slot in range(slots)}
    listeners = [listener for listener, _ in watched.values()]
    asked = dict.fromkeys(range(slots), 0)
    found, begun = (0, 0, 0), 0
    for seed in range(17, 57):  # the first second is enough where both sides have a core
        stage.producer.begin_rewriting(_REWRITE_S, seed, begun)
        end_s = time.monotonic() + _REWRITE_S
        while time.monotonic() < end_s:
            stage.turn()
            for slot, (listener, watch) in list(watched.items()):
                if len(listener.progressed) == asked[slot]:
                    continue
                asked[slot] = len(listener.progressed)
                tag, tokens = listener.progressed[-1]
                if tokens not in {0, VOID_TOKENS}:
                    first = chance.randrange(entries_of(tokens))
                    watch.read_table(tag, first, entries_of(tokens))
                if chance.random() < 0.3:  # as a reader that sees another tag does
                    watch.end()
                    watched[slot], asked[slot] = stage.watch(slot), 0
                    listeners.append(watched[slot][0])
        begun = stage.producer.finish_rewriting()
        found = begun, sum(len(each.progressed) for each in listeners), sum(len(each.tables) for each in listeners)
        if min(found[:2]) > 100 and found[2] > 5:
            break
    expect(min(found[:2]) > 100 and found[2] > 5, f"streams, news and tables: {found} are no test")
    expect(not any(each.ends for each in listeners), "a watch broke")
    for _, watch in watched.values():
        watch.end()
    stage.run_until(lambda: stage.statistic("stream_pads_free") == PAD_COUNT, "all pads")


def check_bad_locations(stage: StreamStage) -> None:
    """Slots, entries and locations that cannot be are refused before anything is read."""
    address, device, slots, capacity = stage.location
    for wrong in ((0, 0, slots, capacity), (address + 4, 0, slots, capacity), (address, -1, slots, capacity),
                  (address, 0, 0, capacity), (address, 0, 1025, capacity), (address, 0, slots, 0), (address, 0, slots, 1 << 21),
                  (1 << 63, 0, slots, capacity)):  # fmt: skip
        expect_error("bad-streams", lambda at=wrong: stage.consumer.add_peer(stage.spec(at)))  # type: ignore[misc]
    for far in ((address, device, 1024, 1 << 20), (address + (1 << 40), device, slots, capacity)):
        stage.consumer.add_peer(stage.spec(far))
        expect_error("peer-rows-unregistered", lambda: stage.watch(0))
        stage.consumer.remove_peer("p")
    stage.consumer.add_peer(stage.spec(None))
    expect_error("bad-streams", lambda: stage.watch(0))
    stage.consumer.remove_peer("p")
    expect_error("unknown-peer", lambda: stage.watch(0))
    stage.connect()
    expect_error("bad-streams", lambda: stage.watch(slots))
    expect_error("bad-streams", lambda: stage.watch(-1))
    _, watch = stage.watch(0)
    for first, stop in ((0, capacity + 1), (3, 3), (-1, 2)):
        expect_error("bad-streams", lambda a=first, b=stop: watch.read_table(1, a, b))  # type: ignore[misc]


def check_removed_peer(stage: StreamStage) -> None:
    """The removal of a peer ends its watches, each once; the peer can be watched again when it is back."""
    stage.connect()
    listener, watch = stage.watch(0)
    ended, gone = stage.watch(1)
    stage.run_until(lambda: bool(listener.progressed), "the first look")
    gone.end()
    watch.read_table(1, 0, 1)
    stage.consumer.remove_peer("p")
    stage.run_for(0.02)
    expect((listener.ends, ended.ends) == (["peer-removed"], []), f"{listener.ends} and {ended.ends}")
    watch.read_table(1, 0, 1)
    watch.end()
    stage.connect()
    again, _ = stage.watch(0)
    stage.run_until(lambda: bool(again.progressed), "a look at the peer that is back")
    stage.consumer.close()
    stage.tell_news()
    expect(again.ends == ["agent-closed"], f"{again.ends}")


def check_killed(stage: StreamStage) -> None:
    """A producer that was killed ends its watches once, with the code of a lost peer."""
    stage.connect()
    _begin(stage, 0, 5, 8)
    listener, watch = stage.watch(0)
    other, _ = stage.watch(1)
    stage.run_until(lambda: (5, 8005) in listener.progressed, "progress")
    stage.producer.kill()
    watch.read_table(5, 0, 8)
    stage.run_until(lambda: bool(listener.ends), "the end")
    stage.run_for(0.1)
    expect((listener.ends, other.ends) == (["peer-disconnected"], ["peer-disconnected"]), f"{listener.ends}")
    expect(stage.statistic("streams_broken") == 2, "each end is counted once")
    stage.run_until(lambda: stage.statistic("stream_pads_free") == PAD_COUNT, "all pads")


def check_stopped(stage: StreamStage) -> None:
    """A producer that stands still costs one pad, however often it is watched, and goes on where it was."""
    stage.connect()
    listener, watch = stage.watch(0)
    stage.run_until(lambda: bool(listener.progressed), "the first look")
    stage.producer.stop()
    for _ in range(10):
        stage.run_for(0.01)
        watch.end()
        stage.run_for(0.001)
        listener, watch = stage.watch(0)
    stage.run_for(0.01)
    expect(stage.statistic("stream_pads_free") >= PAD_COUNT - 1, f"{stage.statistic('stream_pads_free')} pads are free")
    stage.producer.resume()
    _begin(stage, 0, 9, 2)
    stage.run_until(lambda: (9, 2009) in listener.progressed, "progress after the stop")
    expect(not listener.ends, f"{listener.ends}")


def check_deregistered(stage: StreamStage) -> None:
    """A producer that closes its agent shows every stream as void, or breaks the watch; no progress comes after it."""
    stage.connect()
    _begin(stage, 0, 5, 8)
    listener, _ = stage.watch(0)
    stage.run_until(lambda: (5, 8005) in listener.progressed, "progress")
    stage.producer.deregister()
    expect_error("agent-closed", lambda: stage.producer.stream("open", 0, 6, 6))
    stage.run_until(lambda: listener.progressed[-1][1] == VOID_TOKENS or bool(listener.ends), "the void, or the end")
    stage.run_for(0.05)
    expect(len(listener.ends) <= 1, f"{listener.ends}")


STREAM_CHECKS: tuple[Callable[[StreamStage], None], ...] = (
    check_progress_and_tables,
    check_entries_of_another_tag,
    check_many_watches_one_read,
    check_no_torn_look,
    check_bad_locations,
    check_removed_peer,
)

STREAM_FAULT_CHECKS: tuple[Callable[[StreamStage], None], ...] = (check_killed, check_stopped, check_deregistered)
