"""`TransferThread`: the thread that owns and drives one agent.

Other threads only put calls into a mailbox (one append, and a wake-up if the thread sleeps); they never touch NIXL and never wait
for it. `loop.py` is the thread's own side.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

import numpy as np

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.loop import Callbacks, Loop
from kv_nixl_agent.nixl.binding import open_nixl
from kv_nixl_agent.nixl.side_effects import POOL
from kv_nixl_agent.options import AgentOptions, ThreadOptions
from kv_nixl_agent.values import TransferOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.nixl.port import PortFactory
    from kv_nixl_agent.nixl.side_effects import State
    from kv_nixl_agent.streams.polls import StreamListener, StreamWatch
    from kv_nixl_agent.streams.words import StreamWords
    from kv_nixl_agent.values import (
        FenceLocation,
        MemoryRegion,
        PeerDescription,
        QuarantineEntry,
        StallEntry,
        StreamLocation,
        TransferResult,
    )

    Indices = npt.NDArray[np.int32]

__all__ = ["ThreadHealth", "ThreadState", "TransferThread"]

_START_TIMEOUT_S: Final = 120.0
_NO_INDICES: Final = np.empty(0, dtype=np.int32)


@final
class TransferThread:
    """Owns a `TransferAgent` and runs it on a separate thread.

    Methods under "owner" may be called only on that thread: through `call_soon`, from timers or from callbacks. On other threads
    they raise `wrong-thread`, and `agent-closed` once the thread no longer has an agent.

    Args:
        name: NIXL agent name.
        regions: Memory to register: (address, length_bytes, device, kind).
        on_result: Called on the owner thread once per transfer with its result.
        on_notification: Called on the owner thread with (agent name of the peer, payload).
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
        self._name = name
        self._clock = clock
        self._options = thread_options or ThreadOptions()
        self._is_closed = False
        given_regions, agent_options = tuple(regions), options or AgentOptions()

        def make_agent() -> TransferAgent:
            return TransferAgent(name, given_regions, agent_options, port_factory=port_factory, clock=clock)

        callbacks = Callbacks(on_result, on_notification, on_quiet)
        self._loop = Loop(name, make_agent, callbacks, self._options, clock)
        self._thread = threading.Thread(target=self._loop.run, name=f"kv-nixl-{name}", daemon=True)

    # ---------------------------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        """Create the agent and register its memory on the owner thread; return once that is done.

        Raises:
            AgentError: as `TransferAgent`; `thread-dead` if this takes over two minutes or the thread was started before.
        """
        if self._thread.ident is not None or self._is_closed:
            raise AgentError("thread-dead", f"transfer thread {self._name!r} can be started once only")
        self._thread.start()
        if not self._loop.ready.wait(_START_TIMEOUT_S):
            raise AgentError("thread-dead", f"transfer thread {self._name!r} was not ready in {_START_TIMEOUT_S:.0f} s")
        if self._loop.failure is not None:
            raise self._loop.failure

    def agent_metadata(self) -> bytes:
        """Return this agent's metadata for peers, as of the latest registration.

        Raises:
            AgentError: `not-started`.
        """
        if not self._loop.metadata:
            raise self._not_started()
        return self._loop.metadata

    @property
    def fence(self) -> FenceLocation:
        """(address, device, word count) of this rank's registered fence array.

        Raises:
            AgentError: `not-started`.
        """
        if self._loop.fence is None:
            raise self._not_started()
        return self._loop.fence

    @property
    def streams(self) -> StreamLocation | None:
        """(address, device, slots, capacity) of this rank's stream memory; None without the option `stream_slots`.

        Raises:
            AgentError: `not-started`.
        """
        if self._loop.fence is None:
            raise self._not_started()
        return None if self._loop.stream_words is None else self._loop.stream_words.location

    @property
    def stream_words(self) -> StreamWords | None:
        """This rank's stream memory, writable from any thread; None without stream slots.

        Raises:
            AgentError: `not-started`.
        """
        if self._loop.fence is None:
            raise self._not_started()
        return self._loop.stream_words

    def _not_started(self) -> AgentError:
        return AgentError("not-started", f"transfer thread {self._name!r} has no agent yet; start it first")

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run `function` on the owner thread soon; wakes the thread and never blocks.

        A notification that arrives after this returns is delivered after `function` has run.

        Raises:
            AgentError: `agent-closed` or `thread-dead`: the function would never run.
        """
        self._loop.mailbox.put(function)
        self._loop.pacer.wake()

    def call_every(self, period_s: float, function: Callable[[], object]) -> None:
        """Run `function` on the owner thread about every `period_s` while the thread lives; may be called before `start`.

        Calls and notifications that were waiting when the timer fell due run first.

        Raises:
            AgentError: `bad-options`.
        """
        if not period_s > 0:
            raise AgentError("bad-options", f"a timer needs a positive period, not {period_s} s")
        if self._thread.ident is None:
            self._loop.timers.add(period_s, function, self._clock())
        else:
            self.call_soon(lambda: self._loop.timers.add(period_s, function, self._clock()))

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array; any thread.

        This is one aligned store and no call into NIXL. A producer writes the word of a new request on the engine thread, so that
        the word is in place before any reader can hold the ticket.

        Raises:
            AgentError: `bad-fence`, `not-started`, `agent-closed`.
        """
        agent = self._loop.agent
        if agent is None:
            if self._loop.fence is not None:
                raise AgentError("agent-closed", f"transfer thread {self._name!r} has no agent any more")
            raise self._not_started()
        agent.write_fence(slot, generation)

    def allow_slow_polling(self, allowed: bool) -> None:
        """Let the thread poll for notifications less often while it is idle; any thread.

        Use it while no lease is open, so that no peer has a reason to read from this rank or to notify it. Calls and orders still
        wake the thread at once.
        """
        self._loop.pacer.may_poll_slowly = allowed

    def statistics(self) -> Mapping[str, float]:
        """Return the thread's figures, and the agent's counters, times and gauges as of about 0.1 s ago (0.3 s at rest)."""
        return {
            **self._loop.snapshot.summary(),
            "thread_turns": float(self._loop.turns),
            "thread_callback_errors": float(self._loop.errors.callback_errors),
            "thread_loop_errors": float(self._loop.errors.loop_errors),
            "thread_calls_waiting": float(len(self._loop.mailbox)),
        }

    def stalls(self) -> Sequence[StallEntry]:
        """Return the transfers on the wire without progress, as of about 0.1 s ago (0.3 s at rest)."""
        return self._loop.stalls

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Return the transfers in quarantine, as of about 0.1 s ago (0.3 s at rest)."""
        return self._loop.quarantine

    @property
    def is_alive(self) -> bool:
        """Whether the owner thread runs and accepts orders; False from the moment it fails."""
        return self._thread.is_alive() and self._loop.failure is None

    @property
    def has_ended(self) -> bool:
        """Whether the owner thread has stopped, so that it no longer touches the memory."""
        return not self._thread.is_alive()

    @property
    def failure(self) -> AgentError | None:
        """Reason why the thread died or did not start; None while it works and after an orderly close."""
        return self._loop.failure

    def health(self) -> ThreadHealth:
        """Return the owner thread's state and latest error, and whether a dying reader can end this process."""
        age_s = self._clock() - self._loop.turn_began_s
        error, text = self._loop.errors.last
        return ThreadHealth(
            state=self._state(age_s),
            turn_age_s=age_s,
            turns=self._loop.turns,
            calls_waiting=len(self._loop.mailbox),
            callback_errors=self._loop.errors.callback_errors,
            loop_errors=self._loop.errors.loop_errors,
            last_error=error,
            last_traceback=text,
            ucx_requests=POOL.state,
        )

    def _state(self, turn_age_s: float) -> ThreadState:
        if self._loop.failure is not None:
            return "dead"
        if self._is_closed:
            return "closed"
        if self._thread.ident is None:
            return "new"
        if not self._thread.is_alive():
            return "closed" if self._loop.is_closing else "dead"
        return "stuck" if turn_age_s > self._options.stuck_after_s else "running"

    def close(self) -> None:
        """Shut down in order: transfers, prepared lists, peers, registrations. Idempotent, from any thread.

        Transfers in flight get `close_grace_s` to end; then they are cancelled. Every transfer gets its result, and
        every quarantined one its `on_quiet`, before this returns (unless it is called on the owner thread itself).
        """
        if self._is_closed:
            return
        if self._thread.ident is None:
            self._loop.mailbox.shut("agent-closed", f"transfer thread {self._name!r} was closed")
            self._is_closed = True
            return
        self._loop.is_closing = True
        self._loop.pacer.wake()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(self._options.close_grace_s + self._options.stuck_after_s)
        self._is_closed = True

    # --------------------------------------------------------------------------------------------------------- owner

    @property
    def agent(self) -> TransferAgent:
        """The agent itself, for members without a method here, such as `peers`.

        Raises:
            AgentError: `wrong-thread`, `agent-closed`.
        """
        if threading.current_thread() is not self._thread:
            raise AgentError(
                "wrong-thread",
                f"this method belongs to the owner thread of {self._name!r}; hand it over with call_soon",
            )
        if self._loop.agent is None:
            raise AgentError("agent-closed", f"transfer thread {self._name!r} has no agent any more")
        return self._loop.agent

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register further memory; `agent_metadata` changes."""
        agent = self.agent
        agent.register(regions)
        self._loop.metadata = agent.agent_metadata()

    def add_peer(self, spec: PeerDescription) -> None:
        """Register a peer rank and start connecting to it; see `TransferAgent.add_peer`."""
        self.agent.add_peer(spec)

    def replace_peer(self, spec: PeerDescription) -> None:
        """Register a restarted peer whose key may be in use; see `TransferAgent.replace_peer`."""
        self.agent.replace_peer(spec)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; see `TransferAgent.remove_peer`."""
        self.agent.remove_peer(peer)

    def has_peer(self, peer: str) -> bool:
        """Return whether `peer` can be used."""
        return self.agent.has_peer(peer)

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
        """Queue a read of a peer's rows into ours. Its end, even for an index out of range, is reported through `on_result`.

        Args:
            transfer_id: Name of the transfer, unique among those that have not ended.
            peer: The peer's key.
            local_indices: Our rows to fill, int32 of shape (n,); see `PeerSpec` for the rows.
            peer_indices: The peer's rows to read, int32 of the same length: row `peer_indices[i]` goes to `local_indices[i]`.
            notification: Bytes for the peer once the data has arrived and its fence has held; none if empty.
            deadline_s: Seconds from now after which the read ends with `timed-out`.
            fence: (slot, generation) to verify after the data; None for data that needs no proof.

        Raises:
            AgentError: `duplicate-transfer`, `wrong-thread`, `agent-closed`.
        """
        self._loop.accept(
            self.agent, TransferOrder(transfer_id, peer, local_indices, peer_indices, notification, deadline_s, fence)
        )

    def probe(self, transfer_id: str, peer: str, *, deadline_s: float) -> None:
        """Read one word of a peer, whatever its value, to see whether the peer answers. `on_result` reports the end.

        `done`: the peer's memory can be read. `failed` with `peer-disconnected`: its process is gone. `timed-out`: no answer in
        time. Over CMA the kernel answers even for a stopped process.

        Raises:
            AgentError: `duplicate-transfer`.
        """
        self._loop.accept(
            self.agent,
            TransferOrder(transfer_id, peer, _NO_INDICES, _NO_INDICES, deadline_s=deadline_s, operation="probe"),
        )

    def watch_stream(self, peer: str, slot: int, listener: StreamListener, *, tokens: int = 0) -> StreamWatch:
        """Start polling a stream slot of a peer; `listener` receives its progress, and the tables that the watch requests.

        Args:
            peer: The peer's key.
            slot: The peer's slot.
            listener: Receives progress, table entries and the end of the watch.
            tokens: Progress that the peer will reach, 0 if unknown; near the expected end of its last step it is polled often.

        Raises:
            AgentError: `unknown-peer`; `bad-streams` without stream memory on either side, or for a slot that does not exist;
                `peer-rows-unregistered`.
        """
        return self.agent.polls.watch(peer, slot, listener, tokens=tokens)

    def cancel(self, transfer_id: str) -> None:
        """End a transfer early; its result says `cancelled`. Unknown ids are fine: it may just have ended."""
        self.agent.cancel(transfer_id)

    def send_notification(self, peer: str, payload: bytes) -> bool:
        """Send `payload` to a peer; False if it cannot be sent."""
        return self.agent.send_notification(peer, payload)


ThreadState = Literal["new", "running", "stuck", "dead", "closed"]


@final
@dataclass(frozen=True, slots=True)
class ThreadHealth:
    """State of the owner thread at one moment.

    Attributes:
        state: `new`, `running`, `stuck` (one turn takes longer than `stuck_after_s`), `dead` or `closed`.
        turn_age_s: Time since the current turn began.
        turns: Turns of the loop so far.
        calls_waiting: Calls and orders that are waiting to run.
        callback_errors: Number of callbacks and calls that have raised.
        loop_errors: Number of turns that have raised.
        last_error: Type and message of the latest error of either kind; empty if there was none.
        last_traceback: Traceback of that error as text; empty if there was none.
        ucx_requests: UCX's pool of requests in this process. Only with `zeroed`, a consumer that dies in the middle of a read
            over TCP cannot end this process with SIGSEGV; any other word is the reason why it can.
    """

    state: ThreadState
    turn_age_s: float
    turns: int
    calls_waiting: int
    callback_errors: int
    loop_errors: int
    last_error: str
    last_traceback: str
    ucx_requests: State
