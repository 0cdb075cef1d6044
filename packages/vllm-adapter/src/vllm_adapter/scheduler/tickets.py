"""Tickets of this engine beside the request machines: seals, log lines and drain."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config.secrets import FleetSecrets
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.hooks import Arrival

__all__ = ["Draining", "TicketLog", "TicketSeals"]

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

    def params_of(self, arrival: Arrival) -> object:
        """Return the params that a request's hand-over follows; None for a session, whose prompt is never known to be complete.

        Source: vLLM tells connectors of a session's first part alone. Later parts extend the prompt and write into its blocks.
        """
        if arrival.is_session and arrival.params:
            text = "the request is a session whose prompt comes in parts, and only whole prompts are handed over"
            self.refused(arrival.request_id, "ticket-session", text)
            return None
        return arrival.params

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


_logger = logging.getLogger("vllm.vllm_adapter")


@final
class Draining:
    """Lets the request machines drain once the host is shutting down, and counts leased blocks.

    The host keeps stepping while a finished request keeps blocks, so open leases need no action here.

    Args:
        facts: This engine.
        state: Its request machines.
        is_ending: Tells whether the host has been told to shut down.

    Attributes:
        is_revoking: Whether the next step is to revoke all leases; set on another thread.
    """

    def __init__(self, facts: EngineFacts, state: SchedulerState, is_ending: Callable[[], bool]) -> None:
        self._engine_id = facts.engine_id
        self._block_bytes = tuple(group.block_bytes for group in facts.groups)
        self._state = state
        self._is_ending = is_ending
        self._has_ended = False
        self.is_revoking = False

    @property
    def leased_blocks(self) -> int:
        """Blocks that finished requests keep for a reader; a block shared by two of them counts twice."""
        return sum(self._state.leased_blocks)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the leased blocks on each rank.

        Example: 3 blocks of 4096 bytes in the first group and 1 of 1024 in the second: 13312.
        """
        return sum(blocks * size for blocks, size in zip(self._state.leased_blocks, self._block_bytes, strict=True))

    def look(self) -> None:
        """Start to drain if the host is shutting down; the first time, log the tickets that are still to be read."""
        if self._state.is_draining or not self._is_ending():
            return
        self._state.drain()
        _logger.info(
            "engine %s drains: it gives no more tickets; %d requests keep %d blocks (%d bytes on each rank) until they are "
            "read, their lease expires or the host's --shutdown-timeout is over",
            self._engine_id,
            self._state.lease_count,
            self.leased_blocks,
            self.leased_bytes,
        )

    def ask_to_revoke(self) -> Answer:
        """Let the next step revoke all leases; return how many there are and what they keep. Any thread.

        The host steps as long as there is a lease.
        """
        count = self._state.lease_count
        self.is_revoking = count > 0
        return {"leases": count, "leased_blocks": self.leased_blocks, "leased_bytes": self.leased_bytes}

    def revoke(self, now_s: float) -> None:
        """Order the end of all leases, as an operator has asked."""
        self.is_revoking = False
        _logger.info(
            "engine %s revokes %d leases, which keep %d blocks, as an operator has asked",
            self._engine_id,
            self._state.lease_count,
            self.leased_blocks,
        )
        self._state.revoke_all(now_s=now_s)

    def end(self) -> None:
        """Warn about tickets that can no longer be read; idempotent."""
        if self._state.lease_count and not self._has_ended:
            _logger.warning(
                "engine %s ends with %d requests unread, which keep %d blocks: their readers will find it gone",
                self._engine_id,
                self._state.lease_count,
                self.leased_blocks,
            )
        self._has_ended = True


_COUNT_EVERY_S = 1.0
"""Interval of counting live requests, which takes a scan and is too costly for every step."""
