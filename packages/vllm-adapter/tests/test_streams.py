"""Streamed reads between recording fakes, with the real machine that says what is read next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import CodedFailure, FakeAgent, FakeCodec, FakeRecorder, Plan, Result, order

from kv_nixl_agent import PeerSpec
from kv_scheduler_state import BlockList
from kv_scheduler_state.streams import StreamOrder
from kv_scheduler_state.streams.reader import StreamReaders
from vllm_adapter.config import Settings
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.worker.transfer.records import PeerEngine, Read, TransferParts
from vllm_adapter.worker.transfer.stream_records import StreamShape
from vllm_adapter.worker.transfer.streams import StreamCoordinator

TAG, FENCE = 99, (3, 99)
TWO_RANKS = ((0, 0), (0, 1))


class Watch:
    def __init__(self, listener: Any) -> None:
        self.listener = listener
        self.asked: list[tuple[int, int, int]] = []
        self.is_ended = False

    def read_table(self, tag: int, first: int, stop: int) -> None:
        self.asked.append((tag, first, stop))

    def end(self) -> None:
        self.is_ended = True

    def tell(self) -> None:
        """Tell the tables that were asked for: the id at place p is 500 + p."""
        asked, self.asked = self.asked, []
        for tag, first, stop in asked:
            self.listener.table(tag, first, tuple(range(500 + first, 500 + stop)))


class Agent(FakeAgent):
    def __init__(self) -> None:
        super().__init__()
        self.watches: dict[str, Watch] = {}

    def watch_stream(self, peer: str, slot: int, listener: Any, *, tokens: int = 0) -> Watch:
        assert (slot, tokens) == (FENCE[0], 100)
        self.watches[peer] = watch = Watch(listener)
        return watch


class Spec:
    local_rows = np.zeros((1, 5), np.uint64)


class Bench:
    """A prompt of 100 tokens in blocks of 16, read into the blocks 10 to 16."""

    def __init__(self, ranks: Any = ((0, 0),), *, start: int = 0, can_stream: bool = True) -> None:
        self.now_s = 100.0
        self.agent, self.recorder = Agent(), FakeRecorder()
        self.released: list[Any] = []
        self.finished: list[ReadEnd] = []
        self.torn: list[tuple[str, str]] = []
        self.dropped: list[str] = []
        untyped: Any = (self.agent, None, FakeCodec(), self.recorder, self)
        agent, handshakes, codec, recorder, peers = untyped
        parts = TransferParts(
            agent, handshakes, codec, recorder, lambda: self.now_s, "D", PeerSpec, Settings(read_timeout_s=5.0), 14
        )
        machine: Any = StreamReaders(stall_s=5.0)
        self.streams = StreamCoordinator(
            parts,
            machine,
            StreamShape([(16, 0)]),
            peers,
            self.ended,
        )
        ids = tuple(range(10 + start // 16, 17))
        here = order(tokens=100, fence=FENCE, local_blocks=(BlockList(ids, start, 0),), peer_blocks=(BlockList(()),))
        self.engine = PeerEngine(here.ticket.peer, 0.0, 0.0)
        untyped_plan: Any = Plan(producer_ranks=ranks)
        self.engine.plan, self.engine.can_stream, self.engine.phase = untyped_plan, can_stream, "ready"
        for rank in ranks:
            untyped_spec: Any = Spec()
            self.agent.peers[self.engine.key(rank)] = untyped_spec
        self._order = StreamOrder(here, TAG, start)
        self.begin()

    def begin(self) -> None:
        self.read = Read(self._order.read, ReadTimes(self.now_s))
        self.streams.begin(self.read, self._order, self.engine)

    def ended(self, end: ReadEnd) -> None:
        if end.code in {"", "stream-stopped"}:
            self.finished.append(end)
        else:
            self.torn.append((end.order.request_id, end.code))

    # the directory of engines, as streams know it
    def waiting(self, _request_id: str) -> list[Read]:
        return []

    def release(self, read: Read, _engine: PeerEngine, ranks: Any) -> None:
        self.released.append((read.order.request_id, tuple(ranks)))

    def drop(self, engine: PeerEngine, reason: str) -> None:
        assert engine is self.engine
        self.dropped.append(reason)

    def read_ended(self, engine: PeerEngine) -> None:
        engine.reads_in_flight -= 1

    def watch(self, rank: Any = (0, 0)) -> Watch:
        return self.agent.watches[self.engine.key(rank)]

    def progress(self, tokens: int, rank: Any = (0, 0), tag: int = TAG) -> None:
        self.watch(rank).listener.progress(tag, tokens)

    def read_to(self, tokens: int, rank: Any = (0, 0)) -> None:
        """Let a rank finish so many tokens, and list their blocks."""
        self.progress(tokens, rank)
        self.watch(rank).tell()

    def posts(self) -> list[tuple[list[int], list[int], Any]]:
        """Return the transfers that are not over: our blocks, the peer's, fence."""
        return [(post["local"], post["remote"], post["fence"]) for post in self.agent.posts.values()]

    def end_parts(self) -> None:
        """End the transfers that are not fence words."""
        for transfer_id, post in list(self.agent.posts.items()):
            if post["fence"] is None:
                del self.agent.posts[transfer_id]
                assert self.streams.transfer_ended(Result(transfer_id))

    def end_all(self, *, times: int = 1, **facts: Any) -> None:
        """End all transfers; at the second time those that the first ends have led to, e.g. of fence words."""
        for _ in range(times):
            for transfer_id in list(self.agent.posts):
                del self.agent.posts[transfer_id]
                assert self.streams.transfer_ended(Result(transfer_id, **facts))

    def codes(self) -> list[str]:
        return [end.code for end in self.finished]


