"""Times and bytes of one transfer, for its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ._values import TransferResult

if TYPE_CHECKING:
    from ._parts import Part
    from ._peer import Peer
    from ._port import MemoryKind, WireTelemetry
    from ._states import State
    from ._values import Outcome, TransferOrder

__all__ = ["Account"]


@final
class Account:
    """Collects the figures that a result reports. No decision depends on it."""

    __slots__ = ("_carried", "descriptor_count", "entered_s", "merged_count", "payload_bytes", "post_s")

    def __init__(self, descriptor_count: int, payload_bytes: int) -> None:
        self.descriptor_count = descriptor_count
        self.payload_bytes = payload_bytes
        self.post_s = 0.0
        """Time inside NIXL's make and post calls."""
        self.merged_count = 0
        self.entered_s: dict[State, float] = {}
        """Time at which each state was entered."""
        self._carried: dict[tuple[str, MemoryKind, MemoryKind], int] = {}

    def complete(self, part: Part, telemetry: WireTelemetry | None) -> None:
        """Record a completed part and NIXL's telemetry of it."""
        backend = ""
        if telemetry is not None:
            self.merged_count += telemetry.descriptor_count
            backend = telemetry.backend
        path = (backend, part.local_kind, part.peer_kind)
        self._carried[path] = self._carried.get(path, 0) + part.payload_bytes

    def result(
        self,
        order: TransferOrder,
        peer: Peer,
        ending: tuple[Outcome, str, str],
        *,
        now_s: float,
        is_memory_quiet: bool,
        is_notified: bool,
    ) -> TransferResult:
        """Return the result of the transfer as of now; `ending` is (outcome, code, message)."""
        entered_s = self.entered_s
        first_s, data_s = entered_s.get("posted"), entered_s.get("data-done")
        was_moved = data_s is not None
        outcome, code, message = ending
        return TransferResult(
            transfer_id=order.transfer_id,
            peer=peer.key,
            outcome=outcome,
            code=code,
            message=message,
            is_memory_quiet=is_memory_quiet,
            bytes_moved=self.payload_bytes if was_moved else 0,
            descriptor_count=self.descriptor_count,
            merged_count=self.merged_count,
            queue_s=(now_s if first_s is None else first_s) - entered_s["queued"],
            post_s=self.post_s,
            wire_s=0.0 if first_s is None else (now_s if data_s is None else data_s) - first_s,
            fence_s=self._fence_s(),
            is_notified=is_notified,
            bytes_by_path=tuple([(*path, size) for path, size in self._carried.items()]) if was_moved else (),
        )

    def _fence_s(self) -> float:
        entered_s = self.entered_s
        if "fence-posted" not in entered_s or "verified" not in entered_s:
            return 0.0
        return entered_s["verified"] - entered_s["data-done"]
