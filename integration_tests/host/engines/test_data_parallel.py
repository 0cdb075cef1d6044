"""Data-parallel engines: each rank is an engine of its own to its peers, with its own id, port and leases."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from commands import parts
from fleets import COMPUTED, FAILED, OWN_WORKERS, TRANSFERS, Fleet, ours, prompt, started_fleet
from processes import family_of, is_alive

from kvdev.engines import metric_sum

RANKS = 2
PATIENCE: dict[str, Any] = {"read_timeout_s": 360.0}


MORE = pytest.mark.skipif(not os.environ.get("KVDEV_LONG"), reason="long: dev.py test --long host; more engines start")


def started(sizes: dict[str, int]) -> AbstractContextManager[Fleet]:
    """Start an engine of so many ranks by each name."""
    many = [name for name, size in sizes.items() if size > 1]
    return started_fleet(
        "dense",
        {name: ours(kv_load_failure_policy="recompute", **PATIENCE) for name in sizes},
        arguments={name: ["--data-parallel-size", str(sizes[name])] for name in many},
        environments=dict.fromkeys(many, OWN_WORKERS),
        cores=dict.fromkeys(many, "0|1"),
    )


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with started({"one": 1, "two": RANKS}) as running:
        yield running


def to_rank(rank: int | None) -> dict[str, Any]:
    """Return the headers that send a request to a rank."""
    return {} if rank is None else {"X-data-parallel-rank": str(rank)}


def text_of(fleet: Fleet, text: str, engine: str, rank: int | None, given: dict[str, Any] | None = None) -> str:
    body = {"prompt": text, "max_tokens": 12, **({"kv_transfer_params": given} if given else {})}
    return str(fleet.ask(engine, body, **to_rank(rank))["choices"][0]["text"])


def assert_crosses(
    fleet: Fleet, number: int, prefill: str, decode: str, ranks: Sequence[tuple[int | None, int | None]]
) -> set[str]:
    """Hand two prompts over between each pair of ranks; return the ids of the engines that computed them."""
    failed, transfers = fleet.count(decode, FAILED), fleet.count(decode, TRANSFERS)
    computed, ids = fleet.count(decode, COMPUTED, source="local_compute"), set[str]()
    for place, (source, target) in enumerate(ranks):
        texts = [prompt(100 * number + 10 * place + n, 40) for n in range(2)]
        given = [fleet.take_ticket(prefill, text, **to_rank(source)) for text in texts]
        port = fleet.engines[prefill].side_channel_port + (source or 0)
        assert [one["remote_port"] for one in given] == [port] * len(texts)
        ids |= {one["remote_engine_id"] for one in given}
        read = [text_of(fleet, text, decode, target, one) for text, one in zip(texts, given, strict=True)]
        last = 2 * (place + 1)
        assert fleet.count(decode, COMPUTED, source="local_compute") <= computed + last, "all of it was read"
        assert read == [text_of(fleet, text, prefill, source) for text in texts]
    assert fleet.count(decode, TRANSFERS) - transfers == 2 * len(ranks)
    assert fleet.count(decode, FAILED) == failed
    return ids


def assert_one_engine_of(ids: set[str]) -> None:
    assert sorted(name.rpartition("_")[2] for name in ids) == [f"dp{rank}" for rank in range(RANKS)]
    assert len({name.rpartition("_")[0] for name in ids}) == 1


def shares_of(fleet: Fleet, engine: str) -> list[float]:
    """Return the reads of each rank."""
    page = fleet.engines[engine].metrics()
    return [metric_sum(page, TRANSFERS, engine=str(rank)) for rank in range(RANKS)]


@MORE
def test_ranks_hand_over_to_ranks() -> None:
    """Each to each, both ways. Before the other fleet starts, since it has engines of its own."""
    every = [(source, target) for source in range(RANKS) for target in range(RANKS)]
    with started({"left": RANKS, "right": RANKS}) as fleet:
        for number, (prefill, decode) in enumerate([("left", "right"), ("right", "left")]):
            assert_one_engine_of(assert_crosses(fleet, number, prefill, decode, every))
            assert shares_of(fleet, decode) == [4, 4]
        fleet.assert_all_blocks_free()


@pytest.mark.proves("data-parallel ranks: proof")
def test_a_rank_hands_over_to_an_engine_of_one_and_back(fleet: Fleet) -> None:
    assert_one_engine_of(assert_crosses(fleet, 0, "two", "one", [(rank, None) for rank in range(RANKS)]))
    assert shares_of(fleet, "two") == [0, 0]
    assert_crosses(fleet, 1, "one", "two", [(None, rank) for rank in range(RANKS)])
    assert shares_of(fleet, "two") == [2, 2]
    fleet.assert_all_blocks_free()


def test_a_rank_that_dies_costs_its_readers_nothing_but_the_prompt(fleet: Fleet) -> None:
    """The last test of this fleet. vLLM ends the whole engine when a rank dies; tickets of both ranks are out by then."""
    texts = [prompt(500 + rank, 40) for rank in range(RANKS)]
    given = [fleet.take_ticket("two", text, **to_rank(rank)) for rank, text in enumerate(texts)]
    scheduler = parts(f"127.0.0.1:{fleet.engines['two'].side_channel_port + 1}")["scheduler"]
    # A worker that outlives its core for a moment still serves its memory.
    family = family_of(scheduler["pid"])
    assert len(family) > 1
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    while any(map(is_alive, family)):
        time.sleep(0.01)
    computed, began_s = fleet.count("one", COMPUTED, source="local_compute"), time.monotonic()
    assert text_of(fleet, texts[1], "one", None, given[1]) == text_of(fleet, texts[1], "one", None)
    assert fleet.count("one", COMPUTED, source="local_compute") > computed
    assert time.monotonic() - began_s < PATIENCE["read_timeout_s"] / 3
    read_or_computed = text_of(fleet, texts[0], "one", None, given[0])
    fleet.end("two")
    fleet.assert_all_blocks_free(within_s=60)
    assert read_or_computed == text_of(fleet, texts[0], "one", None)
    log = fleet.log("one")
    assert log.count("its KV was not taken over") in {1, 2}, "one line per request"
    assert "Traceback" not in log
