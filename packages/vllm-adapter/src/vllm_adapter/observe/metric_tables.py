"""Table of all metrics: the `vllm:nixl_*` of vLLM's own connector, and ours beside them.

Observations of a counter are numbers that add up, codes, or lists of label values with a number at the end. Those of a gauge are
changes of its level, alike. Changes of several ranks and intervals add up.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = [
    "CONSTANTS",
    "FAILURE_KEYS",
    "INFO",
    "LIVE_KEY",
    "METRICS",
    "PATH_KEY",
    "SERIES_KEYS",
    "Metric",
    "empty_observations",
]

SERIES_KEYS = ("transfer_duration", "post_duration", "bytes_transferred", "num_descriptors")
"""Series of every completed read (seconds, seconds, bytes, descriptors). Source: vLLM's connector statistics."""
FAILURE_KEYS = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes", "num_unasked_engines")
"""Events that vLLM's own connector counts as failed transfers. The last: reads without a handshake because their engine had
failed a moment ago; vLLM's connector makes one each time, and counts it."""
PATH_KEY = "read_bytes"
"""Bytes of good reads: [backend, memory "PEER->LOCAL", UCX_TLS, bytes] per read and path."""
LIVE_KEY = "live_requests"
CONSTANTS = {"lease_seconds": "lease_s", "ranks": "ranks"}
"""Gauges that never change, and the label of `info` with their value."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_SHORT = (0.0001, 0.001, *_SECONDS)
_LATENESS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0)
"""Bucket bounds of a heartbeat's lag; a lease of 30 s ends at a lag of 15 s."""
_BYTES = tuple(float(2**n) for n in range(11, 34, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4)


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: `histogram`, `counter` or `gauge`.
        key: Key of its observations.
        help: Help text.
        labels: Labels beside those of the engine.
        buckets: Bucket bounds of a histogram.
    """

    kind: Literal["histogram", "counter", "gauge"]
    key: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Prometheus name."""
        return _NAMES.get(self.key, f"vllm:kv_transfer_{self.key.replace('_duration', '_seconds')}")


_NAMES: dict[str, str] = {
    "transfer_duration": "vllm:nixl_xfer_time_seconds",
    "post_duration": "vllm:nixl_post_time_seconds",
    "bytes_transferred": "vllm:nixl_bytes_transferred",
    "num_descriptors": "vllm:nixl_num_descriptors",
    "num_failed_transfers": "vllm:nixl_num_failed_transfers",
    "num_failed_notifications": "vllm:nixl_num_failed_notifications",
    "num_kv_expired_reqs": "vllm:nixl_num_kv_expired_reqs",
    "num_notifications_after_expiry": "vllm:nixl_num_notifications_after_expiry",
}
"""Names by key of the metrics that vLLM's own connector has. Any other key is its own name behind `vllm:kv_transfer_`, with its
unit: a duration is in seconds."""
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "transfer_duration": (_SECONDS, "Seconds on the wire per read."),
    "post_duration": ((0.001, *_SECONDS), "Seconds to post a read."),
    "bytes_transferred": (_BYTES, "Bytes per read."),
    "stream_bytes": (_BYTES, "Bytes per rank of a prompt that was read while the peer computed it."),
    "stream_early_bytes": (_BYTES, "The part of them that had arrived when the prompt was seen to be finished."),
    "num_descriptors": (_DESCRIPTORS, "Descriptors per read, after merging."),
    "queue_duration": (_SECONDS, "Seconds that a read waited before it was posted."),
    "fence_duration": ((0.0001, *_SECONDS), "Seconds to verify the fence after a read."),
    "handshake_duration": ((*_SECONDS, 10.0, 20.0, 60.0), "Seconds per handshake with an engine."),
    "heartbeat_lag_seconds": (_LATENESS, "Prefill, per heartbeat or expired lease: seconds beyond the interval."),
    "heartbeat_delay_seconds": (
        _LATENESS,
        "Decode, per step with heartbeats: seconds that the latest one was overdue.",
    ),
    "mirror_save_duration": (_SHORT, "Engine thread's seconds per step for copies to the mirror (host-buffer mode)."),
    "mirror_restore_duration": (_SHORT, "Engine thread's seconds per read for copies from the mirror."),
    "conversion_duration": (_SHORT, "Engine thread's seconds to put a read's pages in order, or to queue that."),
}
"""(bucket bounds, help). Source of the bounds of vLLM's names: its dashboards."""
_COUNTERS: dict[str, str] = {
    "num_requests": "Requests that came with a ticket, refused ones included.",
    "num_failed_transfers": "Reads that failed, and failed handshakes and notifications.",
    "num_failed_notifications": "Notifications that could not be sent.",
    "num_kv_expired_reqs": "Requests whose lease ended unread.",
    "num_revoked_leases": "Leases that this engine ended unread: a cache reset, sleep, a command, or want of blocks.",
    "num_notifications_after_expiry": "Completions that came after their lease had ended.",
    "num_failed_handshakes": "Handshakes that failed, were refused or did not end in time.",
    "num_failed_conversions": "Reads whose pages could not be put in order.",
    "num_failed_mirror_copies": "Requests whose blocks could not be copied between the device and its mirror (host-buffer mode).",
    "num_fence_rejections": "Reads voided because the lease had ended.",
    "num_quarantined_reads": "Reads whose pages had to be quarantined.",
    "num_stalled_reads": "Reads on the wire of which no part ended for 5 s.",
    "num_retried_reads": "Reads that were retried after a new handshake with a peer that was lost.",
    "num_dropped_engines": "Peer engines that were dropped because of a failed read or silence.",
    "num_callback_errors": "Unexpected exceptions of a worker and refused lease orders; each failed its own order only.",
    "num_refused_notifications": "Notifications that made no sense.",
    "num_lease_renewals": "Leases renewed by heartbeats.",
    "num_unsent_heartbeats": "Heartbeats not sent because the handshake with their engine had not ended.",
}
_BY_CODE: dict[str, str] = {
    "num_cancelled_reads": "Reads that this engine gave up by itself, by reason; they did not fail.",
    "num_torn_streams": "Streams that broke off, on one rank, by reason; their prompts were asked for again.",
    "num_failed_reads": "Requests whose KV was not taken over, by reason.",
    "num_refused_tickets": "Tickets that were refused, by reason.",
    "num_unstreamed_prompts": "Prompts with an early ticket that were not read while the peer computed them, by reason.",
    "num_withheld_tickets": "Prompts that ended well and were not handed over, by reason.",
}
"""Their codes are in `codes.toml`; a mistake in this engine and a malformed document have a series once they occur."""
_PATHS = "Bytes read, by NIXL backend, memory (peer's->ours) and, for UCX, the transports that it may choose from."
_LEVELS: dict[str, str] = {
    "lease_seconds": "The configured lease, kv_lease_duration.",
    "ranks": "Ranks of the engine, each of which counts its own reads, leases, handshakes and dropped peers.",
    "quarantined_bytes": "Bytes of pages that a failed read might still write into.",
    "stuck_threads": "Ranks whose transfer thread is stuck in one turn or has died.",
    "fence_slots_used": "Fence slots in use; with all 4096 in use nothing is handed over.",
    "leased_blocks": "Blocks that finished requests keep for a reader; a block that two of them share counts twice.",
    "leased_bytes": "Bytes of these blocks on each rank.",
}


METRICS: tuple[Metric, ...] = (
    *(Metric("histogram", key, text, buckets=buckets) for key, (buckets, text) in _HISTOGRAMS.items()),
    *(Metric("counter", key, text) for key, text in _COUNTERS.items()),
    *(Metric("counter", key, text, ("code",)) for key, text in _BY_CODE.items()),
    Metric("counter", PATH_KEY, _PATHS, ("backend", "memory", "ucx_tls")),
    *(Metric("gauge", key, text) for key, text in _LEVELS.items()),
    Metric("gauge", LIVE_KEY, "Requests with a hand-over, by its state.", ("state",)),
)
INFO = Metric("gauge", "info", "Always 1: the connector that runs, with its versions and choices as labels.")


def empty_observations() -> dict[str, list[Any]]:
    """Return an empty list for every key."""
    return {key: [] for key in (*(metric.key for metric in METRICS), *FAILURE_KEYS)}
