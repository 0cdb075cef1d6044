"""Work of an owner thread: calls, notifications and timers, the order in which they are served, and the waiting for them.

Calls, notifications and timers may wait for the owner thread at the same time, and their order matters to a producer. The engine
thread hands over "expect readers of request 7" before a reader can hold a ticket of it, so a reader's completion must not be
delivered before that call has run. And a reader's renewal that waits, since the process was stopped for a minute, must count
before the timer that ends leases. So each notification, and each round of timers, carries the number of calls that were handed
over before it, and is due only when so many have run. The number is fixed, so a steady stream of calls does not delay them
further.

Example: calls 1 to 3 wait, a notification comes in (due after call 3), call 4 is handed over. Served: 1, 2, 3, notification, 4.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.side_effects import SwitchInterval, sleep_precisely

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_nixl_agent.options import ThreadOptions

__all__ = ["Mailbox", "Pacer"]

_HORIZON_S: Final = 1.0
_PAUSE_S: Final = 0.5
_CATCH_UP_S: Final = 0.5
"""After a pause, NIXL's threads took up to 0.24 s to bring in what had been sent meanwhile (three busy processes, two cores)."""
_CALLS_SLICE_S: Final = 2e-4


@final
@dataclass(slots=True, eq=False)
class _Timer:
    period_s: float
    function: Callable[[], object]
    due_s: float


