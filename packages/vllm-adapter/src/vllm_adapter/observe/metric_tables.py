"""All metrics by kind: the `vllm:nixl_*` of vLLM's own connector, and ours beside them.

A row is (key of observations, Prometheus name, help). The observations of a counter are ones, of a gauge changes of its level:
numbers, or requests by state (mappings). Changes of several ranks and intervals add up.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BY_CODE",
    "COUNTERS",
    "FAILURE_KEYS",
    "HISTOGRAMS",
    "INFO",
    "LEVELS",
    "LIVE",
    "LIVE_KEY",
    "PATHS",
    "PATH_KEY",
    "SERIES_KEYS",
    "SUMS",
    "empty_observations",
]

SERIES_KEYS = ("transfer_duration", "post_duration", "bytes_transferred", "num_descriptors")
"""Series of every completed read (seconds, seconds, bytes, descriptors). Source: vLLM's connector statistics."""
FAILURE_KEYS = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes", "num_unasked_engines")
"""Events that vLLM's own connector counts as failed transfers. The last: reads without a handshake because their engine had
failed a moment ago; vLLM's connector makes one each time, and counts it."""
PATH_KEY = "bytes_by_path"
"""Bytes of good reads: [backend, memory "PEER->LOCAL", UCX_TLS, bytes] per read and path."""
LIVE_KEY = "live_requests"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_LATENESS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0)
"""Bucket bounds of a heartbeat's lag; a lease of 30 s ends at a lag of 15 s."""
_BYTES = tuple(float(2**n) for n in range(11, 34, 2))
HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "transfer_duration": ("vllm:nixl_xfer_time_seconds", "Seconds on the wire per read.", _SECONDS),
    "post_duration": ("vllm:nixl_post_time_seconds", "Seconds to post a read.", (0.001, *_SECONDS)),
    "bytes_transferred": (
        "vllm:nixl_bytes_transferred",
        "Bytes per read.",
        _BYTES,
    ),
    "stream_bytes": (
        "vllm:kv_transfer_stream_bytes",
        "Bytes per rank of a prompt that was read while the peer computed it.",
        _BYTES,
    ),
    "stream_early_bytes": (
        "vllm:kv_transfer_stream_early_bytes",
        "The part of them that had arrived when the prompt was seen to be finished.",
        _BYTES,
    ),
    "num_descriptors": (
        "vllm:nixl_num_descriptors",
        "Descriptors per read, after merging.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4),
    ),
    "queue_duration": ("vllm:kv_transfer_queue_seconds", "Seconds that a read waited before it was posted.", _SECONDS),
    "fence_duration": (
        "vllm:kv_transfer_fence_seconds",
        "Seconds to verify the fence after a read.",
        (0.0001, *_SECONDS),
    ),
    "handshake_duration": (
        "vllm:kv_transfer_handshake_seconds",
        "Seconds per handshake with an engine.",
        (*_SECONDS, 10.0, 20.0, 60.0),
    ),
    "heartbeat_lag": (
        "vllm:kv_transfer_heartbeat_lag_seconds",
        "Prefill side, per heartbeat and expired lease: seconds of silence beyond the heartbeat interval.",
        _LATENESS,
    ),
    "heartbeat_delay": (
        "vllm:kv_transfer_heartbeat_delay_seconds",
        "Decode side, per step with heartbeats: seconds that the most overdue one had been due.",
        _LATENESS,
    ),
    "mirror_save_duration": (
        "vllm:kv_transfer_mirror_save_seconds",
        "Seconds of the engine thread, per step, to copy computed blocks to the mirror or wait for that (host-buffer mode).",
        (0.0001, 0.001, *_SECONDS),
    ),
    "mirror_restore_duration": (
        "vllm:kv_transfer_mirror_restore_seconds",
        "Seconds of the engine thread to copy a read's blocks from the mirror (host-buffer mode).",
        (0.0001, 0.001, *_SECONDS),
    ),
    "conversion_duration": (
        "vllm:kv_transfer_conversion_seconds",
        "Seconds of the engine thread to put a read's pages in order (to queue that, on a device with streams).",
        (0.0001, 0.001, *_SECONDS),
    ),
}
"""Key of the data -> (Prometheus name, help, bucket bounds). Source of the `vllm:nixl_*` bounds: vLLM's dashboards."""

