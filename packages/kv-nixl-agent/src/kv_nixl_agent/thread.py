"""`TransferThread`: the thread that owns and drives one agent.

Other threads put calls into a mailbox: one append, and a wake-up if the thread sleeps. See `run_here` for the exception.

One turn of the thread: run calls, call the agent's `advance` once, deliver notifications, run timers that are due, deliver
results and quiet memory, wait. `mailbox.py` says what precedes what. An exception from a callback or call is counted and
recorded, and the thread continues. If the loop itself fails, every accepted order, posted or still in the mailbox, is reported
as failed with `thread-dead`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Final, Self, final

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.errors import AgentError, demand, demand_callable
from kv_nixl_agent.mailbox import Mailbox, Pacer
from kv_nixl_agent.nixl.binding import open_nixl
from kv_nixl_agent.nixl.side_effects import POOL
from kv_nixl_agent.options import AgentOptions, ThreadOptions
from kv_nixl_agent.values import Figures, ThreadHealth, ThreadState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_nixl_agent.nixl.port import PortFactory
    from kv_nixl_agent.streams.words import StreamWords
    from kv_nixl_agent.values import (
        FenceLocation,
        MemoryRegion,
        QuarantineEntry,
        StallEntry,
        StreamLocation,
        TransferResult,
    )

__all__ = ["TransferThread"]

_START_TIMEOUT_S: Final = 120.0
_SPIN_S: Final = 3e-4  # a short read takes 0.2 ms, and a pause 0.07
"""Time for which a caller of `run_here` waits for a turn in progress, and polls without a pause."""
_MOST_ROWS: Final = 1024
"""Most descriptors that a caller posts, at up to 5 us each."""
_MAX_CRASHES_IN_A_ROW: Final = 16
_PUBLISH_PERIOD_S: Final = 0.1


@final
class TransferThread:
    """Owns a `TransferAgent` and runs it on a separate thread: orders go to `agent`, on that thread alone.

    As a context manager it is started and closed.

    Args:
        name: NIXL agent name.
        regions: Memory to register: (address, length_bytes, device, kind).
        on_result: Called once per transfer with its result, on the thread that makes the turn, see `run_here`.
        on_notification: Called with (agent name of the peer, payload), on the thread that makes the turn.
        on_quiet: Called there with the id of a transfer that ended with `is_memory_quiet=False`, once its memory is quiet.
        options: See `AgentOptions`.
        thread_options: See `ThreadOptions`.
        port_factory: Creates the NIXL port; tests pass a fake.
        clock: Monotonic clock, in seconds.
    """

    def __init__(  # noqa: PLR0913 - wired once
        self,
        name: str,
        regions: Sequence[MemoryRegion],
        *,
        on_result: Callable[[TransferResult], None],
        on_notification: Callable[[str, bytes], None],
        on_quiet: Callable[[str], None] | None = None,
        options: AgentOptions | None = None,
        thread_options: ThreadOptions | None = None,
        port_factory: PortFactory = open_nixl,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        demand("thread_options", thread_options, ThreadOptions, NoneType)
        demand_callable(on_result, on_notification, on_quiet or on_result)
        self._name = name
        self._make_agent: Callable[[], TransferAgent] = lambda: TransferAgent(
            name, regions, options, port_factory=port_factory, clock=clock
        )
        self._on_result = on_result
        self._on_quiet: Callable[[str], None] = on_quiet or (lambda _: None)
        self._options = thread_options or ThreadOptions()
        self._clock = clock
        self._thread = self._driver = threading.Thread(target=self._run, name=f"kv-nixl-{name}", daemon=True)
        self._turn_lock = threading.Lock()
        self._ready = threading.Event()
        self._mailbox = Mailbox(on_notification, clock)
        self._pacer = Pacer(self._options, clock)
        # The last one: whether a caller has left work since the last turn (`run_here`).
        self._is_running = self._is_closing = self._is_closed = self._is_handed_back = False
        self._failure: AgentError | None = None
        self._agent: TransferAgent | None = None
        self._metadata = b""
        self._turns = self._loop_errors = 0
        self._turn_began_s = clock()
        self._figures = Figures({})
        self._results: deque[TransferResult] = deque()
        self._quarantine: Sequence[QuarantineEntry] = ()
        self._stalls: Sequence[StallEntry] = ()

    # ---------------------------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        """Create the agent and register its memory on the owner thread; return once that is done.

        Raises:
            AgentError: as `TransferAgent`; `thread-dead` if this takes over two minutes or the thread was started before.
        """
        if self._thread.ident is not None or self._is_closed:
            raise AgentError("thread-dead", f"transfer thread {self._name!r} can be started once only")
        self._is_running = True
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            self._is_closing = True  # a thread that becomes ready after all ends at once and releases its memory
            raise AgentError("thread-dead", f"transfer thread {self._name!r} was not ready in {_START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def agent_metadata(self) -> bytes:
        """Return this agent's metadata for peers, as of its start (`not-started` before `start`)."""
        self._started()
        return self._metadata

    @property
    def fence(self) -> FenceLocation:
        """(address, device, word count) of this rank's registered fence array (`not-started` before `start`)."""
        return self._started().fence

    @property
    def streams(self) -> StreamLocation | None:
        """(address, device, slots, capacity) of this rank's stream memory, None without slots (`not-started` before `start`)."""
        words = self.stream_words
        return None if words is None else words.location

    @property
    def stream_words(self) -> StreamWords | None:
        """This rank's stream memory, writable from any thread; None without stream slots (`not-started` before `start`)."""
        return self._started().stream_words

    def _started(self) -> TransferAgent:
        if self._agent is None:
            raise AgentError("not-started", f"transfer thread {self._name!r} has no agent yet; start it first")
        return self._agent

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run `function` on the owner thread soon; wakes the thread and never blocks.

        A notification that arrives after this returns is delivered after `function` has run.

        Raises:
            AgentError: `agent-closed` or `thread-dead`: the function would never run.
        """
        demand_callable(function)
        self._mailbox.put(function)
        self._pacer.wake()

    def run_here(self, function: Callable[[], object] | None, is_done: Callable[[], object], within_s: float) -> bool:
        """Run `function` on the calling thread, and turns for the transfers that it orders, until `is_done`.

        For a caller that waits for them anyway, which saves two changes of threads. Other calls and timers stay with the owner
        thread, as do notifications, which are delivered here without a function; `function` adds no peer. It gives up after a
        pause of `within_s`, or five times as long, and at once if there are over 1024 descriptors to post. An exception of a
        signal's handler passes through and ends the thread; orders of this turn may then have no result.

        Returns:
            False if nothing was run, because a turn is in progress, other work waits or the thread is dead: use `call_soon`.
        """
        if not self._turn_lock.acquire(timeout=_SPIN_S):
            return False
        try:
            agent = self._agent
            if agent is None or agent.has_work or self._mailbox.calls or self._is_closing or not self.is_alive:
                return False
            self._driver, self._is_handed_back = threading.current_thread(), True
            self._mailbox.run(function or (lambda: self._mailbox.deliver(agent.take_notifications())))
            began_s = moved_s = self._clock()
            while agent.waiting_rows <= _MOST_ROWS:
                moved_s = self._clock() if agent.advance() else moved_s
                self._deliver_ends(agent)
                now_s = self._clock()
                if is_done() or now_s - moved_s >= within_s or now_s - began_s >= 5 * within_s:
                    self._is_handed_back = agent.has_work
                    break
                if now_s - moved_s > _SPIN_S:
                    time.sleep(0)
        except Exception as error:  # noqa: BLE001 - the owner thread goes on with the transfers
            self._keep_error(error)
        except BaseException as error:
            self._keep_error(error)
            self._fail(AgentError("thread-dead", "a turn was interrupted"))  # nothing half done may count
            raise
        finally:  # no call before the lock is free: another signal may come
            self._driver = self._thread
            self._turn_lock.release()
            if self._is_handed_back:
                self._pacer.wake()
        return True

    def call_every(self, period_s: float, function: Callable[[], object]) -> None:
        """Run `function` on the owner thread about every `period_s` while the thread lives; may be called before `start`.

        Calls and notifications that were waiting when the timer fell due run first.

        Raises:
            AgentError: `bad-options`.
        """
        demand("period_s", period_s, int, float)
        demand_callable(function)
        if not period_s > 0:
            raise AgentError("bad-options", f"a timer needs a positive period, not {period_s} s")
        if self._thread.ident is None:
            self._mailbox.add_timer(period_s, function)
        else:
            self.call_soon(lambda: self._mailbox.add_timer(period_s, function))

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array; any thread.

        This is one aligned store and no call into NIXL. A producer writes the word of a new request on the engine thread, so that
        the word is in place before any reader can hold the ticket.

        Raises:
            AgentError: `bad-fence`, `not-started`, `agent-closed`.
        """
        self._started().write_fence(slot, generation)

    def allow_slow_polling(self, allowed: bool) -> None:
        """Let the thread poll for notifications less often while it is idle; any thread.

        Use it while no lease is open, so that no peer has a reason to read from this rank or to notify it. Calls and orders still
        wake the thread at once.
        """
        is_ended = self._pacer.may_poll_slowly and not allowed
        self._pacer.may_poll_slowly = allowed
        if is_ended:
            self._pacer.wake()  # the thread may be in a long sleep

    def statistics(self) -> Mapping[str, float]:
        """Return the number of turns, and the agent's counters, times and gauges as of about 0.1 s ago (0.3 s at rest)."""
        return {**self._figures.summary(), "thread_turns": float(self._turns)}

    def stalls(self) -> Sequence[StallEntry]:
        """Return the transfers on the wire without progress, as of about 0.1 s ago (0.3 s at rest)."""
        return self._stalls

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return the transfers in quarantine, as of about 0.1 s ago (0.3 s at rest)."""
        return self._quarantine

    @property
    def is_alive(self) -> bool:
        """Whether the owner thread runs and accepts orders; False from the moment it fails."""
        return self._is_running and self._failure is None

    @property
    def has_ended(self) -> bool:
        """Whether the owner thread has stopped, so that it no longer touches the memory."""
        return not self._thread.is_alive()

    @property
    def failure(self) -> AgentError | None:
        """Reason why the thread died or did not start; None while it works and after an orderly close."""
        return self._failure

    def health(self) -> ThreadHealth:
        """Return the owner thread's state and latest error, and whether a dying reader can end this process."""
        age_s = self._clock() - self._turn_began_s
        state: ThreadState = "stuck" if age_s > self._options.stuck_after_s else "running"
        if self._failure is not None:
            state = "dead"
        elif self._is_closed:
            state = "closed"
        elif self._thread.ident is None:
            state = "new"
        elif not self._thread.is_alive():
            state = "closed" if self._is_closing else "dead"
        mailbox = self._mailbox
        return ThreadHealth(
            state=state,
            turn_age_s=age_s,
            turns=self._turns,
            calls_waiting=len(mailbox.calls),
            callback_errors=mailbox.callback_errors,
            loop_errors=self._loop_errors,
            last_error=mailbox.last_error[0],
            last_traceback=mailbox.last_error[1],
            ucx_requests=POOL.state,
        )

    def close(self) -> None:
        """Shut down in order: transfers, prepared lists, peers, registrations. Idempotent, from any thread.

        Transfers in flight get `close_grace_s` to end; then they are cancelled. Every transfer gets its result, and
        every quarantined one its `on_quiet`, before this returns (unless it is called on the owner thread itself).
        """
        if self._is_closed:
            return
        if self._thread.ident is None:
            self._mailbox.shut(self._closed())
            self._is_closed = True
            return
        self._is_closing = True
        self._pacer.wake()
        if threading.current_thread() is self._driver:
            return
        self._thread.join(self._options.close_grace_s + self._options.stuck_after_s)
        self._is_closed = True

    # --------------------------------------------------------------------------------------------------------- owner

    @property
    def agent(self) -> TransferAgent:
        """The agent, for the thread that makes the turn: in `call_soon`, `run_here`, timers and callbacks.

        Raises:
            AgentError: `wrong-thread` on any other; `not-started`.
        """
        if threading.current_thread() is not self._driver:
            raise AgentError(
                "wrong-thread",
                f"the agent belongs to the owner thread of {self._name!r}; hand the call over with call_soon",
            )
        return self._agent or self._started()

    # ---------------------------------------------------------------------------------------------------------- turns

    def _run(self) -> None:
        self._pacer.begin()
        try:
            agent = self._set_up()
            if agent is not None:
                self._ready.set()
                self._turn_until_closed(agent)
                with self._turn_lock:
                    self._tear_down(agent)
        finally:
            self._is_running = False
            self._pacer.end()
            self._ready.set()

    def _set_up(self) -> TransferAgent | None:
        """Create the agent; return None, with `failure` set, if that fails."""
        try:
            if self._options.on_thread_start is not None:
                self._options.on_thread_start()
            agent = self._make_agent()
            self._metadata = agent.agent_metadata()
        except AgentError as error:
            self._fail(error)
            return None
        except Exception as error:  # noqa: BLE001 - handed to the starter
            self._fail(AgentError("thread-dead", f"the set-up raised {type(error).__name__}: {error}"))
            return None
        if agent.stream_words is not None:
            agent.stream_words.on_open = self._pacer.wake
        self._agent = agent
        self._mailbox.add_timer(_PUBLISH_PERIOD_S, lambda: self._publish(agent))
        self._publish(agent)
        return agent

    def _fail(self, failure: AgentError) -> None:
        self._failure = failure
        self._mailbox.shut(failure)
        if self._agent is not None:
            self._agent.refusal = failure

    def _turn_until_closed(self, agent: TransferAgent) -> None:
        crashes = 0
        while not self._is_closing:
            try:
                with self._turn_lock:
                    if self._failure is not None:  # perhaps of a caller's turn that this thread waited for
                        return
                    wait = self._turn(agent)
                wait()
                crashes = 0
            except BaseException as error:  # noqa: BLE001 - one bad turn must not strand every request
                self._keep_error(error)
                crashes += 1
                text = self._mailbox.last_error[0]
                is_fatal = not isinstance(error, Exception)  # SystemExit and the like
                if is_fatal or crashes >= _MAX_CRASHES_IN_A_ROW:
                    how = f"was ended by {text}" if is_fatal else f"raised {crashes} times in a row, last {text}"
                    self._fail(AgentError("thread-dead", f"the loop {how}"))
                    return
                time.sleep(self._options.max_sleep_s)

    def _keep_error(self, error: BaseException) -> None:
        self._loop_errors += 1
        self._mailbox.keep_error(error)

    def _turn(self, agent: TransferAgent) -> Callable[[], object]:
        """Do one turn; return how to wait for the next one."""
        self._turns, self._is_handed_back = self._turns + 1, False
        mailbox, pacer = self._mailbox, self._pacer
        now_s = self._turn_began_s = self._clock()
        if mailbox.note_time(now_s):
            pacer.progressed()  # quarantine may have ended meanwhile: it is polled often again
        calls, moved, news = mailbox.run_calls(), agent.advance(), mailbox.deliver(agent.take_notifications())
        mailbox.run_timers(now_s)
        has_ends, is_awaited = self._deliver_ends(agent), agent.is_awaited
        if calls or moved or news or has_ends:
            pacer.progressed()
            if is_awaited:
                return lambda: None
            time.sleep(0)  # another thread may wait for this end, or a lease's, and needs the interpreter now
        if is_awaited:
            return pacer.wait_busy
        look_s = math.inf if agent.polls is None else agent.polls.next_look_s
        if (words := agent.stream_words) is not None:
            look_s = min(look_s, words.look_out_s(now_s))
        return partial(
            pacer.wait_idle,
            mailbox.next_timer_s(now_s),
            lambda: any(
                (mailbox.calls, self._is_closing, self._is_handed_back, words is not None and words.has_opened)
            ),
            has_leftovers=agent.has_leftovers,
            look_s=look_s,
        )

    def _deliver_ends(self, agent: TransferAgent) -> bool:
        """Invoke the callbacks for results, quiet memory and streams; return True if there were any."""
        self._results += agent.take_results()
        quiet = agent.take_quiet()
        if quiet:  # an owner that hears of the last one may look at `quarantine` once more, and then never again
            self._quarantine = agent.quarantine()
        news = agent.polls.take_news() if agent.polls is not None else []
        has_ends = bool(self._results or quiet or news)
        while self._results:  # a signal in one callback loses no other result
            self._mailbox.run(self._on_result, self._results.popleft())
        for transfer_id in quiet:
            self._mailbox.run(self._on_quiet, transfer_id)
        for call in news:
            self._mailbox.run(call)
        return has_ends

    def _publish(self, agent: TransferAgent) -> None:
        self._figures = agent.figures()
        self._quarantine = agent.quarantine()
        self._stalls = agent.stalls()

    # ------------------------------------------------------------------------------------------------------ tear-down

    def _tear_down(self, agent: TransferAgent) -> None:
        """End all accepted orders, close the agent, and deliver the last results, each step whatever the one before raised."""
        failure = self._failure

        def end_orders() -> None:
            if failure is None:
                self._drain(agent)
                agent.end_all()
            else:
                agent.end_all("thread-dead", failure.message)

        if failure is None:
            self._mailbox.shut(self._closed())
        for step in (
            # Calls handed over earlier still run; orders that they give after a failure are reported as failed.
            lambda: self._mailbox.run_calls(math.inf),
            end_orders,
            lambda: self._deliver_ends(agent),
            agent.close,
            lambda: self._deliver_ends(agent),
            lambda: self._publish(agent),
        ):
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - results are still to be delivered
                self._keep_error(error)

    def _closed(self) -> AgentError:
        return AgentError("agent-closed", f"transfer thread {self._name!r} was closed")

    def _drain(self, agent: TransferAgent) -> None:
        deadline_s = self._clock() + self._options.close_grace_s
        while agent.is_busy and self._clock() < deadline_s:
            if not agent.advance():
                self._pacer.wait_busy()
            self._mailbox.deliver(agent.take_notifications())
            self._deliver_ends(agent)
        self._mailbox.deliver(agent.take_notifications())
