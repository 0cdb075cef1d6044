"""Memory that goes away: what outlives it, how a registration ends whatever its thread does, and when tickets name the next."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from factories import facts
from fakes import order
from stream_wires import InMemory

from kv_scheduler_state import FenceOrder, GrantOrder, StepPlan
from kv_scheduler_state.streams import StreamOrder, StreamPlan
from vllm_adapter.config import Settings
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.registration import ServedRegistration
from vllm_adapter.steps import RankRegistration, ReadEnd, ReadTimes, StepOrders
from vllm_adapter.wiring import _agent_options, make_worker
from vllm_adapter.worker import registration
from vllm_adapter.worker.engine_thread import _VOID_GENERATION, WorkerSide
from vllm_adapter.worker.registration import Registration

RANK, OTHER_RANK = (0, 0), (0, 1)
ENDED = ["handshakes closed", "agent closed", "reads end: thread-dead", "leases end: False"]
"""Calls at the end of a registration whose thread is dead."""


# ------------------------------------------------------------------------------------------ the end of a registration


class Parts:
    """A registration whose thread does as asked: "well", "dead", "hangs", "dies" (with the order in its queue)."""

    def __init__(self, thread: str, transfers: int = 0) -> None:
        self.thread, self.calls = thread, list[str]()
        self.is_alive, self.is_closed = thread in {"well", "hangs"}, False
        handshakes: Any = SimpleNamespace(close=lambda: self.calls.append("handshakes closed"))
        reads: Any = SimpleNamespace(
            end_all=lambda code, _message: self.calls.append(f"reads end: {code}"),
            snapshot=lambda: {"transfers": transfers},
            read=lambda *_orders: None,
        )
        leases: Any = SimpleNamespace(
            end_all=lambda *, has_fences: self.calls.append(f"leases end: {has_fences}"),
            expect=lambda _ids: None,
            apply=lambda *_: None,
            stream_worker=None,
        )
        agent: Any = self
        self.registration = Registration(agent, handshakes, reads, leases, Recorder(), b"envelope")
        health = SimpleNamespace(
            state="running", calls_waiting=0, callback_errors=0, loop_errors=0, last_error="", ucx_requests="zeroed"
        )
        self.health = lambda: health
        self.stalls, self.statistics = list[Any], dict[str, float]
        self.quarantine = lambda: [SimpleNamespace(bytes_at_risk=4096)]

    @property
    def has_ended(self) -> bool:
        return not self.is_alive and self.thread != "dies slowly"

    def call_soon(self, function: Any) -> None:
        if self.thread in {"dead", "dies slowly"}:
            self.is_alive = False
            raise AdapterError("dead", code="thread-dead")
        if self.thread == "well":
            function()

    def write_fence(self, slot: int, generation: int) -> None:
        if self.is_closed:
            raise AdapterError("closed", code="agent-closed")
        self.calls.append(f"word {slot} = {generation}")

    def close(self) -> None:
        self.calls.append("agent closed")
        self.is_alive = self.thread == "hangs"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_ORDERLY_S", 0.05)
    monkeypatch.setattr(registration, "_QUIET_S", 0.05)


@pytest.mark.parametrize("thread", ["well", "dead", "dies"])
def test_transfers_and_leases_end_before_the_memory_is_given_back_unless_the_thread_is_dead(thread: str) -> None:
    parts = Parts(thread)
    parts.registration.end()
    ends, closes = ["reads end: asleep", f"leases end: {thread == 'well'}"], ["handshakes closed", "agent closed"]
    assert parts.calls == (ends + closes if thread == "well" else closes + ends)


def test_memory_that_a_hanging_thread_may_still_use_must_not_be_unmapped() -> None:
    parts = Parts("hangs")
    for _ in range(2):
        with pytest.raises(AdapterError, match="must stay mapped") as caught:
            parts.registration.end()
        assert caught.value.code == "memory-in-use"
    parts.thread, parts.is_alive = "dead", False
    parts.registration.end()
    assert parts.calls[-2:] == ["reads end: asleep", "leases end: False"]


def test_what_was_at_risk_is_said(caplog: pytest.LogCaptureFixture) -> None:
    Parts("well", transfers=2).registration.end()
    assert "reads still on the wire after 0.05 s: 2 " in caplog.text
    assert "in quarantine: 1, bytes at risk: 4096" in caplog.text


# --------------------------------------------------------------------------------------------------- the worker's side


def _worker(thread: str = "well") -> tuple[WorkerSide, Parts]:
    worker, parts = make_worker(facts(), Settings(streaming=True)), Parts(thread)
    worker._registration = parts.registration
    return worker, parts


def _orders(plan: StepPlan | None = None, question: int = 0) -> StepOrders:
    return StepOrders(plan if plan is not None else StepPlan(), question=question)


def test_a_worker_whose_thread_hangs_steps_on_and_tries_again() -> None:
    worker, parts = _worker("hangs")
    with pytest.raises(AdapterError):
        worker.unregister()
    watches = StreamPlan(watches=(StreamOrder(order("s1"), 7, 0),))
    worker.apply(_orders(StepPlan(reads=(order(),), streams=watches)))
    report = worker.take_report()
    assert (report.failed, report.stream_ends) == ({"r1"}, (("s1", RANK, False),))
    parts.thread, parts.is_alive = "dead", False
    worker.unregister()
    assert worker.registration.envelope is None


@pytest.mark.parametrize("is_seen_before", [True, False])
def test_a_thread_that_has_died_fails_no_step(is_seen_before: bool) -> None:
    worker, parts = _worker()
    parts.thread = "dead"  # `call_soon` raises from now on
    parts.is_alive = not is_seen_before  # it dies between the look and the order
    worker.apply(_orders(StepPlan(reads=(order(),), grants=(GrantOrder("p1", 30.0, None, ""),))))
    results = worker.take_report()
    assert results.sent == {"p1"}
    assert results.received == results.failed == {"r1"}
    assert "restart this engine" in results.failures[0].text
    worker.apply(_orders())
    assert parts.calls == ENDED
    assert worker.registration.envelope is None


def test_a_thread_that_hangs_while_it_dies_keeps_its_leases_and_voids_their_words() -> None:
    """Its readers find the words void at once; blocks come back once nothing of it can touch them any more."""
    worker, parts = _worker()
    worker.apply(_orders(StepPlan(expects=("p1",), fences=(FenceOrder("p1", 3, 9),))))
    assert parts.calls == ["word 3 = 9"]
    parts.thread, parts.is_alive = "dies slowly", False
    parts.calls.clear()
    for _ in range(3):
        worker.apply(_orders(StepPlan(grants=(GrantOrder("p2", 30.0, None, ""),))))
        assert worker.take_report().sent == {"p2"}, "it has no word that stands"
    assert parts.calls == [f"word 3 = {_VOID_GENERATION}"]
    parts.thread = "dead"
    for _ in range(2):
        worker.apply(_orders())
    assert parts.calls[1:] == ENDED


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_words_of_a_stream_that_is_open_when_the_thread_dies_are_voided(is_closed: bool) -> None:
    worker, parts = _worker()
    voided = list[str]()

    def spoil(opening: Any) -> None:
        if is_closed:
            raise AdapterError("closed", code="agent-closed")
        voided.append(opening.request_id)

    stream_worker: Any = SimpleNamespace(spoil=spoil)
    assert worker._streams is not None
    worker._streams.use(stream_worker)
    opening: Any = SimpleNamespace(request_id="p1")
    worker._streams._open["p1"] = opening
    worker.apply(_orders(StepPlan(expects=("p1", "p2"), fences=(FenceOrder("p2", 3, 9),))))
    parts.thread, parts.is_alive, parts.is_closed = "dead", False, is_closed
    for _ in range(2):
        worker.apply(_orders())
    assert voided == ([] if is_closed else ["p1"])
    assert parts.calls[1:] == ([] if is_closed else [f"word 3 = {_VOID_GENERATION}"]) + ENDED


def test_what_is_granted_in_the_very_step_in_which_the_thread_dies_is_voided_before_its_blocks_are_free() -> None:
    worker, parts = _worker()
    worker.apply(_orders(StepPlan(expects=("p1",), fences=(FenceOrder("p1", 3, 9),))))
    orders = _orders(StepPlan(grants=(GrantOrder("p1", 30.0, (3, 9), ""),)))
    worker.before_forward(orders)
    parts.thread = "dies slowly"
    worker.apply(orders)
    assert parts.calls == ["word 3 = 9", f"word 3 = {_VOID_GENERATION}"]
    assert worker.take_report().sent == {"p1"}


@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_sleep_that_fails_beside_a_dying_thread_leaves_nothing_behind(has_stepped: bool) -> None:
    worker, parts = _worker()
    parts.thread, parts.is_alive = "dies slowly", False
    if has_stepped:
        worker.apply(_orders())
    with pytest.raises(AdapterError):
        worker.unregister()
    parts.calls.clear()
    parts.thread = "dead"
    worker.apply(_orders(StepPlan(reads=(order(),))))
    assert parts.calls == ENDED
    assert worker.take_report().failures[0].code == "thread-dead"


def test_two_copies_that_fail_beside_a_dying_thread_fail_no_step() -> None:
    worker, parts = _worker()
    worker.apply(_orders(StepPlan(expects=("p1", "p2"), fences=(FenceOrder("p1", 3, 9), FenceOrder("p2", 4, 9)))))
    parts.is_closed = True
    failed = {"p1": "no memory", "p2": "no memory"}
    mirror: Any = SimpleNamespace(save=lambda _: None, settle=lambda _: failed)
    worker._mirror = mirror
    worker.save(_orders(StepPlan(completes=("p1", "p2"))))
    assert (worker.take_stats() or {})["num_failed_mirror_copies"] == [1, 1]


@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_rank_whose_thread_has_died_is_alive_again_after_a_sleep(
    monkeypatch: pytest.MonkeyPatch, has_stepped: bool
) -> None:
    worker, parts = _worker()
    parts.thread, parts.is_alive = "dead", False
    if has_stepped:
        worker.apply(_orders())
        assert worker.status()["is_registered"] is False
    worker.unregister()
    assert worker.status()["is_asleep"] is True
    anew = Parts("well")
    monkeypatch.setattr(worker, "_open", lambda **_: anew.registration)
    worker.restore()
    assert worker.registration.envelope == b"envelope"
    worker.apply(_orders(StepPlan(grants=(GrantOrder("p1", 30.0, None, ""),))))
    assert not worker.take_report().sent


def test_a_worker_says_what_it_has_when_asked_and_when_it_changed() -> None:
    worker, _ = _worker()
    worker.apply(_orders(question=4))
    assert worker.take_report().registrations == {RANK: RankRegistration(1, b"envelope", 4)}
    assert not worker.take_report().registrations
    worker.unregister()
    assert worker.take_report().registrations == {RANK: RankRegistration(1, None, 4)}


def test_a_reset_that_crosses_with_the_report_of_a_read_leaves_nothing_behind() -> None:
    """The scheduler orders it before it has heard of the end; the next read of that id is another one."""
    worker, _ = _worker("hangs")
    worker.apply(_orders(StepPlan(reads=(order(),))))
    worker._ends.reads.append(ReadEnd(order(), "", "", ReadTimes(0.0), 1.0))
    assert worker.take_report().received == {"r1"}
    worker.apply(_orders(StepPlan(voids=("r1",))))
    assert not worker._due_reads


def test_the_end_of_a_notification_leaves_the_read_of_a_later_request_of_its_id_void() -> None:
    worker, _ = _worker("hangs")
    worker.apply(_orders(StepPlan(reads=(order(),))))
    worker._ends.reads.append(ReadEnd(order(is_reported=False), "", "", ReadTimes(0.0), 1.0))
    worker.take_report()
    worker.apply(_orders(StepPlan(voids=("r1",))))
    worker._ends.reads.append(ReadEnd(order(), "", "", ReadTimes(0.0), 1.0))
    report = worker.take_report()
    assert (report.failed, report.failures[0].code) == ({"r1"}, "cache-reset")


def test_a_request_that_is_released_while_its_engine_sleeps_leaves_nothing_in_the_mirror() -> None:
    worker, _ = _worker()
    forgotten: list[str] = []
    mirror: Any = SimpleNamespace(forget=forgotten.extend)
    worker._mirror, worker._registration = mirror, None
    worker.apply(_orders(StepPlan(releases=("r1",))))
    assert forgotten == ["r1"]


def test_an_agent_of_a_host_that_sleeps_keeps_no_memory() -> None:
    """Source of the settings: vLLM's own connector of 0.33."""
    kept, slept = (_agent_options(Settings(), sleeps=sleeps).backends[0].as_parameters() for sleeps in (False, True))
    assert slept == {**kept, "engine_config": f"RCACHE_ENABLE=n,TLS=^cuda_ipc,{kept['engine_config']}"}


