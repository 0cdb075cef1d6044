"""Owner threads whose process pauses: the body of the test over real NIXL, under a fake clock and with few cores."""

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
from agent_checks.pauses import check_renewals_count_before_timers
from helpers import Pages

from kv_nixl_agent import PeerSpec, ThreadOptions, TransferAgent, TransferThread
from kv_nixl_agent.mailbox import Mailbox
from kv_nixl_agent.testing import FakeFabric


class ClockedOwner:
    """Paused owner of the check, whose loop has a turn every `turn_s`, and whose NIXL gets a core `starved_s` after each pause.

    Until then NIXL's thread brings nothing in, as over TCP, where it alone reads the sockets.
    """

    def __init__(self, turn_s: float, starved_s: float) -> None:
        self._now_s, self._turn_s, self._starved_s, self._core_at_s = 100.0, turn_s, starved_s, 0.0
        self._events: list[str] = []
        fabric, self._pages = FakeFabric(), Pages(1, 8)
        options = ThreadOptions(idle_poll_s=1e-9, gil_switch_interval_s=None)
        self._thread = TransferThread(
            "owner",
            [self._pages.region],
            on_result=lambda _: None,
            on_notification=lambda _, payload: self._events.append(payload.decode()),
            thread_options=options,
            port_factory=fabric.port,
            clock=lambda: self._now_s,
        )
        self._agent = self._thread._set_up()
        port = fabric.agent("owner")
        notifications = port.notifications

        def found() -> Sequence[tuple[str, bytes]]:
            return notifications() if self._has_core() else ()

        port.notifications = found
        self._reader = TransferAgent("reader", [], port_factory=fabric.port)
        rows = self._pages.rows[:0]
        self._reader.add_peer(PeerSpec("owner", self._thread.agent_metadata(), rows, rows))

    def _has_core(self) -> bool:
        return self._now_s >= self._core_at_s

    def _turn(self) -> None:
        assert self._agent is not None
        self._now_s += self._turn_s
        self._thread._turn(self._agent)

    def watch_timer(self, period_s: float) -> None:
        self._thread._mailbox.add_timer(period_s, lambda: self._events.append("timer"))
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
@pytest.mark.parametrize("starved_s", [0.0, 0.04, 0.24])
@pytest.mark.parametrize("turn_s", [0.0005, 0.015, 0.06, 0.3, 0.6])
def test_a_renewal_that_came_during_a_pause_counts_before_timers_however_few_the_turns(turn_s: float, starved_s: float):
    """A machine with time for everybody, one on which the owner has few turns, and one on which NIXL has none for long."""
    check_renewals_count_before_timers(ClockedOwner(turn_s, starved_s))


def note_time(ran: list[float], now_s: list[float]) -> None:
    ran.append(now_s[0])


def make_mailbox(now_s: list[float]) -> Mailbox:
    return Mailbox(lambda *_: None, lambda: now_s[0])


def test_timers_wait_half_a_second_after_a_pause_and_repeated_pauses_do_not_extend_it() -> None:
    for turn_s in (0.0005, 0.3, 0.6):
        ran, now_s = [0.0], [0.0]
        mailbox = make_mailbox(now_s)
        mailbox.add_timer(0.001, partial(note_time, ran, now_s))
        now_s[0] = 60.0
        while now_s[0] < 70.0:
            mailbox.run_timers(now_s[0])
            now_s[0] += turn_s
        assert ran[1] == pytest.approx(60.5, abs=turn_s), turn_s
        assert max(later - earlier for earlier, later in itertools.pairwise(ran[1:])) < 1.3, turn_s


def test_a_process_that_pauses_within_a_turn_runs_no_timer_in_it() -> None:
    now_s, ran = [0.0], []
    mailbox = make_mailbox(now_s)
    mailbox.add_timer(0.02, lambda: ran.append(now_s[0]))
    assert not mailbox.note_time(0.1)
    now_s[0] = 1.1
    mailbox.run_timers(0.1)
    assert not ran
    assert not mailbox.note_time(1.2)
