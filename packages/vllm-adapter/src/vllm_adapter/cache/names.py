"""Names of engines for operators: in log lines, metrics and commands.

An engine is named by the `engine_id` of its configuration. Without one vLLM makes up a UUID, which leads nowhere; then role and
side channel name it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.ports import PeerAddress

__all__ = ["ROLES", "channel_text", "engine_name", "peer_text"]

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_DEFAULT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(_dp[0-9]+)?")
"""Engine id that vLLM makes up where the configuration has none; the end is that of a data-parallel rank."""


def channel_text(host: str, port: int) -> str:
    """Return the address of a side channel as text, an IPv6 address in brackets: `[fd00::1]:5600`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def engine_name(engine_id: str, kv_role: str, side_channel: str) -> str:
    """Return the configured engine id; for a UUID of vLLM's, role and address, as `prefill@10.0.0.1:5600`."""
    made_up = f"{ROLES.get(kv_role, kv_role)}@{side_channel}" if side_channel else engine_id
    return made_up if _DEFAULT_ID.fullmatch(engine_id) else engine_id


def peer_text(peer: PeerAddress) -> str:
    """Return a peer as log lines name it: `engine prefill-0 at 10.0.0.1:5600`, or `engine at 10.0.0.1:5600` for a UUID."""
    name = "" if _DEFAULT_ID.fullmatch(peer.engine_id) else f"{peer.engine_id} "
    return f"engine {name}at {channel_text(peer.host, peer.port)}"
