"""What the adapter needs from kv-nixl-agent: registration and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.ports.values import Indices, MemoryKind, Rows

__all__ = ["QuarantineEntry", "StallEntry", "TransferResult", "TransferThread"]


class TransferResult(Protocol):
    """End of one posted read."""

    @property
    def transfer_id(self) -> str: ...
    @property
    def outcome(self) -> Literal["done", "failed", "fence-rejected", "timed-out", "cancelled"]: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def is_memory_quiet(self) -> bool:
        """False while the peer or the wire might still write into the local pages (quarantine)."""
        ...

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
        """(backend as NIXL names it, empty if it does not; local memory kind; peer memory kind; bytes) of a good read."""
        ...


class QuarantineEntry(Protocol):
    """Pages that a transfer which ended early might still write into."""

    @property
    def bytes_at_risk(self) -> int: ...


class StallEntry(Protocol):
    """A transfer on the wire of which no part has ended for a while."""

    @property
    def transfer_id(self) -> str: ...
    @property
    def since_s(self) -> float:
        """Monotonic time of the last sign of progress, in seconds."""
        ...

    @property
    def bytes_left(self) -> int: ...


class TransferThread(Protocol):
    """The owner thread of one NIXL agent. Methods marked *owner* may only be called on it (through `call_soon`)."""

    def agent_metadata(self) -> bytes: ...
    @property
    def fence(self) -> tuple[int, int, int]:
        """(address, device, word count) of this rank's registered fence array."""
        ...

    def start(self) -> None: ...
    def quarantine(self) -> Sequence[QuarantineEntry]:
        """What is quarantined, perhaps a moment ago; any thread."""
        ...

    def stalls(self) -> Sequence[StallEntry]:
        """Transfers that do not get on, perhaps a moment ago; any thread."""
        ...

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon; wakes it; never blocks; any thread."""
        ...

    def call_every(self, period_s: float, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread about every `period_s` while it lives."""
        ...

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array; one store, any thread."""
        ...

    # owner
    def add_peer(
        self,
        peer: str,
        agent_metadata: bytes,
        *,
        local_rows: Rows,
        peer_rows: Rows,
        memory_kind: MemoryKind,
        fence: tuple[int, int, int] | None,
    ) -> None:
        """Know a peer rank's agent under the key `peer`, with its prepared lists, and wire it up."""
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
        """Queue a read; `fence` is (slot, generation) to verify after it. The end comes through `on_result`."""
        ...

    def cancel(self, transfer_id: str) -> None: ...
    def send_notification(self, peer: str, payload: bytes) -> bool: ...

    def statistics(self) -> Mapping[str, float]: ...
    @property
    def is_alive(self) -> bool: ...
    def close(self) -> None:
        """Idempotent; ordered: transfers, prepared lists, peers, registrations."""
        ...
