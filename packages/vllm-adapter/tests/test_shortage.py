"""Requests that wait for blocks which are leased to peers, while nothing runs: in a circle of two engines a read gives way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_engine import BLOCK, TEXT, Engine
from stream_pair import TEXT as STREAMED
from stream_pair import StreamPair

Round = Callable[[], None]


def own(engine: Engine) -> Round:
    """Return the host's questions in a round that ends at a request of its own."""
    return lambda: ask(engine, "own")


def ask(engine: Engine, request_id: str) -> None:
    tokens, _ = engine.side.external_tokens(request_id, 0)
    assert tokens is not None


def reader(engine: Engine) -> Round:
    """Return those of a round that ends at a prompt to read."""
    engine.admit("d", Engine("far").prefill("far", TEXT), TEXT)
    return lambda: ask(engine, "d")


def loaded(engine: Engine) -> Round:
    """Return those of a round that ends at a prompt that was read: none."""
    reader(engine)()
    engine.allocate("d", [4, 5, 6], external=40)
    engine.step()
    engine.report(received=("d",))
    return lambda: None


KINDS = (own, reader, loaded)


def leased() -> Engine:
    """Return an engine with a lease that a peer keeps, and two reads that wait for blocks."""
    engine = Engine("E")
    assert engine.prefill("lease", TEXT) is not None
    for name in ("early", "late"):
        engine.admit(name, Engine("far").prefill(f"far-{name}", TEXT), TEXT)
    engine.step()
    return engine


def given_up(engine: Engine, questions: Round, *, for_s: float = 1.5, is_empty: bool = True) -> tuple[str, ...]:
    """Return the peers' requests whose reads are given up in steps of 0.1 s."""
    found: list[str] = []
    for _ in range(round(for_s * 10)):
        engine.now_s += 0.1
        questions()
        plan = engine.side.build_step((), (), is_empty=is_empty).plan
        assert not plan.revokes, "no lease is revoked for want of blocks"
        found += [order.ticket.peer_request_id for order in plan.reads if not order.is_reported]
    return tuple(found)


@pytest.mark.never_wrong("B13")
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_whose_blocks_are_leased_gives_up_its_newest_read(
    kind: Callable[[Engine], Round], caplog: pytest.LogCaptureFixture
) -> None:
    engine = leased()
    questions = kind(engine)
    engine.admit("newest", Engine("far").prefill("far-newest", TEXT), TEXT)
    assert given_up(engine, questions) == ("far-newest",)
    assert engine.side.external_tokens("newest", 0) == (0, False), "its prompt is computed here"
    assert (engine.side.take_stats() or {})["num_cancelled_reads"] == ["blocks-leased"]
    (line,) = [each for each in caplog.messages if "blocks-leased" in each]
    assert "request newest: " in line
    assert "leases: 1, blocks: 3" in line


@pytest.mark.never_wrong("B13")
def test_one_read_gives_way_per_second_until_none_waits() -> None:
    engine = leased()
    questions = own(engine)
    assert given_up(engine, questions, for_s=1.5) == ("far-late",)
    assert given_up(engine, questions, for_s=1.0) == ("far-early",)
    assert given_up(engine, questions, for_s=5.0) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_given_up_while_something_runs_or_before_a_second_is_over(kind: Callable[[Engine], Round]) -> None:
    engine = leased()
    questions = kind(engine)
    assert given_up(engine, questions, is_empty=False, for_s=3.0) == ()
    for _ in range(3):
        assert given_up(engine, questions, for_s=0.8) == ()
        assert given_up(engine, questions, for_s=0.1, is_empty=False) == ()


@pytest.mark.never_wrong("B13")
@pytest.mark.parametrize("free_blocks", [5, 6])
def test_an_offer_without_blocks_gives_way(free_blocks: int) -> None:
    """Five of six blocks are free; or all are, and the host keeps some of them for others."""
    pair = StreamPair()
    engine = pair.decode
    assert engine.prefill("lease", TEXT) is not None
    engine.step()
    engine.side.bind_free_blocks(lambda: free_blocks)
    pair.arrive()
    pair.admit()
    pair.start()
    pair.chunk(is_fresh=True)
    reported: list[int | None] = []
    pair.until(lambda: pair.decode.state.state_counts().get("consumer-offered"))
    assert given_up(engine, lambda: reported.append(pair.matched()), is_empty=False, for_s=3.0) == ()
    assert given_up(engine, lambda: reported.append(pair.matched())) == ("p",)
    assert len(STREAMED) == 6 * BLOCK
    assert reported[-1] == 0, "its prompt is computed here"
    assert reported.count(6 * BLOCK) <= (0 if free_blocks < 6 else len(reported) / 3), "those behind it have their turn"
