"""Waiting between turns of the owner thread, and a bound on how long other threads may keep the interpreter."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, ClassVar, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._options import ThreadOptions

__all__ = ["Pacer", "SwitchInterval"]

_SLOWING = 1 / 32  # 8 ms after a quarter of a second without work


@final
class Pacer:
    """Waits between turns of the loop.

    While transfers are in flight it spins briefly, then sleeps longer and longer; otherwise it sleeps on an event.
    A waker from any thread ends the idle sleep at once.
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

    def wake(self) -> None:
        """End an idle sleep, from any thread. The caller has made its work visible before."""
        if self._is_idle:
            self._event.set()

    def progressed(self) -> None:
        """Note that the last turn moved something."""
        self._last_progress_s = self._clock()
        self._sleep_s = self._options.min_sleep_s

    def wait_busy(self) -> None:
        """Wait between two polls of the wire."""
        if self._clock() - self._last_progress_s < self._options.spin_s:
            time.sleep(0)  # lets go of the interpreter and of the core, and comes back
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 2, self._options.max_sleep_s)

    def wait_idle(self, until_s: float, has_work: Callable[[], bool]) -> None:
        """Wait for work, at most the idle polling period and not beyond `until_s`."""
        self._is_idle = True
        # Work that was put down before the flag was visible did not ring the bell: look once more.
        if not has_work():
            now_s = self._clock()
            self._event.wait(max(0.0, min(self._idle_period_s(now_s), until_s - now_s)))
        self._is_idle = False
        self._event.clear()

    def _idle_period_s(self, now_s: float) -> float:
        if not self.may_poll_slowly:
            return self._options.idle_poll_s
        quiet_s = now_s - self._last_progress_s
        return max(self._options.idle_poll_s, min(self._options.slow_poll_s, quiet_s * _SLOWING))


@final
class SwitchInterval:
    """Keeps `sys.getswitchinterval()` at or below a bound while any owner thread wants it, and restores it after."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _wanted: ClassVar[list[float]] = []
    _before: ClassVar[float] = 0.0

    @classmethod
    def lower(cls, bound_s: float) -> None:
        """Ask for a bound."""
        with cls._lock:
            if not cls._wanted:
                cls._before = sys.getswitchinterval()
            cls._wanted.append(bound_s)
            cls._apply()

    @classmethod
    def restore(cls, bound_s: float) -> None:
        """Take a bound back."""
        with cls._lock:
            cls._wanted.remove(bound_s)
            cls._apply()

    @classmethod
    def _apply(cls) -> None:
        sys.setswitchinterval(min([cls._before, *cls._wanted]))
