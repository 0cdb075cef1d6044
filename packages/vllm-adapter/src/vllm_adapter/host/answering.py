"""The socket on which this process answers `vllm-adapter status`, and the connector's description of itself."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vllm_adapter import __version__
from vllm_adapter.observe.status_socket import StatusSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_adapter.config import Settings

__all__ = ["SCHEMA", "open_status"]

SCHEMA = 1
"""Version of the answer; adding keys does not change it."""


def open_status(
    part: str,
    describe: Callable[[], Mapping[str, object]],
    hand_overs: Callable[[], Mapping[str, object]],
    labels: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    *,
    revoke: Callable[[], Mapping[str, object]] | None = None,
) -> StatusSocket:
    """Open this process's socket, if that is possible here.

    Args:
        part: This process's part of its engine: `scheduler`, or a rank as `0.1`.
        describe: Returns its current state, on the socket's thread.
        hand_overs: Returns its latest hand-overs, on the socket's thread.
        labels: The connector's description of itself, made at start.
        settings: The configuration; the figures that peers depend on are included in the answer.
        revoke: Takes all leases back, on the socket's thread; None for a process that grants none.
    """
    began_s = time.monotonic()
    fixed: dict[str, object] = {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "adapter_version": __version__,
        "ucx_tls": os.environ.get("UCX_TLS", ""),
        **(labels or {}),
    }
    if settings is not None:
        fixed |= {
            "lease_s": settings.kv_lease_duration,
            "heartbeat_s": settings.heartbeat_s,
            "requires_seals": settings.requires_seals,
            "is_encrypted": bool(settings.side_channel_key),
        }

    def answer() -> Mapping[str, object]:
        return {**fixed, "up_s": time.monotonic() - began_s, **describe()}

    def trace() -> Mapping[str, object]:
        return {"schema": SCHEMA, "pid": os.getpid(), **hand_overs()}

    status = StatusSocket(part, answer, hand_overs=trace, revoke=revoke)
    status.open()
    return status
