"""`TransferThread`: the thread that owns one agent.

Other threads only put callables and orders into a queue (one append, and a bell if the thread sleeps); they never
touch NIXL and never wait for it. One turn of the loop: run what others put in, run timers that are due, one
`advance` of the agent, hand out results, quiet memory and notifications, wait. A callback or a callable that raises
is counted and kept in `health`, and the loop goes on. Should the loop itself fail, every transfer in progress is
reported failed with `thread-dead`, and `is_alive` turns false.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

from ._agent import TransferAgent
from ._bindings import open_nixl
from ._errors import AgentError
from ._loop import Callbacks, OwnerLoop
from ._options import AgentOptions, ThreadOptions
from ._values import TransferOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from ._port import MemoryKind, PortFactory
    from ._values import MemoryRegion, QuarantineEntry, StallEntry, TransferResult

    Rows = npt.NDArray[np.uint64]
    Indices = npt.NDArray[np.int32]

__all__ = ["ThreadHealth", "TransferThread"]

_START_TIMEOUT_S: Final = 120.0

ThreadState = Literal["new", "running", "stuck", "dead", "closed"]


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

    state: ThreadState
    turn_age_s: float
    turns: int
    callback_errors: int
    loop_errors: int
    last_error: str


@final
class TransferThread:
    """Owns a `TransferAgent` on a thread of its own.

    Methods under "owner" may only be called on that thread, through `call_soon`, from timers or from callbacks;
    elsewhere they raise `wrong-thread`.

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
        self._clock = clock
        self._thread_options = thread_options or ThreadOptions()
        given_regions, agent_options = tuple(regions), options or AgentOptions()

        def make_agent() -> TransferAgent:
            return TransferAgent(name, given_regions, agent_options, port_factory=port_factory, clock=clock)

        callbacks = Callbacks(on_result, on_notification, on_quiet or _ignore)
        self._loop = OwnerLoop(make_agent, callbacks, self._thread_options, clock)
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run, name=f"kv-nixl-{name}", daemon=True)

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
        if not self._loop.ready.wait(_START_TIMEOUT_S):
            raise AgentError(
                "thread-dead", f"transfer thread {self._name!r} was not ready within {_START_TIMEOUT_S:.0f} s"
            )
        if self._loop.failure is not None:
            raise self._loop.failure

    def agent_metadata(self) -> bytes:
        """Return the description of this agent for peers, as of the latest registration.

        Raises:
            AgentError: `not-started`.
        """
        if not self._loop.metadata:
            raise AgentError("not-started", f"transfer thread {self._name!r} has no agent yet; start it first")
        return self._loop.metadata

    @property
    def fence(self) -> tuple[int, int, int]:
        """(address, device, word count) of this rank's registered fence array.

        Raises:
            AgentError: `not-started`.
        """
        if self._loop.fence is None:
            raise AgentError("not-started", f"transfer thread {self._name!r} has no agent yet; start it first")
        return self._loop.fence

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon; wakes it; never blocks.

        Raises:
            AgentError: `agent-closed` or `thread-dead`: the function would never run.
        """
        if self._is_closed or self._loop.is_closing or self._loop.failure is not None:
            raise self._loop.failure or AgentError("agent-closed", f"transfer thread {self._name!r} was closed")
        self._loop.calls.append(function)
        self._loop.pacer.wake()

    def call_every(self, period_s: float, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread about every `period_s` while it lives; before `start`, too.

        Raises:
            AgentError: `bad-options`.
        """
        if not period_s > 0:
            raise AgentError("bad-options", f"a timer needs a positive period, not {period_s} s")
        if self._thread.ident is None:
            self._loop.add_timer(period_s, function)
        else:
            self.call_soon(lambda: self._loop.add_timer(period_s, function))

    def submit(self, order: TransferOrder) -> None:
        """Order a transfer from any thread; it costs the caller one append. Refusals come through `on_result`."""
        self.call_soon(lambda: self._own().submit(order))

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array; any thread.

        It is one aligned store and no call into NIXL. A producer writes the word of a new request on the engine
        thread, so that it is there before anybody can hold the ticket.

        Raises:
            AgentError: `bad-fence`, `not-started`.
        """
        agent = self._loop.agent
        if agent is None:
            raise AgentError("not-started", f"transfer thread {self._name!r} has no agent; start it first")
        agent.write_fence(slot, generation)

    def statistics(self) -> Mapping[str, float]:
        """Return counters, recent times and gauges, as of at most about 0.1 s ago, and those of the thread."""
        health = self.health()
        return {
            **self._loop.statistics.summary(),
            "thread_turns": float(health.turns),
            "thread_callback_errors": float(health.callback_errors),
            "thread_loop_errors": float(health.loop_errors),
            "thread_calls_waiting": float(len(self._loop.calls)),
        }

    def stalls(self) -> Sequence[StallEntry]:
        """Return the transfers on the wire that do not get on, as of at most about 0.1 s ago."""
        return self._loop.stalls

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return what quarantine holds, as of at most about 0.1 s ago."""
        return self._loop.quarantine

    @property
    def is_alive(self) -> bool:
        """Whether the owner thread runs."""
        return self._thread.is_alive() and self._loop.failure is None

    @property
    def failure(self) -> AgentError | None:
        """Why the thread died or did not start; None while all is well and after an orderly close."""
        return self._loop.failure

    def health(self) -> ThreadHealth:
        """Return the state of the owner thread."""
        age_s = self._clock() - self._loop.turn_began_s
        if self._loop.failure is not None:
            state: ThreadState = "dead"
        elif self._is_closed:
            state = "closed"
        elif self._thread.ident is None:
            state = "new"
        elif not self._thread.is_alive():
            state = "dead"
        else:
            state = "stuck" if age_s > self._thread_options.stuck_after_s else "running"
        return ThreadHealth(
            state, age_s, self._loop.turns, self._loop.callback_errors, self._loop.loop_errors, self._loop.last_error
        )

    def close(self) -> None:
        """End everything in order: transfers, prepared lists, peers, registrations. Idempotent, from any thread.

        Transfers in flight get `close_grace_s` to end; then they are cancelled. Every transfer gets its result, and
        every quarantined one its `on_quiet`, before this returns (unless it is called on the owner thread itself).
        """
        if self._is_closed:
            return
        if self._thread.ident is None:
            self._is_closed = True
            return
        self._loop.is_closing = True
        self._loop.pacer.wake()
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
        """Queue a read; `fence` is (slot, generation) to verify after it. Its end comes through `on_result`.

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

    def declare_quiet(self, transfer_id: str) -> bool:
        """End a quarantine on the caller's word; see `TransferAgent.declare_quiet`."""
        return self._own().declare_quiet(transfer_id)

    def send_notification(self, peer: str, payload: bytes) -> bool:
        """Send `payload` to a peer; False if it cannot be sent."""
        return self._own().send_notification(peer, payload)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register further memory; `agent_metadata` changes."""
        self._own().register(regions)
        self._loop.refresh_metadata()

    def _own(self) -> TransferAgent:
        if threading.current_thread() is not self._thread:
            raise AgentError(
                "wrong-thread",
                f"this method belongs to the owner thread of {self._name!r}; hand it over with call_soon",
            )
        if self._loop.agent is None:
            raise AgentError("agent-closed", f"transfer thread {self._name!r} has no agent any more")
        return self._loop.agent


def _ignore(_: str) -> None:
    """Stand in for a callback that was not given."""
