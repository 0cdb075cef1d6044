"""Values that cross the package's boundary: orders, results, trace events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ._port import MemoryKind, Operation

__all__ = [
    "MemoryRegion",
    "Outcome",
    "PageCheck",
    "QuarantineEntry",
    "StallEntry",
    "TraceEvent",
    "TransferOrder",
    "TransferResult",
]

Outcome = Literal["done", "failed", "fence-rejected", "timed-out", "cancelled"]

MemoryRegion = tuple[int, int, int, "MemoryKind"]
"""(address, length_bytes, device, memory kind) of memory to register."""

PageCheck = Callable[[], "Sequence[str]"]
"""Integrity check that runs after a read: returns one text per page that differs, empty when all agree."""


@final
@dataclass(frozen=True, slots=True)
class TransferOrder:
    """One transfer to make.

    Attributes:
        transfer_id: Name of the transfer in results and statistics; unique while it is in progress or quarantined.
        peer: Key of the peer.
        local_indices: int32 (n,), descriptors of the peer's local list. Not to be changed afterwards.
        peer_indices: int32 (n,), descriptors of the peer list, pairwise.
        notification: Bytes that the peer receives once the transfer is done; empty for none.
        deadline_s: Seconds from the order to the latest observed end.
        fence: (slot, generation) that the peer's fence array must show after the data was read.
        operation: `read` (from the peer) or `write` (to it).
        page_check: Integrity check to run between the data's arrival and the result.
    """

    transfer_id: str
    peer: str
    local_indices: npt.NDArray[np.int32]
    peer_indices: npt.NDArray[np.int32]
    notification: bytes = b""
    deadline_s: float = 30.0
    fence: tuple[int, int] | None = None
    operation: Operation = "read"
    page_check: PageCheck | None = field(default=None, compare=False)


@final
@dataclass(frozen=True, slots=True)
class TransferResult:
    """End of one transfer; exactly one is reported for every accepted order.

    Attributes:
        transfer_id: As ordered.
        peer: Key of the peer.
        outcome: `done`, or why not.
        code: Key of `ERROR_CODES`; empty when done.
        message: Explanation; empty when done.
        is_memory_quiet: False while the wire may still write into the local pages; `on_quiet` follows then.
        bytes_moved: Payload bytes of the transfer; 0 unless the data arrived.
        descriptor_count: Descriptors ordered.
        merged_count: Descriptors after merging, as far as NIXL tells; 0 if it does not.
        queue_s: From the order to the first post.
        post_s: Time inside NIXL's make and post calls.
        wire_s: From the first post to the last observed completion of data.
        fence_s: From there to the verified fence word.
        check_s: Time of the integrity check.
        is_notified: Whether the notification was handed to NIXL.
        bytes_by_path: The bytes moved by (backend as NIXL names it, local memory kind, peer memory kind, bytes); the name
            is empty where NIXL does not tell.
    """

    transfer_id: str
    peer: str
    outcome: Outcome
    code: str = ""
    message: str = ""
    is_memory_quiet: bool = True
    bytes_moved: int = 0
    descriptor_count: int = 0
    merged_count: int = 0
    queue_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0
    fence_s: float = 0.0
    check_s: float = 0.0
    is_notified: bool = False
    bytes_by_path: tuple[tuple[str, MemoryKind, MemoryKind, int], ...] = ()


@final
@dataclass(frozen=True, slots=True)
class StallEntry:
    """A transfer on the wire of which no part has ended for a while."""

    transfer_id: str
    peer: str
    since_s: float
    """Monotonic time of the last sign of progress, in seconds."""
    bytes_left: int
    """Payload bytes of the parts that have not ended."""


@final
@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A transfer whose local pages may still be written although its result is out."""

    transfer_id: str
    peer: str
    since_s: float
    bytes_at_risk: int
    last_error: str


@final
@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A state change of a transfer: queued, posted, data-done, fence-posted, fence-read, stalled, ended, quiet."""

    at_s: float
    transfer_id: str
    peer: str
    state: str
    detail: str = ""
