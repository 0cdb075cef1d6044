"""Streams on a rank's engine thread: words before the forward pass, chunks behind it, and reports to whom they are due."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeRecorder, order

from kv_scheduler_state import StepPlan, WorkerState
from kv_scheduler_state.streams import (
    StreamChunk,
    StreamOpen,
    StreamOrder,
    StreamPlan,
    StreamRun,
    StreamVoid,
    StreamWorker,
)
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.worker.streams import ChunkMarks, RankStreams

CHUNK = StreamChunk("p", 1, 7, (StreamRun(0, (4, 5)),), 32)
BEGIN = StepPlan(streams=StreamPlan(opens=(StreamOpen("p", 1, 7, 7),), chunks=(CHUNK,)))


class Words(list[tuple[Any, ...]]):
    """Registered words that note what is stored in them."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.append((name, *values))


class Rank:
    def __init__(self) -> None:
        self.words: Any = Words()
        self.recorder = FakeRecorder()
        untyped: Any = self.recorder
        self.state = WorkerState()
        self.sent: deque[str] = deque()
        self.streams = RankStreams(self.state, untyped, self.sent)
        self.streams.use(StreamWorker(self.words, 4))

    def begin(self) -> None:
        self.step(BEGIN)

    def step(self, plan: StepPlan) -> None:
        self.streams.before_forward(plan)

    def wait_for_device(self) -> list[Any]:
        """Keep the actions that wait for the device in the list that is returned."""
        given: list[Any] = []
        marks: Any = SimpleNamespace(then=given.append)
        self.streams._marks = marks
        return given

    def watch(self, request_id: str = "r1") -> None:
        here: Any = order(request_id)
        self.apply(StepPlan(streams=StreamPlan(watches=(StreamOrder(here, 7, 0),))))

    def apply(self, plan: StepPlan) -> None:
        self.streams.apply(self.state.apply(plan))

    def end(self, code: str = "", request_id: str = "r1") -> None:
        self.streams.ended(ReadEnd(order(request_id), code, code, ReadTimes(0.0), 1.0))

    def take(self) -> Any:
        return self.streams.take()


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_without_memory_words_are_void_already(rank: Rank) -> None:
    rank.streams.use(None)
    rank.begin()
    rank.streams.chunks_given(BEGIN)
    rank.step(StepPlan(streams=StreamPlan(voids=(StreamVoid("p", 1, 99, 7, True),))))
    assert (rank.words, list(rank.sent)) == ([], ["p"])


def test_a_torn_stream_is_reported_to_the_scheduler_half_alone_and_its_reason_kept(rank: Rank) -> None:
    rank.watch()
    rank.end("peer-lost")
    report, ends = rank.take()
    assert (report.received, report.ends, ends) == ((), (("r1", False),), [])
    assert rank.recorder.observed == [("num_torn_streams", "peer-lost")]
    rank.apply(StepPlan(streams=StreamPlan(stops=("r1",))))
    report, ends = rank.take()
    assert (report.received, report.failed) == (("r1",), ("r1",))
    assert [end.code for end in ends] == ["peer-lost"]


def test_a_stream_that_is_stopped_is_reported_failed_however_it_ends(rank: Rank) -> None:
    rank.watch()
    rank.apply(StepPlan(streams=StreamPlan(stops=("r1",))))
    rank.end()
    report, ends = rank.take()
    assert (report.received, report.failed, report.ends) == (("r1",), ("r1",), ())
    assert [end.code for end in ends] == ["stream-stopped"], "all of it was there, and yet it is no good end"


# Marks ---------------------------------------------------------------------------------------------------------------


class Device:
    """Marks that happen when asked."""

    def __init__(self) -> None:
        self.given = 0
        self.done = 0

    def mark(self) -> int:
        self.given += 1
        return self.given

    def is_over(self, mark: Any) -> bool:
        return bool(mark <= self.done)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)


def test_without_streams_an_action_runs_at_once_on_the_calling_thread() -> None:
    ran: list[int] = []
    marks = ChunkMarks(None, lambda *_: None)
    marks.then(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    marks.close()


def test_actions_run_in_order_each_behind_its_mark_and_never_before() -> None:
    device, ran, trouble = Device(), list[str](), list[str]()
    marks = ChunkMarks(device, lambda action, _: trouble.append(action))

    def fail() -> None:
        raise ValueError("words are gone")

    marks.then(lambda: ran.append("first"))
    marks.then(fail)
    marks.then(lambda: ran.append("third"))
    time.sleep(0.02)
    assert ran == []
    device.done = 1
    wait_for(lambda: ran)
    assert ran == ["first"]
    device.done = 3
    wait_for(lambda: len(ran) == 2)
    assert (ran, trouble) == (["first", "third"], ["showing a chunk"])
    marks.then(lambda: ran.append("after the end"))
    marks.close()
    marks.close()
    wait_for(lambda: "kv-chunk-marks" not in {each.name for each in threading.enumerate()})
    assert ran == ["first", "third"]


def test_words_of_a_prompt_whose_copy_failed_move_at_once_and_only_while_they_are_its_own(rank: Rank) -> None:
    assert not rank.streams.void("p"), "no stream: its plain fence is voided"
    rank.begin()
    assert rank.streams.void("p")
    ((kind, slot, word, tag),) = rank.words[2:]
    assert (kind, slot, tag, word != 7) == ("void", 1, 7, True)
    rank.streams.chunks_given(BEGIN)
    assert len(rank.words) == 3, "its chunk is not shown any more"
    rank.streams.forget(["p"])
    assert not rank.streams.void("p"), "its lease has the slot"
    rank.begin()
    rank.step(StepPlan(streams=StreamPlan(voids=(StreamVoid("p", 1, 99, 7, True),))))
    assert not rank.streams.void("p")
    rank.begin()
    rank.streams.use(None)
    assert not rank.streams.void("p")


def test_pages_of_a_prefix_hit_are_shown_behind_the_steps_before_and_not_by_a_mirror(rank: Rank) -> None:
    given = rank.wait_for_device()
    hit = StepPlan(streams=StreamPlan(opens=BEGIN.streams.opens, chunks=(CHUNK._replace(held_tokens=16),)))
    rank.streams.before_forward(hit)
    assert [each[0] for each in rank.words] == ["open", "put"], "the device is still at the step before"
    given.pop()()
    assert rank.words[2:] == [("show", 1, 7, 16)]
    rank.streams.chunks_given(hit)
    given.pop()()
    assert rank.words[3:] == [("show", 1, 7, 32)]
    mirror: Any = object()
    rank.streams.before_forward(BEGIN)
    assert given == [], "nothing was held"
    rank.streams._mirror = mirror
    rank.streams.before_forward(hit)
    assert given == [], "the mirror's copies of this step come first"


def test_with_a_mirror_progress_waits_for_its_copies(rank: Rank) -> None:
    waiting: list[tuple[str, Any]] = []
    mirror: Any = SimpleNamespace(then=lambda request_id, action: waiting.append((request_id, action)))
    rank.streams._mirror = mirror
    rank.begin()
    rank.streams.chunks_given(BEGIN)
    ((request_id, action),) = waiting
    assert (request_id, rank.words[-1][0]) == ("p", "put")
    action()
    assert rank.words[-1] == ("show", 1, 7, 32)
