"""Short reads that end while vLLM's scheduler asks for their tokens (`scheduler/ahead.py`): every page of every request is right.

The truth is `full_engine.content`, and which blocks a request gets is decided by vLLM's own scheduler and pool.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import BLOCK, FULL, SOME_TOKEN, WINDOW, Engine, prompt
from full_engine import FullEngine, content
from seeds import IS_FULL
from test_async_scheduling import PATIENT, QueuedEngine, has_ended
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from kv_nixl_agent.testing import FakeFabric
from vllm_adapter.scheduler import ahead
from vllm_adapter.steps import MOST_READS

Make = Callable[..., Any]
NO_WORKER: Any = SimpleNamespace(read_ahead=None, take_ends_ahead=None, generation=1)


class Checked:
    """Looks at all pages of all running requests after each step.

    Attributes:
        given_up: How many reads this engine has given up, by code.
        weights_of: Weights by which a request's prompt was computed, but for the last token of one that was read; 1 for others.
    """

    def step(self: Any, **reports: Any) -> dict[str, int]:
        steps: dict[str, int] = super().step(**reports)  # type: ignore[misc]
        for request in self.scheduler.running:
            (blocks,) = self.blocks(request.request_id)
            known = request.all_token_ids
            for position in range(request.num_computed_tokens):
                token = known[position] if position < len(known) else SOME_TOKEN
                is_prompt = position < request.num_prompt_tokens - (request.request_id in self.received)
                weights = self.weights_of.get(request.request_id, 1) if is_prompt else 1
                page = self.memory[blocks[position // BLOCK], :, position % BLOCK]
                assert torch.equal(page, content(weights, position, token)), f"{request.request_id}: token {position}"
        return steps


class InTurn(Checked, FullEngine):
    """One step after the other."""


class Ahead(Checked, QueuedEngine):
    """Two batches in flight."""


@pytest.fixture(params=[InTurn, Ahead], ids=["in-turn", "ahead"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    fabric, made = FakeFabric(), list[Any]()
    monkeypatch.setattr(ahead, "SHORT_READS", PATIENT)

    def engine(name: str, **options: Any) -> Any:
        made.append(request.param(tmp_path / name, monkeypatch, fabric, **options))
        made[-1].weights_of, made[-1].given_up = {}, Counter()
        recorder = made[-1].connector._scheduler_side._recorder
        monkeypatch.setattr(recorder, "observe", partial(_observed, recorder.observe, made[-1].given_up))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def _observed(observe: Callable[..., None], given_up: Counter[str], key: str, value: Any) -> None:
    given_up.update([value] * (key == "num_cancelled_reads"))
    observe(key, value)


def tickets(producer: Any, texts: dict[str, list[int]]) -> dict[str, Any]:
    return {name: producer.prefill(f"p-{name}", text) for name, text in texts.items()}


def add(consumer: Any, producer: Any, texts: dict[str, list[int]], max_tokens: int = 3) -> None:
    for name, ticket in tickets(producer, texts).items():
        assert ticket is not None
        consumer.add(name, texts[name], max_tokens=max_tokens, params=ticket)


def connect(consumer: Any, producer: Any) -> None:
    """Connect them, because the first read waits for a handshake, and let both become idle."""
    add(consumer, producer, {"first": prompt(20, seed=77)}, max_tokens=1)
    for engine in (consumer, producer):
        engine.until(lambda engine=engine: not engine.scheduler.has_requests())


def all_end(*engines: Any) -> None:
    for engine in engines:
        engine.until(lambda engine=engine: not engine.scheduler.has_requests())
        engine.assert_nothing_left()


def read_once(consumer: Any, names: Any) -> bool:
    return [order.request_id for order in consumer.reads if order.request_id in names] == list(names)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("is_computing", [False, True])
def test_prompts_that_arrive_together_run_in_the_step_that_asks_for_them(
    make: Make, count: int, *, is_computing: bool
) -> None:
    """Beside a request that computes in the step after: it waits for no read."""
    producer, consumer = make("P"), make("D")
    connect(consumer, producer)
    if is_computing:
        consumer.add("local", prompt(20, seed=9), max_tokens=60)
        for _ in range(3):
            consumer.step()
    texts = {f"d{number}": prompt(40 + number, seed=number) for number in range(count)}
    add(consumer, producer, texts)
    with consumer.transfers_held() if is_computing else nullcontext():
        consumer.step()
    if is_computing:
        while len(consumer.side._ends.reads) < count:
            time.sleep(0.001)
        consumer.step()
    assert {name: consumer.received.get(name) for name in texts} == dict.fromkeys(texts, True)
    for name, text in texts.items():
        assert consumer.scheduler.requests[name].num_computed_tokens == len(text)
    assert read_once(consumer, texts)
    all_end(consumer, producer)
    assert all(f"p-{name}" in producer.sent for name in texts)


@pytest.mark.never_wrong("A15")
def test_a_read_never_writes_into_the_blocks_of_a_prefix_hit(make: Make) -> None:
    """The host has found them, and keeps them from others only once it has the answer: the oldest free blocks of all."""
    producer, consumer = make("P"), make("D", blocks=1 + 16, prefix_caching=True)
    connect(consumer, producer)
    prefix = prompt(3 * BLOCK, seed=1)
    for number in range(6):
        consumer.add(f"old{number}", [*prefix, 40 + number], max_tokens=1)
        consumer.until(partial(has_ended, consumer, f"old{number}"))
        fill = {f"new{number}{place}": prompt(4 * BLOCK, seed=10 * number + place + 5) for place in range(number)}
        for name, text in fill.items():
            consumer.add(name, text, max_tokens=1)
            consumer.until(partial(has_ended, consumer, name))
        text = [*prefix, *prompt(2 * BLOCK + number, seed=number + 60)]
        add(consumer, producer, {f"d{number}": text})
        consumer.until(partial(has_ended, consumer, f"d{number}"))
    hits = [len(order.local_blocks[0].ids) for order in consumer.reads[1:]]
    assert {2, 3} & set(hits), "some of these had a prefix hit"
    all_end(consumer, producer)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_read_that_fails_is_decided_by_the_policy(make: Make, policy: str) -> None:
    producer, consumer = make("P"), make("D", policy=policy)
    connect(consumer, producer)
    texts = {f"d{number}": prompt(40, seed=number) for number in range(2)}
    given = tickets(producer, texts)
    producer.connector._scheduler_side.revoke_leases()
    producer.until(sent="p-d1")
    for name, ticket in given.items():
        consumer.add(name, texts[name], max_tokens=2, params=ticket)
    for name in texts:
        consumer.until(partial(has_ended, consumer, name))
    ends = {name: consumer.outputs[name][-1].finish_reason.name.lower() for name in texts}
    assert ends == dict.fromkeys(texts, "error" if policy == "fail" else "length")
    assert [consumer.received[name] for name in texts] == [False, False]
    all_end(consumer, producer)


def test_an_abort_while_it_is_read_gives_the_blocks_back_without_another_request(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    connect(consumer, producer)
    texts = {f"d{number}": prompt(40, seed=number) for number in range(3)}
    add(consumer, producer, texts)
    free = consumer.free_blocks
    with consumer.transfers_held():
        for _ in range(4):
            consumer.step()
        assert consumer.free_blocks == free - 9
        assert not consumer.outputs.keys() & texts.keys(), "the host waits for them without a request that holds blocks"
        for name in texts:
            consumer.abort(name)
        consumer.step()
        assert consumer.free_blocks == free - 9, "a read may still write into them"
        assert consumer.scheduler.has_requests(), "the host goes on until they are free"
    all_end(consumer, producer)


def tickets_by_weights(producer: Any, texts: dict[str, list[int]], weights: int) -> dict[str, Any]:
    """Let the producer compute prompts by other weights, so that pages show which engine computed them."""
    producer.weights = weights
    producer.weights_of = {f"p-{name}": weights for name in texts}
    given = tickets(producer, texts)
    producer.weights = 1
    return given


def one_waits(make: Make, **options: Any) -> tuple[Any, Any, list[int]]:
    """Return both engines when a prompt has been read for which the host has no place yet, and that prompt."""
    producer, consumer = make("P"), make("D", **options)
    connect(consumer, producer)
    consumer.scheduler.max_num_active_reqs = 1
    texts = {"runs": prompt(40, seed=1), "waits": prompt(50, seed=2)}
    given = tickets(producer, {"runs": texts["runs"]})
    given |= tickets_by_weights(producer, {"waits": texts["waits"]}, 2)
    for name, ticket in given.items():
        consumer.add(name, texts[name], max_tokens=60, params=ticket)
    for _ in range(3):
        consumer.step()
    assert (consumer.received["runs"], consumer.received["waits"]) == (True, True)
    assert [request.request_id for request in consumer.scheduler.running] == ["runs"]
    return producer, consumer, texts["waits"]


def test_a_prompt_that_was_read_waits_for_its_turn_and_is_read_once(make: Make) -> None:
    producer, consumer, _ = one_waits(make)
    consumer.weights_of["waits"] = 2
    consumer.until(partial(has_ended, consumer, "runs"))
    consumer.until(lambda: "waits" in consumer.outputs)
    assert read_once(consumer, ["runs", "waits"])
    all_end(consumer, producer)


def test_a_prompt_that_was_read_uses_a_hit_that_has_grown_meanwhile(make: Make) -> None:
    producer, consumer, text = one_waits(make, prefix_caching=True)
    queue = consumer.scheduler.waiting
    waits = queue.pop_request()
    given = tickets_by_weights(producer, {"same": text[:40]}, 2)
    consumer.add("same", text[:40], max_tokens=1, params=given["same"])
    queue.add_request(waits)
    consumer.weights_of = {"waits": 2, "same": 2}
    consumer.abort("runs")
    consumer.until(lambda: "waits" in consumer.outputs)
    assert read_once(consumer, ["runs", "waits", "same"])
    all_end(consumer, producer)


@pytest.mark.parametrize("change", ["reset", "reset behind its end", "hit shrinks"])
def test_a_read_that_ends_too_late_is_not_used(make: Make, change: str) -> None:
    producer, consumer = make("P"), make("D", policy="recompute", prefix_caching=True)
    connect(consumer, producer)
    text = prompt(60, seed=1)
    consumer.add("prefix", text[: 2 * BLOCK + 1], max_tokens=1)
    consumer.until(partial(has_ended, consumer, "prefix"))
    given = tickets_by_weights(producer, {"d": text}, 2)
    with consumer.transfers_held():
        consumer.add("d", text, max_tokens=3, params=given["d"])
        for _ in range(3):
            consumer.step()
        assert "d" not in consumer.outputs
        if change == "reset":
            consumer.connector.reset_cache()
        elif change == "hit shrinks":
            pool = consumer.scheduler.kv_cache_manager.block_pool
            pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    if change == "reset behind its end":
        while not consumer.side._ends.reads:
            time.sleep(0.001)
        consumer.connector.reset_cache()
    consumer.until(lambda: "d" in consumer.outputs)
    assert [len(order.local_blocks[0].ids) for order in consumer.reads[1:]] == [2], "the part behind the hit"
    all_end(consumer, producer)


def test_offered_blocks_that_others_got_are_given_up(make: Make) -> None:
    producer, consumer, _ = one_waits(make)
    waits = consumer.scheduler.requests["waits"]
    pool = consumer.scheduler.kv_cache_manager.block_pool
    assert consumer.connector.get_num_new_matched_tokens(waits, 0) == (49, False)
    others = pool.get_new_blocks(2)
    for block in others:
        consumer.memory[block.block_id] = 0
    consumer.step()
    pool.free_blocks(others)
    consumer.scheduler.max_num_active_reqs = 2
    consumer.until(lambda: "waits" in consumer.outputs)
    all_end(consumer, producer)


@pytest.mark.parametrize("what", ["abort", "reset", "pause", "blocks"])
def test_a_prompt_that_was_read_gives_way(make: Make, what: str) -> None:
    producer, consumer, text = one_waits(make, blocks=1 + 20)
    free = consumer.free_blocks
    scheduler: Scheduler = consumer.scheduler
    if what == "abort":
        consumer.abort("waits")
        assert consumer.free_blocks == free + 4
    elif what == "reset":
        consumer.connector.reset_cache()
        assert consumer.free_blocks == free + 4
    elif what == "pause":
        consumer.abort("runs")
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        consumer.until(lambda: not scheduler.has_requests())
        assert scheduler.reset_prefix_cache(reset_running_requests=True), "nothing keeps blocks"
        scheduler.set_pause_state(PauseState.UNPAUSED)
    else:
        scheduler.max_num_active_reqs = 3
        scheduler.waiting.remove_request(scheduler.requests["waits"])
        consumer.add("long", prompt(14 * BLOCK, seed=3), max_tokens=1)
        scheduler.waiting.add_request(scheduler.requests["waits"])
        consumer.until(partial(has_ended, consumer, "long"))
        assert not has_ended(consumer, "runs"), "it waited for no other blocks"
    scheduler.max_num_active_reqs = 3
    if what != "abort":
        consumer.until(lambda: "waits" in consumer.outputs)
        assert len(text) == 50
    assert read_once(consumer, ["runs", "waits"])
    assert consumer.given_up == ({"blocks-given": 1} if what in {"pause", "blocks"} else {})
    all_end(consumer, producer)


@pytest.mark.never_wrong("A15")
def test_other_blocks_than_those_that_were_read_into_count_as_not_loaded(make: Make) -> None:
    """A pool that gives other blocks than it promised at the start."""
    producer, consumer = make("P"), make("D", policy="recompute")
    connect(consumer, producer)
    pool = consumer.scheduler.kv_cache_manager.block_pool
    consumer.connector._scheduler_side.ahead._free = _Backwards(consumer.connector._scheduler_side.ahead._free, pool)
    add(consumer, producer, {"d": prompt(40, seed=1)})
    for _ in range(4):  # unchecked: the host has heard of these pages only once it has computed by them
        super(Checked, consumer).step()
    consumer.until(partial(has_ended, consumer, "d"))
    add(consumer, producer, {"e": prompt(40, seed=2)})
    consumer.until(partial(has_ended, consumer, "e"))
    assert consumer.given_up == {"other-blocks-given": 1}
    assert consumer.connector._scheduler_side.ahead.reads == {}
    all_end(consumer, producer)


class _Backwards:
    """Gives blocks back in the wrong order."""

    def __init__(self, free: Any, pool: Any) -> None:
        self._free, self._pool = free, pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._free, name)

    def give_back(self, ids: list[int]) -> None:
        self._free.give_back(ids[::-1])


def test_a_request_of_the_engines_own_that_begins_beside_takes_no_blocks_from_a_read(make: Make) -> None:
    """The read ends between the answer to that request and the end of the step."""
    producer, consumer = make("P"), make("D")
    connect(consumer, producer)
    consumer.add("local", prompt(20, seed=9), max_tokens=60)
    for _ in range(3):
        consumer.step()
    texts = {f"d{number}": prompt(40, seed=number) for number in range(2)}
    given, plan = tickets(producer, texts), consumer.connector.build_connector_meta
    hold = consumer.transfers_held()
    hold.__enter__()
    for name, text in texts.items():
        consumer.add(name, text, params=given[name])
    consumer.step()

    def planned(output: Any) -> Any:
        hold.__exit__(None, None, None)
        while len(consumer.side._ends.reads) < len(texts):
            time.sleep(0.001)
        consumer.connector.build_connector_meta = plan
        return plan(output)

    consumer.connector.build_connector_meta = planned
    consumer.add("plain", prompt(12, seed=35), max_tokens=2)
    consumer.step()
    all_end(consumer, producer)
    assert read_once(consumer, texts)
    assert consumer.given_up == {}


def test_more_reads_than_a_step_may_begin_are_left_to_the_host(make: Make) -> None:
    producer, consumer = make("P", blocks=1 + 127), make("D", blocks=1 + 127)
    connect(consumer, producer)
    texts = {f"d{number:02}": prompt(20, seed=number) for number in range(MOST_READS + 4)}
    add(consumer, producer, texts, max_tokens=1)
    consumer.step()
    assert len([name for name in texts if name in consumer.received]) == MOST_READS
    all_end(consumer, producer)
    assert all(consumer.received[name] for name in texts)
    assert read_once(consumer, texts)


@pytest.mark.parametrize("blocks", [16, 24])
def test_an_eighth_of_the_pool_stays_free(make: Make, blocks: int) -> None:
    producer, consumer = make("P"), make("D", blocks=1 + blocks)
    connect(consumer, producer)
    texts = {f"d{number}": prompt(3 * BLOCK, seed=number) for number in range(8)}
    given = tickets(producer, texts)
    with consumer.transfers_held():
        for name, text in texts.items():
            consumer.add(name, text, max_tokens=1, params=given[name])
        consumer.connector.get_num_new_matched_tokens(consumer.scheduler.requests["d0"], 0)
        kept = (1 + blocks) // 8
        assert kept <= consumer.free_blocks < kept + 3
    all_end(consumer, producer)


def test_a_failing_order_costs_its_reads_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make("P"), make("D", policy="recompute")
    connect(consumer, producer)
    texts = {f"d{number}": prompt(40, seed=number) for number in range(2)}

    def fails(_plan: Any) -> Any:
        raise RuntimeError("a fault of the worker's half")

    given = tickets(producer, texts)
    with monkeypatch.context() as patch:
        patch.setattr(consumer.side._state, "apply", fails)
        for name, text in texts.items():
            consumer.add(name, text, max_tokens=2, params=given[name])
        consumer.connector.get_num_new_matched_tokens(consumer.scheduler.requests["d0"], 0)
    for name in texts:
        consumer.until(partial(has_ended, consumer, name))
    consumer.until(lambda: not consumer.scheduler.has_requests())
    consumer.assert_nothing_left()


@pytest.mark.parametrize("options", [{"specs": (FULL, WINDOW)}, {"specs": (WINDOW,)}, {"role": "kv_producer"}], ids=str)
def test_where_blocks_cannot_be_checked_nothing_is_read_ahead(tmp_path: Path, options: dict[str, Any]) -> None:
    engine = Engine(tmp_path / "D", **options)
    engine.connector._engine.worker = NO_WORKER
    engine.connector.bind_gpu_block_pool(engine.scheduler.kv_cache_manager.block_pool)
    engine.connector.shutdown()
    assert engine.connector._scheduler_side.ahead is None


def test_a_pool_that_gives_older_blocks_first_is_not_read_into(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "D")
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.free_blocks = lambda blocks: pool.free_block_queue.append_n([_freed(block) for block in blocks])
    engine.connector._engine.worker = NO_WORKER
    engine.connector.bind_gpu_block_pool(pool)
    engine.connector.shutdown()
    assert engine.connector._scheduler_side.ahead is None


def _freed(block: Any) -> Any:
    block.ref_cnt -= 1
    return block


@pytest.mark.never_wrong("A15")
def test_any_mix_of_requests_has_right_pages_and_leaves_nothing(make: Make) -> None:
    """Local and handed-over requests with common prefixes, aborts, chunks, and too few blocks, in any order."""
    for seed in range(40 if IS_FULL else 6):
        assert_mix_is_right(make, seed)


def assert_mix_is_right(make: Make, seed: int) -> None:
    draw = random.Random(seed)
    producer = make(f"P{seed}", blocks=1 + 64, batch_tokens=draw.choice((48, 256)))
    options = {
        "blocks": 1 + draw.choice((12, 20, 40)),
        "batch_tokens": draw.choice((48, 256)),
        "prefix_caching": draw.random() < 0.7,
    }
    consumer = make(f"D{seed}", **options, policy=draw.choice(("fail", "recompute")))
    consumer.scheduler.max_num_active_reqs = draw.choice((1, 2, 16))
    prefixes = [prompt(draw.choice((0, BLOCK, 2 * BLOCK, 3 * BLOCK)), seed=number) for number in range(3)]
    for number in range(24):
        text = [*draw.choice(prefixes), *prompt(draw.randrange(4, 4 * BLOCK), seed=draw.randrange(8))]
        kind = draw.choice(("local", "decode", "decode", "decode", "abort", "reset"))
        if kind == "abort" and consumer.scheduler.requests:
            consumer.abort(draw.choice(sorted(consumer.scheduler.requests)))
        elif kind == "reset":
            consumer.connector.reset_cache()
        elif kind == "decode":
            add(consumer, producer, {f"d{number}": text}, max_tokens=draw.randrange(1, 20))
        else:
            consumer.add(f"local{number}", text, max_tokens=draw.randrange(1, 20))
        for _ in range(draw.randrange(4)):
            consumer.step()
            producer.step()
    all_end(consumer, producer)
