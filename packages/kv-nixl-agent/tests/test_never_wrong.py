"""Faults that were found from outside, each with the case that shows it. The mark names the finding."""

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import Pages, make_pair, order, wait_for

from kv_nixl_agent import (
    AgentError,
    PeerSpec,
    ThreadOptions,
    TransferAgent,
    TransferResult,
    TransferThread,
)
from kv_nixl_agent.memory.fences import SCRATCH_WORDS
from kv_nixl_agent.testing import FakeFabric

NOTHING = np.empty(0, dtype=np.int32)
ONE = np.zeros(1, dtype=np.int32)


class Owner:
    """A transfer thread on a fake fabric that writes down what it reports, in order."""

    def __init__(self, fabric, name="rank", **arguments):
        self.pages = Pages(4, 64, seed=1)
        self.events: list[str] = []
        self.results: list[TransferResult] = []
        self.thread = TransferThread(
            name,
            [self.pages.region],
            on_result=self.results.append,
            on_notification=lambda _, payload: self.events.append(payload.decode()),
            port_factory=fabric.port,
            **arguments,
        )
        self.thread.start()

    def hold(self):
        """Keep the owner thread busy until the returned event is set."""
        release, is_held = threading.Event(), threading.Event()

        def wait():
            is_held.set()
            release.wait(10)

        self.thread.call_soon(wait)
        assert is_held.wait(10)
        return release

    def post_in_vain(self, transfer_id):
        self.thread.agent.post_read(transfer_id, "unknown", ONE, ONE)

    def call(self, name, cost_s=0.0):
        def run():
            time.sleep(cost_s)
            self.events.append(name)

        self.thread.call_soon(run)


def notifier(fabric, owner):
    """Return an agent that can notify the owner's."""
    agent = TransferAgent("notifier", [], port_factory=fabric.port)
    rows = owner.pages.rows[:0]
    agent.add_peer(PeerSpec("owner", owner.thread.agent_metadata(), rows, rows))
    return agent


# ------------------------------------------------------------------------------------------------------------- thread


