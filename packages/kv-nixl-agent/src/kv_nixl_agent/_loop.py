"""The loop of the owner thread: one turn runs calls and timers, advances the agent, hands out what ended, and waits."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from ._errors import AgentError
from ._pacing import Pacer, SwitchInterval
from ._statistics import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._agent import TransferAgent
    from ._options import ThreadOptions
    from ._values import QuarantineEntry, StallEntry, TransferResult

__all__ = ["Callbacks", "OwnerLoop"]

_MAX_CRASHES_IN_A_ROW: Final = 16
_PUBLISH_PERIOD_S: Final = 0.1
_CALLS_SLICE_S: Final = 2e-4


@final
@dataclass(frozen=True)
class Callbacks:
    """Whom the loop tells; all run on the owner thread."""

    on_result: Callable[[TransferResult], None]
    on_notification: Callable[[str, bytes], None]
    on_quiet: Callable[[str], None]


@final
class _Timer:
    __slots__ = ("due_s", "function", "period_s")

    def __init__(self, period_s: float, function: Callable[[], None], now_s: float) -> None:
        self.period_s = period_s
        self.function = function
        self.due_s = now_s + period_s


@final
class OwnerLoop:
    """Everything that happens on the owner thread. Other threads append to `calls`, ring `pacer`, and read values."""

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        callbacks: Callbacks,
        options: ThreadOptions,
        clock: Callable[[], float],
    ) -> None:
        self._make_agent = make_agent
        self._callbacks = callbacks
        self._options = options
        self._clock = clock
        self._timers: list[_Timer] = []
        self.calls: deque[Callable[[], None]] = deque()
        self.pacer = Pacer(options, clock)
        self.agent: TransferAgent | None = None
        self.metadata = b""
        self.fence: tuple[int, int, int] | None = None
        self.ready = threading.Event()
        self.is_closing = False
        self.failure: AgentError | None = None
        self.turns = 0
        self.turn_began_s = clock()
        self.callback_errors = 0
        self.loop_errors = 0
        self.last_error = ""
        self.statistics = Snapshot({})
        self.quarantine: Sequence[QuarantineEntry] = ()
        self.stalls: Sequence[StallEntry] = ()

    def add_timer(self, period_s: float, function: Callable[[], None]) -> None:
        """Run `function` about every `period_s`; on the owner thread, or before it runs."""
        self._timers.append(_Timer(period_s, function, self._clock()))

    def run(self) -> None:
        """Be the owner thread, from set-up to tear-down."""
        bound_s = self._options.gil_switch_interval_s
        if bound_s is not None:
            SwitchInterval.lower(bound_s)
        try:
            agent = self._set_up()
            if agent is not None:
                self.ready.set()
                self._loop(agent)
                self._tear_down(agent)
        finally:
            if bound_s is not None:
                SwitchInterval.restore(bound_s)
            self.ready.set()

    def refresh_metadata(self) -> None:
        """Publish the agent's description after its registered memory has changed."""
        if self.agent is not None:
            self.metadata = self.agent.agent_metadata()

    def _set_up(self) -> TransferAgent | None:
        try:
            if self._options.on_thread_start is not None:
                self._options.on_thread_start()
            agent = self._make_agent()
            self.metadata = agent.agent_metadata()
        except AgentError as error:
            self.failure = error
            return None
        except Exception as error:  # noqa: BLE001 - handed to the starter
            self.failure = AgentError("thread-dead", f"the set-up raised {type(error).__name__}: {error}")
            return None
        self.fence = agent.fence
        self.agent = agent
        self.add_timer(_PUBLISH_PERIOD_S, lambda: self._publish(agent))
        self._publish(agent)
        return agent

    def _loop(self, agent: TransferAgent) -> None:
        crashes = 0
        while not self.is_closing:
            try:
                self._turn(agent)
                crashes = 0
            except Exception as error:  # noqa: BLE001 - one bad turn must not strand every request
                self.loop_errors += 1
                self.last_error = f"{type(error).__name__}: {error}"
                crashes += 1
                if crashes >= _MAX_CRASHES_IN_A_ROW:
                    self.failure = AgentError(
                        "thread-dead", f"the loop raised {crashes} times in a row, last {self.last_error}"
                    )
                    return
                time.sleep(self._options.max_sleep_s)

    def _turn(self, agent: TransferAgent) -> None:
        self.turns += 1
        self.turn_began_s = self._clock()
        moved = self._run_calls()
        next_timer_s = self._run_timers(self.turn_began_s)
        moved = agent.advance() or moved
        moved = self._hand_out(agent) or moved
        if moved:
            self.pacer.progressed()
        elif agent.is_busy:
            self.pacer.wait_busy()
        else:
            self.pacer.wait_idle(next_timer_s, self._has_work)

    def _has_work(self) -> bool:
        return bool(self.calls) or self.is_closing

    def _run_calls(self, slice_s: float = _CALLS_SLICE_S) -> bool:
        """Run what was there at the beginning, but not much longer than a slice, so that the first order is soon posted."""
        count, until_s = len(self.calls), self._clock() + slice_s
        for _ in range(count):
            self._guarded(self.calls.popleft())
            if self._clock() > until_s:
                break
        return count > 0

    def _run_timers(self, now_s: float) -> float:
        next_s = now_s + 1.0
        for timer in list(self._timers):
            if timer.due_s <= now_s:
                timer.due_s = now_s + timer.period_s
                self._guarded(timer.function)
            next_s = min(next_s, timer.due_s)
        return next_s

    def _hand_out(self, agent: TransferAgent) -> bool:
        arrived = agent.take_notifications()
        for sender, payload in arrived:
            self._guarded(self._callbacks.on_notification, sender, payload)
        return self._hand_out_ends(agent) or bool(arrived)

    def _hand_out_ends(self, agent: TransferAgent) -> bool:
        results, quiet = agent.take_results(), agent.take_quiet()
        for result in results:
            self._guarded(self._callbacks.on_result, result)
        for transfer_id in quiet:
            self._guarded(self._callbacks.on_quiet, transfer_id)
        return bool(results or quiet)

    def _guarded(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the caller's code must not kill the thread
            self.callback_errors += 1
            self.last_error = f"{type(error).__name__}: {error}"

    def _publish(self, agent: TransferAgent) -> None:
        self.statistics = agent.snapshot()
        self.quarantine = agent.quarantine()
        self.stalls = agent.stalls()

    def _tear_down(self, agent: TransferAgent) -> None:
        try:
            if self.failure is None:
                self._drain(agent)
            else:
                agent.end_all("thread-dead", str(self.failure))
                self._hand_out_ends(agent)
            agent.close()
        except Exception as error:  # noqa: BLE001 - results are still handed out
            self.loop_errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
        self._hand_out_ends(agent)
        self._publish(agent)
        self.agent = None

    def _drain(self, agent: TransferAgent) -> None:
        """Let what is in flight end within the grace time; calls that were handed over before the close still run."""
        deadline_s = self._clock() + self._options.close_grace_s
        self._run_calls(math.inf)
        while agent.is_busy and self._clock() < deadline_s:
            if not agent.advance():
                self.pacer.wait_busy()
            self._hand_out(agent)
        agent.end_all()
        self._hand_out(agent)
