"""The owner thread on the fake fabric."""

import itertools
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import Pages, Rank, code_of, undisturbed, wait_for

from kv_nixl_agent import AgentError, AgentOptions, PeerSpec, ThreadOptions
from kv_nixl_agent.mailbox import Pacer
from kv_nixl_agent.testing import FakeFabric


@pytest.fixture
def ranks():
    fabric = FakeFabric()
    producer = Rank(fabric, "producer", Pages(16, 32, seed=1)).start()
    consumer = Rank(fabric, "consumer", Pages(16, 32)).start()
    metadata, fence = producer.thread.agent_metadata(), producer.thread.fence
    spec = PeerSpec("p", metadata, consumer.pages.rows, producer.pages.rows, fence=fence)
    consumer.do(lambda: consumer.thread.agent.add_peer(spec))
    yield fabric, producer, consumer
    for rank in (consumer, producer):
        rank.thread.close()


def test_owner_methods_refuse_other_threads(ranks):
    _, _, consumer = ranks
    assert code_of(lambda: consumer.thread.agent.has_peer("p")) == "wrong-thread"


ONE = np.zeros(1, dtype=np.int32)


def run_here(rank, function, is_done, within_s=60.0):
    """Run here once the owner thread has no turn and no work in progress, such as the first contact of the fixture."""
    wait_for(lambda: rank.thread.run_here(function, is_done, within_s))


def test_a_caller_that_waits_runs_its_read_itself(ranks):
    _, producer, consumer = ranks
    on_threads = list[threading.Thread]()
    consumer.thread._on_result = lambda _: on_threads.append(threading.current_thread())
    run_here(consumer, lambda: consumer.thread.agent.post_read("r", "p", ONE, ONE), lambda: on_threads)
    assert on_threads == [threading.current_thread()]
    assert (consumer.pages.memory[0] == producer.pages.memory[0]).all()
    assert code_of(lambda: consumer.thread.agent.has_peer("p")) == "wrong-thread"
    assert consumer.do(lambda: consumer.thread.agent.has_peer("p"))


def test_a_caller_without_orders_delivers_notifications_itself(ranks):
    """Each once; the owner thread may be first."""
    _, producer, consumer = ranks
    arrived, here = list[str](), list[str]()

    def deliver(_, payload):
        arrived.append(payload.decode())
        here.extend(arrived[-1:] * (threading.current_thread() is threading.main_thread()))

    producer.thread._mailbox._on_notification = deliver
    for number in range(100):
        consumer.do(lambda number=number: consumer.thread.agent.send_notification("p", str(number).encode()))
        wait_for(lambda number=number: producer.thread.run_here(None, lambda: True, 0.0) and len(arrived) > number)
    assert arrived == [str(number) for number in range(100)]
    assert here


def test_a_caller_delivers_no_notification_before_a_call_that_preceded_it(ranks):
    _, producer, consumer = ranks
    wake, producer.thread._pacer.wake = producer.thread._pacer.wake, lambda: None
    producer.thread.allow_slow_polling(True)
    wait_for(lambda: producer.thread._pacer._is_idle)
    producer.call("grant")
    consumer.do(lambda: consumer.thread.agent.send_notification("p", b"read"))
    for _ in range(20):
        producer.thread.run_here(None, lambda: True, 0.0)
    wake()
    wait_for(lambda: producer.events == ["grant", "read"])


def test_what_outlasts_its_caller_is_left_to_the_owner_thread(ranks):
    """The thread sleeps for long meanwhile, so it has to be woken."""
    fabric, _, consumer = ranks
    consumer.thread.allow_slow_polling(True)
    fabric.agent("producer").stop()
    run_here(consumer, lambda: consumer.thread.agent.post_read("r", "p", ONE, ONE), lambda: consumer.results, 0.01)
    assert not consumer.results
    fabric.agent("producer").resume()
    wait_for(lambda: "r" in consumer.results)
    assert consumer.results["r"][0].outcome == "done"


def test_nothing_overtakes_a_turn_or_calls_that_wait(ranks):
    _, _, consumer = ranks
    release = consumer.hold()
    assert not consumer.thread.run_here(lambda: consumer.events.append("here"), lambda: True, 60.0), "a turn runs"
    consumer.call("first")
    release.set()
    wait_for(lambda: consumer.events == ["first"])
    with consumer.thread._turn_lock:
        consumer.call("second")
        wait_for(lambda: not consumer.thread._pacer._is_idle)
        assert not consumer.thread.run_here(lambda: consumer.events.append("here"), lambda: True, 60.0)
    wait_for(lambda: consumer.events == ["first", "second"])
    consumer.thread.close()
    assert not consumer.thread.run_here(lambda: consumer.events.append("here"), lambda: True, 60.0)


