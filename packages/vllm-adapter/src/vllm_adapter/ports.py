"""Services that the adapter uses, as Protocols, and the names of the libraries' types that it uses as they are.

A service acts on threads, sockets or memory, so tests replace it. The adapter consumes services, so it declares their Protocols
here, and the libraries do not know them; `wiring.py` holds one static conformance line per Protocol. A value or a pure state
machine is never replaced. It is declared once, by its library: this module imports its type for type checkers alone, and the
other modules import it from here. What a member does is documented where it is implemented; here stands what the adapter relies
on beyond the name.

Boundaries carry builtins, bytes, the owners' frozen values, `Literal` strings and numpy arrays of a stated dtype and shape: no
enum, no torch, no other package's exception. Every exception that crosses one carries `code`, `fault`, `is_retry_safe` and
`context`.
"""

# ruff: noqa: TC004  (`__all__` also lists values, which exist for type checkers alone)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kv_handshake import AgentMetadata, Codec, Notification, Outcome
    from kv_nixl_agent import PeerSpec, QuarantineEntry, StallEntry, ThreadHealth, TransferResult
    from kv_scheduler_state import (
        Admission,
        BlockList,
        EndReport,
        FinishDecision,
        HeartbeatOrder,
        LeaseEnd,
        LeaseTable,
        PeerAddress,
        PromptIdentity,
        ReadOrder,
        SchedulerState,
        StepPlan,
        Streams,
        WorkerState,
    )
    from kv_scheduler_state.streams import (
        StreamOpen,
        StreamOrder,
        StreamOutcome,
        StreamPart,
        StreamPlan,
        StreamQuestion,
        StreamReaders,
        StreamReport,
        StreamWords,
        StreamWorker,
    )
    from kv_topology import PageMove, Planner, StagedRegion
    from kv_topology import TransferPlan as PeerPlan

__all__ = [
    "Admission",
    "AgentMetadata",
    "BlockIds",
    "BlockList",
    "Codec",
    "EndReport",
    "FinishDecision",
    "HandshakeClient",
    "HandshakeListener",
    "HeartbeatOrder",
    "Indices",
    "LeaseEnd",
    "LeaseTable",
    "MemoryKind",
    "Notification",
    "Outcome",
    "PageMove",
    "PageNumbers",
    "PeerAddress",
    "PeerPlan",
    "PeerSpec",
    "Planner",
    "PromptIdentity",
    "ReadOrder",
    "SchedulerState",
    "StagedRegion",
    "StallEntry",
    "StepPlan",
    "StreamOpen",
    "StreamOrder",
    "StreamOutcome",
    "StreamPlan",
    "StreamPart",
    "StreamQuestion",
    "StreamReaders",
    "StreamReport",
    "Streams",
    "StreamWatch",
    "StreamWorker",
    "TransferResult",
    "TransferThread",
    "WorkerState",
]

BlockIds = Sequence[Sequence[int]]
"""Logical block ids, one sequence per KV-cache group, in token order."""

MemoryKind = Literal["DRAM", "VRAM"]

Indices = npt.NDArray[np.int32]
"""int32 (n,): descriptor numbers, counted over all rows."""

PageNumbers = npt.NDArray[np.int64]
"""int64 (n,): page numbers in a region, ascending, each once."""


class HandshakeClient(Protocol):
    """Queries many peers at once from its own thread."""

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[tuple[int, int]],
        engine_id: str,
        dialect: int,
        on_done: Callable[[Outcome], None],
        generation: int | None = None,
        check_first: Callable[[AgentMetadata], None] | None = None,
    ) -> None:
        """Start a handshake and return at once; `on_done` runs on the client's thread exactly once.

        While the client remembers a failure of the same question, the request ends at once with ``recently-failed``. With
        `check_first`, every attempt queries rank (0, 0) alone and calls it on the client's thread with that rank's metadata; an
        exception from it ends the handshake with ``first-rank-refused``, before any other rank is queried.
        """
        ...

    def ask(
        self, *, host: str, port: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> Callable[[], None]:
        """Send an ask and return at once a function that cancels it; `on_reply` gets (code, payload) once, on another thread.

        Only a peer that accepts asks is asked; for any other the ask ends with ``ask-unsupported``.
        """
        ...

    def close(self) -> None: ...


class HandshakeListener(Protocol):
    """Serves this engine's metadata, supervised; passes peers' asks to this engine, and sends its answers."""

    @property
    def port(self) -> int: ...
    def start(self) -> None: ...
    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None: ...
    def take_asks(self, on_ask: Callable[[int, bytes], None], on_gone: Callable[[int], None], *, wait_s: float) -> None:
        """Call `on_ask` with (ask id, payload) per ask, `on_gone` for an ask that ended unanswered; set before `start`."""
        ...

    def answer(self, ask_id: int, payload: bytes) -> None: ...
    def close(self) -> None: ...


class StreamListener(Protocol):
    """Receives the findings of a watch, on the owner thread."""

    def progress(self, tag: int, tokens: int) -> None: ...
    def table(self, tag: int, first: int, ids: tuple[int, ...]) -> None: ...
    def broken(self, code: str, message: str) -> None: ...


class StreamWatch(Protocol):
    """A subscription to one stream slot of a peer. Owner thread only."""

    def read_table(self, tag: int, first: int, stop: int) -> None: ...
    def end(self) -> None: ...


class TransferAgent(Protocol):
    """One NIXL agent; its methods may only be called on the owner thread (through `call_soon`)."""

    def add_peer(self, spec: PeerSpec) -> None: ...
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
        """Queue a read; without indices only the fence is verified and the notification sent. `on_result` reports the end."""
        ...

    def probe(self, transfer_id: str, peer: str, *, deadline_s: float) -> None: ...
    def watch_stream(self, peer: str, slot: int, listener: StreamListener, *, tokens: int = 0) -> StreamWatch: ...
    def cancel(self, transfer_id: str) -> bool: ...
    def send_notification(self, peer: str, payload: bytes) -> bool: ...


class TransferThread(Protocol):
    """The owner thread of one NIXL agent."""

    def agent_metadata(self) -> bytes: ...
    @property
    def fence(self) -> tuple[int, int, int]: ...
    @property
    def streams(self) -> tuple[int, int, int, int] | None: ...
    @property
    def stream_words(self) -> StreamWords | None: ...
    def start(self) -> None: ...
    def quarantine(self) -> Sequence[QuarantineEntry]: ...
    def stalls(self) -> Sequence[StallEntry]: ...
    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon, before notifications that arrive after this call; never blocks; any thread."""
        ...

    def call_every(self, period_s: float, function: Callable[[], None]) -> None: ...
    def allow_slow_polling(self, allowed: bool) -> None: ...
    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array with one store; any thread. Refused once the thread is closed."""
        ...

    @property
    def agent(self) -> TransferAgent: ...
    def statistics(self) -> Mapping[str, float]: ...
    def health(self) -> ThreadHealth: ...
    @property
    def is_alive(self) -> bool:
        """Whether orders are accepted; False from the moment the thread fails."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the thread has stopped: its agent is closed and no longer touches the memory."""
        ...

    def close(self) -> None: ...
