"""Streamed hand-overs between two scheduler sides, hook by hook, in memory and over real ZeroMQ."""

from __future__ import annotations

import logging

import pytest
from prompts import Prompt
from scheduler_engine import BLOCK
from stream_pair import TEXT, StreamPair

from vllm_adapter.cache.facts import CacheGroup


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.never_wrong("B2")
@pytest.mark.parametrize("request_id", ["r" * 600, "\u4f60\u597d".encode().decode("latin-1"), "tab\there"], ids=ascii)
def test_a_prompt_is_streamed_whatever_id_its_client_chose(caplog: pytest.LogCaptureFixture, request_id: str) -> None:
    pair = StreamPair()
    pair.arrive(request_id)
    pair.admit()
    pair.start(request_id)
    pair.chunk(request_id, is_fresh=True)
    pair.until(lambda: pair.matched() is not None)
    pair.load()
    (watch,) = pair.decode.step().streams.watches
    assert watch.read.ticket.peer_request_id.isascii()
    pair.chunk(request_id, blocks=4)
    keeps, ticket = pair.finish(request_id)
    assert keeps
    assert ticket is not None
    assert ticket["remote_request_id"] == watch.read.ticket.peer_request_id
    pair.admit("late")
    pair.until(lambda: pair.matched("late") is not None)
    assert not errors(caplog)


def test_an_offer_that_has_come_counts_in_the_step_that_begins() -> None:
    """The host asks first, and builds its step later: an answer must not wait for one more."""
    pair = StreamPair()
    pair.run()
    pair.admit()
    pair.decode.step()
    pair.prefill.step()
    assert pair.matched() == len(TEXT)


STATE = CacheGroup("state", 64, 0, 1, ("c",))
FULL = CacheGroup("attention", BLOCK, 0, 0, ("a",))


@pytest.mark.parametrize(
    ("max_tokens", "tail", "is_dropped", "whole_reason", "is_streamed"),
    [
        (1, 1, True, "", True),
        (9, 1, True, "", True),  # the host was asked to generate one token
        (1, 1, False, "", False),  # it computes a token more than is handed over, and its state has seen that one
        (9, 1, True, "its pages are zeroed early", False),
        (1, 0, False, "", True),
        (9, 0, False, "", False),
    ],
)
def test_a_prompt_whose_state_runs_on_or_whose_pages_are_zeroed_early_is_handed_over_whole(
    caplog: pytest.LogCaptureFixture, max_tokens: int, tail: int, is_dropped: bool, whole_reason: str, is_streamed: bool
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.vllm_adapter")
    groups = (FULL, STATE)
    common = {"groups": groups, "state_backoff_tokens": tail}
    pair = StreamPair(prefill={**common, "whole_reason": whole_reason}, decode=common)
    pair.tokens_left = len(TEXT) - tail
    pair.arrive(max_tokens=max_tokens, drop_tail=lambda _: is_dropped)
    pair.admit()
    pair.start()
    for number in range(3):
        assert bool(pair.chunk(is_fresh=number == 0).streams.chunks) is is_streamed
    pair.arrive("next", max_tokens=max_tokens, drop_tail=lambda _: is_dropped)
    assert caplog.text.count("prompts such as that of request") == (0 if is_streamed else 1), "said once"
    assert whole_reason in caplog.text
    pair.decode.step()
    pair.prefill.step()
    assert (pair.matched() is not None) is is_streamed
    keeps, _ = pair.finish(computed_tokens=len(TEXT) - tail)
    assert keeps


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_prompt_whose_last_window_would_be_freed_is_handed_over_whole(max_tokens: int) -> None:
    window = CacheGroup("sliding-window", BLOCK, 2 * BLOCK, 0, ("w",))
    pair = StreamPair(prefill={"groups": (FULL, window)}, decode={"groups": (FULL, window)})
    pair.arrive(max_tokens=max_tokens)
    pair.start()
    assert bool(pair.chunk(is_fresh=True).streams.chunks) is (max_tokens == 1)


@pytest.mark.parametrize(("is_streaming", "lines"), [(True, 1), (False, 0)])
def test_an_engine_that_streams_says_once_that_its_router_does_not(
    caplog: pytest.LogCaptureFixture, is_streaming: bool, lines: int
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.vllm_adapter")
    pair = StreamPair(streams=(is_streaming, True))
    for name in ("first", "second"):
        pair.prefill.admit(name, {"do_remote_decode": True, "do_remote_prefill": False}, TEXT)
    assert caplog.text.count("came without an early ticket") == lines
    assert ("request first came" in caplog.text) is is_streaming


def test_a_prompt_of_which_a_chunk_was_refused_is_not_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of later chunks would stand in the places of those that are missing."""
    pair = StreamPair()
    pair.arrive()
    pair.start()
    pair.chunk(is_fresh=True)
    state = pair.prefill.state
    known, state._requests = state._requests, {}
    assert not pair.chunk().streams.chunks
    state._requests = known
    assert "failed (traceback below)" in caplog.text
    assert not pair.chunk().streams.chunks
    keeps, ticket = pair.finish()
    assert (keeps, ticket) == (True, None), "the blocks stay until the word has moved"
    (void,) = pair.prefill.step().streams.voids
    assert void.ends
    pair.prefill.report(sent=("p",))
    assert not pair.prefill.state.live_count


def test_an_end_that_the_machines_refuse_keeps_the_blocks_until_the_words_have_moved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Prompt):
        def digest(self, tokens: int) -> str | None:
            raise RuntimeError("the host cannot say")

        def media(self, tokens: int) -> None:
            """Return None: the prompt has no media."""

    pair = StreamPair()
    pair.run()
    assert pair.finish(identity=Broken(TEXT)) == (True, None)
    assert "the host cannot say" in caplog.text
    (void,) = pair.prefill.step().streams.voids
    assert void.ends
    pair.prefill.report(sent=("p",))
    assert not pair.prefill.state.live_count
