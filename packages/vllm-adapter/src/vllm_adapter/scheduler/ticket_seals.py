"""Seals of tickets in the scheduler's process: changing secrets, and peers that do not seal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, final

if TYPE_CHECKING:
    from vllm_adapter.config.secrets import FleetSecrets
    from vllm_adapter.ports import SchedulerState

__all__ = ["TicketSeals"]

_logger = logging.getLogger("vllm.vllm_adapter")
_MOST_PEERS = 256


@final
class TicketSeals:
    """Passes the fleet's secrets to the request machines, and logs once per peer that its tickets are not sealed.

    Args:
        secrets: The fleet's secrets, None if tickets are not sealed.
        state: The request machines.
    """

    def __init__(self, secrets: FleetSecrets | None, state: SchedulerState) -> None:
        self._secrets = secrets
        self._state = state
        self._unsealed: set[tuple[str, str]] = set()
        if secrets is not None:
            state.set_secrets(secrets.current)

    @property
    def current(self) -> tuple[bytes, ...]:
        """The secrets, empty if nothing is sealed; any thread."""
        return self._secrets.current if self._secrets is not None else ()

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """A digest of each secret, in order, for comparing two engines; the first secret seals this engine's tickets."""
        return self._secrets.fingerprints if self._secrets is not None else ()

    def look(self, now_s: float) -> None:
        """Pass secrets that have changed to the request machines."""
        if self._secrets is not None and self._secrets.changed(now_s):
            self._state.set_secrets(self._secrets.current)

    def accepted(self, params: object) -> None:
        """Check the params of an admitted request: a ticket, or a plain request to prefill, which names no blocks."""
        if self._secrets is None or not isinstance(params, Mapping):
            return
        ticket = cast("Mapping[str, object]", params)
        if ticket.get("kv_seal") is not None or not ticket.get("remote_block_ids"):
            return
        peer = str(ticket.get("remote_engine_id"))[:80], str(ticket.get("remote_host"))[:80]
        if peer in self._unsealed or len(self._unsealed) >= _MOST_PEERS:
            return
        self._unsealed.add(peer)
        _logger.warning(
            "engine %r at %s hands over without seals, as unsigned_hosts allows: a client can make up tickets for it",
            *peer,
        )
