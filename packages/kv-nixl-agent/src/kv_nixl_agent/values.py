"""Values that cross the package's boundary: peers and orders in, results, entries and figures out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

import numpy as np

from kv_nixl_agent.errors import ERROR_CODES, demand, demand_ints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.errors import Fault
    from kv_nixl_agent.nixl.port import MemoryKind
    from kv_nixl_agent.nixl.side_effects import State

__all__ = [
    "FenceLocation",
    "Figures",
    "MemoryRegion",
    "OrderKind",
    "Outcome",
    "PeerSpec",
    "QuarantineEntry",
    "StallEntry",
    "MAX_CAPACITY",
    "MAX_SLOTS",
    "StreamLocation",
    "ThreadHealth",
    "ThreadState",
    "TransferOrder",
    "TransferResult",
]

Outcome = Literal["done", "failed", "fence-rejected", "timed-out", "cancelled"]
OrderKind = Literal["read", "probe"]
ThreadState = Literal["new", "running", "stuck", "dead", "closed"]

MemoryRegion = tuple[int, int, int, "MemoryKind"]
"""(address, length_bytes, device, memory kind) of memory to register."""

FenceLocation = tuple[int, int, int]
"""(address, device, word count) of a fence array."""

MAX_SLOTS: Final = 1024
"""Most stream slots of an agent: all progress words are read at once."""
MAX_CAPACITY: Final = 1 << 20
"""Most block ids of a stream slot's table."""

StreamLocation = tuple[int, int, int, int]
"""(address, device, slots, capacity) of stream memory; capacity is the number of block ids that each slot's table holds."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PeerSpec:
    """Description of one peer rank.

    Attributes:
        key: Name of the peer in orders and results.
        agent_metadata: The peer's `agent_metadata()`, or NIXL's own blob.
        local_rows: uint64 (n, 5) over registered local memory: address, length_bytes, device, stride_bytes, count.
        peer_rows: uint64 (m, 5) over the peer's registered memory. Without rows on both sides, the peer can be notified
            and its fence read, nothing else.
        memory_kind: Kind of the peer's rows, one for all or one per row.
        local_kind: Kind of the local rows; None if `memory_kind` is one for all and holds for both sides.
        fence: (address, device, word count) of the peer's fence array; None if the peer has none.
        agent_prefix: Required prefix of the peer's agent name, for instance its engine's name; empty for any. A peer with it
            takes the name over from a peer without.
        streams: (address, device, slots, capacity) of the peer's stream memory; None if the peer has none.
    """

    key: str
    agent_metadata: bytes
    local_rows: npt.NDArray[np.uint64]
    peer_rows: npt.NDArray[np.uint64]
    memory_kind: MemoryKind | Sequence[MemoryKind] = "DRAM"
    local_kind: MemoryKind | Sequence[MemoryKind] | None = None
    fence: FenceLocation | None = None
    agent_prefix: str = ""
    streams: StreamLocation | None = None

    def __post_init__(self) -> None:
        """Refuse values of other types (`wrong-type`)."""
        demand("key", self.key, str)
        demand("agent_metadata", self.agent_metadata, bytes)
        demand("agent_prefix", self.agent_prefix, str)
        if self.fence is not None:
            demand_ints("fence", self.fence, 3)
        if self.streams is not None:
            demand_ints("streams", self.streams, 4)


@final
@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Order for one transfer.

    Attributes:
        transfer_id: Name of the transfer in results and statistics; unique while it is in progress or quarantined.
        peer: Key of the peer.
        local_indices: int32 (n,), descriptors of the peer's local list. Must not be changed afterwards.
        peer_indices: int32 (n,), descriptors of the peer list, pairwise. Without indices nothing is moved, but the fence
            is verified and the notification sent all the same.
        notification: Bytes that the peer receives once the transfer is done; empty for none.
        deadline_s: Seconds from the order to the latest observed end.
        fence: (slot, generation) that the peer's fence array must show after the data was read.
        operation: `read`, or `probe`: read one word of the peer, whatever its value.
    """

    transfer_id: str
    peer: str
    local_indices: npt.NDArray[np.int32]
    peer_indices: npt.NDArray[np.int32]
    notification: bytes = b""
    deadline_s: float = 30.0
    fence: tuple[int, int] | None = None
    operation: OrderKind = "read"

    def __post_init__(self) -> None:
        """Refuse values of other types (`wrong-type`)."""
        demand("transfer_id", self.transfer_id, str)
        demand("peer", self.peer, str)
        demand("notification", self.notification, bytes)
        demand("deadline_s", self.deadline_s, int, float)
        if self.fence is not None:
            demand_ints("fence", self.fence, 2)


@final
@dataclass(frozen=True, slots=True)
class TransferResult:
    """End of one transfer; exactly one is reported for every accepted order.

    Attributes:
        transfer_id: As ordered.
        peer: Key of the peer.
        outcome: `done`, or the kind of failure.
        code: Key of `ERROR_CODES`; empty when done.
        message: Explanation; empty when done.
        is_memory_quiet: False while the wire may still write into the local pages; `on_quiet` follows then.
        bytes_moved: Payload bytes of the transfer; 0 unless the data arrived.
        descriptor_count: Descriptors ordered.
        queue_s: From the order to the first post.
        post_s: Time inside NIXL's make and post calls.
        wire_s: From the first post to the last observed completion of data.
        fence_s: From there to the verified fence word.
        is_notified: Whether the notification was handed to NIXL.
        bytes_by_path: The bytes moved by (backend as NIXL names it, local memory kind, peer memory kind, bytes); the name is
            empty where NIXL reports none.
    """

    transfer_id: str
    peer: str
    outcome: Outcome
    code: str = ""
    message: str = ""
    is_memory_quiet: bool = True
    bytes_moved: int = 0
    descriptor_count: int = 0
    queue_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0
    fence_s: float = 0.0
    is_notified: bool = False
    bytes_by_path: tuple[tuple[str, MemoryKind, MemoryKind, int], ...] = ()

    @property
    def fault(self) -> Literal["", Fault]:
        """Origin of the failure's cause, as `ERROR_CODES` lists it for the code; empty when done."""
        return ERROR_CODES[self.code].fault if self.code else ""


@final
@dataclass(frozen=True, slots=True)
class StallEntry:
    """A transfer on the wire none of whose parts has ended for a while."""

    transfer_id: str
    peer: str
    since_s: float
    """Monotonic time of the last sign of progress, in seconds."""
    bytes_left: int
    """Payload bytes of the parts that have not ended."""


@final
@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A transfer whose local pages may still be written to although its result has been reported."""

    transfer_id: str
    peer: str
    since_s: float
    bytes_at_risk: int
    last_error: str


@final
@dataclass(frozen=True, slots=True)
class Figures:
    """Counts and times at one moment. Taking them costs microseconds; evaluating them costs their reader milliseconds."""

    levels: Mapping[str, float]
    recent: tuple[tuple[float, float, int], ...] = ()

    def summary(self) -> Mapping[str, float]:
        """Return the counters and gauges, and of the recent transfers the wire time's median and 99th percentile and the rate."""
        result = {name: float(value) for name, value in self.levels.items()}
        result["recent_count"] = float(len(self.recent))
        if self.recent:
            recent = np.array(self.recent)
            result["recent_wire_s_p50"], result["recent_wire_s_p99"] = np.percentile(recent[:, 1], (50, 99)).tolist()
            busy_s = float(recent[:, :2].sum())
            result["recent_bytes_per_s"] = float(recent[:, 2].sum()) / busy_s if busy_s > 0 else 0.0
        return result


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