# ------------------------------------------------------------------------------------------------ what tickets may name


def _said(generation: int, envelope: bytes | None, answer: int = 0, *, rank: Any = RANK) -> dict[Any, RankRegistration]:
    return {rank: RankRegistration(generation, envelope, answer)}


_other = partial(_said, rank=OTHER_RANK)
BOTH = {RANK: b"a", OTHER_RANK: b"b"}


@pytest.mark.parametrize(
    ("ranks", "events"),
    [
        (
            (RANK, OTHER_RANK),
            [
                ("doubt", None, (False, 7, 1)),
                ("doubt", None, (False, 7, 2)),
                (_said(7, b"a", 1), None, (False, 7, 2)),
                (_said(7, b"a", 2), None, (False, 7, 2)),
                (_other(7, b"b", 2), BOTH, (True, 7, 0)),
            ],
        ),
        (
            (RANK,),
            [
                (_said(7, None), {}, (False, 7, 1)),
                (_said(7, None, 1), {}, (False, 7, 0)),
                ("serve", None, (False, 7, 2)),
                (_said(8, b"a", 2), {RANK: b"a"}, (True, 8, 0)),
            ],
        ),
        (
            (RANK, OTHER_RANK),
            [
                ("doubt", None, (False, 7, 1)),
                ("wake", None, (True, 8, 0)),
                (_said(8, b"first") | _other(8, b"first"), None, (True, 8, 0)),
                (_said(7, b"a", 1) | _other(7, b"b", 1), {}, (False, 8, 3)),
                (_said(8, b"a", 3) | _other(8, b"b", 3), BOTH, (True, 8, 0)),
            ],
        ),
        (
            (RANK, OTHER_RANK),
            [
                ("doubt", None, (False, 7, 1)),
                ("half", None, (False, 7, 2)),
                (_said(8, b"a", 2) | _other(8, b"b", 2), BOTH, (True, 8, 0)),
            ],
        ),
        ((RANK, OTHER_RANK), [(_said(8, b"a") | _other(8, b"b"), BOTH, (True, 8, 0))]),
        ((RANK, OTHER_RANK), [(_said(8, b"a"), {}, (False, 7, 1))]),
        (
            (RANK, OTHER_RANK),
            [
                (_said(7, None), {}, (False, 7, 1)),
                (_said(7, None, 1), {}, (False, 7, 1)),
                (_other(7, b"b", 1), None, (False, 7, 0)),
                (_said(8, b"a", 1), {}, (False, 7, 0)),
                (_other(8, b"b", 1), BOTH, (True, 8, 0)),
            ],
        ),
    ],
    ids=[
        "a doubt ends with all answers",
        "expected anew",
        "stated by the host, and then by a step of before",
        "one rank has no memory yet when the host tells",
        "unannounced",
        "ranks differ",
        "asked once while asleep",
    ],
)
def test_tickets_name_a_registration_that_all_ranks_have_reported(ranks: Any, events: list[Any]) -> None:
    """Each event with what is served anew (None: no change), and then `is_sure`, the generation and the open question."""
    listener: Any = InMemory()
    kept = ServedRegistration(facts(generation=7), listener)
    kept.serve(dict.fromkeys(ranks, b"first"), ranks)
    for event, served, state in events:
        listener.served.clear()
        if event == "doubt":
            kept.doubt()
        elif event in ("serve", "wake", "half"):
            reported = ranks[:1] if event == "half" else ranks
            kept.serve(dict.fromkeys(reported, b"first"), ranks, None if event == "serve" else 8)
            listener.served.clear()
        else:
            kept.update(event)
        assert (listener.served[-1] if listener.served else None) == served
        assert (kept.is_sure, kept.generation, kept.question) == state
