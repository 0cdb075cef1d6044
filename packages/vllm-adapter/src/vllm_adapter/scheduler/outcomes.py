"""Counts and log lines about what became of hand-overs.

The scheduler counts and logs a failed read, the ranks do not, because the scheduler knows whether the request still wanted it:
one line with the reason of each rank, unless lines of its codes are rate-limited.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.steps import ReadFailure

__all__ = ["OutcomeLog"]

_logger = logging.getLogger("vllm.vllm_adapter")
_MEDIA_MISSING = "ticket-media-missing"
_COUNTED_ONLY = frozenset(("draining", "lease-quota"))
"""Reasons to withhold a ticket that apply to all requests for a time: they are counted, not logged for each request."""

_OF_AN_ENGINE = "ticket-mode"
"""Refusal that concerns all tickets of an engine, which its message names: it is logged once for each engine."""
_MOST_ENGINES = 64
_MOST_PEERS = 256


@final
class OutcomeLog:
    """Counts each outcome by its code, and logs a line for it unless lines of this code are rate-limited."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._log = recorder.cause_log
        self._logged_modes: set[str] = set()
        self._unsealed: set[tuple[str, str]] = set()

    def refused(self, request_id: str, code: str, message: str, *, is_producer: bool = False) -> None:
        """Count and log a request whose ticket was refused; that of a producer costs it the stream or the readback alone."""
        self._recorder.observe("num_refused_tickets", code)
        log, cause, outcome = self._log.warning, code, "its hand-over ticket is refused and the prompt computed here"
        if code == _MEDIA_MISSING:
            log, outcome = self._log.error, "it ends with an error, whatever the policy"
        elif is_producer:
            cause = f"producer-{code}"
            outcome = "its ticket is refused, so its prompt is computed here and handed over whole"
        elif code == _OF_AN_ENGINE:
            if message in self._logged_modes or len(self._logged_modes) >= _MOST_ENGINES:
                return
            self._logged_modes.add(message)
        log(cause, "request %s: %s (%s: %s)", request_id, outcome, code, message)

    def unsealed(self, params: object) -> None:
        """Log once per peer that its tickets have no seal; for params that an engine with fleet secrets has accepted."""
        if not isinstance(params, Mapping):
            return
        ticket = cast("Mapping[str, object]", params)
        # A plain request to prefill names no blocks.
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

    def read_failed(self, request_id: str, failures: Sequence[ReadFailure]) -> None:
        """Count and log a failed read; reads with the same codes share a rate limit."""
        codes = sorted({failure.code for failure in failures})
        for code in codes:
            self._recorder.observe("num_failed_reads", code)
        ranks: defaultdict[str, list[str]] = defaultdict(list)
        for failure in sorted(failures, key=lambda one: one.rank):
            pp_rank, tp_rank = failure.rank
            ranks[failure.text].append(f"{pp_rank}.{tp_rank}")
        # For example: by ranks 0.0, 0.1 from request p1 of engine P: timed out; by rank 0.2 from ...
        reasons = [f"by rank{'s' * (len(of) > 1)} {', '.join(of)} from {reason}" for reason, of in ranks.items()]
        self._log.error(
            " ".join(codes),
            "request %s: its KV was not taken over %s; kv_load_failure_policy decides what becomes of it",
            request_id,
            "; ".join(reasons),
        )

    def read_cancelled(self, request_id: str) -> None:
        """Count and log a read that was given up because its request had ended: its client left, or the host aborted it.

        That is no failure, whatever the ranks' reasons are: a peer may also be lost while the cancelled read leaves the wire.
        """
        self._recorder.observe("num_cancelled_reads", "request-ended")
        self._log.info("request-ended", "request %s: its read was cancelled, as the request had ended", request_id)

    def gave_way(self, request_id: str, lease_count: int, block_count: int) -> None:
        """Count and log a read that was given up because no request here could start for want of blocks."""
        self._recorder.observe("num_cancelled_reads", "blocks-leased")
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
        self._recorder.observe("num_withheld_tickets", code)
        if code not in _COUNTED_ONLY:
            self._log.warning(code, "request %s: its prompt is not handed over (%s)", request_id, code)

    def not_shortened(self, request_id: str) -> None:
        """Count and log a prompt that could not be shortened although the consumer was to compute its last tokens."""
        self._log.warning(
            "tail-not-shortened",
            "request %s: its last prompt tokens are the decode engine's to compute, and could not be left out here",
            request_id,
        )
