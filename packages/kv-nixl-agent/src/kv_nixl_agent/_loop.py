"""The loop of the owner thread.

One turn: run calls, deliver notifications, run timers that are due, call the agent's `advance` once, deliver results and quiet
memory, wait. An exception from a callback or call is counted and recorded, and the loop continues. If the loop itself fails,
every accepted order, posted or still in the mailbox, is reported as failed with `thread-dead`.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from ._errors import AgentError
from ._health import ErrorLog
from ._mailbox import Arrivals, Mailbox
from ._pacing import Pacer
from ._statistics import Snapshot
from ._timers import Timers
from ._values import TransferOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._agent import TransferAgent
    from ._options import ThreadOptions
    from ._stream_words import StreamWords
    from ._values import FenceLocation, QuarantineEntry, StallEntry, TransferResult

__all__ = ["Callbacks", "Loop"]

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
        moved = self._run_calls(agent)
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

    def _run_calls(self, agent: TransferAgent, slice_s: float = _CALLS_SLICE_S) -> bool:
        """Run waiting calls for about one time slice, so that the first order is posted soon."""
        count, until_s = len(self.mailbox), self._clock() + slice_s
        for _ in range(count):
            item = self.mailbox.take()
            if isinstance(item, TransferOrder):
                self._guarded(self.accept, agent, item)
            elif item is not None:
                self._guarded(item)
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
        self._protected(lambda: self._run_calls(agent, math.inf))
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
