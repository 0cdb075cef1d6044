"""Streamed hand-overs between two scheduler sides that do not go their way: refused, aborted, preempted, late, alone."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from scheduler_engine import Prompt
from stream_pair import HAND_OVER, TEXT, StreamPair, make_pairs, streaming  # noqa: F401  (a fixture)
from stream_wires import InMemory, OverZeroMq

from vllm_adapter.scheduler.hooks import Arrival
from vllm_adapter.steps import ReadFailure

CHUNKS = 3


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing here is a fault of this engine, and nothing may be told to the machines that they refuse."""
    caplog.set_level(logging.WARNING, logger="vllm.vllm_adapter")
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


def go_on(pair: StreamPair, chunks: int) -> None:
    for _ in range(CHUNKS - chunks):
        pair.chunk()


# ------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("wire", [InMemory, OverZeroMq])
def test_another_prompt_gets_nothing_and_is_computed_where_it_is_decoded(
    make: Any, caplog: pytest.LogCaptureFixture, wire: Any
) -> None:
    pair = make(wire())
    pair.run()
    pair.admit(text="y" * len(TEXT))
    pair.until(lambda: pair.matched() == 0)
    pair.decode.step()
    assert "digest-mismatch); it is computed here" in caplog.text
    assert pair.decode.side.take_stats()["unstreamed_codes"] == ["digest-mismatch"]
    pair.finish()
    pair.admit("late", text="z" * len(TEXT))  # the listener's thread compares, too
    pair.until(lambda: pair.matched("late") == 0)
    assert not pair.decode.step().reads


@dataclass
class Pictured(Prompt):
    """A prompt with pictures, of which a request may have fewer."""

    pictures: int = 2

    def digest(self, tokens: int) -> str | None:
        whole = super().digest(tokens)
        return whole and hashlib.sha256(f"{whole} {self.pictures}".encode()).hexdigest()

    def media(self, tokens: int) -> Any:
        return self.pictures, super().digest(tokens)


@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize("wire", [InMemory, OverZeroMq])
@pytest.mark.parametrize("identity", [Prompt(TEXT), Pictured(TEXT, pictures=1)], ids=["none", "one of two"])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_streamed_prompt_whose_pictures_went_to_prefill_alone_fails(
    make: Any, caplog: pytest.LogCaptureFixture, wire: Any, identity: Any, is_finished: bool
) -> None:
    pair = make(wire())
    pair.prefill.side.arrived(Arrival("p", pair.early(serves=True), len(TEXT), Pictured(TEXT), max_tokens=1))
    pair.start()
    pair.chunk(blocks=6 if is_finished else 2, is_fresh=True)
    if is_finished:
        keeps, _ = pair.finish(identity=Pictured(TEXT))
        assert keeps
    pair.decode.side.arrived(Arrival("d", pair.early(serves=False), len(TEXT), identity))
    pair.until(lambda: pair.matched() == 0)
    assert pair.decode.side.must_fail("d")
    pair.decode.step()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "ticket-media-missing" in line
    assert "whatever the policy" in line
    pair.decode.end("d", TEXT, [], reason="error", computed_tokens=0)
    caplog.clear()


@pytest.mark.parametrize("wire", [InMemory, OverZeroMq])
def test_an_id_that_is_not_known_yet_is_asked_for_again(make: Any, wire: Any) -> None:
    pair = make(wire())
    pair.admit()
    pair.until(lambda: pair.decode.state._consumers.streams.get("d").retry_s is not None)
    pair.run()
    pair.decode.step()
    assert pair.matched() is None, "it is not time yet"
    pair.decode.now_s = 1.0
    pair.until(lambda: pair.matched() is not None)
    pair.load()
    assert pair.decode.step().streams.watches


@pytest.mark.parametrize("wire", [InMemory, OverZeroMq])
@pytest.mark.parametrize("has_started", [False, True])
def test_a_prompt_that_has_ended_is_computed_where_it_is_decoded(
    make: Any, caplog: pytest.LogCaptureFixture, wire: Any, has_started: bool
) -> None:
    pair = make(wire())
    pair.arrive()
    if has_started:
        pair.start()
        pair.chunk(is_fresh=True)
    pair.finish(reason="abort")
    pair.prefill.step()
    pair.prefill.report(sent=("p",) if has_started else ())
    pair.admit()
    pair.until(lambda: pair.matched() == 0)
    pair.decode.step()
    assert "withdrawn); it is computed here" in caplog.text
    pair.decode.end("d", TEXT, [11])
    pair.assert_nothing_left()