COUNTERS: dict[str, tuple[str, str]] = {
    "num_failed_transfers": (
        "vllm:nixl_num_failed_transfers",
        "Reads that failed, and failed handshakes and notifications.",
    ),
    "num_failed_notifications": ("vllm:nixl_num_failed_notifications", "Notifications that could not be sent."),
    "num_kv_expired_reqs": ("vllm:nixl_num_kv_expired_reqs", "Requests whose lease ended unread."),
    "num_revoked_leases": (
        "vllm:kv_transfer_num_revoked_leases",
        "Leases that this engine ended before they were read: a cache reset, sleep, a command, or want of blocks.",
    ),
    "num_notifications_after_expiry": (
        "vllm:nixl_num_notifications_after_expiry",
        "Completions that came after their lease had ended.",
    ),
    "num_failed_handshakes": (
        "vllm:kv_transfer_num_failed_handshakes",
        "Handshakes that failed, were refused or did not end in time.",
    ),
    "num_failed_conversions": (
        "vllm:kv_transfer_num_failed_conversions",
        "Reads whose pages could not be put in order.",
    ),
    "num_failed_mirror_copies": (
        "vllm:kv_transfer_num_failed_mirror_copies",
        "Requests whose blocks could not be copied between the device and its mirror (host-buffer mode).",
    ),
    "num_fence_rejections": ("vllm:kv_transfer_num_fence_rejections", "Reads voided because the lease had ended."),
    "num_quarantined_reads": ("vllm:kv_transfer_num_quarantined_reads", "Reads whose pages had to be quarantined."),
    "num_stalled_reads": ("vllm:kv_transfer_num_stalled_reads", "Reads on the wire of which no part ended for 5 s."),
    "num_retried_reads": (
        "vllm:kv_transfer_num_retried_reads",
        "Reads made once more after their peer was lost and met anew.",
    ),
    "num_dropped_engines": (
        "vllm:kv_transfer_num_dropped_engines",
        "Peer engines that were dropped because of a failed read or silence.",
    ),
    "num_callback_errors": (
        "vllm:kv_transfer_num_callback_errors",
        "Unexpected exceptions of a worker, on any thread, and lease orders that it refused; each failed its own order only.",
    ),
    "num_refused_notifications": ("vllm:kv_transfer_num_refused_notifications", "Notifications that made no sense."),
    "num_lease_renewals": ("vllm:kv_transfer_num_lease_renewals", "Leases renewed by heartbeats."),
    "num_unsent_heartbeats": (
        "vllm:kv_transfer_num_unsent_heartbeats",
        "Heartbeats not sent because the handshake with their engine had not ended.",
    ),
}
SUMS: dict[str, tuple[str, ...]] = {"num_failed_transfers": FAILURE_KEYS}
"""Counters that sum several keys, as vLLM's own connector counts them."""

BY_CODE: dict[str, tuple[str, str]] = {
    "cancelled_read_codes": (
        "vllm:kv_transfer_num_cancelled_reads",
        "Reads that this engine gave up by itself, by reason; they did not fail.",
    ),
    "torn_stream_codes": (
        "vllm:kv_transfer_num_torn_streams",
        "Streams that broke off, on one rank, by reason; their prompts were asked for again.",
    ),
    "read_failure_codes": ("vllm:kv_transfer_num_failed_reads", "Requests whose KV was not taken over, by reason."),
    "ticket_refusal_codes": ("vllm:kv_transfer_num_refused_tickets", "Tickets that were refused, by reason."),
    "unstreamed_codes": (
        "vllm:kv_transfer_num_unstreamed_prompts",
        "Prompts with an early ticket that were not read while the peer computed them, by reason.",
    ),
    "withheld_ticket_codes": (
        "vllm:kv_transfer_num_withheld_tickets",
        "Prompts that ended well and were not handed over, by reason.",
    ),
}
LEVELS: dict[str, tuple[str, str]] = {
    "quarantined_bytes": (
        "vllm:kv_transfer_quarantined_bytes",
        "Bytes of pages that a failed read might still write into.",
    ),
    "stuck_threads": (
        "vllm:kv_transfer_stuck_threads",
        "Ranks whose transfer thread is stuck in one turn or has died.",
    ),
    "fence_slots_used": (
        "vllm:kv_transfer_fence_slots_used",
        "Fence slots in use; with all of fence_slots in use nothing is handed over.",
    ),
    "leased_blocks": (
        "vllm:kv_transfer_leased_blocks",
        "Blocks that finished requests keep for a reader; a block that two of them share counts twice.",
    ),
    "leased_bytes": (
        "vllm:kv_transfer_leased_bytes",
        "Bytes of these blocks on each rank.",
    ),
}
PATHS = (
    "vllm:kv_transfer_read_bytes",
    "Bytes read, by NIXL backend, memory (peer's->ours) and, for UCX, the transports that it may choose from.",
)
LIVE = ("vllm:kv_transfer_live_requests", "Requests with a hand-over, by its state.")
INFO = ("vllm:kv_transfer_info", "Always 1: the connector that runs, with its versions and choices as labels.")


def empty_observations() -> dict[str, list[Any]]:
    """Return an empty list for every key."""
    return {key: [] for key in (*HISTOGRAMS, *COUNTERS, *FAILURE_KEYS, *BY_CODE, *LEVELS, LIVE_KEY, PATH_KEY)}
