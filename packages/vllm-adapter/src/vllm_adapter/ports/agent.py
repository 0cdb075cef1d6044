"""Registration and transfers: the part of kv-nixl-agent that the adapter uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.ports.values import Indices, MemoryKind, Rows

__all__ = [
    "PeerSpec",
    "QuarantineEntry",
    "ReadFigures",
    "StallEntry",
    "StreamListener",
    "StreamWatch",
    "StreamWords",
    "ThreadHealth",
    "TransferResult",
    "TransferThread",
]


@final
@dataclass(frozen=True, slots=True)
class PeerSpec:
    """Description of one peer rank, for `add_peer` and `replace_peer`.

    Attributes:
        key: Name of the peer in orders, results and statistics.
        agent_metadata: The peer's `agent_metadata()`.
        local_rows: uint64 (n, 5) over registered local memory.
        peer_rows: uint64 (m, 5) over the peer's registered memory. A peer that only gets notifications has no rows on either
            side.
        memory_kind: Memory kind of the peer's rows.
        local_kind: Memory kind of the local rows; None if it equals `memory_kind`.
        fence: (address, device, word count) of the peer's fence array; None if the peer has none.
        agent_prefix: Required prefix of the peer's agent name; empty for any name.
        streams: (address, device, slots, capacity) of the peer's stream memory; None if the peer has none.
    """

    key: str
    agent_metadata: bytes
    local_rows: Rows
    peer_rows: Rows
    memory_kind: MemoryKind = "DRAM"
    local_kind: MemoryKind | None = None
    fence: tuple[int, int, int] | None = None
    agent_prefix: str = ""
    streams: tuple[int, int, int, int] | None = None


class ReadFigures(Protocol):
    """Figures of a read that is done."""

    @property
    def bytes_moved(self) -> int: ...
    @property
    def descriptor_count(self) -> int: ...
    @property
    def post_s(self) -> float: ...
    @property
    def wire_s(self) -> float: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def fence_s(self) -> float: ...
    @property
    def bytes_by_path(self) -> Sequence[tuple[str, MemoryKind, MemoryKind, int]]:
        """(backend, empty if NIXL names none; local memory kind; peer memory kind; bytes) of a good read."""
        ...


class TransferResult(ReadFigures, Protocol):
    """The end of a posted read or probe."""

    @property
    def transfer_id(self) -> str: ...
    @property
    def outcome(self) -> Literal["done", "failed", "fence-rejected", "timed-out", "cancelled"]: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def fault(self) -> Literal["", "local", "peer", "environment"]:
        """Origin of the failure's cause; `local` for refusals of this rank's own agent."""
        ...

    @property
    def is_memory_quiet(self) -> bool:
        """False while the peer or the wire might still write into the local pages (quarantine)."""
        ...


class QuarantineEntry(Protocol):
    """Pages that a transfer which ended early might still write into."""

    @property
    def bytes_at_risk(self) -> int: ...


class StallEntry(Protocol):
    """A transfer on the wire none of whose parts has ended for a while."""

    @property
    def transfer_id(self) -> str: ...
    @property
    def since_s(self) -> float:
        """Monotonic time of the last sign of progress, in seconds."""
        ...

    @property
    def bytes_left(self) -> int: ...


class ThreadHealth(Protocol):
    """State of the transfer thread at one moment."""

    @property
    def state(self) -> Literal["new", "running", "stuck", "dead", "closed"]:
        """State of the thread; `stuck`: one turn of the loop has taken longer than `stuck_after_s`."""
        ...

    @property
    def calls_waiting(self) -> int:
        """Calls and orders that are waiting to run."""
        ...

    @property
    def callback_errors(self) -> int:
        """Number of callbacks and calls that have raised. A higher count means a new error: log it once."""
        ...

    @property
    def loop_errors(self) -> int:
        """Number of turns of the loop that have raised."""
        ...

    @property
    def last_error(self) -> str:
        """Type and message of the latest error of either kind; empty if there was none."""
        ...

    @property
    def last_traceback(self) -> str:
        """Traceback of that error as text; empty if there was none."""
        ...

    @property
    def ucx_requests(self) -> str:
        """`zeroed`: a consumer that dies in a read over TCP cannot end this process with SIGSEGV; else the reason why it may."""
        ...


class StreamWords(Protocol):
    """This rank's registered words of streams; stores are safe on any thread. A slot's fence word has the slot's number."""

    def open(self, slot: int, generation: int, tag: int) -> None:
        """Store the generation, and progress 0 under the tag; the table starts without entries."""
        ...

    def void(self, slot: int, word: int, tag: int) -> None:
        """Store a fence word that no reader accepts, and void progress under the tag."""
        ...

    def put(self, slot: int, tag: int, first: int, ids: Sequence[int]) -> None:
        """Store block ids as the table's entries `first` and following."""
        ...

    def show(self, slot: int, tag: int, tokens: int) -> None:
        """Store the progress, after all data that it covers; dropped if the slot has another tag by now."""
        ...


