"""The pace of looks at a peer's progress words, in time that stands still between them, and on a thread."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import Rank

from kv_nixl_agent import AgentOptions, PeerSpec, TransferAgent
from kv_nixl_agent.testing import FakeFabric

NOTHING = np.empty((0, 5), dtype=np.uint64)


class Watched:
    """A producer and a consumer that looks at it; time moves from look to look."""

    def __init__(self, **pace):
        self._now_s = 100.0
        fabric = self.fabric = FakeFabric(latency_polls=0)
        options = AgentOptions(stream_slots=8, stream_capacity=16, **pace)
        self.producer = TransferAgent("producer", [], options, port_factory=fabric.port)
        self.consumer = TransferAgent("consumer", [], options, port_factory=fabric.port, clock=lambda: self._now_s)
        location = self.producer.stream_words.location
        self.consumer.add_peer(PeerSpec("p", self.producer.agent_metadata(), NOTHING, NOTHING, streams=location))

    def looks(self, duration_s):
        """Return the number of looks in a span of time."""
        before, end_s = self.consumer.statistics()["stream_looks"], self._now_s + duration_s
        while self._now_s < end_s:
            self.consumer.advance()
            for call in self.consumer.polls.take_news():
                call()
            self._now_s = min(max(self.consumer.polls.next_look_s, self._now_s + 1e-6), end_s)
        return self.consumer.statistics()["stream_looks"] - before

    def turns(self, duration_s):
        """Take a turn every half millisecond; return how often the consumer polled NIXL for the end of a read."""
        port, polled = self.fabric.agent("consumer"), []
        check = port.check
        port.check = lambda transfer: polled.append(transfer) or check(transfer)
        for _ in range(round(duration_s / 5e-4)):
            self.consumer.advance()
            self._now_s += 5e-4
        port.check = check
        return len(polled)


def test_the_pace_follows_the_peer():
    watched = Watched(stream_poll_s=0.001, stream_slow_poll_s=0.05)
    producer, consumer, looks = watched.producer, watched.consumer, watched.looks
    assert consumer.polls.next_look_s == float("inf")
    assert looks(10.0) == 0
    watch = consumer.watch_stream("p", 0, SimpleNamespace(progress=lambda *_: None))
    assert 28 <= looks(0.032) <= 34, "every millisecond for the first 32"
    assert 20 <= looks(0.032) <= 28, "then every 32nd of the time"
    looks(10.0)
    assert 18 <= looks(1.0) <= 22, "every 50 ms at last"
    producer.stream_words.open(0, 1, 1)
    looks(0.05)
    assert 24 <= looks(0.03) <= 32, "and fast again after a change"
    watch.end()
    assert looks(1.0) == 0


def test_the_last_step_is_looked_for_closely_and_those_before_it_rarely():
    """Steps of 100 tokens and 0.1 s; 350 tokens: the last step has 50 and should take 0.05 s."""
    watched = Watched(stream_poll_s=0.0005, stream_slow_poll_s=0.02)
    producer, consumer, looks = watched.producer, watched.consumer, watched.looks
    reported = []
    listener = SimpleNamespace(progress=lambda tag, tokens: reported.append((tag, tokens)))
    watch = consumer.watch_stream("p", 0, listener, tokens=350)
    producer.stream_words.open(0, 7, 7)
    looks(0.1)
    for tokens in (100, 200, 300):
        producer.stream_words.show(0, 7, tokens)
        count = looks(0.1 if tokens < 300 else 0.03)
        if tokens == 200:
            assert 12 <= count <= 20, "sixteen: the step after the next one is the last, and may be short"
        else:
            assert count <= 8 or tokens == 100, (tokens, count)
    assert reported[-1] == (7, 300)
    assert looks(0.02) >= 12, "from three fifths of 0.05 s on, about every millisecond or more often"
    producer.stream_words.show(0, 7, 350)
    looks(0.0016)
    assert reported[-1] == (7, 350)
    watch.end()

    late = consumer.watch_stream("p", 1, listener, tokens=350)
    producer.stream_words.open(1, 8, 8)
    looks(0.1)
    producer.stream_words.open(1, 9, 9)
    looks(0.002)
    assert looks(0.1) >= 40, "no step is known of a prompt that has started again"
    late.end()


def test_a_poll_of_a_stopped_peer_is_polled_as_rarely_as_quarantine_once_nobody_waits_for_it():
    watched = Watched()
    consumer, port = watched.consumer, watched.fabric.agent("producer")
    watch = consumer.watch_stream("p", 0, SimpleNamespace(progress=lambda *_: None))
    port.stop()
    assert watched.turns(0.01) == 19, "in every turn after the first, which posts"
    assert (consumer.is_awaited, consumer.has_leftovers) == (True, False)
    watch.end()
    assert (consumer.is_awaited, consumer.has_leftovers) == (False, True)
    assert consumer.polls.next_look_s == float("inf")
    assert 9 <= watched.turns(0.01) <= 11, "every millisecond"
    consumer.remove_peer("p")
    assert watched.turns(0.01) == 20, "a read of one of our own words should end soon"
    assert (consumer.is_awaited, consumer.has_leftovers) == (True, False)
    watched.turns(1.0)
    assert (consumer.is_awaited, consumer.has_leftovers) == (False, True)
    assert 9 <= watched.turns(0.01) <= 11, "and is a leftover after a second"
    port.resume()
    watched.turns(0.01)
    assert (consumer.is_awaited, consumer.has_leftovers) == (False, False)


def turns_of(thread):
    """Return a thread's turns in half a second at least, and how long that was."""
    before, began_s = thread._turns, time.monotonic()
    time.sleep(0.5)
    return thread._turns - before, time.monotonic() - began_s


