"""Waiting between turns of the owner thread."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, final

from kv_nixl_agent.nixl.side_effects import SwitchInterval

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_nixl_agent.options import ThreadOptions

__all__ = ["Pacer"]

_SLOWING = 1 / 8  # 0.25 s after 2 s without work
_REST_AFTER_S = 0.1
_MOST_LATE_S = 0.25  # of timers at rest; twice that between turns would count as a pause of the process
_QUARANTINE_SLOWING, _QUARANTINE_MOST_S = 1 / 32, 0.05


@final
class Pacer:
    """Waits between turns of the loop.

    While transfers are in flight it spins briefly, then sleeps for growing times; otherwise it sleeps on an event. `wake`, from
    any thread, ends the idle sleep at once.

    The interpreter's switch interval is lowered while there is work or may be at any moment. While a thread may poll slowly and
    has had nothing to do for 0.1 s, it does not ask for this: the interval returns to the process's own until the thread is
    woken. The waker lowers the interval before it wakes the thread, since the woken thread waits for the interpreter for that
    interval.
    """

    def __init__(self, options: ThreadOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._event = threading.Event()
        self._is_idle = False
        self._last_progress_s = clock()
        self._sleep_s = options.min_sleep_s
        self.may_poll_slowly = False
        """Whether the idle polling period may grow to `slow_poll_s` when nothing has happened for a while."""
        self._interval = SwitchInterval(options.gil_switch_interval_s)

    def begin(self) -> None:
        """Lower the switch interval when the owner thread starts."""
        self._interval.lower()

    def end(self) -> None:
        """Restore the switch interval permanently when the owner thread ends."""
        self._interval.close()

    def wake(self) -> None:
        """End an idle sleep, from any thread. The caller must have made its work visible before."""
        if self._is_idle:
            self._interval.lower()
            self._event.set()

    def progressed(self) -> None:
        """Record that the last turn made progress."""
        self._last_progress_s = self._clock()
        self._sleep_s = self._options.min_sleep_s
        self._interval.lower()

    def wait_busy(self) -> None:
        """Wait between two polls of the wire."""
        self._interval.lower()
        if self._clock() - self._last_progress_s < self._options.spin_s:
            time.sleep(0)  # yields the interpreter and the core once
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 2, self._options.max_sleep_s)

    def wait_idle(
        self, until_s: float, has_work: Callable[[], bool], *, has_leftovers: bool = False, look_s: float = math.inf
    ) -> None:
        """Wait for work, at most the idle polling period, and not beyond `until_s` or `look_s`, when a stream is polled.

        A thread at rest runs its timers up to 0.25 s late, all of them in one turn. Example: 1.6 s after its last work it wakes
        every 0.2 s, even for a timer of 0.05 s. Quarantine ends by polling, and pages and new reads wait for that, so a thread
        with quarantined transfers, or other leftovers, does not rest. Example: 1.6 s after its last work it polls every 0.05 s.
        """
        now_s = self._clock()
        quiet_s = now_s - self._last_progress_s
        may_poll_slowly = self.may_poll_slowly
        wait_s = self._options.idle_poll_s
        if may_poll_slowly:
            wait_s = max(wait_s, min(self._options.slow_poll_s, quiet_s * _SLOWING))
        if has_leftovers:
            wait_s = max(self._options.idle_poll_s, min(wait_s, quiet_s * _QUARANTINE_SLOWING, _QUARANTINE_MOST_S))
        if may_poll_slowly and quiet_s > _REST_AFTER_S and not has_leftovers:
            wait_s = min(wait_s, max(until_s - now_s, _MOST_LATE_S))
            self._interval.restore()
        else:
            wait_s = min(wait_s, until_s - now_s)
            if not may_poll_slowly:
                self._interval.lower()
        self._is_idle = True
        # Work, or an end to slow polling, that came before the flag was visible did not wake the thread: check once more.
        if not has_work() and self.may_poll_slowly is may_poll_slowly:
            self._event.wait(max(0.0, min(wait_s, look_s - now_s)))
        self._is_idle = False
        self._event.clear()
        self._sleep_s = self._options.min_sleep_s
