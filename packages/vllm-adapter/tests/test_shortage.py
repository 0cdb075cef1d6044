"""Blocks of leases for requests that wait while nothing runs: the host itself asks for those of running requests alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from scheduler_engine import BLOCK, PREFILL, TEXT, Engine, Prompt
from stream_pair import TEXT as STREAMED
from stream_pair import StreamPair
from stream_wires import InMemory

from vllm_adapter.scheduler.values import Arrival

Round = Callable[[], None]


def own(engine: Engine) -> Round:
    """Return the host's questions in a round that ends at a request of its own."""
    return lambda: ask(engine, "own")


def ask(engine: Engine, request_id: str) -> None:
    tokens, _ = engine.side.external_tokens(request_id, 0)
    assert tokens is not None


def prompt(engine: Engine) -> Round:
    """Return those of a round that ends at a prompt to hand over."""
    engine.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    return lambda: ask(engine, "p")


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


def behind_one_that_waits(engine: Engine) -> Round:
    """Return those of a round that passes over a sibling of a read under way, and ends at a request of its own."""
    ticket = Engine("far").prefill("far", TEXT)
    for name in ("d1", "d2"):
        engine.admit(name, ticket, TEXT)
    ask(engine, "d1")
    engine.allocate("d1", [4, 5, 6], external=40)
    engine.step()

    def questions() -> None:
        assert engine.side.external_tokens("d2", 0) == (None, False)
        ask(engine, "own")

    return questions


KINDS = (own, prompt, reader, loaded, behind_one_that_waits)


def leased() -> Engine:
    """Return an engine with a lease that a peer keeps."""
    engine = Engine("E")
    assert engine.prefill("lease", TEXT) is not None
    engine.step()
    return engine


def revoked(engine: Engine, questions: Round, *, for_s: float = 1.5, is_empty: bool = True) -> tuple[str, ...]:
    """Return what is asked back in steps of 0.1 s."""
    found: tuple[str, ...] = ()
    for _ in range(round(for_s * 10)):
        engine.now_s += 0.1
        questions()
        found += tuple(engine.side.build_step((), (), is_empty=is_empty).plan.revokes)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_without_blocks_asks_the_oldest_lease_back(kind: Callable[[Engine], Round]) -> None:
    engine = leased()
    assert revoked(engine, kind(engine)) == ("lease",)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_asked_back_while_something_runs_or_before_a_second_is_over(
    kind: Callable[[Engine], Round],
) -> None:
    engine = leased()
    questions = kind(engine)
    assert revoked(engine, questions, is_empty=False, for_s=3.0) == ()
    for _ in range(3):
        assert revoked(engine, questions, for_s=0.8) == ()
        assert revoked(engine, questions, for_s=0.1, is_empty=False) == ()


def test_nothing_is_asked_back_for_requests_that_have_blocks_or_wait_for_peers() -> None:
    engine = leased()
    ticket = Engine("far").prefill("far", TEXT)
    for name in ("d1", "d2", "d3"):
        engine.admit(name, ticket, TEXT)
    ask(engine, "d1")
    engine.allocate("d1", [4, 5, 6], external=40)
    assert revoked(engine, lambda: engine.side.external_tokens("d2", 0) and None, for_s=3.0) == ()
    engine.report(received=("d1",))
    engine.allocate("d1", [4, 5, 6])
    assert revoked(engine, lambda: None, for_s=3.0) == ()


@pytest.mark.parametrize("ending", ["abort before the report", "failed", "abort after it"])
def test_a_read_that_nobody_waits_for_asks_nothing_back(ending: str) -> None:
    engine = leased()
    reader(engine)()
    engine.allocate("d", [4, 5, 6], external=40)
    engine.step()
    if ending == "abort before the report":
        engine.end("d", TEXT, [4, 5, 6], reason="abort")
    engine.report(received=("d",), failed=("d",) if ending == "failed" else ())
    if ending == "abort after it":
        engine.end("d", TEXT, [4, 5, 6], reason="abort")
    assert revoked(engine, lambda: None, for_s=3.0) == ()


@pytest.fixture
def pair() -> Iterator[StreamPair]:
    pair = StreamPair(InMemory())
    yield pair
    pair.close()


@pytest.mark.parametrize("free_blocks", [5, 6])
def test_an_offer_without_blocks_asks_the_oldest_lease_back(pair: StreamPair, free_blocks: int) -> None:
    """Five of six blocks are free; or all are, and the host keeps some of them for others."""
    engine = pair.decode
    assert engine.prefill("lease", TEXT) is not None
    engine.step()
    engine.side.bind_free_blocks(lambda: free_blocks)
    pair.arrive()
    pair.admit()
    pair.start()
    pair.chunk(is_fresh=True)
    told: list[int | None] = []
    pair.until(lambda: pair.decode.state.state_counts().get("consumer-offered"))
    steps = revoked(engine, lambda: told.append(pair.matched()), is_empty=False, for_s=3.0)
    assert steps == (), "what runs ends by itself"
    assert revoked(engine, lambda: told.append(pair.matched())) == ("lease",)
    assert len(STREAMED) == 6 * BLOCK
    assert told.count(6 * BLOCK) <= (0 if free_blocks < 6 else len(told) / 3), "those behind it have their turn"
