"""Faults that were found from outside, each with the case that shows it. The mark names the finding."""

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import Rank, make_pair, wait_for

from kv_nixl_agent import AgentError, PeerSpec, ThreadOptions, TransferAgent
from kv_nixl_agent.memory.fences import FENCE_PADS
from kv_nixl_agent.testing import FakeFabric

ONE = np.zeros(1, dtype=np.int32)


def post_in_vain(owner, transfer_id):
    owner.thread.agent.post_read(transfer_id, "unknown", ONE, ONE)


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
    owner = Rank(fabric, thread_options=ThreadOptions(max_sleep_s=1e-4)).start()
    accepted: list[list[str]] = [[] for _ in range(4)]

    def submit(mine, caller):
        for number in range(20_000):
            try:
                owner.thread.call_soon(partial(post_in_vain, owner, f"{caller}-{number}"))
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
    ended = [transfer_id for transfer_id, results in owner.results.items() for _ in results]
    assert sorted(ended) == sorted(one for mine in accepted for one in mine)
    assert {result.code for (result,) in owner.results.values()} <= {"unknown-peer", "thread-dead"}


@pytest.mark.never_wrong("C4")
def test_a_steady_stream_of_calls_delays_notifications_and_timers_only_by_those_before_them():
    fabric = FakeFabric()
    owner = Rank(fabric).start()
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
    owner = Rank(FakeFabric()).start()
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


def test_work_wakes_a_slowly_polling_thread_at_once():
    owner = Rank(FakeFabric(), thread_options=ThreadOptions(idle_poll_s=1e-3, slow_poll_s=1e6)).start()
    owner.thread.allow_slow_polling(True)
    for _ in range(20):
        time.sleep(0.01)
        owner.hold().set()
    owner.thread.close()


# ------------------------------------------------------------------------------------------------------------- fences


@pytest.mark.never_wrong("C5")
def test_a_suspect_pad_is_used_again_after_all_others():
    fences = make_pair().consumer._fences
    suspect: Any = fences.pads.take()
    fences.pads.give_back(suspect, is_suspect=True)
    taken: list[Any] = [fences.pads.take() for _ in range(FENCE_PADS)]
    assert taken.index(suspect) == FENCE_PADS - 1


@pytest.mark.never_wrong("C5")
def test_writers_on_other_threads_revive_no_word_of_a_closed_agent():
    for _ in range(20):
        owner = Rank(FakeFabric()).start()
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
        assert is_running.wait(60)
        owner.thread.close()
        writer.join(60)
        assert fences.read(3) == (1 << 64) - 1
