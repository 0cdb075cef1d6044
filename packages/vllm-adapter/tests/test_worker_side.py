"""The engine thread's half of a worker: it hands over, takes away, and says once what went wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from factories import attention_cache, facts
from fakes import heartbeat, order
from scheduler_engine import BLOCK, TEXT
from scheduler_engine import Engine as SchedulerEngine

from kv_scheduler_state import FenceOrder, GrantOrder, HeartbeatOrder, StepPlan
from kv_scheduler_state.plan import EMPTY_PLAN
from kv_scheduler_state.streams import StreamChunk, StreamOpen, StreamOrder, StreamPlan, StreamVoid
from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.config import Settings
from vllm_adapter.errors import AdapterError
from vllm_adapter.steps import SHORT_REST_S, ReadEnd, ReadTimes, StepOrders, StepReport
from vllm_adapter.wiring import make_worker
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.registration import Registration

if TYPE_CHECKING:
    from collections.abc import Callable


def _worker() -> WorkerSide:
    return make_worker(facts(), Settings(streaming=True))


def test_caches_in_two_kinds_of_memory_are_refused_at_registration() -> None:
    one, other = (
        attention_cache(layer, address=address) for layer, address in (("layers.0", 1 << 40), ("layers.1", 1 << 41))
    )
    with pytest.raises(AdapterError) as caught:
        _worker().register([one, replace(other, memory_kind="VRAM")])
    assert (caught.value.code, caught.value.context) == ("mixed-memory-kinds", {"kinds": ["DRAM", "VRAM"]})


def _use(worker: WorkerSide, agent: Any) -> None:
    unused: Any = None
    reads: Any = SimpleNamespace(are_ready=lambda _: False)
    worker._registration = Registration(agent, unused, reads, unused, worker._recorder, b"")


def _end(code: str = "", **changes: Any) -> ReadEnd:
    return ReadEnd(order(**changes), code, code and "the peer said nothing", ReadTimes(0.0), 1.0)


def test_a_notification_that_failed_is_logged_but_no_request_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    worker = _worker()
    worker._ends.reads.append(_end("peer-lost", is_reported=False))
    results = worker.take_report()
    assert results.received == results.failed == set()
    assert "not taken over" not in caplog.text
    assert (worker.take_stats() or {})["num_failed_notifications"] == [1]
    end = _end("connection-refused", is_reported=False)
    assert "could not notify" in caplog.text
    caplog.clear()
    worker._ends.reads.append(replace(end, was_connected=False))
    worker.take_report()
    assert not caplog.messages, "the read that failed by it has its line"
    assert worker.take_stats() is None, "the handshake counts as failed, and nothing else does"


def test_handing_a_step_over_waits_for_no_peer() -> None:
    """The transfer thread may be busy: only the fence words are written at once, so that no ticket is ahead of them."""
    worker, queued, fences = _worker(), list[Any](), list[tuple[int, int]]()
    agent = SimpleNamespace(
        call_soon=queued.append, write_fence=lambda slot, generation: fences.append((slot, generation)), is_alive=True
    )
    _use(worker, agent)
    plan = StepPlan(reads=(order(),), expects=("p1",), fences=(FenceOrder("p1", 3, 9),))
    began_s = time.monotonic()
    worker.apply(StepOrders(plan))
    assert time.monotonic() - began_s < 30  # not 60
    assert fences == [(3, 9)]
    assert len(queued) == 1
    chunk: Any = SimpleNamespace(request_id="p1", held_tokens=0)
    worker.apply(StepOrders(StepPlan(streams=StreamPlan(chunks=(chunk,)))))
    assert len(queued) == 1, "a chunk of a stream is no reason to wake the transfer thread"


class Agent:
    """A transfer thread that says how it is."""

    def __init__(self) -> None:
        self.errors, self.state, self.held = 0, "running", list[Any]()

    def health(self) -> Any:
        return SimpleNamespace(
            state=self.state,
            callback_errors=self.errors,
            loop_errors=0,
            last_error="ValueError: odd\n\x1b[2J",
            last_traceback="Traceback: line 7\nERROR of\x1b[2J a peer\n",
        )

    def quarantine(self) -> list[Any]:
        return self.held


@pytest.fixture(autouse=True)
def looks_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_adapter.worker.engine_thread._CHECK_EVERY_S", 0.0)


@pytest.mark.never_wrong("B2", "B12")
def test_an_exception_on_the_transfer_thread_is_logged_once_with_its_traceback_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, agent = _worker(), Agent()
    _use(worker, agent)
    worker.take_report()
    agent.errors = 3
    for _ in range(3):
        worker.take_report()
    assert caplog.text.count("Traceback: line 7") == 1
    assert "ValueError: odd" in caplog.text
    assert "\x1b" not in caplog.text
    assert caplog.records[-1].exc_text == "    Traceback: line 7\n    ERROR of\\x1b[2J a peer"
    assert sum((worker.take_stats() or {})["num_callback_errors"]) == 3


@pytest.mark.never_wrong("B12")
def test_a_stuck_or_dead_transfer_thread_is_an_error_and_a_gauge(caplog: pytest.LogCaptureFixture) -> None:
    worker, agent = _worker(), Agent()
    _use(worker, agent)
    agent.state = "stuck"
    for _ in range(2):
        worker.take_report()
    agent.state = "dead"
    for _ in range(2):
        worker.take_report()
    assert caplog.text.count("is stuck in one turn") == 1
    assert caplog.text.count("has died") == 1
    assert (worker.take_stats() or {})["stuck_threads"] == [1], "a dead thread makes no progress either"


def test_quarantined_bytes_are_reported_as_changes() -> None:
    worker, agent = _worker(), Agent()
    _use(worker, agent)
    for held in ([4096], [4096], [1024], []):
        agent.held = [SimpleNamespace(bytes_at_risk=size) for size in held]
        worker.take_report()
    assert (worker.take_stats() or {})["quarantined_bytes"] == [4096, -3072, -1024]


class Waits:
    """An event in whose stead ends happen: each wait takes the next of them, in the order given, and then nothing more."""

    def __init__(self, worker: WorkerSide) -> None:
        self.waited: list[float] = []
        self.ends: list[Callable[[], None]] = []
        ended: Any = SimpleNamespace(wait=self._wait, clear=lambda: None, set=lambda: None)
        worker._ends.has_more = ended

    def _wait(self, within_s: float) -> bool:
        self.waited.append(within_s)
        for end in self.ends[:1]:
            end()
        return bool(self.ends and self.ends.pop(0))


def _resting_worker() -> tuple[WorkerSide, Waits, Callable[..., StepReport]]:
    worker = _worker()
    agent: Any = Agent()
    agent.is_alive = True
    agent.call_soon = lambda _: None
    _use(worker, agent)

    def step(plan: StepPlan = EMPTY_PLAN, rest_s: float = 0.005) -> StepReport:
        worker.apply(StepOrders(plan, rest_s=rest_s))
        return worker.take_report()

    return worker, Waits(worker), step


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(reads=(order("r1"),)),
        StepPlan(grants=(GrantOrder("r1", 30.0, None),)),
        StepPlan(streams=StreamPlan(watches=(StreamOrder(order("r1"), 1, 0),))),
    ],
    ids=["read", "lease", "stream"],
)
def test_a_rank_rests_only_until_it_has_reported_all_that_it_waits_for(plan: StepPlan) -> None:
    worker, waits, step = _resting_worker()
    step(plan)
    step()
    assert waits.waited == [0.005] * 2
    end = partial(worker._ends.lease_ended, "r1") if plan.grants else partial(worker._ends.read_ended, _end())
    if plan.streams.watches:
        end = partial(worker._ends.read_ended, replace(_end(), is_streamed=True))
    end()
    for _ in range(5):
        step()
    assert waits.waited == [0.005] * 2, "an end that is there is reported at once, and nothing is left to wait for"


GRANT = StepPlan(grants=(GrantOrder("r1", 30.0, None),))


@pytest.mark.parametrize(
    ("rest_s", "plan", "looks"),
    [
        (SHORT_REST_S, GRANT, True),
        (2 * SHORT_REST_S, GRANT, False),  # the engine has waited for long: looking takes its core
        (SHORT_REST_S, GRANT._replace(reads=(order("r2"),)), False),  # the transfer thread is at work
    ],
)
def test_a_rank_looks_for_notifications_itself_soon_after_a_grant(
    rest_s: float, plan: StepPlan, *, looks: bool
) -> None:
    worker, _, step = _resting_worker()
    step(plan, rest_s=0.0)
    asked = list[float]()

    def run_here(call: Callable[[], None] | None, is_done: Callable[[], bool], within_s: float) -> bool:
        assert call is None
        assert is_done()
        asked.append(within_s)
        if len(asked) == 3:
            worker._ends.lease_ended("r1")
        return len(asked) != 2  # a turn may be in progress

    assert worker._registration is not None
    agent: Any = worker._registration.agent
    agent.run_here = run_here
    assert set(step(rest_s=rest_s).sent) == ({"r1"} if looks else set())
    assert asked == [0.0] * (3 * looks)


def test_a_step_waits_for_all_reads_that_it_orders_and_reports_them_together() -> None:
    worker, waits, step = _resting_worker()

    def ends(name: str) -> Callable[[], None]:
        return partial(worker._ends.read_ended, replace(_end(), order=order(name)))

    step(StepPlan(reads=(order("old"),), grants=(GrantOrder("lease", 30.0, None),)), rest_s=0.0)
    waits.ends = [ends("r1"), partial(worker._ends.lease_ended, "lease"), ends("old"), ends("r2"), ends("r3")]
    report = step(StepPlan(reads=(order("r1"), order("r2"))), rest_s=60.0)
    assert report.received == {"r1", "r2", "old"}
    assert report.sent == {"lease"}
    assert len(waits.waited) == 4
    assert waits.waited == sorted(waits.waited, reverse=True), "the wait is one for all"
    assert step(StepPlan(reads=(order("r3"), order("r4"))), rest_s=60.0).received == {"r3"}, "one is late"
    assert len(waits.waited) == 6, "a report under way lets no step go without its own reads"
    waits.ends = [ends("r4")]
    step()
    assert len(waits.waited) == 6, "a report under way waits for nothing else"
    assert step().received == {"r4"}


@pytest.mark.parametrize(
    ("rest_s", "are_ready", "is_free", "runs_here"),
    [
        (60.0, True, True, True),
        (0.0, True, True, False),  # the step computes: the host's thread is not free
        (60.0, False, True, False),  # a peer is yet to be connected, which takes long
        (60.0, True, False, False),  # the transfer thread is at work
    ],
)
def test_a_step_that_waits_for_its_reads_runs_them_itself(
    rest_s: float, are_ready: bool, is_free: bool, runs_here: bool
) -> None:
    worker, waits, step = _resting_worker()
    assert worker._registration is not None
    agent: Any = worker._registration.agent
    reads: Any = SimpleNamespace(are_ready=lambda _: are_ready)
    worker._registration.reads = reads
    handed_over, asked, renewed = list[Any](), list[float](), list[HeartbeatOrder]()
    reads.read, reads.heartbeat = (lambda _: None), renewed.append

    def run_here(call: Callable[[], None], is_done: Callable[[], bool], within_s: float) -> bool:
        asked.append(within_s)
        assert not is_done()
        assert not handed_over
        if is_free:
            call()
            assert not renewed, "a heartbeat does not hold up the read"
            worker._ends.read_ended(replace(_end(), order=order("r")))
            assert is_done()
        return is_free

    agent.call_soon, agent.run_here = handed_over.append, run_here
    report = step(StepPlan(reads=(order("r"),), heartbeats=(heartbeat(),)), rest_s=rest_s)
    assert bool(report.received) is runs_here
    (later,) = handed_over
    later()
    assert renewed == [heartbeat()]
    assert asked == [rest_s] * bool(rest_s and are_ready)
    assert bool(waits.waited) is (bool(rest_s) and not runs_here), "what ran here is not waited for again"


@pytest.mark.parametrize("is_lock_stepped", [False, True])
def test_no_rank_rests_that_others_wait_for(is_lock_stepped: bool) -> None:
    side = SchedulerEngine(is_lock_stepped=is_lock_stepped).side
    side._requests.ordered(StepPlan(reads=(order("r"),)), 0.0)
    side._requests.finished("p", is_error=False, keeps_blocks=True)
    rests = [side.build_step((), (), is_empty=True).rest_s for _ in range(4)]
    assert any(rests) is not is_lock_stepped


def test_the_scheduler_lets_workers_rest_while_it_waits_for_peers_alone() -> None:
    side = SchedulerEngine().side

    def rest_s(**given: bool) -> float:
        return side.build_step((), (), **given).rest_s

    def later() -> float:
        return [rest_s(is_empty=True) for _ in range(41)][-1]

    assert not rest_s(is_empty=True)
    assert not rest_s(is_empty=True), "nothing is read"
    side._requests.ordered(StepPlan(streams=StreamPlan(watches=(StreamOrder(order("s"), 1, 0),))), 0.0)
    assert rest_s(is_empty=True) == 0.01, "a prompt that is still computed"
    side._requests.ordered(StepPlan(reads=(order("r"),)), 0.0)
    assert rest_s(is_empty=True) == 0.0015, "the end of a plain read is near"
    assert later() == 0.005
    assert not rest_s(), "something is computed"
    assert not rest_s(is_empty=True), "one may stand between two that compute"
    assert rest_s(is_empty=True) == 0.0015
    side._requests.take(StepReport(received=["r"]))
    assert rest_s(is_empty=True) == 0.01
    side._requests.ordered(StepPlan(reads=(order("s"),)), 0.0)
    assert rest_s(is_empty=True) == 0.0015, "its final ticket is read"
    side._requests.take(StepReport(received=["s"]))
    assert not rest_s(is_empty=True)
    side._requests.finished("p", is_error=False, keeps_blocks=True)
    assert rest_s(is_empty=True) == 0.0015, "a peer reads from here"
    assert later() == 0.005
    side._requests.take(StepReport(sent=["p"]))
    assert not rest_s(is_empty=True)
    asking: Any = SimpleNamespace(is_asking=True, receive=lambda _now_s: None, send=lambda: None)
    side._streams = asking
    assert rest_s(is_empty=True) == 0.005, "a peer is asked"


@pytest.mark.parametrize(
    ("facts", "block_bytes", "waits_s"),
    [
        ({}, 4096, [0.002, 0.0005]),
        ({}, 1 << 20, [0.002, 0.0]),
        ({}, 4 << 20, [0.0, 0.0]),
        ({"pp": 2}, 4096, [0.002, 0.0]),
        ({"is_lock_stepped": True}, 4096, [0.0, 0.0]),
    ],
    ids=["short", "short for an idle engine", "long", "stages", "lock-stepped"],
)
def test_the_step_that_orders_short_reads_waits_for_them(
    facts: dict[str, Any], block_bytes: int, waits_s: list[float]
) -> None:
    groups = (CacheGroup("attention", BLOCK, 0, 0, ("layers.0",), block_bytes=block_bytes),)
    producer, decode = SchedulerEngine("producer"), SchedulerEngine("decode", groups=groups, **facts)

    def rest_s(name: str, *, is_empty: bool) -> float:
        decode.admit(name, producer.prefill(name, TEXT), TEXT)
        assert decode.side.external_tokens(name, 0) == (len(TEXT), True)
        decode.allocate(name, [1, 2, 3], external=len(TEXT))
        return decode.side.build_step((), (), is_empty=is_empty).rest_s

    decode.step()
    assert [rest_s("1", is_empty=True), rest_s("2", is_empty=False)] == waits_s


WORDS = [
    StreamPlan((StreamVoid("r", 1, 9, 9, ends=True),)),
    StreamPlan((), (StreamOpen("r", 1, 9, 9),)),
    StreamPlan((), (), (StreamChunk("r", 1, 9, (), 16),)),
]


@pytest.mark.parametrize("brought", ["nothing", "other orders", "its orders"])
@pytest.mark.parametrize(("streams", "has_words"), [(StreamPlan(), False), *[(streams, True) for streams in WORDS]])
def test_words_that_move_after_the_forward_pass_are_said_once(
    caplog: pytest.LogCaptureFixture, streams: StreamPlan, has_words: bool, brought: str
) -> None:
    """As under a host that does not call the hook before its forward pass, or calls it with another step's orders."""
    worker = _worker()
    for _ in range(3):
        orders = StepOrders(StepPlan(streams=streams))
        if brought != "nothing":
            worker.before_forward(orders if brought == "its orders" else StepOrders(StepPlan()))
        worker.apply(orders)
    announced = [record for record in caplog.records if "(words-late)" in record.getMessage()]
    assert len(announced) == (has_words and brought != "its orders")
    assert all(record.levelname == "ERROR" for record in announced)


def test_what_the_scheduler_could_not_order_is_reported_as_failed() -> None:
    worker = _worker()
    worker.apply(StepOrders(StepPlan(failures=("o1",))))
    results = worker.take_report()
    assert results.received == results.failed == {"o1"}
    assert not worker.take_report().received