@final
class Mailbox:
    """Calls, notifications and timers of one owner thread. `put` and `shut` are for any thread, the rest for the owner.

    Timers that fall due wait for the calls and notifications that arrived before them (see above). After more than half a
    second without a turn, when the process was probably stopped, they also wait for another half second, because notifications
    sent meanwhile are still in the transport. Repeated pauses do not extend this. Nothing else is delayed. It makes unnecessary
    ends of leases rare; that a pause ends none is up to the caller's clock, which must not count it.

    Args:
        on_notification: Called with each notification that is due: (agent name of the peer, payload).
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, on_notification: Callable[[str, bytes], None], clock: Callable[[], float]) -> None:
        self._on_notification = on_notification
        self._clock = clock
        self.calls: deque[Callable[[], object]] = deque()
        """Calls that are waiting to run."""
        self._lock = threading.Lock()
        self._refusal: AgentError | None = None
        self._taken_count = 0
        """Calls that were taken out so far."""
        self._arrived: deque[tuple[int, str, bytes]] = deque()
        """Notifications, each with the number of calls that must run first."""
        self._timers: list[_Timer] = []
        self._seen_s = clock()
        self._held_until_s = -math.inf
        """Time until which timers are held back after a pause."""
        self._round: tuple[int, float] | None = None
        """(number of calls that must run first, time of the round's start) for the due timers that are waiting."""
        self.callback_errors = 0
        self.last_error = ("", "")
        """(type and message, traceback) of the latest error."""

    def put(self, call: Callable[[], object]) -> None:
        """Hand a call over. Once this returns, the call is served, also when the thread dies.

        Raises:
            AgentError: the refusal given to `shut`.
        """
        with self._lock:
            if self._refusal is not None:
                raise AgentError(self._refusal.code, self._refusal.message)
            self.calls.append(call)

    def shut(self, refusal: AgentError) -> None:
        """Refuse further calls with this error; those handed over before stay."""
        with self._lock:
            self._refusal = refusal

    def add_timer(self, period_s: float, function: Callable[[], object]) -> None:
        """Run `function` about every `period_s`."""
        self._timers.append(_Timer(period_s, function, self._clock() + period_s))

    # ------------------------------------------------------------------------------------------------------------ turn

    def note_time(self, now_s: float) -> bool:
        """Record the time, at the beginning of a turn and within it; return True if the process paused since the last call."""
        has_paused = now_s - self._seen_s > _PAUSE_S
        if has_paused and self._held_until_s == -math.inf:
            self._held_until_s = now_s + _CATCH_UP_S
        self._seen_s = now_s
        return has_paused

    def run_calls(self, slice_s: float = _CALLS_SLICE_S) -> bool:
        """Run waiting calls for about one time slice, so that the first order is posted soon; return True if any waited."""
        count, until_s = len(self.calls), self._clock() + slice_s
        for _ in range(count):
            self._taken_count += 1
            self.run(self.calls.popleft())
            if self._clock() > until_s:
                break
        return count > 0

    def deliver(self, arrived: Sequence[tuple[str, bytes]]) -> bool:
        """Keep new notifications, and deliver those that no earlier call must precede; return True if any arrived."""
        given_count = self._taken_count + len(self.calls)
        self._arrived.extend([(given_count, sender, payload) for sender, payload in arrived])
        while self._arrived and self._arrived[0][0] <= self._taken_count:
            _, sender, payload = self._arrived.popleft()
            self.run(self._on_notification, sender, payload)
        return bool(arrived)

    def run_timers(self, now_s: float) -> None:
        """Run the timers that are due at `now_s`, the time at which the turn began."""
        self.note_time(self._clock())  # a process that was stopped within this turn must not end leases in it
        if now_s < self._held_until_s or all(timer.due_s > now_s for timer in self._timers):
            return
        if self._round is None:
            self._round = (self._taken_count + len(self.calls), now_s)
        due_after, opened_s = self._round
        if self._taken_count < due_after:
            return
        self._round, self._held_until_s = None, -math.inf
        due = [timer for timer in self._timers if timer.due_s <= opened_s]
        for timer in due:
            timer.due_s = now_s + timer.period_s
        for timer in due:
            self.run(timer.function)

    def next_timer_s(self, now_s: float) -> float:
        """Return the time at which a timer falls due next, at most a second ahead."""
        due_s = min([timer.due_s for timer in self._timers], default=math.inf)
        return min(now_s + _HORIZON_S, max(due_s, self._held_until_s, now_s))

    # ---------------------------------------------------------------------------------------------------------- errors

    def run(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function of the caller's; an error is kept, and does not end the thread."""
        try:
            function(*arguments)
        except BaseException as error:  # the caller's code must not kill the thread
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # a signal's, in a turn that the caller makes itself
            self.callback_errors += 1
            self.keep_error(error)

    def keep_error(self, error: BaseException) -> None:
        """Keep the text of an error."""
        self.last_error = (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


_MOST_LATE_S: Final = 0.25  # of timers at rest; twice that between turns would count as a pause of the process
_QUARANTINE_SLOWING, _QUARANTINE_MOST_S = 1 / 32, 0.05


@final
class Pacer:
    """Waits between turns of the loop.

    While transfers are in flight it spins briefly, then sleeps for growing times; otherwise it sleeps until `wake`, from any
    thread, rings a bell: a lock, which is free once it has rung, because an event takes several calls of Python on either side.

    A thread that may poll slowly rests as soon as it has nothing to do: each further turn would take the interpreter from an
    engine that computes. Measured on an H200 while it polled on, first every 0.5 ms: the two steps after a read of 3900 tokens
    took 2.3 ms longer than with vLLM's own connector.

    The interpreter's switch interval is lowered while there is work or may be at any moment, and returns to the process's own at
    rest. The waker lowers the interval before it wakes the thread, since the woken thread waits for the interpreter for that
    interval.
    """

    def __init__(self, options: ThreadOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_idle = False
        self._last_progress_s = clock()
        self._sleep_s = options.min_sleep_s
        self.may_poll_slowly = False
        """Whether the idle polling period is `slow_poll_s`."""
        self._interval = SwitchInterval(options.gil_switch_interval_s)

    def begin(self) -> None:
        """Lower the switch interval and sharpen the sleeps of the owner thread when it starts."""
        sleep_precisely()
        self._interval.lower()

    def end(self) -> None:
        """Restore the switch interval permanently when the owner thread ends."""
        self._interval.close()

    def wake(self) -> None:
        """End an idle sleep, from any thread. The caller must have made its work visible before."""
        if self._is_idle:
            self._interval.lower()
            with suppress(RuntimeError):  # it has rung already
                self._bell.release()

    def progressed(self) -> None:
        """Record that the last turn made progress."""
        self._last_progress_s = self._clock()
        self._sleep_s = self._options.min_sleep_s
        self._interval.lower()

    def wait_busy(self) -> None:
        """Wait between two polls of the wire."""
        self._interval.lower()
        if self._clock() - self._last_progress_s < self._options.spin_s:
            time.sleep(0)  # yields the interpreter and the core: 16 us, or 69 with the usual timer slack
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 2, self._options.max_sleep_s)

    def wait_idle(
        self, until_s: float, has_work: Callable[[], bool], *, has_leftovers: bool = False, look_s: float = math.inf
    ) -> None:
        """Wait for work, at most the idle polling period, and not beyond `until_s` or `look_s`, when a stream is polled.

        A thread at rest runs its timers up to 0.25 s late, all of them in one turn. Example: it wakes every 0.25 s, even for a
        timer of 0.05 s. Quarantine ends by polling, and pages and new reads wait for that, so a thread with quarantined
        transfers, or other leftovers, does not rest. Example: 0.32 s after its last work it polls every 0.01 s.
        """
        now_s = self._clock()
        may_poll_slowly = self.may_poll_slowly
        wait_s = self._options.slow_poll_s if may_poll_slowly else self._options.idle_poll_s
        if has_leftovers:
            quiet_s = now_s - self._last_progress_s
            wait_s = max(self._options.idle_poll_s, min(wait_s, quiet_s * _QUARANTINE_SLOWING, _QUARANTINE_MOST_S))
        if may_poll_slowly and not has_leftovers:
            wait_s = min(wait_s, max(until_s - now_s, _MOST_LATE_S))
            if look_s == math.inf:
                self._interval.restore()
        else:
            wait_s = min(wait_s, until_s - now_s)
            if not may_poll_slowly:
                self._interval.lower()
        self._is_idle = True
        # Work, or an end to slow polling, that came before the flag was visible did not wake the thread: check once more.
        if not has_work() and self.may_poll_slowly is may_poll_slowly:
            self._bell.acquire(timeout=max(0.0, min(wait_s, look_s - now_s)))
        self._is_idle = False
        self._sleep_s = self._options.min_sleep_s