class StreamListener(Protocol):
    """Receives the findings of a watch, on the owner thread."""

    def progress(self, tag: int, tokens: int) -> None:
        """Receive the slot's progress word: the first one read, then each one that differs from the previous one."""
        ...

    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None:
        """Receive the requested entries `first` and following."""
        ...

    def broken(self, code: str, message: str) -> None:
        """Receive the end of the watch: the peer's words can no longer be read. Called once."""
        ...


class StreamWatch(Protocol):
    """A subscription to one stream slot of a peer. Owner thread only."""

    def read_table(self, tag: int, first: int, stop: int) -> None:
        """Read the table's entries `first` to `stop - 1`; the listener receives them once all of them carry the tag."""
        ...

    def end(self) -> None:
        """Stop watching; the listener gets no further calls. May be called more than once."""
        ...


class TransferThread(Protocol):
    """The owner thread of one NIXL agent. Methods marked *owner* may only be called on it (through `call_soon`)."""

    def agent_metadata(self) -> bytes: ...
    @property
    def fence(self) -> tuple[int, int, int]:
        """(address, device, word count) of this rank's registered fence array."""
        ...

    @property
    def streams(self) -> tuple[int, int, int, int] | None:
        """(address, device, slots, capacity) of this rank's stream memory; None if it has none."""
        ...

    @property
    def stream_words(self) -> StreamWords | None:
        """This rank's stream memory; None if it has none."""
        ...

    def start(self) -> None: ...
    def quarantine(self) -> Sequence[QuarantineEntry]:
        """Quarantined transfers, as of about 0.1 s ago; any thread."""
        ...

    def stalls(self) -> Sequence[StallEntry]:
        """Transfers without progress, as of about 0.1 s ago; any thread."""
        ...

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon; wakes the thread; never blocks; any thread.

        A notification that arrived after this call is delivered after `function` has run.
        """
        ...

    def call_every(self, period_s: float, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread about every `period_s` while the thread lives.

        Calls and notifications that were waiting when the timer fell due run before it.
        """
        ...

    def allow_slow_polling(self, allowed: bool) -> None:
        """Let the owner thread poll less often while it is idle and no peer has a reason to write to us; any thread."""
        ...

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array with one store; any thread. Refused once the thread is closed."""
        ...

    # owner
    def add_peer(self, spec: PeerSpec) -> None:
        """Register a peer rank, prepare its lists, and connect to it in the background."""
        ...

    def replace_peer(self, spec: PeerSpec) -> None:
        """Register a peer rank whose key may be in use; transfers of the previous peer fail with `peer-removed`."""
        ...

    def remove_peer(self, peer: str) -> None: ...
    def has_peer(self, peer: str) -> bool: ...
    def post_read(
        self,
        transfer_id: str,
        peer: str,
        local_indices: Indices,
        peer_indices: Indices,
        *,
        notification: bytes,
        deadline_s: float,
        fence: tuple[int, int] | None,
    ) -> None:
        """Queue a read; `fence` is (slot, generation) to verify after it. `on_result` reports the end.

        Without indices nothing is read; the fence is verified and the notification sent all the same.
        """
        ...

    def probe(self, transfer_id: str, peer: str, *, deadline_s: float) -> None:
        """Read one word of a peer, whatever its value, to see whether the peer answers. `on_result` reports the end.

        `done`: the peer's memory can be read. `failed` with `peer-disconnected`: its process is gone. `timed-out`: no answer.
        """
        ...

    def watch_stream(self, peer: str, slot: int, listener: StreamListener, *, tokens: int = 0) -> StreamWatch:
        """Start polling a stream slot of a peer; raises a coded error for a slot or a peer that cannot be watched.

        `tokens` is the progress that the peer will reach, 0 if unknown; near the expected end of its last step it is polled
        often.
        """
        ...

    def cancel(self, transfer_id: str) -> None: ...
    def send_notification(self, peer: str, payload: bytes) -> bool: ...

    def statistics(self) -> Mapping[str, float]: ...
    def health(self) -> ThreadHealth:
        """State of the owner thread and its latest error; any thread."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether orders are accepted; False from the moment the thread fails."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the thread has stopped: its agent is closed and no longer touches the memory."""
        ...

    def close(self) -> None:
        """Shut down in order: transfers, prepared lists, peers, registrations. Idempotent."""
        ...
