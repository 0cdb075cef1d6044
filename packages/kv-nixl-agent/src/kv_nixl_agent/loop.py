"""The loop of the owner thread.

One turn: run calls, deliver notifications, run timers that are due, call the agent's `advance` once, deliver results and quiet
memory, wait. An exception from a callback or call is counted and recorded, and the loop continues. If the loop itself fails,
every accepted order, posted or still in the mailbox, is reported as failed with `thread-dead`.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.pacing import Pacer
from kv_nixl_agent.statistics import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kv_nixl_agent.agent import TransferAgent
    from kv_nixl_agent.options import ThreadOptions
    from kv_nixl_agent.streams.words import StreamWords
    from kv_nixl_agent.values import FenceLocation, QuarantineEntry, StallEntry, TransferOrder, TransferResult

__all__ = ["Arrivals", "Callbacks", "Loop", "Mailbox", "Timers"]

_MAX_CRASHES_IN_A_ROW: Final = 16
_PUBLISH_PERIOD_S: Final = 0.1
_CALLS_SLICE_S: Final = 2e-4


@final
@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks that the loop invokes, always on the owner thread."""

    on_result: Callable[[TransferResult], None]
    on_notification: Callable[[str, bytes], None]
    on_quiet: Callable[[str], None] | None


@final
class Loop:
    """State and turns of one owner thread. Other threads put items into `mailbox`, wake it through `pacer`, and read the rest."""

    def __init__(
        self,
        name: str,
        make_agent: Callable[[], TransferAgent],
        callbacks: Callbacks,
        options: ThreadOptions,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._make_agent = make_agent
        self._callbacks = callbacks
        self._options = options
        self._clock = clock
        self._arrivals = Arrivals()
        self.mailbox = Mailbox()
        self.timers = Timers(clock())
        self.pacer = Pacer(options, clock)
        self.errors = ErrorLog()
        self.ready = threading.Event()
        self.is_closing = False
        self.failure: AgentError | None = None
        self.agent: TransferAgent | None = None
        self.metadata = b""
        self.fence: FenceLocation | None = None
        self.stream_words: StreamWords | None = None
        self.turns = 0
        self.turn_began_s = clock()
        self.snapshot = Snapshot({})
        self.quarantine: Sequence[QuarantineEntry] = ()
        self.stalls: Sequence[StallEntry] = ()

    def run(self) -> None:
        """Run the owner thread, from set-up to tear-down."""
        self.pacer.begin()
        try:
            agent = self.set_up()
            if agent is not None:
                self.ready.set()
                self._turn_until_closed(agent)
                self.tear_down(agent)
        finally:
            self.pacer.end()
            self.ready.set()

    def accept(self, agent: TransferAgent, order: TransferOrder) -> None:
        """Accept an order on the owner thread; if the loop has failed, report the order as failed.

        Raises:
            AgentError: `duplicate-transfer`.
        """
        if self.failure is None:
            agent.submit(order)
        else:
            agent.refuse(order, self.failure)

    def set_up(self) -> TransferAgent | None:
        """Create the agent; return None, with `failure` set, if that fails."""
        try:
            if self._options.on_thread_start is not None:
                self._options.on_thread_start()
            agent = self._make_agent()
            self.metadata = agent.agent_metadata()
        except AgentError as error:
            self.fail(error)
            return None
        except Exception as error:  # noqa: BLE001 - handed to the starter
            self.fail(AgentError("thread-dead", f"the set-up raised {type(error).__name__}: {error}"))
            return None
        words = self.stream_words = agent.stream_words
        if words is not None:
            words.on_open = self.pacer.wake
        self.fence = agent.fence
        self.agent = agent
        self.timers.add(_PUBLISH_PERIOD_S, lambda: self._publish(agent), self._clock())
        self._publish(agent)
        return agent

    def fail(self, failure: AgentError) -> None:
        """Accept no more calls and orders, and record the reason."""
        self.failure = failure
        self.mailbox.shut(failure.code, str(failure))

    # ---------------------------------------------------------------------------------------------------------- turns

    def _turn_until_closed(self, agent: TransferAgent) -> None:
        crashes = 0
        while not self.is_closing:
            try:
                self.turn(agent)
                crashes = 0
            except Exception as error:  # noqa: BLE001 - one bad turn must not strand every request
                self.errors.loop_raised(error)
                crashes += 1
                if crashes >= _MAX_CRASHES_IN_A_ROW:
                    last = self.errors.last[0]
                    self.fail(AgentError("thread-dead", f"the loop raised {crashes} times in a row, last {last}"))
                    return
                time.sleep(self._options.max_sleep_s)
            except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the thread, but no order is lost
                self.errors.loop_raised(error)
                self.fail(AgentError("thread-dead", f"the loop was ended by {self.errors.last[0]}"))
                return

    def turn(self, agent: TransferAgent) -> None:
        """Do one turn."""
        self.turns += 1
        now_s = self.turn_began_s = self._clock()
        if self.timers.note(now_s):
            self.pacer.progressed()  # a thread that was at rest would otherwise poll too rarely now
        moved = self._run_calls()
        moved = self._deliver_notifications(agent) or moved
        self.timers.note(self._clock())  # a process that was stopped within this turn must not end leases in it
        given, taken = self.mailbox.given_count, self.mailbox.taken_count
        for function in self.timers.take_due(now_s, given_count=given, taken_count=taken):
            self._guarded(function)
        moved = agent.advance() or moved
        has_ends = self.deliver_ends(agent)
        if moved or has_ends:
            self.pacer.progressed()
            if not has_ends or agent.is_awaited:
                return
            time.sleep(0)  # another thread may wait for this last end, and needs the interpreter now
        if agent.is_awaited:
            self.pacer.wait_busy()
        else:
            look_s = agent.polls.next_look_s
            if self.stream_words is not None:
                look_s = min(look_s, self.stream_words.look_out_s(now_s))
            self.pacer.wait_idle(
                self.timers.next_s(now_s), self._has_work, has_leftovers=agent.has_leftovers, look_s=look_s
            )

    def _has_work(self) -> bool:
        return len(self.mailbox) > 0 or self.is_closing

    def _run_calls(self, slice_s: float = _CALLS_SLICE_S) -> bool:
        """Run waiting calls for about one time slice, so that the first order is posted soon."""
        count, until_s = len(self.mailbox), self._clock() + slice_s
        for _ in range(count):
            call = self.mailbox.take()
            if call is not None:
                self._guarded(call)
            if self._clock() > until_s:
                break
        return count > 0

    def _deliver_notifications(self, agent: TransferAgent) -> bool:
        """Fetch new notifications, and deliver those that no earlier call must precede."""
        arrived = agent.take_notifications()
        if arrived:
            self._arrivals.add(arrived, self.mailbox.given_count)
        if len(self._arrivals):
            for sender, payload in self._arrivals.take_due(self.mailbox.taken_count):
                self._guarded(self._callbacks.on_notification, sender, payload)
        return bool(arrived)

    def deliver_ends(self, agent: TransferAgent) -> bool:
        """Invoke the callbacks for results, quiet memory and streams; return True if there were any."""
        results, quiet, news = agent.take_results(), agent.take_quiet(), agent.polls.take_news()
        for result in results:
            self._guarded(self._callbacks.on_result, result)
        if self._callbacks.on_quiet is not None:
            for transfer_id in quiet:
                self._guarded(self._callbacks.on_quiet, transfer_id)
        for call in news:
            self._guarded(call)
        return bool(results or quiet or news)

    def _guarded(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - the caller's code must not kill the thread
            self.errors.callback_raised(error)

    def _publish(self, agent: TransferAgent) -> None:
        self.snapshot = agent.snapshot()
        self.quarantine = agent.quarantine()
        self.stalls = agent.stalls()

    # ------------------------------------------------------------------------------------------------------ tear-down

    def tear_down(self, agent: TransferAgent) -> None:
        """End all accepted orders, close the agent, and deliver the last results."""
        if self.failure is None:
            self.mailbox.shut("agent-closed", f"transfer thread {self._name!r} was closed")
        # Calls handed over earlier still run; orders that they give after a failure are reported as failed.
        self._protected(lambda: self._run_calls(math.inf))
        if self.failure is None:
            self._protected(lambda: self._drain(agent))
            self._protected(agent.end_all)
        else:
            failure = self.failure
            self._protected(lambda: agent.end_all("thread-dead", str(failure)))
        self._protected(lambda: self.deliver_ends(agent))
        self._protected(agent.close)
        self._protected(lambda: self.deliver_ends(agent))
        self._protected(lambda: self._publish(agent))
        self.agent = None

    def _protected(self, step: Callable[[], object]) -> None:
        """Run one step of the tear-down; an exception does not prevent the later steps."""
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - results are still to be delivered
            self.errors.loop_raised(error)

    def _drain(self, agent: TransferAgent) -> None:
        """Let transfers in flight end within the grace period."""
        deadline_s = self._clock() + self._options.close_grace_s
        while agent.is_busy and self._clock() < deadline_s:
            if not agent.advance():
                self.pacer.wait_busy()
            self._deliver_notifications(agent)
            self.deliver_ends(agent)
        self._deliver_notifications(agent)


@final
class Mailbox:
    """Calls, first in, first out. `put` and `len` are for any thread, the rest for the owner."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._refusal: tuple[str, str] | None = None
        self.taken_count = 0
        """Items that were taken out so far."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def given_count(self) -> int:
        """Items that were handed over so far."""
        return self.taken_count + len(self._items)

    def put(self, item: Callable[[], object]) -> None:
        """Hand an item over. Once this returns, the item is served, also when the thread dies.

        Raises:
            AgentError: the refusal given to `shut`.
        """
        with self._lock:
            if self._refusal is None:
                self._items.append(item)
                return
        code, message = self._refusal
        raise AgentError(code, message)

    def take(self) -> Callable[[], object] | None:
        """Return the next item, None if there is none."""
        if not self._items:
            return None
        self.taken_count += 1
        return self._items.popleft()

    def shut(self, code: str, message: str) -> None:
        """Refuse further items with this error; those handed over before stay."""
        with self._lock:
            self._refusal = (code, message)


@final
class Arrivals:
    """Notifications that came in, until the calls that were handed over before them have run."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, arrived: Iterable[tuple[str, bytes]], given_count: int) -> None:
        """Keep notifications, due after `given_count` calls."""
        self._waiting.extend((given_count, sender, payload) for sender, payload in arrived)

    def take_due(self, taken_count: int) -> Iterator[tuple[str, bytes]]:
        """Return the notifications that are due after `taken_count` calls, oldest first."""
        while self._waiting and self._waiting[0][0] <= taken_count:
            _, sender, payload = self._waiting.popleft()
            yield sender, payload


_HORIZON_S: Final = 1.0
_PAUSE_S: Final = 0.5
_CATCH_UP_S: Final = 0.5
"""After a pause, NIXL's threads took up to 0.24 s to bring in what had been sent meanwhile (three busy processes, two cores)."""


@final
class _Timer:
    __slots__ = ("due_s", "function", "period_s")

    def __init__(self, period_s: float, function: Callable[[], object], now_s: float) -> None:
        self.period_s = period_s
        self.function = function
        self.due_s = now_s + period_s


@final
class Timers:
    """Functions that run about once per period.

    Timers that fall due wait for the calls and notifications that arrived before them (see `_mailbox.py`). After more than half a
    second without a turn, when the process was probably stopped, they also wait for another half second, because notifications
    sent meanwhile are still in the transport. Repeated pauses do not extend this. Nothing else is delayed. It makes unnecessary
    ends of leases rare; that a pause ends none is up to the caller's clock, which must not count it.
    """

    def __init__(self, now_s: float) -> None:
        self._timers: list[_Timer] = []
        self._seen_s = now_s
        self._held_until_s: float | None = None
        self._round: tuple[int, float] | None = None
        """(number of calls that must run first, time of the round's start) for the due timers that are waiting."""

    def add(self, period_s: float, function: Callable[[], object], now_s: float) -> None:
        """Run `function` about every `period_s`."""
        self._timers.append(_Timer(period_s, function, now_s))

    def note(self, now_s: float) -> bool:
        """Record the time, at the beginning of a turn and within it; return True if the process paused since the last call."""
        paused = now_s - self._seen_s > _PAUSE_S
        if paused and self._held_until_s is None:
            self._held_until_s = now_s + _CATCH_UP_S
        self._seen_s = now_s
        return paused

    def take_due(self, now_s: float, *, given_count: int, taken_count: int) -> list[Callable[[], object]]:
        """Return the functions to run now, given the numbers of calls handed over and of calls that have run."""
        is_held = self._held_until_s is not None and now_s < self._held_until_s
        if is_held or all(timer.due_s > now_s for timer in self._timers):
            return []
        if self._round is None:
            self._round = (given_count, now_s)
        due_after, opened_s = self._round
        if taken_count < due_after:
            return []
        self._round = self._held_until_s = None
        due = [timer for timer in self._timers if timer.due_s <= opened_s]
        for timer in due:
            timer.due_s = now_s + timer.period_s
        return [timer.function for timer in due]

    def next_s(self, now_s: float) -> float:
        """Return the time at which a timer falls due next, at most a second ahead."""
        earliest_s = now_s if self._held_until_s is None else self._held_until_s
        return min([now_s + _HORIZON_S, *[max(timer.due_s, earliest_s) for timer in self._timers]])


@final
class ErrorLog:
    """Counts errors by origin and keeps the text of the latest."""

    def __init__(self) -> None:
        self.callback_errors = 0
        self.loop_errors = 0
        self.last = ("", "")
        """(type and message, traceback) of the latest error."""

    def callback_raised(self, error: BaseException) -> None:
        """Count a callback or call that raised."""
        self.callback_errors += 1
        self._keep(error)

    def loop_raised(self, error: BaseException) -> None:
        """Count a turn of the loop that raised."""
        self.loop_errors += 1
        self._keep(error)

    def _keep(self, error: BaseException) -> None:
        self.last = (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