def test_an_engine_that_takes_no_step_answers_what_stands(make: Any) -> None:
    """An idle engine is not stepped: the listener's thread answers by itself."""
    pair = make()
    pair.run()
    _, ticket = pair.finish()
    assert ticket is not None
    pair.admit()
    pair.decode.step()
    assert pair.matched() == len(TEXT), "the final ticket"
    pair.load()
    (read,) = pair.decode.step().reads
    assert list(read.ticket.fence) == ticket["kv_fence"]
    pair.admit("other", text="y" * len(TEXT))
    pair.decode.step()
    assert pair.matched("other") == 0, "another prompt"
    pair.prefill.report(sent=("p",))
    pair.admit("late")
    pair.decode.step()
    assert pair.matched("late") == 0, "withdrawn"


def test_a_lease_that_is_taken_back_stands_no_more(make: Any) -> None:
    pair = make()
    pair.run()
    pair.finish()
    pair.prefill.step()
    pair.prefill.state.revoke_all(now_s=pair.prefill.now_s)
    pair.prefill.step()
    pair.admit()
    pair.decode.step()
    assert pair.matched() == 0


def test_an_id_that_comes_again_is_parked_for_its_new_prompt(make: Any) -> None:
    pair = make()
    pair.arrive()
    pair.finish(reason="abort")
    pair.arrive("again")
    pair.start("again")
    pair.chunk("again", is_fresh=True)
    pair.admit()
    pair.until(lambda: pair.matched() is not None)
    pair.load()
    (watch,) = pair.decode.step().streams.watches
    assert watch.read.ticket.peer_request_id == "again"


def test_without_a_free_slot_the_final_ticket_answers(make: Any) -> None:
    pair = make(prefill={"stream_slots": 1})
    pair.arrive("first")
    pair.start("first")
    assert pair.prefill.state.streams.produced.slots_used == 1
    stream = {"id": "aa" * 16, "host": "127.0.0.1", "port": pair.wire.port}
    pair.prefill.admit("p", {"do_remote_decode": True, "do_remote_prefill": False, "kv_stream": stream}, TEXT)
    pair.start("p")
    assert not pair.chunk("p", blocks=6, is_fresh=True).streams.chunks
    pair.decode.admit("d", {"do_remote_decode": False, "do_remote_prefill": True, "kv_stream": stream}, TEXT)
    pair.decode.step()
    pair.prefill.step()
    assert pair.matched() is None
    keeps, ticket = pair.finish("p")
    assert keeps
    pair.prefill.step()
    pair.until(lambda: pair.matched() is not None)
    pair.load()
    (read,) = pair.decode.step().reads
    assert (read.ticket.peer_request_id, list(read.ticket.fence)) == ("p", ticket["kv_fence"])


def test_no_answer_in_time_means_that_the_prompt_is_computed_here(make: Any) -> None:
    pair = make()
    stream = pair.park()
    pair.decode.now_s = 10.0
    pair.decode.step()
    assert pair.matched() == 0
    pair.prefill.step()
    assert not stream.parked, "the peer keeps no place for it"


def whole(make: Any) -> StreamPair:
    """Let a request wait for the final ticket of a prompt that has begun, from an engine that offers none early."""
    pair: StreamPair = make(prefill={"whole_reason": "its states cannot be told apart"}, decode=FAILS)
    pair.arrive()
    pair.admit()
    pair.start()
    pair.chunk(is_fresh=True)
    return pair


def without_room(make: Any) -> StreamPair:
    """Let it wait for the final ticket because it needs more than the share of blocks."""
    pair: StreamPair = make(decode={**FAILS, "stream_reserve_fraction": 0.1})
    pair.arrive()
    pair.admit()
    pair.start()
    pair.chunk(is_fresh=True)
    pair.until(lambda: (pair.matched(), pair.decode.state.state_counts().get("consumer-asking-final"))[1])
    return pair


