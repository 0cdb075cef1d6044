"""Streamed reads between recording fakes, with the real machine that says what is read next."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import read_bench
from fakes import CodedFailure, FakeAgent, FakeWatch, Metadata, Outcome, Plan, order

from kv_scheduler_state import BlockList
from kv_scheduler_state.streams import StreamOrder, StreamPlan
from kv_scheduler_state.streams.reader import StreamReaders
from vllm_adapter.steps import ReadTimes

TAG, FENCE = 99, (3, 99)
TWO_RANKS = ((0, 0), (0, 1))


class Bench(read_bench.Bench):
    """A prompt of 100 tokens in blocks of 16, read into the blocks 10 to 16."""

    def __init__(self, ranks: Any = ((0, 0),), *, start: int = 0, can_stream: bool = True) -> None:
        super().__init__(read_timeout_s=5.0)
        self.planner.made = Plan(ranks, is_staged=not can_stream)
        ids = tuple(range(10 + start // 16, 17))
        here = order(tokens=100, fence=FENCE, local_blocks=(BlockList(ids, start, 0),), peer_blocks=(BlockList(()),))
        self._order = StreamOrder(here, TAG, start)
        self.peers = {rank: Metadata(streams=(0xA000, 0, 64, 8192)) for rank in ranks}
        self.begin()
        self.handshakes.answer(Outcome(peers=self.peers))

    def begin(self) -> None:
        self.order(streams=StreamPlan(watches=(self._order,)))

    def stop(self) -> None:
        self.order(streams=StreamPlan(stops=("r1",)))

    @property
    def times(self) -> ReadTimes:
        streams: Any = self.reads._streams
        times: ReadTimes = streams._streams["r1"].times
        return times

    def ended(self) -> list[str]:
        return [end.code for end in self.ends]

    @property
    def reported(self) -> list[str]:
        """Return the ranks that were notified that their pages are not needed any more."""
        return [key[-3:] for key, _ in self.agent.notified]

    @property
    def in_flight(self) -> int:
        """Return the reads under way from the engine; 0 once it has been let go."""
        described: Any = self.reads.describe(1)
        return sum(engine["reads_in_flight"] for engine in described["peer_engines"])

    def watch(self, rank: Any = (0, 0)) -> FakeWatch:
        return self.agent.watches[f"{read_bench.KEY[:-3]}{rank[0]}.{rank[1]}"]

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
                self.finish(transfer_id)

    def end_all(self, *, times: int = 1, **facts: Any) -> None:
        """End all transfers; at the second time those that the first ends have led to, e.g. of fence words."""
        for _ in range(times):
            for transfer_id in list(self.agent.posts):
                del self.agent.posts[transfer_id]
                self.finish(transfer_id, **facts)


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
    assert bench.ended() == []
    bench.end_all()
    assert bench.posts() == [([], [], FENCE)], "the word is read once all parts have landed"
    assert bench.watch().is_ended
    assert bench.reported == []
    bench.end_all()
    assert bench.ended() == [""]
    assert bench.reported == ["0.0"]
    (times, dropped) = bench.ends[0].times, bench.counts["num_dropped_engines"]
    assert (times.bytes_moved, times.early_bytes, bench.in_flight, dropped) == (400, 200, 0, 0)
    assert bench.recorder.done_bytes == [300], "its parts are counted as one read, as a plain one is"


def test_the_times_of_a_stream_tell_the_prompts_end_the_last_bytes_and_the_fence_apart() -> None:
    """Two ranks: the first one's word is verified while the second one still reads, so the second one's bytes are the last."""
    bench = Bench(((0, 0), (0, 1)))
    times = bench.times
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
    assert bench.ended() == [""]


VOID = {"fence-rejected": "fence-mismatch", "failed": "transfer-failed", "timed-out": "deadline-exceeded"}


@pytest.mark.parametrize(("outcome", "code"), VOID.items())
def test_a_fence_that_does_not_hold_tears_the_stream(outcome: str, code: str) -> None:
    bench = Bench()
    bench.read_to(100)
    bench.end_all()
    bench.end_all(outcome=outcome, code=code)
    assert bench.ended() == ["stream-void"]
    assert not bench.recorder.done_bytes
    assert bench.reported == []


def test_a_restart_tears_the_stream_once_its_parts_are_quiet() -> None:
    bench = Bench()
    bench.read_to(40)
    bench.progress(80)  # its table is never read
    bench.progress(0, tag=TAG + 1)
    assert bench.ended() == [], "a part is on the wire"
    bench.end_all()
    assert bench.ended() == ["stream-restarted"]
    assert bench.watch().is_ended
    bench.watch().tell()
    assert bench.posts() == [], "a late table orders nothing"


def test_pages_in_quarantine_are_waited_for() -> None:
    bench = Bench()
    bench.read_to(40)
    (transfer_id,) = bench.agent.posts
    bench.end_all(outcome="timed-out", code="deadline-exceeded", is_memory_quiet=False)
    assert bench.ended() == []
    bench.reads.memory_quiet(transfer_id)
    assert bench.ended() == ["deadline-exceeded"]
    bench.reads.memory_quiet(transfer_id)
    assert len(bench.ends) == 1


@pytest.mark.parametrize(("code", "dropped"), [("bad-indices", 0), ("peer-disconnected", 1), ("transfer-failed", 1)])
def test_what_the_own_agent_refuses_is_not_held_against_the_peer(code: str, dropped: int) -> None:
    bench = Bench()
    bench.read_to(40)
    bench.end_all(outcome="failed", code=code)
    assert (bench.ended(), bench.counts["num_dropped_engines"]) == ([code], dropped)


def test_all_ranks_are_done_or_none() -> None:
    bench = Bench(TWO_RANKS)
    for rank in TWO_RANKS:
        bench.progress(100, rank)
    bench.watch((0, 0)).tell()
    bench.end_all(times=2)
    assert bench.ended() == []
    assert bench.reported == [], "a rank that is done is not notified: the stream may be read once more"
    bench.watch((0, 1)).tell()
    bench.end_all(times=2)
    assert bench.ended() == [""]
    assert bench.reported == ["0.0", "0.1"]


def test_one_broken_rank_ends_the_others() -> None:
    bench = Bench(TWO_RANKS)
    bench.read_to(40, (0, 0))
    bench.watch((0, 1)).listener.broken("peer-disconnected", "gone")
    assert bench.ended() == []
    assert bench.watch((0, 0)).is_ended
    assert bench.counts["num_dropped_engines"] == 1, "the engine is met anew"
    bench.end_all()
    assert bench.ended() == ["peer-disconnected"]
    assert bench.in_flight == 0


def test_no_progress_in_time_tears_the_stream() -> None:
    bench = Bench()
    bench.progress(40)
    bench.now_s += 4.9
    bench.reads.maintain()
    assert bench.ended() == []
    bench.now_s += 0.2
    bench.reads.maintain()
    assert bench.ended() == ["stream-stalled"]


@pytest.mark.parametrize(
    ("phase", "others", "is_torn"), [("ready", 1, False), ("draining", 0, False), ("draining", 1, True)]
)
def test_a_long_stream_keeps_no_engine_from_being_met_anew(phase: Any, others: int, is_torn: bool) -> None:
    """Another read from the engine failed, and those behind wait until all that are under way have ended."""
    bench = Bench()
    bench.read_to(40)
    (engine,) = bench.reads._peers.engines.values()
    engine.phase = phase
    for number in range(others):
        bench.reads.read(order(f"other-{number}"))
    for _ in range(2):
        bench.reads.maintain()
    assert bench.ended() == [], "a part of it is still on the wire"
    bench.end_all()
    assert bench.codes().get("r1") == ("stream-broken" if is_torn else None)
    assert bench.in_flight == (0 if is_torn else 1)


def test_a_stream_that_is_stopped_ends_once_quiet() -> None:
    bench = Bench()
    bench.read_to(40)
    bench.stop()
    bench.stop()
    assert bench.ended() == []
    assert set(bench.agent.cancelled) == set(bench.agent.posts)
    bench.end_all()
    assert bench.ended() == ["stream-stopped"]
    assert bench.reported == ["0.0"], "nobody reads it any more"
    bench.stop()
    assert len(bench.ends) == 1


def test_the_fence_word_of_an_attempt_that_is_over_says_nothing_of_the_next() -> None:
    bench = Bench(TWO_RANKS)
    whole, broken = TWO_RANKS
    bench.read_to(100, whole)
    bench.end_parts()
    ((late, _),) = bench.agent.posts.items()
    bench.watch(broken).listener.broken("nixl-remote", "its words cannot be read")
    assert bench.ended() == ["nixl-remote"]
    bench.begin()
    bench.handshakes.answer(Outcome(peers=bench.peers))
    for rank in TWO_RANKS:
        bench.read_to(100, rank)
    bench.end_parts()
    del bench.agent.posts[late]
    bench.finish(late)
    assert len(bench.posts()) == 2, "both fence words of the second attempt are on their way"
    for transfer_id in list(bench.agent.posts):
        assert len(bench.ends) == 1
        del bench.agent.posts[transfer_id]
        bench.finish(transfer_id)
    assert bench.ended() == ["nixl-remote", ""]


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
    assert bench.ended() == ["duplicate-request"]
    bench.stop()
    described: Any = bench.reads.describe(1)
    assert (len(bench.ends), bench.in_flight, described["streams"]) == (1, 0, 0)


@pytest.mark.parametrize(("start", "can_stream"), [(8, True), (0, False)])
def test_pages_that_cannot_be_read_in_parts_are_not(start: int, can_stream: bool) -> None:
    bench = Bench(start=start, can_stream=can_stream)
    assert bench.ended() == ["not-streamed"]
    assert bench.agent.watches == {}


@pytest.mark.parametrize("refused", ["ids", "post", "watch"])
def test_what_the_plan_or_the_agent_refuses_tears_the_stream(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    if refused == "watch":
        monkeypatch.setattr(FakeAgent, "watch_stream", Mock(side_effect=CodedFailure("bad-streams")))
    bench = Bench(TWO_RANKS if refused == "watch" else ((0, 0),))
    if refused != "watch":
        bench.agent.refuse_post = refused == "post"
        bench.progress(40)
        bench.watch().listener.table(TAG, 0, (1, 5000 if refused == "ids" else 2))
    assert bench.ended() == [{"ids": "block-out-of-range", "post": "post-refused"}.get(refused, "bad-streams")]


def test_a_second_order_of_a_stream_is_left_and_ends_nothing_of_the_first_one() -> None:
    bench = Bench()
    bench.read_to(40)
    on_wire = list(bench.agent.posts)
    bench.begin()
    bench.stop()
    assert (bench.ended(), list(bench.agent.posts)) == ([], on_wire), "it ends once its pages are quiet"
    bench.end_all(outcome="cancelled", code="cancelled")
    assert bench.ended() == ["stream-stopped"]
    assert not bench.reads._open
