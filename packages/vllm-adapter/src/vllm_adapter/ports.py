"""Services that the adapter uses, as Protocols, and the names of the libraries' types that it uses as they are.

A service acts on threads, sockets or memory, so tests replace it. The adapter consumes services, so it declares their Protocols
here, and the libraries do not know them; `wiring.py` holds one static conformance line per Protocol. A value or a pure state
machine is never replaced, nor is an object that only a service hands out. It is declared once, by its library: this module
imports its type for type checkers alone, and the other modules import it from here. What a member does is documented where it is
implemented; here stands what the adapter relies on beyond the name.

Boundaries carry builtins, bytes, the owners' frozen values, `Literal` strings and numpy arrays of a stated dtype and shape: no
enum, no torch, no other package's exception. Every exception that crosses one carries `code`, `fault`, `is_retry_safe` and
`context`.
"""

# ruff: noqa: PLC0414  (an alias of the same name re-exports a value, for type checkers alone)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kv_handshake import AgentMetadata as AgentMetadata
    from kv_handshake import Codec as Codec
    from kv_handshake import Notification as Notification
    from kv_handshake import Outcome as Outcome
    from kv_nixl_agent import PeerSpec as PeerSpec
    from kv_nixl_agent import QuarantineEntry, ThreadHealth, TransferAgent
    from kv_nixl_agent import StallEntry as StallEntry
    from kv_nixl_agent import TransferResult as TransferResult
    from kv_nixl_agent.streams.polls import StreamWatch as StreamWatch
    from kv_scheduler_state import Admission as Admission
    from kv_scheduler_state import BlockList as BlockList
    from kv_scheduler_state import EndReport as EndReport
    from kv_scheduler_state import FinishDecision as FinishDecision
    from kv_scheduler_state import HeartbeatOrder as HeartbeatOrder
    from kv_scheduler_state import LeaseEnd as LeaseEnd
    from kv_scheduler_state import LeaseTable as LeaseTable
    from kv_scheduler_state import PeerAddress as PeerAddress
    from kv_scheduler_state import PromptIdentity as PromptIdentity
    from kv_scheduler_state import ReadOrder as ReadOrder
    from kv_scheduler_state import SchedulerState as SchedulerState
    from kv_scheduler_state import StepPlan as StepPlan
    from kv_scheduler_state import Streams as Streams
    from kv_scheduler_state import WorkerState as WorkerState
    from kv_scheduler_state.streams import StreamOpen as StreamOpen
    from kv_scheduler_state.streams import StreamOrder as StreamOrder
    from kv_scheduler_state.streams import StreamOutcome as StreamOutcome
    from kv_scheduler_state.streams import StreamPart as StreamPart
    from kv_scheduler_state.streams import StreamQuestion as StreamQuestion
    from kv_scheduler_state.streams import StreamReaders as StreamReaders
    from kv_scheduler_state.streams import StreamReport as StreamReport
    from kv_scheduler_state.streams import StreamWorker as StreamWorker
    from kv_topology import Cast as Cast
    from kv_topology import PageMove as PageMove
    from kv_topology import Planner as Planner
    from kv_topology import StagedRegion as StagedRegion
    from kv_topology import TransferPlan as PeerPlan  # noqa: TC004  (`__all__` lists it, because it has another name here)

__all__ = [
    "BlockIds",
    "HandshakeClient",
    "HandshakeListener",
    "Indices",
    "MemoryKind",
    "PageNumbers",
    "PeerPlan",
    "TransferThread",
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


class TransferThread(Protocol):
    """The owner thread of one NIXL agent; `wiring.py` starts it and reads what it announces."""

    def quarantine(self) -> Sequence[QuarantineEntry]: ...
    def stalls(self) -> Sequence[StallEntry]: ...
    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon, before notifications that arrive after this call; never blocks; any thread."""
        ...

    def run_here(self, function: Callable[[], None] | None, is_done: Callable[[], bool], within_s: float) -> bool:
        """Run `function`, and turns until `is_done` or a pause of `within_s`, on the calling thread; False if nothing was run.

        Without a function it delivers notifications.
        """
        ...

    def allow_slow_polling(self, allowed: bool) -> None: ...
    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array with one store; any thread. Refused once the thread is closed."""
        ...

    @property
    def agent(self) -> TransferAgent:
        """The agent, whose methods may only be called within `call_soon` and `run_here`."""
        ...

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