@pytest.mark.full
def test_a_thread_whose_own_slots_are_open_looks_out_for_its_readers():
    """NIXL ends some reads of a peer only when this thread has looked, and slow polling is for times without readers."""
    fabric = FakeFabric(latency_polls=0)
    for progress_thread, least in ((False, 15), (True, 0)):
        options = AgentOptions(stream_slots=2, stream_capacity=16, progress_thread=progress_thread)
        thread = Rank(fabric, f"producer {progress_thread}", options=options).start().thread
        try:
            thread.allow_slow_polling(True)
            count = -1
            for tag in range(7, 17, 2):
                time.sleep(0.3)  # it looks every 0.25 s by now
                thread.stream_words.open(1, tag, tag)
                count, took_s = turns_of(thread)
                assert count <= 25 + 20 * took_s, "every 10 ms for 0.2 s, then every 0.1 s"
                rest, took_s = turns_of(thread)
                assert rest <= 5 + 20 * took_s, "they take the interpreter from the engine that computes"
                thread.stream_words.void(1, tag + 1, tag)
                time.sleep(0.05)
                rest, took_s = turns_of(thread)
                assert rest < 5 + 20 * took_s
                if count >= least:  # else the machine gave it no core
                    break
            assert count >= least
        finally:
            thread.close()


class Reader:
    """A listener that asks for the table as soon as there is progress."""

    def __init__(self):
        self.watch: Any = None
        self.tokens = 0
        self.ids: tuple[int, ...] = ()

    def progress(self, tag, tokens):
        if tokens and not self.tokens:
            self.tokens = tokens
            self.watch.read_table(tag, 0, 4)

    def table(self, tag, first, ids):
        self.ids = ids

    def broken(self, code, message):
        raise AssertionError(code)


@pytest.mark.parametrize(("pads", "look_pads", "peers"), [(8, 6, 40), (8, 2, 40), (64, 48, 100)])
def test_more_peers_are_watched_than_there_are_pads(monkeypatch, pads, look_pads, peers):
    monkeypatch.setattr("kv_nixl_agent.streams.polls.PAD_COUNT", pads)
    monkeypatch.setattr("kv_nixl_agent.streams.polls._LOOK_PADS", look_pads)
    now_s = 100.0
    fabric = FakeFabric(latency_polls=0)
    options = AgentOptions(stream_slots=8, stream_capacity=16)
    consumer = TransferAgent("consumer", [], options, port_factory=fabric.port, clock=lambda: now_s)
    readers = {f"p{number}": Reader() for number in range(peers)}
    producers = {key: TransferAgent(key, [], options, port_factory=fabric.port) for key in readers}
    for key, reader in readers.items():
        words = producers[key].stream_words
        consumer.add_peer(PeerSpec(key, producers[key].agent_metadata(), NOTHING, NOTHING, streams=words.location))
        reader.watch = consumer.watch_stream(key, 0, reader, tokens=64)
        words.open(0, 7, 7)
        words.put(0, 7, 0, [1, 2, 3, 4])
        words.show(0, 7, 32)
        # The peer never fills this one.
        reader.watch.read_table(9, 8, 9)
    while not all(reader.ids for reader in readers.values()):
        now_s += 0.05
        assert now_s < 110, f"{sum(bool(reader.tokens) for reader in readers.values())} of {peers} saw progress"
        consumer.advance()
        for call in consumer.polls.take_news():
            call()
    assert {reader.ids for reader in readers.values()} == {(1, 2, 3, 4)}
    for reader in readers.values():
        reader.watch.end()
    consumer.advance()
    assert consumer.statistics()["stream_pads_free"] == pads
