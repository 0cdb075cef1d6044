"""Owner threads whose process pauses: the body of the test over real NIXL, under a fake clock and with few cores."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent_checks.pauses import check_renewals_count_before_timers
from helpers import Pages, wait_for

from kv_nixl_agent import AgentOptions, PeerSpec, ThreadOptions, TransferAgent
from kv_nixl_agent._loop import Callbacks, Loop
from kv_nixl_agent._settling import Settling, ThreadWatch, thread_ids
from kv_nixl_agent._timers import Timers
from kv_nixl_agent.testing import FakeFabric


class ClockedOwner:
    """`PausedOwner` whose loop has a turn every `turn_s`, and whose NIXL gets a core `starved_s` after each pause.

    Until then NIXL's thread brings nothing in, as over TCP, where it alone reads the sockets.
    """

    def __init__(self, turn_s: float, starved_s: float) -> None:
        self._now_s, self._turn_s, self._starved_s, self._core_at_s = 100.0, turn_s, starved_s, 0.0
        self._events: list[str] = []
        fabric, self._pages = FakeFabric(), Pages(1, 8)
        options = ThreadOptions(idle_poll_s=1e-9, gil_switch_interval_s=None)
        self._loop = Loop("owner", lambda: self._make_agent(fabric), self._callbacks(), options, lambda: self._now_s)
        self._agent = self._loop.set_up()
        assert self._agent is not None
        self._loop.timers.watch(self._has_core)
        self._reader = TransferAgent("reader", [], port_factory=fabric.port)
        rows = self._pages.rows[:0]
        self._reader.add_peer(PeerSpec("owner", self._loop.metadata, rows, rows))

    def _make_agent(self, fabric: FakeFabric) -> TransferAgent:
        agent = TransferAgent(
            "owner", [self._pages.region], AgentOptions(), port_factory=fabric.port, clock=lambda: self._now_s
        )
        port = fabric.agent("owner")
        notifications = port.notifications

        def found() -> Sequence[tuple[str, bytes]]:
            return notifications() if self._has_core() else ()

        port.notifications = found
        return agent

    def _callbacks(self) -> Callbacks:
        return Callbacks(lambda _: None, lambda _, payload: self._events.append(payload.decode()), None)

    def _has_core(self) -> bool:
        return self._now_s >= self._core_at_s

    def _turn(self) -> None:
        assert self._agent is not None
        self._now_s += self._turn_s
        self._loop.turn(self._agent)

    def watch_timer(self, period_s: float) -> None:
        self._loop.timers.add(period_s, lambda: self._events.append("timer"), self._now_s)
        self._events.clear()
        self.events_since_stop("timer")

    def stop(self) -> None:
        self._events.clear()

    def wait(self, duration_s: float) -> None:
        self._now_s += duration_s

    def notify(self, payload: str) -> None:
        assert self._reader.send_notification("owner", payload.encode())

    def resume(self) -> None:
        self._core_at_s = self._now_s + self._starved_s

    def events_since_stop(self, event: str) -> Sequence[str]:
        end_s = self._now_s + 100.0
        while event not in self._events:
            assert self._now_s < end_s, self._events
            self._turn()
        return self._events


@pytest.mark.never_wrong("C4")
@pytest.mark.parametrize("starved_s", [0.0, 0.04, 0.24, 1.9])
@pytest.mark.parametrize("turn_s", [0.0005, 0.015, 0.06, 0.3, 0.6])
def test_a_renewal_that_came_during_a_pause_counts_before_timers_however_few_the_turns(turn_s: float, starved_s: float):
    """A machine with time for everybody, one on which the owner has few turns, and one on which NIXL has none for long."""
    check_renewals_count_before_timers(ClockedOwner(turn_s, starved_s))


def hold_of(have_run: Sequence[bool], step_s: float) -> float:
    """Return how long timers wait after a pause, with turns every `step_s` and threads that have run as given, then always."""
    looks = iter(have_run)
    timers = Timers(0.0, lambda: next(looks, True))
    timers.add(0.001, lambda: None, 0.0)
    for number in itertools.count():
        now_s = 60.0 + number * step_s
        timers.begin_turn(now_s)
        if timers.take_due(now_s, given_count=0, taken_count=0):
            return round(now_s - 60.0, 6)
    raise AssertionError


def test_the_hold_lasts_as_long_as_its_description_says() -> None:
    assert hold_of([], step_s=0.0005) == pytest.approx(0.18, abs=0.06)
    assert hold_of([], step_s=0.3) == pytest.approx(2.7)
    assert hold_of([False] * 12, step_s=0.0005) == pytest.approx(12 * 0.02 + 0.18, abs=0.06)
    assert hold_of([True, False] * 1000, step_s=0.0005) == pytest.approx(99 * 0.02, abs=0.06), "held for ever"


def test_pauses_one_after_the_other_hold_the_timers_no_longer_than_ten_seconds() -> None:
    assert hold_of([], step_s=0.6) == pytest.approx(10.0, abs=0.6)


@pytest.mark.parametrize(("before_s", "within_s"), [(0.6, 0.001), (0.001, 0.6), (0.3, 0.3), (0.6, 0.6)])
@pytest.mark.parametrize("every", [1, 9])
def test_timers_run_every_ten_seconds_wherever_and_however_often_turns_pause(
    before_s: float, within_s: float, every: int
) -> None:
    """Each turn, or each ninth, pauses before it begins or while it runs calls and takes notifications."""
    timers, ran = Timers(0.0), [0.0]
    timers.add(0.001, lambda: None, 0.0)
    now_s = 0.0
    for number in range(2000):
        is_slow = number % every == 0
        now_s += before_s if is_slow else 0.001
        timers.begin_turn(now_s)
        now_s += within_s if is_slow else 0.001
        timers.note(now_s)
        if timers.take_due(now_s, given_count=0, taken_count=0):
            ran.append(now_s)
    assert max(later - earlier for earlier, later in itertools.pairwise([*ran, now_s])) < 12.5


def test_a_process_that_pauses_within_a_turn_runs_no_timer_in_it() -> None:
    timers = Timers(0.0)
    timers.add(0.02, lambda: None, 0.0)
    assert not timers.begin_turn(0.1)
    assert timers.note(1.1)
    assert not timers.take_due(0.1, given_count=0, taken_count=0)
    assert not timers.note(1.2)
    settling = Settling(lambda: True)
    assert settling.is_over


def write_account(tasks: Path, name: str, state: str, run_ns: int | None) -> None:
    (tasks / name).mkdir(exist_ok=True)
    (tasks / name / "stat").write_text(f"{name} (a) b ( {state}) {state} 1 1")
    if run_ns is not None:
        (tasks / name / "schedstat").write_text(f"{run_ns} 77 3\n")


def test_a_thread_has_run_if_it_sleeps_or_its_run_time_grows(tmp_path: Path) -> None:
    write_account(tmp_path, "7", "S", 5)
    write_account(tmp_path, "8", "R", 5)
    both, asleep, ready = (ThreadWatch(names, tmp_path).have_run for names in (["7", "8", "9"], ["7"], ["8"]))
    assert [asleep(), asleep(), ready(), ready(), both(), both()] == [True, True, False, False, False, False]
    write_account(tmp_path, "8", "R", 6)
    assert [asleep(), ready(), both()] == [True, True, True]
    assert [asleep(), ready(), both()] == [True, False, False]
    write_account(tmp_path, "8", "S", 6)
    assert ready()
    write_account(tmp_path, "8", "R", 6)
    assert not ready()


def test_a_kernel_that_keeps_no_such_account_holds_nothing_back(tmp_path: Path) -> None:
    write_account(tmp_path, "7", "R", None)
    assert ThreadWatch(["7", "8"], tmp_path).have_run()
    assert ThreadWatch(["7"], tmp_path / "nowhere").have_run()


@pytest.mark.skipif(not thread_ids(), reason="this kernel has no /proc/self/task")
def test_threads_of_a_real_process_are_seen_to_wait_and_to_run() -> None:
    """A child that computes runs; stopped, it neither runs nor is ready; the kernel tells both from a thread that waits."""
    spin = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert spin.stdout is not None
        assert spin.stdout.readline()
        watch = ThreadWatch([str(spin.pid)], Path(f"/proc/{spin.pid}/task"))
        assert not watch.have_run(), "the first look has nothing to compare with"
        wait_for(watch.have_run, what="run time that grows")
        spin.send_signal(signal.SIGSTOP)
        wait_for(lambda: watch.have_run() and watch.have_run(), what="a thread that is not ready to run")
    finally:
        spin.kill()
        spin.communicate()
