"""Parts of a streamed hand-over alone: reservations, places in tables, words, readers, reports and tags."""

from __future__ import annotations

from typing import Any

import pytest

from kv_scheduler_state import LeaseEnd
from kv_scheduler_state.errors import DuplicateRequest, UnknownRequest
from kv_scheduler_state.fences import is_later_tag, stream_tag
from kv_scheduler_state.plan import (
    EMPTY_PLAN,
    ReadOrder,
    StepPlan,
    StreamChunk,
    StreamOpen,
    StreamOrder,
    StreamPart,
    StreamPlan,
    StreamRun,
    StreamVoid,
)
from kv_scheduler_state.streams.reader import StreamReaders
from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress
from kv_scheduler_state.worker.state import StreamWorker, WorkerState


class Log(list):
    """Registered words that note what is done to them."""

    def __getattr__(self, name):
        return lambda *values: self.append((name, *values))


def test_words_are_stored_in_the_order_that_makes_them_safe():
    words = Log()
    worker = StreamWorker(words, 2)
    chunk = StreamChunk("r", 1, 8, (StreamRun(0, (3,)), StreamRun(7, (4,))), 16)
    ended = 7 | 1 << 63
    worker.before_forward(StreamPlan((StreamVoid("o", 1, ended, 7, ends=True),), (StreamOpen("r", 1, 8, 8),), (chunk,)))
    assert words == [("void", 1, ended, 7), ("open", 1, 8, 8), ("put", 1, 8, 0, (3,)), ("put", 1, 8, 7, (4,))]
    assert worker.take_sent() == ["o"]
    assert worker.take_sent() == []
    words.clear()
    worker.chunk_ended(chunk._replace(tag=7))
    assert words == []
    worker.chunk_ended(chunk)
    assert words == [("show", 1, 8, 16)]
    words.clear()
    worker.leases_ended(
        [LeaseEnd("p", "read", (2, 9), True, False, 1), LeaseEnd("r", "read", (1, ended), True, False, 1)]
    )
    assert words == [("void", 1, ended, 7)]
    worker.chunk_ended(chunk)
    assert words == [("void", 1, ended, 7)]
    assert worker.take_sent() == []


STREAM: Any = {"generation": 7, "tag": 7, "prompt_tokens": 100, "entry_tokens": 16, "now_s": 0.0}


def test_a_worker_whose_fence_held_tells_the_engine_once():
    ticket = HandoffTicket("handoff", PeerAddress("p", "10.0.0.1", 1), "p1", (), fence=(0, 1), nonce="n", lease_s=1.0)
    watch = StepPlan(streams=StreamPlan(watches=(StreamOrder(ReadOrder("r", ticket, (), 16, is_reported=True), 1, 0),)))
    worker = WorkerState()
    assert worker.apply(watch) == watch
    assert worker.is_reading
    worker.ended("r", is_done=True)
    assert not worker.is_reading
    assert worker.take_report() == (("r",), (), (("r", True),))
    # Another worker broke: what this one has read counts for the next stream, for the final ticket and for a stop.
    assert worker.apply(watch) == EMPTY_PLAN
    assert worker.take_report() == ((), (), (("r", True),))
    assert worker.apply(StepPlan(streams=StreamPlan(stops=("r",)))) == EMPTY_PLAN
    assert worker.take_report() == ((), (), ())


def test_held_tokens_are_shown_under_the_tag_of_their_start_alone():
    words = Log()
    worker = StreamWorker(words, 2)
    chunk = StreamChunk("r", 1, 8, (), 100, held_tokens=96)
    worker.before_forward(StreamPlan((), (StreamOpen("r", 1, 8, 8),), ()))
    words.clear()
    worker.held(chunk)
    worker.held(chunk._replace(tag=7))
    assert words == [("show", 1, 8, 96)]
    worker.spoil(StreamOpen("r", 1, 8, 8))
    worker.held(chunk)
    assert words[1:] == [("void", 1, 8 | 1 << 63, 8)], "nothing is shown of a prompt whose pages are no good"


def test_words_that_refuse_an_order_fail_it_alone():
    class Gone(Log):
        def put(self, *values):
            raise ValueError(values[0])

    words = Gone()
    worker = StreamWorker(words, 3)
    chunks = tuple(StreamChunk(f"r{slot}", slot, 8, (StreamRun(0, (3,)),), 16) for slot in (1, 2))
    opens = tuple(StreamOpen(f"r{slot}", slot, 8, 8) for slot in (1, 2))
    refused = worker.before_forward(StreamPlan((), opens, chunks))
    assert [(request_id, str(error)) for request_id, error in refused] == [("r1", "1"), ("r2", "2")]
    assert words == [("open", 1, 8, 8), ("open", 2, 8, 8)]


