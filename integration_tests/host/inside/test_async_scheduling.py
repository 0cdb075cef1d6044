"""Scheduling ahead of the output, vLLM's default on GPUs and off on CPUs: its `AsyncScheduler`, with a step in flight."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import BLOCK, FULL, PREFILL, SOME_TOKEN, STATE, STOP_TOKEN, Engine, ids, prompt
from full_engine import FullEngine
from seeds import IS_FULL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kv_nixl_agent.testing import FakeFabric
from vllm_adapter.host import connector
from vllm_adapter.scheduler import side

Make = Callable[..., "AsyncEngine"]
OWN_STEPS = {"reads_ahead": False}
"""Reads that steps order, as those of several cache groups and long ones."""
PATIENT = {False: (8 << 20, 60.0), True: (8 << 20, 60.0)}


class AsyncEngine(Engine):
    """An engine that schedules a step before it knows the output of the one before; its workers end transfers by themselves."""

    def __init__(self, folder: Any, *, lag: int = 1, seed: int = 0, stops: float = 0.1, **options: Any) -> None:
        super().__init__(folder, scheduler_class=AsyncScheduler if lag else Scheduler, **options)
        self._lag, self._stops = lag, stops
        self._flight: deque[tuple[Any, Any]] = deque()
        self._written: dict[int, set[int]] = {}
        self._draw = random.Random(seed)
        self._reads: dict[str, int] = {}
        self._leases: dict[str, int] = {}
        self.is_held = False
        self.refused: list[str] = []

    def step(self, **_reports: Any) -> dict[str, int]:
        token = STOP_TOKEN if self._draw.random() < self._stops else 7
        output, ran = self._run(set(), set(), set(), token)
        self._flight.append((output, ran))
        if len(self._flight) > self._lag:
            self._take(*self._flight.popleft())
        return dict(output.num_scheduled_tokens)

    def settle(self) -> None:
        """Take in the steps that are in flight."""
        while self._flight:
            self._take(*self._flight.popleft())

    def _work(self, output: Any, sent: set[str], received: set[str], failed: set[str]) -> KVConnectorOutput:
        plan = self.plans[-1].plan
        written = {block for step, _ in self._flight for block in self._written[id(step)]}
        self._written = {id(step): self._written[id(step)] for step, _ in self._flight}
        self._written[id(output)] = set(self._blocks_written(output))
        for order in plan.reads:
            filled = {block for blocks in ids(order.local_blocks) for block in blocks}
            assert not filled & written, f"a step under way writes into {filled & written}, which a read fills"
            if order.is_reported:
                assert order.request_id not in self._reads, "a read was ordered while the same one runs"
                self._reads[order.request_id] = self._draw.randrange(4)
        for grant in plan.grants:
            self._leases[grant.request_id] = self._draw.randrange(6)
        for request_id in plan.revokes:
            self._leases[request_id] = 0
        self.refused += plan.failures
        return super()._work(output, self._due(self._leases), self._due(self._reads), set(plan.failures))

    def _blocks_written(self, output: Any) -> Iterator[int]:
        """Return the blocks that hold the tokens of a step that was scheduled just now."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        for name, tokens in output.num_scheduled_tokens.items():
            computed = self.scheduler.requests[name].num_computed_tokens
            for group, blocks in zip(groups, self.blocks(name), strict=True):
                places = {position // group.kv_cache_spec.block_size for position in range(computed - tokens, computed)}
                yield from (blocks[place] for place in places if place < len(blocks))

    def _due(self, waiting: dict[str, int]) -> set[str]:
        due = set() if self.is_held else {request_id for request_id, steps in waiting.items() if steps == 0}
        for request_id in due:
            del waiting[request_id]
        for request_id, steps in waiting.items():
            waiting[request_id] = max(steps - 1, 0)
        return due

    def until(self, condition: Callable[[], Any], steps: int = 60) -> None:
        """Step until something is so."""
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {steps} steps")

    def end(self) -> None:
        """Step until nothing is left."""
        self.until(lambda: not self.scheduler.has_requests() and not self._leases and not self._reads, 400)
        self.settle()
        self.assert_nothing_left()


@pytest.fixture(params=[1, 0], ids=["ahead", "in-turn"])
def make(request: pytest.FixtureRequest, tmp_path: Any) -> Make:
    return lambda name, **options: AsyncEngine(tmp_path / name, lag=request.param, **options)


def ticket_of(engine: AsyncEngine, request_id: str, tokens: list[int], **options: Any) -> dict[str, Any]:
    engine.add(request_id, tokens, max_tokens=1, params=dict(PREFILL), **options)
    engine.until(lambda: request_id in engine.outputs)
    return engine.ticket(request_id)


def has_ended(engine: Any, request_id: str) -> bool:
    outputs = engine.outputs.get(request_id)
    return bool(outputs) and outputs[-1].finish_reason is not None


def test_a_ticket_for_the_next_turn_counts_no_token_of_a_step_in_flight(make: Make) -> None:
    """Such a token may be one that was sampled after the answer had ended: its KV belongs to no conversation."""
    options = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 16}
    lengths = set()
    for seed in range(12):
        producer, decode = make(f"P{seed}", **options), make(f"D{seed}", seed=seed, **options)
        text = prompt(40, seed)
        decode.add("d", text, params=ticket_of(producer, "p", text), max_tokens=60)
        decode.until(partial(has_ended, decode, "d"), 200)
        answer = [token for output in decode.outputs["d"] for token in output.new_token_ids]
        back = decode.ticket("d")
        # The last token of an answer was sampled, but never computed.
        valid = len(text) + len(answer) - 1
        assert back["remote_num_tokens"] == valid
        assert len(back["remote_block_ids"][0]) == -(-valid // BLOCK)
        lengths.add(valid)
        decode.end()
        producer.end()
    assert len(lengths) > 3, "answers of one length show little"


def read_back_after_an_abort(make: Make, aborts_after: int) -> list[str]:
    """Let a producer read a turn back into blocks of a request that was aborted while a step computed for it."""
    options = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 16, "prefix_caching": False, "stops": 0.0}
    producer, decode = make("P", role="kv_producer", blocks=1 + 9, **options), make("D", role="kv_consumer", **options)
    text = prompt(40)
    decode.add("d", text, params=ticket_of(producer, "p", text), max_tokens=24)
    decode.until(partial(has_ended, decode, "d"), 200)
    producer.until(lambda: not producer.scheduler.has_requests())
    back = decode.ticket("d")
    answer = [token for output in decode.outputs["d"] for token in output.new_token_ids]
    turn = [*text, *answer, *prompt(9, seed=5)]
    producer.add("local", prompt(75, seed=9), max_tokens=60)
    for _ in range(aborts_after):
        producer.step()
    producer.abort("local")
    producer.add("again", turn, max_tokens=1, params=back)
    producer.until(partial(has_ended, producer, "again"), 100)
    reads = [order.request_id for order in producer.orders("reads")]
    assert producer.outputs["again"][-1].kv_transfer_params["do_remote_prefill"] is True
    producer.end()
    decode.end()
    return reads