def test_an_error_of_a_caller_is_counted_and_ends_neither_thread(ranks):
    _, _, consumer = ranks
    run_here(consumer, lambda: 1 // 0, lambda: True)
    run_here(consumer, lambda: None, lambda: 1 // 0)
    health = consumer.thread.health()
    assert (health.callback_errors, health.loop_errors, health.state) == (1, 1, "running")
    assert consumer.do(lambda: consumer.thread.agent.has_peer("p"))


def test_callers_and_the_owner_thread_take_turns(ranks):
    """Each read ends once, whoever drives the agent, and no two at once."""
    _, _, consumer = ranks
    inside, overlaps = list[int](), list[int]()
    advance = consumer.thread._agent.advance

    def watched():
        inside.append(1)
        overlaps.append(len(inside))
        try:
            return advance()
        finally:
            inside.pop()

    consumer.thread._agent.advance = watched
    ran_here = 0
    for number in range(400):
        call = partial(consumer.thread._agent.post_read, f"r{number}", "p", ONE, ONE)
        wait_for(lambda: not consumer.thread._mailbox.calls)
        ran = number % 3 > 0 and consumer.thread.run_here(call, partial(bool, number % 2), 1e-4)
        ran_here += ran
        if not ran:
            consumer.thread.call_soon(call)
    wait_for(lambda: len(consumer.results) == 400)
    assert all(len(results) == 1 for results in consumer.results.values())
    assert set(overlaps) == {1}
    assert ran_here


def test_a_caller_gives_up_although_something_moves_all_the_time(ranks):
    """Each reading of the clock is a millisecond after the one before, so no pause is ever as long as 10 ms."""
    _, _, consumer = ranks
    ticks, moved, asked = itertools.count(), itertools.count(), itertools.count()

    def moves():
        consumer.thread._clock = lambda: next(ticks) / 1000
        consumer.thread._agent.advance = lambda: next(moved) < 1000

    run_here(consumer, moves, lambda: next(asked) > 1000, 0.01)
    assert 10 < next(asked) < 200


def test_a_caller_takes_no_part_in_work_that_is_in_progress(ranks):
    fabric, _, consumer = ranks
    fabric.agent("producer").stop()
    consumer.do(lambda: consumer.thread.agent.post_read("before", "p", ONE, ONE))
    assert not consumer.thread.run_here(lambda: consumer.events.append("here"), lambda: True, 60.0)
    assert not consumer.events
    fabric.agent("producer").resume()
    wait_for(lambda: "before" in consumer.results)


@pytest.mark.parametrize(("count", "is_here"), [(1024, True), (1025, False)])
def test_a_caller_posts_no_long_list(ranks, count, is_here):
    """A post takes up to 5 us a descriptor, and the bytes of a read do not tell their number."""
    _, _, consumer = ranks
    many, threads = np.zeros(count, dtype=np.int32), list[threading.Thread]()
    consumer.thread._on_result = lambda _: threads.append(threading.current_thread())
    run_here(consumer, lambda: consumer.thread.agent.post_read("r", "p", many, many), lambda: threads)
    wait_for(lambda: threads)
    assert (threads == [threading.current_thread()]) is is_here


def test_a_result_of_the_last_look_is_the_owners_which_is_woken(ranks):
    """It would otherwise sleep for 0.2 s."""
    _, _, consumer = ranks
    wakes, wake = itertools.count(), consumer.thread._pacer.wake
    consumer.thread._pacer.wake = lambda: next(wakes) or wake()

    def is_done():
        consumer.thread.agent.post_read("r", "unknown", ONE, ONE)  # is refused
        return True

    run_here(consumer, lambda: None, is_done)
    assert next(wakes)
    wait_for(lambda: "r" in consumer.results)


def test_a_signal_in_a_callback_loses_no_other_result(ranks):
    _, _, consumer = ranks
    deliver, calls = consumer.thread._on_result, itertools.count()

    def interrupted(result):
        if not next(calls):
            raise KeyboardInterrupt
        deliver(result)

    def order():
        for name in "qrs":
            consumer.thread.agent.post_read(name, "p", ONE, ONE)

    consumer.thread._on_result = interrupted
    with pytest.raises(KeyboardInterrupt):
        run_here(consumer, order, lambda: False)
    wait_for(lambda: consumer.thread.has_ended)
    assert len(consumer.results) == 2


@pytest.mark.parametrize("place", ["order", "turn"])
def test_a_signal_within_a_callers_turn_ends_the_thread_and_no_read_counts(ranks, place):
    """As a handler that raises; the read is accepted and may be half posted, so nothing of it may be reported as done."""
    _, _, consumer = ranks
    advance = consumer.thread._agent.advance

    def interrupted():
        consumer.thread._agent.advance = advance
        raise KeyboardInterrupt

    def order():
        consumer.thread.agent.post_read("r", "p", ONE, ONE)
        consumer.thread._agent.advance = interrupted
        if place == "order":
            interrupted()

    with pytest.raises(KeyboardInterrupt):
        run_here(consumer, order, lambda: consumer.results)
    wait_for(lambda: consumer.thread.has_ended)
    assert [one.code for one in consumer.results["r"]] == ["thread-dead"]
    assert consumer.thread.health().state == "dead"
    assert code_of(lambda: consumer.thread.call_soon(lambda: None)) == "thread-dead"


def test_start_reports_what_registration_raised():
    fabric = FakeFabric()
    fabric.fail_next("register", "nixl-backend")
    rank = Rank(fabric, "broken", options=AgentOptions(fence_words=1))
    assert code_of(rank.thread.start) == "registration-failed"
    assert not rank.thread.is_alive
    with pytest.raises(AgentError):
        rank.thread.call_soon(lambda: None)
    rank.thread.close()


def test_a_stuck_turn_is_seen():
    rank = Rank(FakeFabric(), "slow", thread_options=ThreadOptions(stuck_after_s=0.05)).start()
    release = rank.hold()
    wait_for(lambda: rank.thread.health().state == "stuck")
    release.set()
    wait_for(lambda: rank.thread.health().state == "running")
    rank.thread.close()
    assert rank.thread.health().state == "closed"


def test_close_gives_every_result_and_quiet_before_it_returns(ranks):
    fabric, _, consumer = ranks
    fabric.agent("producer").stop()
    one = np.zeros(1, dtype=np.int32)
    consumer.do(lambda: [consumer.thread.agent.post_read(f"r{n}", "p", one, one) for n in range(5)])
    consumer.thread.close()
    consumer.thread.close()
    assert set(consumer.results) == {f"r{n}" for n in range(5)}
    assert {one[0].outcome for one in consumer.results.values()} == {"cancelled"}
    assert sorted(consumer.quiet) == [f"r{n}" for n in range(5)]
    assert code_of(lambda: consumer.thread.call_soon(lambda: None)) == "agent-closed"


def test_the_end_of_the_last_quarantine_finds_none(ranks):
    fabric, _, consumer = ranks
    seen: list[int] = []
    consumer.thread._on_quiet = lambda _: seen.append(len(consumer.thread.quarantine()))
    fabric.agent("producer").stop()
    one = np.zeros(1, dtype=np.int32)
    consumer.do(lambda: consumer.thread.agent.post_read("r", "p", one, one, deadline_s=0.05))
    wait_for(lambda: len(consumer.thread.quarantine()) == 1)
    fabric.agent("producer").resume()
    wait_for(lambda: seen)
    assert seen == [0]


def test_the_switch_interval_is_lowered_while_threads_live_and_restored():
    before = sys.getswitchinterval()
    fabric = FakeFabric()
    first = Rank(fabric, "first", thread_options=ThreadOptions(gil_switch_interval_s=1e-3))
    second = Rank(fabric, "second", thread_options=ThreadOptions(gil_switch_interval_s=2e-3))
    first.thread.start()
    second.thread.start()
    assert sys.getswitchinterval() == pytest.approx(min(before, 1e-3))
    first.thread.close()
    assert sys.getswitchinterval() == pytest.approx(min(before, 2e-3))
    second.thread.close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_an_idle_thread_leaves_the_switch_interval_to_the_process_until_it_is_woken():
    before = sys.getswitchinterval()
    rank = Rank(FakeFabric(), "idle", thread_options=ThreadOptions(gil_switch_interval_s=1e-3)).start()
    assert sys.getswitchinterval() == pytest.approx(min(before, 1e-3))
    rank.thread.allow_slow_polling(True)
    wait_for(lambda: sys.getswitchinterval() == pytest.approx(before))
    assert rank.do(sys.getswitchinterval) == pytest.approx(min(before, 1e-3))
    wait_for(lambda: sys.getswitchinterval() == pytest.approx(before))
    rank.thread.allow_slow_polling(False)
    wait_for(lambda: sys.getswitchinterval() == pytest.approx(min(before, 1e-3)))
    rank.thread.close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_thread_at_rest_wakes_a_few_times_a_second_whatever_its_timers():
    rank = Rank(FakeFabric(), "resting", thread_options=ThreadOptions(slow_poll_s=0.1)).start()
    ticks: list[float] = []
    rank.thread.call_every(0.01, lambda: ticks.append(time.monotonic()))
    rank.thread.allow_slow_polling(True)
    counts = undisturbed(lambda: np.array([rank.thread.statistics()["thread_turns"], len(ticks)]), wait_s=1.0)
    assert counts[0] <= 13
    assert 2 <= counts[1] <= 13
    rank.thread.close()


def test_timers_of_a_thread_at_rest_run_however_slowly_it_may_poll():
    """Turns that come more than half a second apart look like a pause of the process, after which timers are held back."""
    rank = Rank(FakeFabric(), "slow", thread_options=ThreadOptions(slow_poll_s=2.0)).start()
    ticks: list[float] = []
    rank.thread.call_every(0.05, lambda: ticks.append(time.monotonic()))
    rank.thread.allow_slow_polling(True)
    wait_for(lambda: ticks)  # the calls above count as work
    assert undisturbed(lambda: len(ticks), wait_s=0.3) >= 2
    rank.thread.close()


def _note(slept: list[float], timeout: float) -> None:
    slept.append(timeout)


def test_a_thread_that_has_quarantine_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quarantine ends by polling, and the pages of its reads are held until then."""
    pacer = Pacer(ThreadOptions(gil_switch_interval_s=None), lambda: 100.0)
    pacer.may_poll_slowly = True
    slept: list[float] = []
    monkeypatch.setattr(pacer, "_bell", SimpleNamespace(acquire=partial(_note, slept)))
    for quiet_s, has_leftovers in itertools.product((0.016, 0.32, 1.0, 60.0), (False, True)):
        pacer._last_progress_s = 100.0 - quiet_s
        pacer.wait_idle(101.0, lambda: False, has_leftovers=has_leftovers)
    assert slept == pytest.approx([0.25, 0.0005, 0.25, 0.01, 0.25, 0.03125, 0.25, 0.05])


def test_a_probe_that_nobody_answers_keeps_no_idle_thread_awake(ranks):
    fabric, _, consumer = ranks
    wait_for(lambda: not consumer.do(lambda: consumer.thread.agent.is_busy), what="the end of the warm-up")
    consumer.thread.allow_slow_polling(True)
    fabric.agent("producer").stop()
    consumer.do(lambda: consumer.thread.agent.probe("silent", "p", deadline_s=120.0))
    turns = undisturbed(lambda: consumer.thread.statistics()["thread_turns"], wait_s=0.0)
    fabric.agent("producer").resume()
    wait_for(lambda: "silent" in consumer.results)
    assert consumer.results["silent"][0].outcome == "done"
    assert turns < 80  # polling every 0.5 ms, as for a read, it would be more than a thousand


@pytest.mark.parametrize(("operation", "most"), [("probe", 12), ("read", 40)])
def test_a_thread_rests_as_soon_as_nothing_is_awaited(ranks, operation, most):
    """Each further turn takes the interpreter from the engine. A probe, which no caller waits for, does not end the rest."""
    _, _, consumer = ranks
    thread, numbers = consumer.thread, itertools.count()
    orders = {
        "probe": lambda name: thread.agent.probe(name, "p", deadline_s=1.0),
        "read": lambda name: thread.agent.post_read(name, "p", ONE, ONE),
    }
    thread.call_every(0.3, lambda: orders[operation](f"{operation} {next(numbers)}"))
    thread.allow_slow_polling(True)
    assert undisturbed(lambda: thread.statistics()["thread_turns"], wait_s=1.0) < most
    wait_for(lambda: sum(name.startswith(operation) for name in consumer.results) > 2)


def test_an_end_to_slow_polling_ends_a_long_sleep():
    options = ThreadOptions(slow_poll_s=60.0, gil_switch_interval_s=None)
    thread = Rank(FakeFabric(), "slow", thread_options=options).thread
    thread.allow_slow_polling(True)
    sleeper = threading.Thread(target=thread._pacer.wait_idle, args=(1e12, lambda: False))
    sleeper.start()
    time.sleep(0.05)
    assert sleeper.is_alive()
    thread.allow_slow_polling(False)
    sleeper.join(50)
    assert not sleeper.is_alive()