def test_parts_follow_progress_and_the_fence_decides() -> None:
    bench = Bench()
    bench.progress(0)
    bench.progress(40)
    assert bench.watch().asked == [(TAG, 0, 2)]
    assert bench.posts() == []
    bench.watch().tell()
    assert bench.posts() == [([10, 11], [500, 501], None)]
    bench.read_to(80)
    bench.end_all()
    bench.read_to(100)
    assert bench.posts() == [([15, 16], [505, 506], None)]
    assert not bench.finished
    bench.end_all()
    assert bench.posts() == [([], [], FENCE)], "the word is read once all parts have landed"
    assert bench.watch().is_ended
    assert not bench.released
    bench.end_all()
    assert bench.codes() == [""]
    assert bench.released == [("r1", ((0, 0),))]
    assert (bench.read.times.bytes_moved, bench.engine.reads_in_flight, bench.dropped) == (400, 0, [])
    assert bench.read.times.early_bytes == 200
    assert bench.torn == []
    assert bench.recorder.done_bytes == [300], "its parts are counted as one read, as a plain one is"
    assert not bench.streams.transfer_ended(Result("somebody/0.0"))


def test_the_times_of_a_stream_tell_the_prompts_end_the_last_bytes_and_the_fence_apart() -> None:
    """Two ranks: the first one's word is verified while the second one still reads, so the second one's bytes are the last."""
    bench = Bench(((0, 0), (0, 1)))
    times = bench.read.times
    for now_s, event in (
        (101.0, lambda: bench.progress(40)),
        (102.0, lambda: bench.progress(100)),
        (103.0, lambda: bench.watch().tell()),
        (104.0, bench.end_all),  # the parts of the first rank
        (106.0, bench.end_all),  # its word
    ):
        bench.now_s = now_s
        event()
    assert (times.whole_s, times.data_s, times.fence_s) == (102.0, 104.0, 2.0)
    bench.now_s = 107.0
    bench.progress(100, rank=(0, 1))
    bench.watch((0, 1)).tell()
    bench.now_s = 110.0
    bench.end_all()
    assert (times.whole_s, times.data_s, times.fence_s) == (102.0, 110.0, 0.0)
    bench.now_s = 110.5
    bench.end_all()
    assert (times.whole_s, times.data_s, times.fence_s) == (102.0, 110.0, 0.5)
    assert bench.codes() == [""]


def test_what_is_here_already_is_not_read() -> None:
    bench = Bench(start=32)
    bench.read_to(48)
    assert bench.posts() == [([12], [502], None)]