def interrupted(make: Any) -> StreamPair:
    """Let it wait for another start of a prompt that was preempted."""
    pair: StreamPair = make(decode=FAILS)
    streaming(pair, 2)
    pair.prefill.step(preempted=("p",))
    pair.told(is_done=False)
    return pair


FAILS = {"load_failure_policy": "fail"}


@pytest.mark.parametrize("situation", [whole, without_room, interrupted])
def test_a_prompt_that_its_peer_goes_on_with_is_waited_for(make: Any, situation: Any) -> None:
    """For four times as long as for an answer, of an engine that ends requests whose KV does not come."""
    pair = situation(make)
    waits = pair.states()[1]
    for second in range(40):
        pair.decode.now_s = pair.prefill.now_s = float(second)
        pair.prefill.step()
        pair.decode.step()
        assert pair.states()[1] == waits
    if situation is interrupted:
        pair.start(preemptions=1)
        pair.chunk(is_fresh=True)
    for _ in range(2):
        pair.chunk()
    pair.finish()
    reads = []
    for second in range(40, 50):
        pair.decode.now_s = pair.prefill.now_s = float(second)
        pair.prefill.step()
        if situation is not interrupted and pair.matched():
            pair.load()
        plan = pair.decode.step()
        reads += [*plan.reads, *[order.read for order in plan.streams.watches]]
    assert len(reads) == 1
    assert not reads[0].is_notify_only


@pytest.mark.parametrize("wire", [InMemory, OverZeroMq])
def test_an_engine_that_does_not_stream_is_said_once(make: Any, caplog: pytest.LogCaptureFixture, wire: Any) -> None:
    pair = make(wire(), streams=(False, True))
    for number in range(3):
        pair.admit(f"d{number}")
        pair.until(lambda: pair.matched(f"d{number}") == 0)  # noqa: B023
        pair.decode.end(f"d{number}", TEXT, [11])
    assert caplog.text.count("not streamed") == 1
    pair.arrive()
    pair.start()
    assert not pair.chunk(blocks=6, is_fresh=True).streams.chunks
    keeps, ticket = pair.finish()
    assert keeps
    assert ticket is not None, "the router may use it as ever"


