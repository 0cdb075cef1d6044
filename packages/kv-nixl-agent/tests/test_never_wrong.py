"""Faults that were found from outside, each with the case that shows it. The mark names the finding."""

import gc
import threading
import time

import numpy as np
import pytest
from helpers import Pages, make_pair, order, wait_for

from kv_nixl_agent import (
    AgentError,
    AgentOptions,
    PeerSpec,
    ThreadOptions,
    TransferAgent,
    TransferOrder,
    TransferThread,
)
from kv_nixl_agent._fences import SCRATCH_WORDS
from kv_nixl_agent._pacing import Pacer
from kv_nixl_agent._transfer import Transfer
from kv_nixl_agent.testing import FakeFabric

NOTHING = np.empty(0, dtype=np.int32)
ONE = np.zeros(1, dtype=np.int32)


class Owner:
    """A transfer thread on a fake fabric that writes down what it reports, in order."""

    def __init__(self, fabric, name="rank", **arguments):
        self.pages = Pages(4, 64, seed=1)
        self.events, self.results = [], []
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
    accepted = [[] for _ in range(4)]

    def submit(mine, caller):
        for number in range(20_000):
            try:
                owner.thread.submit(TransferOrder(f"{caller}-{number}", "nobody", ONE, ONE))
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

        owner.thread.agent._transfers.launch = broken

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
    owner.thread.call_soon(lambda: setattr(owner.thread.agent._transfers, "launch", lambda: 1 // 0))
    time.sleep(0.01)
    for number in range(200):
        owner.call("slow", 1e-4)
        owner.thread.call_soon(lambda number=number: owner.thread.post_read(f"r{number}", "nobody", ONE, ONE))
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
    owner.thread._loop.timers.add(0.02, lambda: owner.events.append("expire"), time.monotonic())
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
        consumer.thread.add_peer(spec)
        consumer.thread.probe("alive", "p", deadline_s=5.0)

    consumer.thread.call_soon(begin)
    wait_for(lambda: len(consumer.results) == 1)
    fabric.agent("producer").stop()
    consumer.thread.call_soon(lambda: consumer.thread.probe("silent", "p", deadline_s=0.05))
    wait_for(lambda: len(consumer.results) == 2)
    fabric.agent("producer").die()
    consumer.thread.call_soon(lambda: consumer.thread.probe("gone", "p", deadline_s=5.0))
    wait_for(lambda: len(consumer.results) == 3)
    consumer.thread.close()
    ends = [(result.transfer_id, result.outcome, result.code) for result in consumer.results]
    assert ends == [
        ("alive", "done", ""),
        ("silent", "timed-out", "deadline-exceeded"),
        ("gone", "failed", "peer-disconnected"),
    ]


def test_idle_polling_slows_down_only_where_it_is_allowed():
    now_s = [100.0]
    pacer = Pacer(ThreadOptions(idle_poll_s=5e-4, slow_poll_s=8e-3), lambda: now_s[0])

    def period_s(quiet_s):
        return pacer._idle_period_s(100.0 + quiet_s)

    assert period_s(60.0) == 5e-4
    pacer.may_poll_slowly = True
    assert [period_s(quiet_s) for quiet_s in (0.0, 0.01, 0.3, 60.0)] == [5e-4, 5e-4, 8e-3, 8e-3]
    now_s[0] = 160.0
    pacer.progressed()
    assert pacer._idle_period_s(160.0) == 5e-4


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
    fences = pair.consumer._memory.fences
    repair = break_word_reads(pair)
    for number in range(SCRATCH_WORDS + 88):
        pair.consumer.post(order(f"r{number}", [0], [0], fence=(0, 3)))
        pair.run(12)
        assert pair.results[f"r{number}"].code == "transfer-failed"
    assert fences.free_scratch_words == SCRATCH_WORDS
    repair()
    pair.consumer.post(order("good", [0], [0], fence=(0, 3)))
    assert pair.run()["good"].outcome == "done"
    assert pair.consumer.peers()["p"]["outstanding"] == 0


@pytest.mark.never_wrong("C5")
def test_a_suspect_scratch_word_is_used_again_after_all_others():
    fences = make_pair().consumer._memory.fences
    suspect = fences.take_scratch(0)
    fences.give_back(suspect, is_suspect=True)
    taken = [fences.take_scratch(0) for _ in range(SCRATCH_WORDS)]
    assert taken.index(suspect) == SCRATCH_WORDS - 1


@pytest.mark.never_wrong("C5")
def test_no_word_becomes_valid_while_or_after_the_agent_closes():
    refused = []

    def revive(event):
        try:
            agent.write_fence(0, 7)
        except AgentError as error:
            refused.append(error.code)

    pair = make_pair()
    options = AgentOptions(trace=lambda event: event.state == "ended" and revive(event))
    agent = TransferAgent("other", [pair.local.region], options, port_factory=pair.fabric.port)
    agent.add_peer(pair.spec(pair.producer))
    agent.write_fence(0, 7)
    agent.post(order("r", [0], [0]))
    agent.close()
    with pytest.raises(AgentError, match="void"):
        agent.write_fence(0, 7)
    assert agent._memory.fences.read(0) == (1 << 64) - 1
    assert refused == ["agent-closed"]


@pytest.mark.never_wrong("C5")
def test_writers_on_other_threads_revive_no_word_of_a_closed_agent():
    for _ in range(20):
        owner = Owner(FakeFabric())
        fences = owner.thread._loop.agent._memory.fences
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


@pytest.mark.never_wrong("C5")
def test_an_order_without_descriptors_still_checks_its_fence():
    pair = make_pair()
    pair.connect()
    pair.producer.write_fence(4, 10)
    pair.consumer.post(order("stale", [], [], fence=(4, 9), notification=b"stale:1"))
    pair.consumer.post(order("good", [], [], fence=(4, 10), notification=b"good:1"))
    pair.run()
    assert (pair.results["stale"].outcome, pair.results["good"].outcome) == ("fence-rejected", "done")
    assert [payload for _, payload in pair.producer.take_notifications()] == [b"good:1"]


@pytest.mark.never_wrong("L8")
def test_lists_that_are_evicted_between_data_and_fence_are_prepared_again():
    pair = make_pair(latency_polls=0, options=AgentOptions(max_prepared_peers=1))
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.connect()
    pair.producer.write_fence(0, 3)
    fences = pair.consumer._memory.fences
    taken = [fences.take_scratch(0) for _ in range(SCRATCH_WORDS)]
    pair.consumer.post(order("r", [0], [1], fence=(0, 3)))
    pair.run(3)
    assert pair.results == {}, "the data is there, the fence waits for a word"
    pair.consumer.add_peer(pair.spec(other, "q"))
    assert not pair.consumer.peers()["p"]["is_prepared"]
    for word in taken:
        fences.give_back(word)
    result = pair.run()["r"]
    assert (result.outcome, result.code) == ("done", "")


# ----------------------------------------------------------------------------------------------- peers and quarantine


@pytest.mark.never_wrong("C5")
def test_replacing_a_peer_keeps_the_bound_on_its_quarantine():
    pair = make_pair(options=AgentOptions(max_quarantined_per_peer=4))
    pair.connect()
    pair.run(3)
    pair.fabric.agent("producer").stop()
    accepted = 0
    for number in range(30):
        try:
            pair.consumer.post(order(f"r{number}", [0], [0], deadline_s=0.1))
        except AgentError as error:
            assert error.code == "quarantine-full"
        else:
            accepted += 1
        pair.run(2, step_s=0.2)
        pair.consumer.replace_peer(pair.spec(pair.producer))
    assert accepted == 4
    assert len(pair.consumer.quarantine()) == 4
    pair.fabric.agent("producer").resume()
    pair.run(5, step_s=0.1)
    pair.consumer.post(order("next", [0], [0]))
    assert pair.run()["next"].outcome == "done"


@pytest.mark.never_wrong("C5")
@pytest.mark.parametrize("when", ["on the wire", "in quarantine"])
def test_a_peer_that_is_killed_and_replaced_between_two_polls_is_found_disconnected(when):
    pair = make_pair()
    pair.connect()
    pair.run(3)
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("r", [0], [0], deadline_s=10.0 if when == "on the wire" else 0.1))
    pair.run(3, step_s=0.2)
    pair.fabric.agent("producer").die()
    again = TransferAgent("producer", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.replace_peer(pair.spec(again))
    pair.run(2, step_s=0.1)
    assert pair.results["r"].code == ("peer-disconnected" if when == "on the wire" else "deadline-exceeded")
    assert pair.results["r"].is_memory_quiet is (when == "on the wire")
    assert not pair.consumer.has_quarantine
    assert pair.consumer.take_quiet() == ([] if when == "on the wire" else ["r"])


@pytest.mark.never_wrong("C5")
def test_a_stalled_transfer_keeps_no_later_ones_in_memory():
    pair = make_pair(latency_polls=0)
    pair.connect()
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.add_peer(pair.spec(other, "q"))
    pair.run(3)
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("stalled", [0], [0], deadline_s=1.0))
    for number in range(3000):
        pair.consumer.post(order(f"q{number}", [1], [1], peer="q", deadline_s=1000.0))
        pair.run(1)
    assert len(pair.results) == 3000
    gc.collect()
    alive = sum(isinstance(one, Transfer) for one in gc.get_objects())
    assert alive < 300, f"{alive} transfers are kept, and 1 is in progress"


@pytest.mark.never_wrong("C5")
def test_cancelled_orders_do_not_count_as_queued():
    pair = make_pair(options=AgentOptions(max_queued=3))
    pair.connect()
    for number in range(20):
        pair.consumer.post(order(f"r{number}", [0], [0]))
        assert pair.consumer.cancel(f"r{number}")
    assert pair.consumer.statistics()["queued"] == 0
    pair.consumer.post(order("last", [0], [0]))
    assert pair.run()["last"].outcome == "done"


@pytest.mark.never_wrong("C5")
@pytest.mark.parametrize("latency_polls", [0, 3])
def test_an_error_at_the_end_of_a_warm_up_leaks_neither_handle_nor_peer(latency_polls):
    pair = make_pair(latency_polls=latency_polls)
    pair.fabric.fail_next("release_prepared", "nixl-backend")
    pair.connect()
    pair.run(10)
    assert pair.consumer.peers()["p"]["outstanding"] == 0
    assert pair.ports[1].open_handles()["transfer"] == 0
    pair.consumer.remove_peer("p")
    assert pair.consumer.statistics()["peers_retiring"] == 0


@pytest.mark.never_wrong("C2")
def test_a_peer_that_is_dead_is_unloaded_and_a_living_one_is_kept_for_its_return():
    pair = make_pair()
    pair.connect()
    pair.run(3)
    pair.consumer.remove_peer("p")
    assert pair.ports[1].peers == {"producer"}
    pair.connect()
    pair.fabric.agent("producer").die()
    pair.consumer.post(order("r", [0], [0]))
    assert pair.run()["r"].code == "peer-disconnected"
    pair.consumer.remove_peer("p")
    assert pair.ports[1].peers == set()
    assert pair.fabric.agent("consumer").sockets == 0