@pytest.mark.never_wrong("A9")
@pytest.mark.parametrize("aborts_after", range(1, 6))
def test_a_producer_reads_back_into_blocks_that_no_step_writes(make: Make, aborts_after: int) -> None:
    """vLLM defers frees for engines that consume; one that only produces is given such blocks at once."""
    assert read_back_after_an_abort(make, aborts_after) == ["again"]


FAMILIES = {"dense": (FULL,), "state": (STATE, FULL)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", range(4))
def test_a_prompt_that_is_preempted_is_handed_over_whole(make: Make, more: int, family: str) -> None:
    """All but the last token of a state's, which is left out once and not again."""
    specs, caches = FAMILIES[family], family == "dense"
    blocks = 1 + (8 if caches else 10)  # a state takes one block of each request
    engine = make("P", specs=specs, prefix_caching=caches, blocks=blocks, batch_tokens=BLOCK + 1, stops=0.0)
    engine.add("local", prompt(3 * BLOCK - 3, seed=90), max_tokens=30)
    engine.until(lambda: "local" in engine.outputs)
    text = prompt(5 * BLOCK - more, seed=more)
    request = engine.add("p", text, max_tokens=1, params=dict(PREFILL))
    engine.until(lambda: "p" in engine.outputs, 200)
    assert request.num_preemptions > 0
    ticket = engine.ticket("p")
    assert (ticket["remote_num_tokens"], len(ticket["remote_block_ids"][-1])) == (len(text) - (STATE in specs), 5)
    engine.until(lambda: engine.orders("grants"))
    (grant,) = engine.orders("grants")
    assert list(grant.fence) == ticket["kv_fence"], "the fence of its last computation counts"
    engine.end()


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_at_any_step_of_a_read_leaves_nothing(make: Make, steps: int) -> None:
    producer, consumer = make("P"), make("D")
    consumer.add("d", prompt(40), params=ticket_of(producer, "p", prompt(40)))
    consumer.is_held = True
    for _ in range(steps):
        consumer.step()
    consumer.abort("d")
    consumer.step()
    was_read = any(order.is_reported for order in consumer.orders("reads"))
    assert consumer.orders("cancels") == ["d"] * was_read
    assert consumer.free_blocks == 63 - (3 if was_read else 0), "blocks with a read in flight stay"
    consumer.is_held = False
    consumer.add("next", prompt(20, seed=5))
    consumer.end()
    producer.end()


@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_of_requests_ends_and_leaves_nothing(make: Make, family: str) -> None:
    """Local and handed-over requests, aborts, chunks, and too few blocks, in any order."""
    for seed in range(25 if IS_FULL else 4):
        assert_mix_ends(make, family, seed)


def assert_mix_ends(make: Make, family: str, seed: int) -> None:
    draw = random.Random(f"{family} {seed}")
    options: dict[str, Any] = {"specs": FAMILIES[family], "prefix_caching": family == "dense", "seed": seed}
    tight = {"blocks": 1 + draw.choice((12, 20, 63)), "batch_tokens": draw.choice((48, 256)), **options}
    producer, consumer = make("P", **tight), make("D", **tight, policy=draw.choice(("fail", "recompute")))
    tickets: list[tuple[list[int], dict[str, Any]]] = []
    for number in range(14):
        engine, text = draw.choice((producer, consumer)), prompt(draw.randrange(4, 6 * BLOCK), seed=number)
        kind = draw.choice(("local", "prefill", "decode", "decode", "abort"))
        name = f"{kind}{number}"
        if kind == "prefill":
            producer.add(name, text, max_tokens=1, params=dict(PREFILL))
        elif kind == "decode" and tickets:
            text, ticket = tickets.pop()
            consumer.add(name, text, max_tokens=draw.randrange(1, 20), params=ticket)
        elif kind == "abort" and engine.scheduler.requests:
            engine.abort(draw.choice(sorted(engine.scheduler.requests)))
        else:
            engine.add(name, text, max_tokens=draw.randrange(1, 20))
        for _ in range(draw.randrange(4)):
            producer.step()
            consumer.step()
        for name, outputs in producer.outputs.items():
            given = outputs[-1].kv_transfer_params
            if given is not None and given["do_remote_prefill"]:
                request_text = prompt(given["remote_num_tokens"], seed=int(name.removeprefix("prefill")))
                tickets.append((request_text, dict(given)))
        producer.outputs.clear()
    producer.end()
    consumer.end()
    assert consumer.refused == []


class QueuedEngine(FullEngine):
    """A whole engine that is driven by vLLM's `EngineCore.step_with_batch_queue`, with two batches in flight.

    Attributes:
        rests: Per step of the worker: whether it waited for an end, and whether it reported one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, scheduler_class=AsyncScheduler, **{"prefix_caching": False, **options})
        self.rests: list[tuple[bool, bool]] = []
        self._waits: list[float] = []
        self.side._ends.has_more = _Ended(self._waits)
        self._core: Any = SimpleNamespace(
            scheduler=self.scheduler,
            batch_queue=deque(),
            batch_queue_size=2,
            model_executor=SimpleNamespace(execute_model=self._execute, sample_tokens=self._sample),
            is_mm_encoder_only=False,
            is_pooling_model=False,
            capture_iteration_details=lambda _output: nullcontext(),
            log_error_detail=lambda _output: nullcontext(),
            _should_throttle_prefills=lambda: False,
            _process_aborts_queue=lambda: None,
            _attach_iteration_details=lambda *_: None,
            _attach_weight_version=lambda *_: None,
        )

    def step(self, **_reports: Any) -> dict[str, int]:
        outputs, _ = EngineCore.step_with_batch_queue(self._core)
        for each in (outputs or {}).values():
            for one in each.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)
        return {}

    def _execute(self, output: Any, *, non_block: bool) -> Future[Any]:
        assert non_block
        self._waits.clear()
        ran = self._ran(output, set(), set(), set(), SOME_TOKEN)
        ends = ran.kv_connector_output
        self.rests.append((bool(self._waits), bool(ends and (ends.finished_sending or ends.finished_recving))))
        self._output = Future[Any]()
        self._output.set_result(ran)
        return self._output

    def _sample(self, _grammar: Any, *, non_block: bool) -> Future[Any]:
        assert non_block
        return self._output


class _Ended(threading.Event):
    """Notes for how long the worker was ready to wait."""

    def __init__(self, waits: list[float]) -> None:
        super().__init__()
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        self._waits.append(timeout or 0.0)
        return super().wait(timeout)


def test_a_worker_rests_while_it_waits_and_never_while_its_report_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes a report in after the next batch has run; a rest in that batch delays the request by as much."""
    fabric = FakeFabric()
    producer, consumer = engines = [QueuedEngine(tmp_path / name, monkeypatch, fabric, **OWN_STEPS) for name in "PD"]
    try:
        for engine in engines:  # a lease that stays open gives the worker a reason to rest in every empty step
            assert engine.prefill("kept", prompt(20)) is not None
        for number in range(5):
            text = prompt(40, seed=number)
            ticket = producer.prefill(f"p{number}", text)
            consumer.add(f"d{number}", text, max_tokens=1, params=ticket)
            consumer.rests.clear()
            with consumer.transfers_held():
                for _ in range(8):
                    consumer.step()
            assert [rested for rested, _ in consumer.rests[3:]] == [True] * 5, "an idle engine does not spin"
            consumer.until(received=f"d{number}")
            producer.until(sent=f"p{number}")
            for engine in engines:
                for _ in range(4):
                    engine.step()
                (reported,) = [step for step, (_, reports) in enumerate(engine.rests) if reports]
                assert not engine.rests[reported + 1][0], "the report waits for the end of this rest"
                engine.rests.clear()
            assert f"d{number}" in consumer.outputs
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("is_computing", [False, True])
@pytest.mark.parametrize("kind", [FullEngine, QueuedEngine], ids=["in-turn", "ahead"])
def test_short_reads_end_together_in_the_step_that_orders_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[FullEngine], *, is_computing: bool
) -> None:
    """Here as long as the reads take; so they may run in the next step, and all of them in the same one."""
    monkeypatch.setattr(side, "SHORT_READS", PATIENT)
    fabric = FakeFabric()
    producer, consumer = engines = [kind(tmp_path / name, monkeypatch, fabric, **OWN_STEPS) for name in "PD"]
    try:
        texts = {f"d{number}": prompt(40, seed=number) for number in range(4)}
        tickets = [producer.prefill(f"p{name}", text) for name, text in texts.items()]
        if is_computing:
            consumer.add("local", prompt(20, seed=9), max_tokens=50)
            for _ in range(4):
                consumer.step()
        for (name, text), ticket in zip(texts.items(), tickets, strict=True):
            consumer.add(name, text, params=ticket)
        consumer.step()
        assert consumer.received == dict.fromkeys(texts, True)
        if is_computing:  # the step before is taken in behind this one
            assert consumer.scheduler.finished_recving_kv_req_ids == set(texts)
    finally:
        for engine in engines:
            engine.close()


