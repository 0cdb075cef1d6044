"""Tickets of this engine beside the request machines: seals and log lines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, final

if TYPE_CHECKING:
    from vllm_adapter.config.secrets import FleetSecrets
    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState

__all__ = ["TicketLog", "TicketSeals"]

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


_MEDIA_MISSING = "ticket-media-missing"
_COUNTED_ONLY = frozenset(("draining", "lease-quota"))
"""Reasons to withhold a ticket that apply to all requests for a time: they are counted, not logged for each request."""


_OF_AN_ENGINE = "ticket-mode"
"""Refusal that concerns all tickets of an engine, which its message names: it is logged once for each engine."""

_MOST_ENGINES = 64


@final
class TicketLog:
    """Counts each such ticket by its code, and logs a line for it unless lines of this code are rate-limited."""

    def __init__(self, recorder: Recorder, log: CauseLog) -> None:
        self._recorder = recorder
        self._log = log
        self._said: set[str] = set()

    def refused(self, request_id: str, code: str, message: str, *, is_producer: bool = False) -> None:
        """Count and log a request whose ticket was refused; that of a producer costs it the stream or the readback alone."""
        self._recorder.observe("ticket_refusal_codes", code)
        if code == _MEDIA_MISSING:
            self._log.error(
                code, "request %s: it ends with an error, whatever the policy (%s: %s)", request_id, code, message
            )
            return
        if is_producer:
            self._log.warning(
                f"producer-{code}",
                "request %s: its ticket is refused, so its prompt is computed here and handed over whole (%s: %s)",
                request_id,
                code,
                message,
            )
            return
        if code == _OF_AN_ENGINE and not self._is_new(message):
            return
        self._log.warning(
            code,
            "request %s: its hand-over ticket is refused and the prompt computed here (%s: %s)",
            request_id,
            code,
            message,
        )

    def _is_new(self, message: str) -> bool:
        """Return whether a line about an engine was not logged before; engines beyond the first 64 are counted only."""
        if message in self._said or len(self._said) >= _MOST_ENGINES:
            return False
        self._said.add(message)
        return True

    def gave_way(self, request_id: str, lease_count: int, block_count: int) -> None:
        """Count and log a read that was given up because no request here could start for want of blocks."""
        self._recorder.observe("cancelled_read_codes", "blocks-leased")
        self._log.warning(
            "blocks-leased",
            "request %s: its read is given up and its prompt computed here (blocks-leased): for a second nothing could run for "
            "want of blocks, and %d leases keep %d of them for peers, which may wait for blocks that they keep for this engine; "
            "its peer gets its blocks back. Give both engines more cache if this goes on",
            request_id,
            lease_count,
            block_count,
        )

    def withheld(self, request_id: str, code: str) -> None:
        """Count and log a finished request whose response has no ticket."""
        self._recorder.observe("withheld_ticket_codes", code)
        if code not in _COUNTED_ONLY:
            self._log.warning(code, "request %s: its prompt is not handed over (%s)", request_id, code)

    def not_shortened(self, request_id: str) -> None:
        """Count and log a prompt that could not be shortened although the consumer was to compute its last tokens."""
        self._log.warning(
            "tail-not-shortened",
            "request %s: its last prompt tokens are the decode engine's to compute, and could not be left out here",
            request_id,
        )
