"""What a worker observes between two steps: lists of numbers by key, as vLLM carries them from process to process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from vllm_adapter.ports import TransferResult

__all__ = ["CHANGE_KEYS", "CODE_KEYS", "FAILURE_KEYS", "PATH_KEY", "SERIES_KEYS", "StatsBuffer", "empty_observations"]

SERIES_KEYS = ("transfer_duration", "post_duration", "bytes_transferred", "num_descriptors")
"""Series of every read that was done (seconds, seconds, bytes, descriptors). Source: vLLM's connector statistics."""

FAILURE_KEYS = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes")
_OTHER_KEYS = (
    "num_kv_expired_reqs",
    "num_notifications_after_expiry",
    "queue_duration",
    "fence_duration",
    "handshake_duration",
    "heartbeat_lag",
    "heartbeat_delay",
    "conversion_duration",
    "num_failed_conversions",
    "mirror_save_duration",
    "mirror_restore_duration",
    "num_failed_mirror_copies",
    "num_fence_rejections",
    "num_quarantined_reads",
    "num_stalled_reads",
    "num_refused_notifications",
    "num_lease_renewals",
    "num_unsent_heartbeats",
)
CODE_KEYS = ("read_failure_codes", "ticket_refusal_codes")
"""Reasons by code, one per request."""
CHANGE_KEYS = ("quarantined_bytes", "live_requests")
"""How much a level has changed: bytes, and requests by state (mappings). Changes of ranks and intervals add up."""
PATH_KEY = "bytes_by_path"
"""Bytes of good reads: [backend, memory "PEER->LOCAL", UCX_TLS, bytes] per read and path."""


def empty_observations() -> dict[str, list[Any]]:
    """Return an empty list for every key; a counter is a list of ones."""
    return {key: [] for key in (*SERIES_KEYS, *FAILURE_KEYS, *_OTHER_KEYS, *CODE_KEYS, *CHANGE_KEYS, PATH_KEY)}


@final
class StatsBuffer:
    """Collects observations on the transfer thread; the engine thread takes them once per step.

    Args:
        ucx_tls: UCX's choice of transports as configured; a label of bytes that the UCX backend moved.
    """

    def __init__(self, *, ucx_tls: str = "") -> None:
        self._ucx_tls = ucx_tls
        self._lock = threading.Lock()
        self._data = empty_observations()

    def transfer(self, result: TransferResult) -> None:
        """Note a read that was done."""
        with self._lock:
            data = self._data
            data["transfer_duration"].append(result.wire_s)
            data["post_duration"].append(result.post_s)
            data["bytes_transferred"].append(result.bytes_moved)
            data["num_descriptors"].append(result.descriptor_count)
            data["queue_duration"].append(result.queue_s)
            if result.fence_s > 0:
                data["fence_duration"].append(result.fence_s)
            data[PATH_KEY] += [
                [backend or "unknown", f"{peer_kind}->{local_kind}", self._ucx_tls if backend == "UCX" else "", size]
                for backend, local_kind, peer_kind, size in result.bytes_by_path
            ]

    def count(self, key: str, times: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._data[key].extend([1] * times)

    def observe(self, key: str, value: object) -> None:
        """Note one value of a series, a code, or the change of a level."""
        with self._lock:
            self._data[key].append(value)

    def take(self) -> dict[str, list[Any]] | None:
        """Return what was collected since the last call, None for nothing."""
        with self._lock:
            if not any(self._data.values()):
                return None
            taken, self._data = self._data, empty_observations()
            return taken
