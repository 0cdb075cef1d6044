"""Streams on the fake fabric: the checks that real NIXL passes too, the stores of words, and a thread with watches."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from agent_checks.recording import RecordingPort, recording_factory
from agent_checks.stream_checks import STREAM_CHECKS, STREAM_FAULT_CHECKS, Listener, StreamStage
from agent_checks.stream_rewriter import VOID_TOKENS, entry_id, rewrite_words
from helpers import Rank, code_of, undisturbed, wait_for

from kv_nixl_agent import AgentError, AgentOptions, PeerSpec, ThreadOptions, TransferAgent
from kv_nixl_agent.memory.fences import FenceArray
from kv_nixl_agent.streams.words import StreamLayout, StreamWords
from kv_nixl_agent.testing import FakeFabric

NOTHING = np.empty((0, 5), dtype=np.uint64)
OPTIONS = AgentOptions(stream_slots=8, stream_capacity=2048)


class InProcessStreams:
    """Producer of the checks over an agent of the same process."""

    def __init__(self, fabric):
        self.agent = TransferAgent("producer", [], OPTIONS, port_factory=fabric.port)
        port = fabric.agent("producer")
        self.stop, self.resume, self.kill, self.deregister = port.stop, port.resume, port.die, self.agent.close
        words = self.agent.stream_words
        assert words is not None
        self.words = words
        self._rewriting: Future[int] = Future()

    def stream(self, method, *arguments):
        getattr(self.words, method)(*arguments)

    def begin_rewriting(self, duration_s, seed, begun):
        self._rewriting = ThreadPoolExecutor(1).submit(rewrite_words, self.words, duration_s, seed, begun)

    def finish_rewriting(self):
        return self._rewriting.result(60)


def make_stage(latency_polls, ports=None):
    fabric = FakeFabric(latency_polls=latency_polls)
    producer = InProcessStreams(fabric)
    factory = fabric.port if ports is None else recording_factory(fabric.port, ports)
    consumer = TransferAgent("consumer", [], OPTIONS, port_factory=factory)
    metadata, fence = producer.agent.agent_metadata(), producer.agent.fence

    def spec(location):
        return PeerSpec("p", metadata, NOTHING, NOTHING, fence=fence, streams=location)

    return StreamStage(consumer, producer, spec, producer.words.location)


@pytest.mark.parametrize("latency_polls", [0, 3])
@pytest.mark.parametrize("check", [*STREAM_CHECKS, *STREAM_FAULT_CHECKS], ids=lambda check: check.__name__)
def test_check(check, latency_polls):
    ports: list[RecordingPort] = []
    stage = make_stage(latency_polls, ports)
    check(stage)
    stage.consumer.close()
    assert ports[0].open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}
    assert ports[0].double_releases == 0


# Words ---------------------------------------------------------------------------------------------------------------


def make_words(slots=4, capacity=20):
    fences = FenceArray(8)
    words = StreamWords(fences, slots, capacity)
    return fences, words, words._memory


def test_the_worked_example_of_the_layout():
    layout = StreamLayout(5, 20)
    assert (layout.first_table, layout.row_words, layout.words) == (8, 24, 128)
    assert 0x10000 + 8 * layout.entry(2, 3) == 66008
    assert 7 << 32 | 40 == 30064771112


def test_open_slots_are_counted_and_each_opening_is_reported():
    _, words, _ = make_words()
    reported = []
    words.on_open = lambda: reported.append(words.open_count)
    words.void(1, 9, 3)
    words.open(1, 7, 7)
    words.open(1, 8, 8)
    words.open(3, 9, 9)
    words.void(1, 10, 8)
    words.void(1, 10, 8)
    assert (reported, words.open_count) == ([1, 1, 2], 1)
    words.void_all()
    assert words.open_count == 0


def test_stores_of_a_slot():
    fences, words, memory = make_words()
    assert words.location == (memory.ctypes.data, 0, 4, 20)
    assert memory.ctypes.data % 64 == 0
    words.open(2, 1 << 40 | 7, 7)
    assert (fences.read(2), int(memory[2])) == (1 << 40 | 7, 7 << 32)
    words.put(2, 7, 18, [5, 6])
    words.show(2, 7, 320)
    at = words._layout.entry(2, 18)
    assert memory[at : at + 2].tolist() == [7 << 32 | 5, 7 << 32 | 6]
    assert int(memory[2]) == 7 << 32 | 320
    assert (memory[8:] != np.uint64((1 << 64) - 1)).sum() == 2, "no other entry"
    words.void(2, 99, 7)
    assert (fences.read(2), int(memory[2])) == (99, 7 << 32 | VOID_TOKENS)
    words.show(2, 7, 336)
    assert int(memory[2]) == 7 << 32 | VOID_TOKENS, "a chunk that ends after the void"
    words.open(2, 8, 8)
    words.show(2, 7, 336)
    assert int(memory[2]) == 8 << 32, "a chunk that ends after the restart"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda words: words.open(4, 1, 1),
        lambda words: words.open(-1, 1, 1),
        lambda words: words.open(0, 1, 1 << 32),
        lambda words: words.void(4, 1, 1),
        lambda words: words.put(1, 7, 19, [1, 2]),
        lambda words: words.put(1, 7, -1, [1]),
        lambda words: words.put(1, 7, 0, [-1]),
        lambda words: words.put(1, 7, 0, [VOID_TOKENS]),
        lambda words: words.put(1, 8, 0, [1]),
        lambda words: words.put(0, 7, 0, [1]),
        lambda words: words.show(1, 7, VOID_TOKENS),
        lambda words: words.show(1, 7, -1),
    ],
)
def test_what_cannot_be_stored_is_refused_and_changes_nothing(wrong):
    _, words, memory = make_words()
    words.open(1, 7, 7)
    before = memory.copy()
    assert code_of(lambda: wrong(words)) == "bad-streams"
    assert np.array_equal(memory, before)


def test_without_slots_nothing_is_registered_and_nobody_watches():
    fabric = FakeFabric()
    plain = TransferAgent("plain", [], port_factory=fabric.port)
    streams = TransferAgent("streams", [], OPTIONS, port_factory=fabric.port)
    assert plain.stream_words is None
    assert len(fabric.agent("plain")._all_regions()) == 2
    assert len(fabric.agent("streams")._all_regions()) == 4
    location = streams.stream_words.location
    plain.add_peer(PeerSpec("p", streams.agent_metadata(), NOTHING, NOTHING, fence=streams.fence, streams=location))
    assert code_of(lambda: plain.watch_stream("p", 0, Listener())) == "bad-streams"


# Pace and thread -----------------------------------------------------------------------------------------------------


def test_a_thread_tells_its_listeners_and_rests_when_nobody_watches():
    fabric = FakeFabric()
    threads = [
        Rank(fabric, name, options=OPTIONS, thread_options=ThreadOptions(slow_poll_s=0.25)).thread
        for name in ("producer", "consumer")
    ]
    producer, consumer = threads
    with pytest.raises(AgentError) as error:
        assert producer.streams
    assert error.value.code == "not-started"
    for thread in threads:
        thread.start()
    listener, watches = Listener(), []
    spec = PeerSpec("p", producer.agent_metadata(), NOTHING, NOTHING, fence=producer.fence, streams=producer.streams)
    consumer.call_soon(lambda: consumer.agent.add_peer(spec))
    consumer.call_soon(lambda: watches.append(consumer.agent.watch_stream("p", 1, listener)))
    consumer.allow_slow_polling(True)
    wait_for(lambda: listener.progressed)
    looks = undisturbed(lambda: consumer.statistics()["stream_looks"], wait_s=0.3)
    assert looks > 30, "a watched peer is looked at every 20 ms at least, by a thread that has nothing else to do"
    producer.stream_words.open(1, 5, 5)
    producer.stream_words.put(1, 5, 0, [entry_id(5, 0)])
    producer.stream_words.show(1, 5, 1005)
    wait_for(lambda: (5, 1005) in listener.progressed)
    consumer.call_soon(lambda: watches[0].read_table(5, 0, 1))
    wait_for(lambda: listener.tables)
    consumer.call_soon(watches[0].end)
    assert undisturbed(lambda: consumer.health().turns, wait_s=1.0) < 40, "nobody watches: the thread rests"
    other = Listener()
    consumer.call_soon(lambda: consumer.agent.watch_stream("p", 2, other))
    wait_for(lambda: other.progressed)
    consumer.close()
    assert other.ends == ["agent-closed"]
    assert listener.ends == []
    assert consumer.health().callback_errors == 0
    producer.close()


def test_a_watch_that_ends_gets_no_earlier_findings():
    stage = make_stage(latency_polls=0)
    stage.connect()
    listener, watch = stage.watch(0)
    stage.consumer.advance()
    watch.end()
    news = stage.consumer.polls.take_news()
    assert len(news) == 1
    news[0]()
    assert listener.progressed == []
