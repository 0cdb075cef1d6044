"""`TransferThread`: the thread that owns one agent.

Other threads only put callables and orders into a queue (one append, and a bell if the thread sleeps); they never touch NIXL
and never wait for it. One turn of the loop: run what others put in, run timers that are due, one `advance` of the agent,
hand out results, quiet memory and notifications, wait. A callback or a callable that raises is counted and kept in
`health`, and the loop goes on. Should the loop itself fail, every transfer in progress is reported failed with
`thread-dead`, and `is_alive` turns false.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from ._agent import TransferAgent
from ._bindings import open_nixl
from ._errors import AgentError
from ._options import AgentOptions, ThreadOptions
from ._pacing import Pacer, SwitchInterval
from ._values import TransferOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from ._port import MemoryKind, PortFactory
    from ._values import MemoryRegion, QuarantineEntry, TransferResult

    Rows = npt.NDArray[np.uint64]
    Indices = npt.NDArray[np.int32]

__all__ = ["ThreadHealth", "TransferThread"]

_START_TIMEOUT_S = 120.0
_MAX_CRASHES_IN_A_ROW = 16


@final
@dataclass(frozen=True, slots=True)
class ThreadHealth:
    """State of the owner thread.

    Attributes:
        state: `new`, `running`, `stuck` (one turn takes longer than `stuck_after_s`), `dead` or `closed`.
        turn_age_s: Time since the current turn began.
        turns: Turns of the loop so far.
        callback_errors: Callbacks and callables that raised.
        loop_errors: Turns that raised.
        last_error: Text of the latest of these errors.
    """

    state: Literal["new", "running", "stuck", "dead", "closed"]
    turn_age_s: float
    turns: int
    callback_errors: int
    loop_errors: int
    last_error: str


@final
class _Timer:
    __slots__ = ("due_s", "function", "period_s")

    def __init__(self, period_s: float, function: Callable[[], None], now_s: float) -> None:
        self.period_s = period_s
        self.function = function
        self.due_s = now_s + period_s


@final
class TransferThread:
    """Owns a `TransferAgent` on a thread of its own.

    Methods under "owner" may only be called on that thread, through `call_soon`, from timers or from callbacks; elsewhere
    they raise `wrong-thread`.

    Args:
        name: NIXL agent name.
        regions: Memory to register: (address, length_bytes, device, kind).
        on_result: Called on the owner thread with the one result of every transfer.
        on_notification: Called on the owner thread with (agent name of the peer, payload).
        on_quiet: Called on the owner thread with the id of a transfer whose result said `is_memory_quiet=False`, once
            its local memory can be used again.
        options: See `AgentOptions`.
        thread_options: See `ThreadOptions`.
        port_factory: Makes the NIXL port; a fake in tests.
        clock: Monotonic seconds.
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
        self._name = name
        self._regions = tuple(regions)
        self._on_result = on_result
        self._on_notification = on_notification
        self._on_quiet = on_quiet
        self._options = options or AgentOptions()
        self._thread_options = thread_options or ThreadOptions()
        self._port_factory = port_factory
        self._clock = clock
        self._agent: TransferAgent | None = None
        self._metadata = b""
        self._fence: tuple[int, int, int] | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[_Timer] = []
        self._pacer = Pacer(self._thread_options, clock)
        self._ready = threading.Event()
        self._is_closing = False
        self._is_closed = False
        self._failure: AgentError | None = None
        self._turns = 0
        self._turn_began_s = clock()
        self._callback_errors = 0
        self._loop_errors = 0
        self._last_error = ""
        self._statistics: Mapping[str, float] = {}
        self._quarantine: Sequence[QuarantineEntry] = ()
        self._thread = threading.Thread(target=self._run, name=f"kv-nixl-{name}", daemon=True)

    # ---------------------------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        """Create the agent and register its memory on the owner thread; returns once that is done.

        Raises:
            AgentError: what `TransferAgent` raises; `thread-dead` if that takes longer than two minutes or the thread
                was started before.
        """
        if self._thread.ident is not None or self._is_closed:
            raise AgentError("thread-dead", f"transfer thread {self._name!r} can be started once only")
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise AgentError(
                "thread-dead", f"transfer thread {self._name!r} was not ready within {_START_TIMEOUT_S:.0f} s"
            )
        if self._failure is not None:
            raise self._failure

    def agent_metadata(self) -> bytes:
        """Return the description of this agent for peers, as of the latest registration.

        Raises:
            AgentError: `not-started`.
        """
        if not self._metadata:
            raise AgentError("not-started", f"transfer thread {self._name!r} has no agent yet; start it first")
        return self._metadata

    @property
    def fence(self) -> tuple[int, int, int]:
        """(address, device, word count) of this rank's registered fence array.

        Raises:
            AgentError: `not-started`.
        """
        if self._fence is None:
            raise AgentError("not-started", f"transfer thread {self._name!r} has no agent yet; start it first")
        return self._fence

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon; wakes it; never blocks.

        Raises:
            AgentError: `agent-closed` or `thread-dead`: the function would never run.
        """
        if self._is_closed or self._is_closing or self._failure is not None:
            raise self._failure or AgentError("agent-closed", f"transfer thread {self._name!r} was closed")
        self._calls.append(function)
        self._pacer.wake()

    def call_every(self, period_s: float, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread about every `period_s` while it lives; before `start`, too.

        Raises:
            AgentError: `bad-options`.
        """
        if not period_s > 0:
            raise AgentError("bad-options", f"a timer needs a positive period, not {period_s} s")
        timer = _Timer(period_s, function, self._clock())
        if self._thread.ident is None:
            self._timers.append(timer)
        else:
            self.call_soon(lambda: self._timers.append(timer))

    def submit(self, order: TransferOrder) -> None:
        """Order a transfer from any thread; it costs the caller one append. Refusals come through `on_result`."""
        self.call_soon(lambda: self._own().submit(order))

    def statistics(self) -> Mapping[str, float]:
        """Return counters, recent times and gauges, as of at most about 0.1 s ago, and those of the thread."""
        health = self.health()
        return {
            **self._statistics,
            "thread_turns": float(health.turns),
            "thread_callback_errors": float(health.callback_errors),
            "thread_loop_errors": float(health.loop_errors),
            "thread_calls_waiting": float(len(self._calls)),
        }

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return what quarantine holds, as of at most about 0.1 s ago."""
        return self._quarantine

    @property
    def is_alive(self) -> bool:
        """Whether the owner thread runs."""
        return self._thread.is_alive() and self._failure is None

    @property
    def failure(self) -> AgentError | None:
        """Why the thread died or did not start; None while all is well and after an orderly close."""
        return self._failure

    def health(self) -> ThreadHealth:
        """Return the state of the owner thread."""
        age_s = self._clock() - self._turn_began_s
        if self._failure is not None:
            state: Literal["new", "running", "stuck", "dead", "closed"] = "dead"
        elif self._is_closed:
            state = "closed"
        elif self._thread.ident is None:
            state = "new"
        elif not self._thread.is_alive():
            state = "dead"
        else:
            state = "stuck" if age_s > self._thread_options.stuck_after_s else "running"
        return ThreadHealth(state, age_s, self._turns, self._callback_errors, self._loop_errors, self._last_error)

    def close(self) -> None:
        """End everything in order: transfers, prepared lists, peers, registrations. Idempotent, from any thread.

        Transfers in flight get `close_grace_s` to end; then they are cancelled. Every transfer gets its result, and every
        quarantined one its `on_quiet`, before this returns (unless it is called on the owner thread itself).
        """
        if self._is_closed:
            return
        if self._thread.ident is None:
            self._is_closed = True
            return
        self._is_closing = True
        self._pacer.wake()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(self._thread_options.close_grace_s + self._thread_options.stuck_after_s)
        self._is_closed = True

    # --------------------------------------------------------------------------------------------------------- owner

    def add_peer(
        self,
        peer: str,
        agent_metadata: bytes,
        *,
        local_rows: Rows,
        peer_rows: Rows,
        memory_kind: MemoryKind | Sequence[MemoryKind] = "DRAM",
        fence: tuple[int, int, int] | None = None,
        local_kind: MemoryKind | Sequence[MemoryKind] | None = None,
    ) -> None:
        """Know a peer rank under the key `peer`; see `TransferAgent.add_peer`."""
        self._own().add_peer(
            peer,
            agent_metadata,
            local_rows=local_rows,
            peer_rows=peer_rows,
            memory_kind=memory_kind,
            local_kind=local_kind,
            fence=fence,
        )

    def replace_peer(
        self,
        peer: str,
        agent_metadata: bytes,
        *,
        local_rows: Rows,
        peer_rows: Rows,
        memory_kind: MemoryKind | Sequence[MemoryKind] = "DRAM",
        fence: tuple[int, int, int] | None = None,
        local_kind: MemoryKind | Sequence[MemoryKind] | None = None,
    ) -> None:
        """Know a restarted peer under its old key; see `TransferAgent.replace_peer`."""
        self._own().replace_peer(
            peer,
            agent_metadata,
            local_rows=local_rows,
            peer_rows=peer_rows,
            memory_kind=memory_kind,
            local_kind=local_kind,
            fence=fence,
        )

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; see `TransferAgent.remove_peer`."""
        self._own().remove_peer(peer)

    def has_peer(self, peer: str) -> bool:
        """Return whether `peer` can be used."""
        return self._own().has_peer(peer)

    def peers(self) -> Mapping[str, Mapping[str, object]]:
        """Return a snapshot of every peer."""
        return self._own().peers()

    def post_read(
        self,
        transfer_id: str,
        peer: str,
        local_indices: Indices,
        peer_indices: Indices,
        *,
        notification: bytes = b"",
        deadline_s: float = 30.0,
        fence: tuple[int, int] | None = None,
    ) -> None:
        """Queue a read; `fence` is (slot, generation) to verify after it. Its end comes through `on_result`, never here.

        Raises:
            AgentError: `duplicate-transfer`.
        """
        self._own().submit(
            TransferOrder(transfer_id, peer, local_indices, peer_indices, notification, deadline_s, fence)
        )

    def post(self, order: TransferOrder) -> None:
        """Queue any transfer; its end comes through `on_result`.

        Raises:
            AgentError: `duplicate-transfer`.
        """
        self._own().submit(order)

    def cancel(self, transfer_id: str) -> None:
        """End a transfer early; its result says `cancelled`. Unknown ids are fine: it may just have ended."""
        self._own().cancel(transfer_id)

    def send_notification(self, peer: str, payload: bytes) -> bool:
        """Send `payload` to a peer; False if it cannot be sent."""
        return self._own().send_notification(peer, payload)

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array."""
        self._own().write_fence(slot, generation)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register further memory; `agent_metadata` changes."""
        agent = self._own()
        agent.register(regions)
        self._metadata = agent.agent_metadata()

    def _own(self) -> TransferAgent:
        if threading.current_thread() is not self._thread:
            raise AgentError(
                "wrong-thread",
                f"this method belongs to the owner thread of {self._name!r}; hand it over with call_soon",
            )
        if self._agent is None:
            raise AgentError("agent-closed", f"transfer thread {self._name!r} has no agent any more")
        return self._agent

    # ------------------------------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        bound_s = self._thread_options.gil_switch_interval_s
        if bound_s is not None:
            SwitchInterval.lower(bound_s)
        try:
            self._set_up()
        except BaseException as error:  # noqa: BLE001 - handed to the starter
            self._failure = (
                error if isinstance(error, AgentError) else AgentError("thread-dead", f"set-up raised {error!r}")
            )
        else:
            self._ready.set()
            self._loop()
            self._tear_down()
        finally:
            if bound_s is not None:
                SwitchInterval.restore(bound_s)
            self._ready.set()

    def _set_up(self) -> None:
        if self._thread_options.on_thread_start is not None:
            self._thread_options.on_thread_start()
        agent = TransferAgent(
            self._name, self._regions, self._options, port_factory=self._port_factory, clock=self._clock
        )
        self._metadata = agent.agent_metadata()
        self._fence = agent.fence
        self._agent = agent
        self._timers.append(_Timer(0.1, self._publish, self._clock()))
        self._publish()

    def _loop(self) -> None:
        crashes = 0
        while not self._is_closing:
            try:
                self._turn()
                crashes = 0
            except Exception as error:  # noqa: BLE001 - one bad turn must not strand every request
                self._loop_errors += 1
                self._last_error = f"{type(error).__name__}: {error}"
                crashes += 1
                if crashes >= _MAX_CRASHES_IN_A_ROW:
                    self._failure = AgentError(
                        "thread-dead",
                        f"the loop of {self._name!r} raised {crashes} times in a row, last {self._last_error}",
                    )
                    return
                time.sleep(self._thread_options.max_sleep_s)

    def _turn(self) -> None:
        self._turns += 1
        self._turn_began_s = self._clock()
        agent = self._own()
        moved = self._run_calls()
        next_timer_s = self._run_timers(self._turn_began_s)
        moved = agent.advance() or moved
        moved = self._hand_out(agent) or moved
        if moved:
            self._pacer.progressed()
        elif agent.is_busy:
            self._pacer.wait_busy()
        else:
            self._pacer.wait_idle(next_timer_s, self._has_work)

    def _has_work(self) -> bool:
        return bool(self._calls) or self._is_closing

    def _run_calls(self) -> bool:
        count = len(self._calls)  # what arrives meanwhile waits for the next turn, so that polling is never starved
        for _ in range(count):
            self._guarded(self._calls.popleft())
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
        results, quiet, arrived = agent.take_results(), agent.take_quiet(), agent.take_notifications()
        for result in results:
            self._guarded(self._on_result, result)
        if self._on_quiet is not None:
            for transfer_id in quiet:
                self._guarded(self._on_quiet, transfer_id)
        for sender, payload in arrived:
            self._guarded(self._on_notification, sender, payload)
        return bool(results or quiet or arrived)

    def _guarded(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the caller's code must not kill the thread
            self._callback_errors += 1
            self._last_error = f"{type(error).__name__}: {error}"

    def _publish(self) -> None:
        agent = self._own()
        self._statistics = agent.statistics()
        self._quarantine = agent.quarantine()

    def _tear_down(self) -> None:
        agent = self._agent
        assert agent is not None
        try:
            if self._failure is None:
                self._drain(agent)
            else:
                agent.end_all("thread-dead", str(self._failure))
            agent.close()
        except Exception as error:  # noqa: BLE001 - results are still handed out
            self._loop_errors += 1
            self._last_error = f"{type(error).__name__}: {error}"
        for result in agent.take_results():
            self._guarded(self._on_result, result)
        if self._on_quiet is not None:
            for transfer_id in agent.take_quiet():
                self._guarded(self._on_quiet, transfer_id)
        self._statistics, self._quarantine = agent.statistics(), ()
        self._agent = None

    def _drain(self, agent: TransferAgent) -> None:
        """Let what is in flight end within the grace time; work that was handed over before the close still runs."""
        deadline_s = self._clock() + self._thread_options.close_grace_s
        self._run_calls()
        while agent.is_busy and self._clock() < deadline_s:
            if not agent.advance():
                self._pacer.wait_busy()
            self._hand_out(agent)
        agent.end_all()
        self._hand_out(agent)