@pytest.mark.parametrize("outcome", ["fence-rejected", "failed", "timed-out"])
def test_a_fence_that_does_not_hold_tears_the_stream(outcome: str) -> None:
    bench = Bench()
    bench.read_to(100)
    bench.end_all()
    bench.end_all(outcome=outcome, code="x")
    assert bench.torn == [("r1", "stream-void")]
    assert not bench.recorder.done_bytes
    assert not bench.finished
    assert not bench.released


def test_a_restart_tears_the_stream_once_its_parts_are_quiet() -> None:
    bench = Bench()
    bench.read_to(40)
    bench.progress(80)  # its table is never told
    bench.progress(0, tag=TAG + 1)
    assert bench.torn == [], "a part is on the wire"
    bench.end_all()
    assert bench.torn == [("r1", "stream-restarted")]
    assert bench.watch().is_ended
    bench.watch().tell()
    assert bench.posts() == [], "a late table orders nothing"


def test_pages_in_quarantine_are_waited_for() -> None:
    bench = Bench()
    bench.read_to(40)
    (transfer_id,) = bench.agent.posts
    bench.end_all(outcome="timed-out", code="deadline-exceeded", is_memory_quiet=False)
    assert bench.torn == []
    assert bench.recorder.counts["num_quarantined_reads"] == 1
    assert bench.recorder.warnings == [
        "request r1: its pages stay quarantined until the transfers from engine P are known to be over (deadline-exceeded)"
    ]
    assert bench.streams.memory_quiet(transfer_id)
    assert bench.torn == [("r1", "deadline-exceeded")]
    assert not bench.streams.memory_quiet(transfer_id)


@pytest.mark.parametrize(("fault", "dropped"), [("local", 0), ("peer", 1), ("environment", 1)])
def test_what_the_own_agent_refuses_is_not_held_against_the_peer(fault: str, dropped: int) -> None:
    bench = Bench()
    bench.read_to(40)
    bench.end_all(outcome="failed", code="x", fault=fault)
    assert (bench.torn, len(bench.dropped)) == ([("r1", "x")], dropped)


def test_all_ranks_are_done_or_none() -> None:
    bench = Bench(TWO_RANKS)
    for rank in TWO_RANKS:
        bench.progress(100, rank)
    bench.watch((0, 0)).tell()
    bench.end_all(times=2)
    assert not bench.finished
    assert not bench.released, "a rank that is done is not told: the stream may be read once more"
    bench.watch((0, 1)).tell()
    bench.end_all(times=2)
    assert bench.codes() == [""]
    assert bench.released == [("r1", TWO_RANKS)]


def test_one_broken_rank_ends_the_others() -> None:
    bench = Bench(TWO_RANKS)
    bench.read_to(40, (0, 0))
    bench.watch((0, 1)).listener.broken("peer-disconnected", "gone")
    assert bench.torn == []
    assert bench.watch((0, 0)).is_ended
    assert len(bench.dropped) == 1, "the engine is met anew"
    bench.end_all()
    assert bench.torn == [("r1", "peer-disconnected")]
    assert bench.engine.reads_in_flight == 0


def test_a_rank_that_broke_ends_the_stream_though_another_was_done_before() -> None:
    bench = Bench(TWO_RANKS)
    bench.read_to(100, (0, 0))
    bench.end_all(times=2)
    bench.progress(0, (0, 1), tag=TAG + 1)
    assert bench.torn == [("r1", "stream-restarted")]
    assert not bench.released


def test_no_progress_in_time_tears_the_stream() -> None:
    bench = Bench()
    bench.progress(40)
    bench.now_s += 4.9
    bench.streams.look_after()
    assert bench.torn == []
    bench.now_s += 0.2
    bench.streams.look_after()
    assert bench.torn == [("r1", "stream-stalled")]


@pytest.mark.parametrize(
    ("phase", "others", "is_torn"), [("ready", 1, False), ("draining", 0, False), ("draining", 1, True)]
)
def test_a_long_stream_keeps_no_engine_from_being_met_anew(phase: Any, others: int, is_torn: bool) -> None:
    """Another read from the engine failed, and those behind wait until all that are under way have ended."""
    bench = Bench()
    bench.read_to(40)
    bench.engine.phase, bench.engine.waiting = phase, [bench.read] * others
    for _ in range(2):
        bench.streams.look_after()
    assert bench.torn == [], "a part of it is still on the wire"
    bench.end_all()
    assert bench.torn == ([("r1", "stream-broken")] if is_torn else [])
    assert bench.engine.reads_in_flight == (0 if is_torn else 1)


