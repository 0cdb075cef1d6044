"""The parts that all tickets of an engine have in common."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kv_scheduler_state._ticket import PeerAddress

if TYPE_CHECKING:
    from kv_scheduler_state._config import SchedulerConfig

__all__ = ["own_address", "params_template", "wire_id"]

_FIRST_WITH_GENERATION: Final = 15
"""Connector version whose tickets name a registration generation. Source: vLLM 0.33."""

_SHORT: Final = "kv-id-"
_MOST_CHARS: Final = 512
"""Longest request id that readers accept, see `TicketLimits.max_text_chars`."""


def wire_id(request_id: str) -> str:
    """Return the id under which peers know a request: its own, or a short digest of one that not every reader accepts.

    Clients choose request ids, so they may be long, not printable or in any script.
    """
    is_plain = request_id.isascii() and len(request_id) <= _MOST_CHARS and request_id.isprintable()
    # An id that looks like a digest is replaced, too, so that it is never taken for that of another request.
    if is_plain and not request_id.startswith(_SHORT):
        return request_id
    return _SHORT + sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def own_address(config: SchedulerConfig, generation: int | None) -> PeerAddress:
    """Return the address under which peers know this engine."""
    sizes = config.tp, config.pp, config.dcp
    return PeerAddress(config.engine_id, config.host, config.port, *sizes, generation, config.dialect)


def params_template(
    config: SchedulerConfig, lease_s: float, generation: int | None, *, is_readback: bool
) -> dict[str, object]:
    """Return the params of a ticket without the parts that differ from request to request."""
    params: dict[str, object] = {
        "do_remote_prefill": not is_readback,
        "do_remote_decode": is_readback,
        "remote_block_ids": None,
        "remote_engine_id": config.engine_id,
        "remote_request_id": None,
        "remote_host": config.host,
        "remote_port": config.port,
        "tp_size": config.tp,
        "dcp_size": config.dcp,
        "pp_size": config.pp,
        "remote_num_tokens": 0,
        # A clock reading would mean nothing to the peer; the lease's length travels in kv_lease_s.
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "kv_lease_s": lease_s,
    }
    optional: dict[str, int | None] = {
        "kv_null_block": config.null_block,
        "kv_generation": generation,
        "kv_dialect": config.dialect,
    }
    params.update((key, value) for key, value in optional.items() if value is not None)
    if generation is not None and (config.dialect or 0) >= _FIRST_WITH_GENERATION:
        params["remote_registration_generation"] = generation
    return params