def test_ends_run_together_with_those_whose_report_is_still_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes the report of the first in behind the step that reads the others: they would run a step later."""
    monkeypatch.setattr(side, "SHORT_READS", PATIENT)
    fabric = FakeFabric()
    producer, consumer = engines = [QueuedEngine(tmp_path / name, monkeypatch, fabric, **OWN_STEPS) for name in "PD"]
    try:
        for number in range(3):
            texts = {f"d{number}{place}": prompt(40, seed=10 * number + place) for place in range(3)}
            tickets = {name: producer.prefill(f"p{name}", text) for name, text in texts.items()}
            first, *others = texts
            for names in ([first], others):
                for name in names:
                    consumer.add(name, texts[name], max_tokens=1, params=tickets[name])
                consumer.step()
            waiting = {
                name
                for name in texts
                if consumer.scheduler.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS
            }
            assert waiting >= set(others)
            assert waiting == consumer.scheduler.finished_recving_kv_req_ids, "the next step runs all that wait"
            for name in texts:
                consumer.until(partial(has_ended, consumer, name))
                producer.until(sent=f"p{name}")
        consumer.until(lambda: not consumer.scheduler.has_requests())
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("is_alone", [True, False])
def test_blocks_are_free_in_the_step_that_reports_them_unless_another_connector_may_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_alone: bool
) -> None:
    """A connector around ours, as vLLM's MultiConnector, may hold the end of a lease back until another one has ended its own."""
    if not is_alone:
        monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
        monkeypatch.setattr(connector, "get_kv_transfer_group", object)
    fabric = FakeFabric()
    producer, consumer = engines = [QueuedEngine(tmp_path / name, monkeypatch, fabric, **OWN_STEPS) for name in "PD"]
    try:
        for number in range(3):
            name, text = f"p{number}", prompt(40, seed=number)
            consumer.add(f"d{number}", text, max_tokens=1, params=producer.prefill(name, text))
            consumer.until(received=f"d{number}")
            for _ in range(number):  # in whichever step the end comes
                producer.step()
            producer.until(sent=name)
            assert (name not in producer.scheduler.requests) is is_alone
            producer.step()
            assert name not in producer.scheduler.requests
            assert not producer.scheduler.has_requests()
            consumer.until(partial(has_ended, consumer, f"d{number}"))
    finally:
        for engine in engines:
            engine.close()
