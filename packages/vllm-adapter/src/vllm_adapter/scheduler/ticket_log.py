"""Counts and log lines of tickets that this engine refuses or does not give."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.scheduler.values import Arrival

__all__ = ["TicketLog"]

_COUNTED_ONLY = frozenset(("draining", "lease-quota"))
"""Reasons to give no ticket that concern all requests for a time: no line for each."""


@final
class TicketLog:
    """Counts every such ticket by its code, and logs a line for it as far as lines of this code are not held back."""

    def __init__(self, recorder: Recorder, log: CauseLog) -> None:
        self._recorder = recorder
        self._log = log

    def refused(self, request_id: str, code: str, message: str) -> None:
        """Note a request that came with a ticket that is not believed."""
        self._recorder.observe("ticket_refusal_codes", code)
        self._log.warning(
            code,
            "request %s: its hand-over ticket is refused and the prompt computed here (%s: %s)",
            request_id,
            code,
            message,
        )

    def params_of(self, arrival: Arrival) -> object:
        """Return the params that a request's hand-over follows; none of a session, whose prompt is never known to be whole.

        Source: vLLM tells connectors of a session's first part alone. Later parts prolong the prompt and write into its blocks.
        """
        if arrival.is_session and arrival.params:
            text = "the request is a session whose prompt comes in parts, and only whole prompts are handed over"
            self.refused(arrival.request_id, "ticket-session", text)
            return None
        return arrival.params

    def withheld(self, request_id: str, code: str) -> None:
        """Note a finished request whose response has no ticket."""
        self._recorder.observe("withheld_ticket_codes", code)
        if code not in _COUNTED_ONLY:
            self._log.warning(code, "request %s: its prompt is not handed over (%s)", request_id, code)

    def not_shortened(self, request_id: str) -> None:
        """Note a prompt whose last tokens the consumer was to compute, and which could not be shortened."""
        self._log.warning(
            "tail-not-shortened",
            "request %s: its last prompt tokens are the decode engine's to compute, and could not be left out here",
            request_id,
        )