def test_the_readers_example():
    made = StreamReaders(5.0)
    made.watch("r", **STREAM)
    assert made.observed("r", 0, 0, 0.0) is None
    assert made.observed("r", 7, 10, 0.0) is None
    assert made.observed("r", 7, 40, 0.0) == StreamPart(0, 2, is_last=False)
    assert made.observed("r", 7, 80, 0.0) == StreamPart(2, 5, is_last=False)
    assert made.observed("r", 7, 100, 0.0) == StreamPart(5, 7, is_last=True)
    for _ in range(3):
        assert made.take_fences() == []
        made.landed("r", is_good=True, now_s=1.0)
    assert made.take_fences() == ["r"]
    made.fence_found("r", 7)
    assert made.take_reports() == [("r", True, "")]
    with pytest.raises(UnknownRequest):
        made.landed("r", is_good=True, now_s=1.0)
    made.watch("r", **STREAM)
    with pytest.raises(DuplicateRequest):
        made.watch("r", **STREAM)


@pytest.mark.parametrize(("tag", "tokens"), [(8, 40), (7, 101), (7, 30)])
def test_progress_that_cannot_be_breaks_the_stream(tag, tokens):
    """Of a later start, beyond the prompt's end, or back."""
    made = StreamReaders(5.0)
    made.watch("r", **STREAM)
    made.observed("r", 7, 40, 0.0)
    assert made.observed("r", 7, 40, 0.0) is None, "the same word twice is no news"
    assert made.observed("r", tag, tokens, 0.0) is None
    assert made.state_of("r") == "breaking"
    made.cancel("r")
    made.cancel("unknown")
    assert made.cause_of("r") == "changed", "the first event that broke it"
    made.landed("r", is_good=True, now_s=0.0)
    assert made.take_reports() == [("r", False, "changed")]


def test_a_prompt_that_creeps_is_slow_and_a_word_that_differs_is_lost():
    made = StreamReaders(5.0)
    made.watch("r", **STREAM)
    for second, tokens in ((4, 20), (8, 40)):
        made.observed("r", 7, tokens, float(second))
        made.landed("r", is_good=True, now_s=float(second))
    made.tick(11.0)
    assert made.take_reports() == [("r", False, "slow")]
    made.watch("r", **STREAM)
    made.observed("r", 7, 100, 0.0)
    made.landed("r", is_good=True, now_s=0.0)
    assert made.take_fences() == ["r"]
    made.fence_found("r", 8)
    assert made.take_reports() == [("r", False, "lost")]


def test_tags_go_round():
    assert stream_tag((1 << 32) + 7) == 7
    assert is_later_tag(8, 7)
    assert is_later_tag(1, (1 << 32) - 1)
    assert not is_later_tag(7, 7)
    assert not is_later_tag(7, 8)


def test_only_copies_and_words_of_streams_ask_nothing_of_the_transfer_thread() -> None:
    something: Any = ("r",)
    local = {name for name in StepPlan._fields if name != "streams" and StepPlan(**{name: something}).is_local}
    assert local == {"saves", "completes"}
    words = {name for name in StreamPlan._fields if StepPlan(streams=StreamPlan(**{name: something})).is_local}
    assert words == {"voids", "opens", "chunks"}
    assert StepPlan().is_local
    assert not StepPlan(streams=StreamPlan(opens=something), heartbeats=something).is_local


@pytest.mark.parametrize("entry_tokens", [1, 16, 128])
@pytest.mark.parametrize("tokens_per_step", [1, 7, 16, 200])
@pytest.mark.parametrize("period_s", [1.0, 29.0, 59.0])
def test_a_stream_that_creeps_is_given_up(entry_tokens, tokens_per_step, period_s):
    """A peer that raised its progress by a token every 59 s held a place of the reserve for days."""
    readers = StreamReaders(60.0)
    prompt_tokens = 100_000
    readers.watch("s", generation=9, tag=9, prompt_tokens=prompt_tokens, entry_tokens=entry_tokens, now_s=0.0)
    now_s = tokens = 0.0
    while readers.state_of("s") == "watching":
        now_s += period_s
        tokens += tokens_per_step
        part = readers.observed("s", 9, min(int(tokens), prompt_tokens), now_s)
        if part is not None:
            readers.landed("s", is_good=True, now_s=now_s)
        readers.tick(now_s)
    assert now_s <= 120.0 + prompt_tokens / 100 + period_s
    if tokens_per_step * (60 / period_s + 1) < entry_tokens:
        assert now_s <= 60.0 + period_s, "tokens that complete no entry are no progress"
    assert (readers.state_of("s") == "fencing") == (tokens >= prompt_tokens)
    if tokens < prompt_tokens:
        assert [report.is_done for report in readers.take_reports()] == [False]