def test_a_stream_that_is_stopped_ends_once_quiet() -> None:
    bench = Bench()
    bench.read_to(40)
    bench.streams.stop("r1")
    bench.streams.stop("r1")
    assert not bench.finished
    assert set(bench.agent.cancelled) == set(bench.agent.posts)
    bench.end_all()
    assert bench.codes() == ["stream-stopped"]
    assert bench.released == [("r1", ((0, 0),))], "nobody reads it any more"
    assert bench.torn == []
    bench.streams.stop("r1")
    assert len(bench.finished) == 1


def test_a_stream_that_is_over_does_not_end_again() -> None:
    torn = Bench()
    torn.watch().listener.broken("peer-removed", "gone")
    assert torn.torn == [("r1", "peer-removed")]
    torn.streams.stop("r1")
    assert (torn.codes(), torn.engine.reads_in_flight) == ([], 0)
    done = Bench()
    done.read_to(100)
    done.end_all(times=2)
    done.streams.stop("r1")
    assert done.codes() == [""]


def test_the_fence_word_of_an_attempt_that_is_over_says_nothing_of_the_next() -> None:
    bench = Bench(TWO_RANKS)
    whole, broken = TWO_RANKS
    bench.read_to(100, whole)
    bench.end_parts()
    ((late, _),) = bench.agent.posts.items()
    bench.watch(broken).listener.broken("nixl-remote", "its words cannot be read")
    assert bench.torn == [("r1", "nixl-remote")]
    bench.begin()
    for rank in TWO_RANKS:
        bench.read_to(100, rank)
    bench.end_parts()
    del bench.agent.posts[late]
    assert bench.streams.transfer_ended(Result(late))
    assert len(bench.posts()) == 2, "both fence words of the second attempt are on their way"
    for transfer_id in list(bench.agent.posts):
        assert bench.codes() == []
        del bench.agent.posts[transfer_id]
        assert bench.streams.transfer_ended(Result(transfer_id))
    assert bench.codes() == [""]


@pytest.mark.parametrize("good", [0, 1])
def test_a_stream_of_which_a_rank_cannot_be_followed_ends_once(monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    watch, left = StreamReaders.watch, [good]

    def fail(readers: StreamReaders, name: str, **values: Any) -> None:
        if not left[0]:
            raise CodedFailure("duplicate-request")
        left[0] -= 1
        watch(readers, name, **values)

    monkeypatch.setattr(StreamReaders, "watch", fail)
    bench = Bench(TWO_RANKS)
    assert bench.torn == [("r1", "duplicate-request")]
    bench.streams.stop("r1")
    assert (bench.codes(), bench.engine.reads_in_flight, bench.streams.describe(1)["streams"]) == ([], 0, 0)


def test_a_second_order_of_a_request_is_left() -> None:
    bench = Bench()
    bench.begin()
    assert bench.engine.reads_in_flight == 1
    bench.read_to(100)
    bench.end_all(times=2)
    assert (bench.codes(), bench.torn, bench.engine.reads_in_flight) == ([""], [], 0)


@pytest.mark.parametrize(("start", "can_stream"), [(8, True), (0, False)])
def test_pages_that_cannot_be_read_in_parts_are_not(start: int, can_stream: bool) -> None:
    bench = Bench(start=start, can_stream=can_stream)
    assert bench.torn == [("r1", "not-streamed")]
    assert bench.agent.watches == {}


@pytest.mark.parametrize("refused", ["ids", "post", "watch"])
def test_what_the_plan_or_the_agent_refuses_tears_the_stream(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CodedFailure("bad-streams")

    if refused == "watch":
        monkeypatch.setattr(Agent, "watch_stream", refuse)
    bench = Bench(TWO_RANKS if refused == "watch" else ((0, 0),))
    if refused != "watch":
        bench.agent.refuse_post = refused == "post"
        bench.progress(40)
        bench.watch().listener.table(TAG, 0, (1, 5000 if refused == "ids" else 2))
    assert bench.torn == [("r1", {"ids": "block-out-of-range", "post": "post-refused"}.get(refused, "bad-streams"))]