def test_a_decode_engine_that_does_not_stream_refuses_the_early_ticket(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make(streams=(True, False))
    pair.admit()
    assert pair.matched() == 0
    assert "ticket-early-off" in caplog.text
    assert pair.decode.refusals() == ["ticket-early-off"]
    assert not pair.decode.side.follows("d")


def test_an_address_that_nothing_covers_is_not_asked(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    pair = make(decode={"peer_networks": ("10.0.0.0/8",)})
    pair.admit()
    assert pair.matched() == 0
    assert pair.decode.refusals()
    assert not pair.decode.state.streams.take_questions()


# ------------------------------------------------------------------------------------------- aborts, preemptions


@pytest.mark.parametrize("chunks", range(1, CHUNKS + 1))
def test_a_prompt_that_is_aborted_keeps_its_blocks_until_the_words_have_moved(make: Any, chunks: int) -> None:
    pair = make()
    streaming(pair, chunks)
    assert pair.finish(reason="abort") == (True, None)
    (void,) = pair.prefill.step().streams.voids
    assert void.ends
    pair.prefill.report(sent=("p",))
    pair.told(is_done=False)
    assert not pair.decode.step().streams.stops, "it asks for another start first"
    assert pair.decode.step().streams.stops == ("d",)
    pair.decode.report(received=("d",), failed=("d",))
    pair.decode.end("d", TEXT, [11], reason="error")
    pair.assert_nothing_left()


@pytest.mark.parametrize("chunks", range(1, CHUNKS + 1))
def test_a_reader_that_is_aborted_holds_its_blocks_until_it_is_quiet(make: Any, chunks: int) -> None:
    pair = make()
    streaming(pair, chunks)
    assert pair.decode.state.streams.consumed.blocks_held == 6
    pair.decode.end("d", TEXT, [11], reason="abort")
    assert pair.decode.step().streams.stops == ("d",)
    assert pair.decode.state.streams.consumed.blocks_held == 6
    reason = {"d": {(0, 0): ReadFailure("stream-stopped", "request p: the stream was given up (stream-stopped)")}}
    pair.decode.side.update_output(sent=(), received=("d",), failed=("d",), reasons=reason)
    go_on(pair, chunks)
    assert pair.finish()[0]
    pair.prefill.report(sent=("p",))
    pair.assert_nothing_left()


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_reader_that_is_aborted_before_it_has_blocks_leaves_no_question(make: Any, is_answered: bool) -> None:
    pair = make()
    pair.arrive()
    pair.start()
    if is_answered:
        pair.chunk(is_fresh=True)
    pair.admit()
    pair.decode.step()
    pair.prefill.step()
    pair.decode.step()
    pair.decode.end("d", TEXT, [], reason="abort")
    reads = pair.decode.step().reads
    assert [(read.is_notify_only, read.is_reported) for read in reads] == [(True, False)] * is_answered
    pair.prefill.step()
    assert not pair.prefill.state._producers.streams._by_id[HAND_OVER].parked


@pytest.mark.parametrize("chunks", range(1, CHUNKS + 1))
def test_a_preempted_prompt_is_read_anew_into_the_same_blocks(make: Any, chunks: int) -> None:
    pair = make()
    streaming(pair, chunks)
    plan = pair.prefill.step(preempted=("p",))
    assert [(void.slot, void.ends) for void in plan.streams.voids] == [(0, False)]
    pair.told(is_done=False)
    assert pair.states() == (["producer-voided"], ["consumer-awaiting"])
    pair.decode.step()
    pair.prefill.step()
    pair.blocks = [21, 22, 23, 24, 25, 26]
    pair.start(preemptions=1)
    plan = pair.chunk(is_fresh=True)
    ((opening,), (chunk,)) = plan.streams.opens, plan.streams.chunks
    assert (chunk.runs[0].first, chunk.runs[0].ids) == (0, (21, 22))
    (again,) = pair.decode.step().streams.watches  # heard before the plan was taken
    assert (again.tag, again.read.ticket.fence) == (opening.tag, (opening.slot, opening.generation))
    assert again.read.local_blocks[0].ids == (11, 12, 13, 14, 15, 16)
    pair.chunk()
    pair.chunk()
    assert pair.finish()[0]
    pair.told(is_done=True)
    pair.decode.end("d", TEXT, [11])
    pair.prefill.report(sent=("p",))
    pair.assert_nothing_left()


def test_a_stream_that_broke_is_read_from_the_final_ticket_into_the_same_blocks(make: Any) -> None:
    pair = make()
    streaming(pair, 2)
    pair.chunk()
    assert pair.finish()[0]
    pair.prefill.step()
    pair.told(is_done=False)
    pair.decode.step()
    (read,) = pair.decode.step().reads
    assert read.is_reported
    assert read.local_blocks[0].ids == (11, 12, 13, 14, 15, 16)
    pair.decode.report(received=("d",))
    assert pair.matched() == 0
    pair.decode.end("d", TEXT, [11])
    pair.prefill.report(sent=("p",))
    pair.assert_nothing_left()


def test_an_end_of_a_stream_that_nobody_knows_is_nobodys(make: Any) -> None:
    pair = make()
    pair.told("never", is_done=False)
    pair.told("never", is_done=True)
    streaming(pair, 1)
    pair.told(is_done=True)
    pair.told(is_done=False)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_peer_that_is_gone_ends_the_read_by_the_policy_without_waiting(make: Any, policy: str) -> None:
    """Nobody listens there: the process is gone, and no other one knows this hand-over."""
    pair = make(decode={"load_failure_policy": policy})
    streaming(pair, 1)
    pair.prefill.side.close()
    pair.wire.port = 1  # nobody listens there
    pair.told(is_done=False)
    pair.decode.step()
    assert pair.decode.step().streams.stops == ("d",)
    pair.decode.report(received=("d",), failed=("d",))
    assert pair.states()[1] == ["consumer-local" if policy == "recompute" else "consumer-failed"]
    assert pair.matched() == 0
