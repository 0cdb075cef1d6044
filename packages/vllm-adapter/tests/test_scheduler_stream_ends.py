"""Streamed hand-overs between two scheduler sides that do not go their way: refused, aborted, preempted, late, alone."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prompts import Prompt
from stream_pair import TEXT, StreamPair, streaming

from vllm_adapter.scheduler.followed import Arrival


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing here is a fault of this engine, and nothing may be passed to the machines that they refuse."""
    caplog.set_level(logging.WARNING, logger="vllm.vllm_adapter")
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


# ------------------------------------------------------------------------------------------------- answers


def test_another_prompt_gets_nothing_and_is_computed_where_it_is_decoded(caplog: pytest.LogCaptureFixture) -> None:
    pair = StreamPair()
    pair.run()
    pair.admit(text="y" * len(TEXT))
    pair.until(lambda: pair.matched() == 0)
    pair.decode.step()
    assert "digest-mismatch); it is computed here" in caplog.text
    assert (pair.decode.side.take_stats() or {})["num_unstreamed_prompts"] == ["digest-mismatch"]
    pair.finish()
    pair.admit("late", text="z" * len(TEXT))  # the listener's thread compares, too
    pair.until(lambda: pair.matched("late") == 0)
    assert not pair.decode.step().reads


class Pictured(Prompt):
    """A prompt with pictures, of which a request may have fewer."""

    def __init__(self, text: str, pictures: int = 2) -> None:
        super().__init__(text)
        self.pictures = pictures

    def digest(self, tokens: int) -> str | None:
        whole = super().digest(tokens)
        return whole and hashlib.sha256(f"{whole} {self.pictures}".encode()).hexdigest()

    def media(self, tokens: int) -> Any:
        return self.pictures, super().digest(tokens)


@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize("identity", [Prompt(TEXT), Pictured(TEXT, pictures=1)], ids=["none", "one of two"])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_streamed_prompt_whose_pictures_went_to_prefill_alone_fails(
    caplog: pytest.LogCaptureFixture, identity: Any, is_finished: bool
) -> None:
    pair = StreamPair()
    pair.prefill.side.arrived(Arrival("p", pair.early(serves=True), len(TEXT), Pictured(TEXT), max_tokens=1))
    pair.start()
    pair.chunk(blocks=6 if is_finished else 2, is_fresh=True)
    if is_finished:
        keeps, _ = pair.finish(identity=Pictured(TEXT))
        assert keeps
    ended: list[str] = []
    early, end = pair.early(serves=False), lambda: ended.append("d")
    pair.decode.side.arrived(Arrival("d", early, len(TEXT), identity, end_with_error=end))
    pair.until(lambda: pair.matched() is None and ended)
    pair.decode.step()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "ticket-media-missing" in line
    assert "whatever the policy" in line
    pair.decode.end("d", TEXT, [], reason="error", computed_tokens=0)
    caplog.clear()


def test_an_id_that_comes_again_is_parked_for_its_new_prompt() -> None:
    pair = StreamPair()
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


def test_an_engine_that_does_not_stream_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = StreamPair(streams=(False, True))
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


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_peer_that_is_gone_ends_the_read_by_the_policy_without_waiting(policy: str) -> None:
    """Nobody listens there: the process is gone, and no other one knows this hand-over."""
    pair = StreamPair(decode={"load_failure_policy": policy})
    streaming(pair, 1)
    pair.prefill.side.close()
    pair.wire.port = 1  # nobody listens there
    pair.reported(is_done=False)
    pair.decode.step()
    assert pair.decode.step().streams.stops == ("d",)
    pair.decode.report(received=("d",), failed=("d",))
    assert pair.states()[1] == ["consumer-local" if policy == "recompute" else "consumer-failed"]
    assert pair.matched() == 0


def test_closing_either_side_in_mid_stream_is_quiet() -> None:
    pair = StreamPair()
    streaming(pair, 1)
    pair.admit("asking", text="y" * len(TEXT))
    pair.decode.step()
    pair.prefill.side.close()
    pair.decode.step()
    pair.decode.side.close()
    pair.decode.side.close()
    pair.decode.step()
    pair.prefill.step()