@pytest.mark.never_wrong("C3")
@pytest.mark.parametrize("death", [RuntimeError, SystemExit])
def test_every_accepted_order_has_one_result_though_the_thread_dies(death):
    fabric = FakeFabric()
    owner = Owner(fabric, thread_options=ThreadOptions(max_sleep_s=1e-4))
    accepted: list[list[str]] = [[] for _ in range(4)]

    def submit(mine, caller):
        for number in range(20_000):
            try:
                owner.thread.call_soon(partial(owner.post_in_vain, f"{caller}-{number}"))
            except AgentError as error:
                assert error.code == "thread-dead"
                return
            mine.append(f"{caller}-{number}")

    def break_later():
        turns = iter(range(40))

        def broken():
            if next(turns, None) is None:
                raise death("broken on purpose")
            return False

        setattr(owner.thread.agent._transfers, "advance", broken)  # noqa: B010 - a method, to a type checker

    owner.thread.call_soon(break_later)
    callers = [threading.Thread(target=submit, args=(mine, caller)) for caller, mine in enumerate(accepted)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(50)
    owner.thread._thread.join(50)
    assert owner.thread.health().state == "dead"
    assert "broken on purpose" in owner.thread.health().last_traceback
    ended = [result.transfer_id for result in owner.results]
    assert sorted(ended) == sorted(one for mine in accepted for one in mine)
    assert {result.code for result in owner.results} <= {"unknown-peer", "thread-dead"}


@pytest.mark.never_wrong("C3")
def test_calls_that_wait_when_the_thread_dies_still_order_and_are_told_so():
    fabric = FakeFabric()
    owner = Owner(fabric, thread_options=ThreadOptions(max_sleep_s=1e-4))
    release = owner.hold()
    owner.thread.call_soon(lambda: setattr(owner.thread.agent._transfers, "advance", lambda: 1 // 0))
    time.sleep(0.01)
    for number in range(200):
        owner.call("slow", 1e-4)
        owner.thread.call_soon(partial(owner.post_in_vain, f"r{number}"))
    release.set()
    owner.thread._thread.join(30)
    assert [result.transfer_id for result in owner.results] == [f"r{number}" for number in range(200)]
    assert owner.results[-1].code == "thread-dead"


@pytest.mark.never_wrong("C4")
def test_a_notification_is_delivered_after_the_calls_that_were_handed_over_before_it():
    fabric = FakeFabric()
    owner = Owner(fabric)
    reader = notifier(fabric, owner)
    release = owner.hold()
    for _ in range(20):
        owner.call("work", 1e-3)  # several slices' worth
    owner.call("expect r")
    assert reader.send_notification("owner", b"r is read")
    owner.call("grant r")
    release.set()
    wait_for(lambda: {"r is read", "grant r"} <= set(owner.events))
    owner.thread.close()
    assert owner.events.index("expect r") < owner.events.index("r is read")


@pytest.mark.never_wrong("C4")
@pytest.mark.parametrize("how", ["call", "notification"])
def test_a_renewal_that_waits_counts_before_timers_run(how):
    fabric = FakeFabric()
    owner = Owner(fabric)
    reader = notifier(fabric, owner)
    release = owner.hold()
    owner.thread._mailbox.add_timer(0.02, lambda: owner.events.append("expire"))
    time.sleep(0.05)  # the timer has fallen due
    for _ in range(10):
        owner.call("work", 1e-3)
    if how == "call":
        owner.call("renew")
    else:
        assert reader.send_notification("owner", b"renew")
    release.set()
    wait_for(lambda: "expire" in owner.events)
    owner.thread.close()
    assert owner.events.index("renew") < owner.events.index("expire")


@pytest.mark.never_wrong("C4")
def test_a_steady_stream_of_calls_delays_notifications_and_timers_only_by_those_before_them():
    fabric = FakeFabric()
    owner = Owner(fabric)
    reader = notifier(fabric, owner)
    is_over = threading.Event()

    def again():
        time.sleep(1e-4)
        if not is_over.is_set():
            owner.thread.call_soon(again)

    for _ in range(10):
        owner.thread.call_soon(again)
    owner.thread.call_every(0.005, lambda: owner.events.append("tick"))
    assert reader.send_notification("owner", b"hello")
    wait_for(lambda: "hello" in owner.events and owner.events.count("tick") > 2)
    is_over.set()
    owner.thread.close()


@pytest.mark.never_wrong("B12")
def test_health_shows_waiting_calls_and_the_traceback_of_the_latest_error():
    owner = Owner(FakeFabric())
    release = owner.hold()

    def this_name_is_in_the_traceback():
        raise KeyError("x")

    owner.thread.call_soon(this_name_is_in_the_traceback)
    owner.call("later")
    assert owner.thread.health().calls_waiting == 2
    release.set()
    wait_for(lambda: owner.events == ["later"])
    health = owner.thread.health()
    owner.thread.close()
    assert (health.state, health.calls_waiting, health.callback_errors) == ("running", 0, 1)
    assert health.last_error == "KeyError: 'x'"
    assert "this_name_is_in_the_traceback" in health.last_traceback


@pytest.mark.never_wrong("B12")
def test_a_probe_through_the_thread():
    fabric = FakeFabric()
    consumer, producer = Owner(fabric, "consumer"), Owner(fabric, "producer")

    def begin():
        spec = PeerSpec("p", producer.thread.agent_metadata(), consumer.pages.rows, producer.pages.rows)
        consumer.thread.agent.add_peer(spec)
        consumer.thread.agent.probe("alive", "p", deadline_s=5.0)

    consumer.thread.call_soon(begin)
    wait_for(lambda: len(consumer.results) == 1)
    fabric.agent("producer").stop()
    consumer.thread.call_soon(lambda: consumer.thread.agent.probe("silent", "p", deadline_s=0.05))
    wait_for(lambda: len(consumer.results) == 2)
    fabric.agent("producer").die()
    consumer.thread.call_soon(lambda: consumer.thread.agent.probe("gone", "p", deadline_s=5.0))
    wait_for(lambda: len(consumer.results) == 3)
    consumer.thread.close()
    ends = [(result.transfer_id, result.outcome, result.code) for result in consumer.results]
    assert ends == [
        ("alive", "done", ""),
        ("silent", "timed-out", "deadline-exceeded"),
        ("gone", "failed", "peer-disconnected"),
    ]


def test_work_wakes_a_slowly_polling_thread_at_once():
    owner = Owner(FakeFabric(), thread_options=ThreadOptions(idle_poll_s=1e-3, slow_poll_s=30.0))
    owner.thread.allow_slow_polling(True)
    time.sleep(0.1)
    began_s = time.monotonic()
    for _ in range(20):
        owner.hold().set()
    assert time.monotonic() - began_s < 5.0
    owner.thread.close()


# ------------------------------------------------------------------------------------------------------------- fences


def break_word_reads(pair):
    """Let NIXL report an error for ever for reads of one word."""
    port = pair.ports[1]
    check, post = port.check, port.post

    def is_word(handle):
        return handle.copies[:, 2].tolist() == [8]

    def broken_check(handle):
        if is_word(handle):
            raise AgentError("nixl-backend", "for ever")
        return check(handle)

    port.check = broken_check

    def repair():
        port.check, port.post = check, post

    return repair


@pytest.mark.never_wrong("C5")
def test_scratch_words_return_after_any_error_of_their_read():
    pair = make_pair(latency_polls=1)
    pair.connect()
    pair.run(3)
    pair.producer.write_fence(0, 3)
    fences = pair.consumer._fences
    repair = break_word_reads(pair)
    for number in range(SCRATCH_WORDS + 88):
        pair.consumer.post(order(f"r{number}", [0], [0], fence=(0, 3)))
        pair.run(12)
        assert pair.results[f"r{number}"].code == "transfer-failed"
    assert fences.scratch.free_count == SCRATCH_WORDS
    repair()
    pair.consumer.post(order("good", [0], [0], fence=(0, 3)))
    assert pair.run()["good"].outcome == "done"
    assert pair.consumer.peers()["p"]["outstanding"] == 0


@pytest.mark.never_wrong("C5")
def test_a_suspect_scratch_word_is_used_again_after_all_others():
    fences = make_pair().consumer._fences
    suspect: Any = fences.scratch.take(0)
    fences.scratch.give_back(suspect, is_suspect=True)
    taken: list[Any] = [fences.scratch.take(0) for _ in range(SCRATCH_WORDS)]
    assert taken.index(suspect) == SCRATCH_WORDS - 1


@pytest.mark.never_wrong("C5")
def test_no_word_becomes_valid_while_or_after_the_agent_closes():
    refused: list[str] = []

    def report(result):
        real_report(result)
        try:
            agent.write_fence(0, 7)
        except AgentError as error:
            refused.append(error.code)

    pair = make_pair()
    agent = TransferAgent("other", [pair.local.region], port_factory=pair.fabric.port)
    transfers: Any = agent._transfers
    real_report, transfers.report = transfers.report, report
    agent.add_peer(pair.spec(pair.producer))
    agent.write_fence(0, 7)
    agent.post(order("r", [0], [0]))
    agent.close()
    with pytest.raises(AgentError, match="void"):
        agent.write_fence(0, 7)
    assert agent._fences.read(0) == (1 << 64) - 1
    assert refused == ["agent-closed"]


@pytest.mark.never_wrong("C5")
def test_writers_on_other_threads_revive_no_word_of_a_closed_agent():
    for _ in range(20):
        owner = Owner(FakeFabric())
        fences = owner.thread._agent._fences
        is_running = threading.Event()

        def write(thread=owner.thread, is_running=is_running):
            while True:
                try:
                    thread.write_fence(3, 11)
                except AgentError:
                    return
                is_running.set()

        writer = threading.Thread(target=write)
        writer.start()
        assert is_running.wait(10)
        owner.thread.close()
        writer.join(10)
        assert fences.read(3) == (1 << 64) - 1


# ----------------------------------------------------------------------------------------------- peers and quarantine
