"""The one exception of this package and the table of its codes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AgentError", "ERROR_CODES", "ErrorFacts", "Fault", "transfer_code"]

Fault = Literal["local", "peer", "environment"]


@final
@dataclass(frozen=True)
class ErrorFacts:
    """Properties of a code that hold for every error with that code."""

    fault: Fault
    is_retry_safe: bool | None
    """Whether the same call may be repeated later; None when that depends on the cause."""
    meaning: str


def _facts(fault: Fault, is_retry_safe: bool | None, meaning: str) -> ErrorFacts:
    return ErrorFacts(fault, is_retry_safe, meaning)


ERROR_CODES: Final[Mapping[str, ErrorFacts]] = MappingProxyType(
    {
        # The agent and its thread.
        "bad-options": _facts("local", False, "an option is out of its range"),
        "agent-closed": _facts("local", False, "the agent was closed"),
        "not-started": _facts("local", True, "the transfer thread has not been started"),
        "wrong-thread": _facts("local", False, "an owner method was called on another thread"),
        "thread-dead": _facts("local", False, "the transfer thread died or did not start"),
        "nixl-missing": _facts("environment", False, "no NIXL Python package can be imported"),
        "backend-unavailable": _facts("environment", False, "a NIXL backend is missing or refused its options"),
        # Memory.
        "bad-region": _facts("local", False, "a region to register is empty, overlaps another one or is malformed"),
        "registration-failed": _facts("environment", False, "NIXL refused to register or deregister memory"),
        "bad-rows": _facts("local", False, "rows are malformed: shape, dtype, zero lengths or overlapping strides"),
        "rows-unregistered": _facts("local", False, "local rows reach outside registered memory"),
        "peer-rows-unregistered": _facts("peer", False, "peer rows reach outside the memory that the peer registered"),
        # Peers.
        "metadata-damaged": _facts("peer", True, "agent metadata was truncated or changed on its way"),
        "no-descriptors": _facts("environment", True, "this process may not open the descriptors that a peer needs"),
        "metadata-rejected": _facts("peer", None, "NIXL cannot use the peer's agent metadata"),
        "agent-name": _facts("peer", False, "the agent metadata names another agent than the peer's"),
        "unknown-peer": _facts("local", False, "no peer is known under that key"),
        "peer-known": _facts(
            "local", False, "the peer key, or its agent name with other metadata, is in use; replace or remove it first"
        ),
        "peer-removed": _facts("local", None, "the peer was removed or replaced while a transfer was on its way"),
        "peer-disconnected": _facts("peer", True, "the connection to the peer is gone"),
        "notification-failed": _facts("peer", True, "a notification could not be sent"),
        # Transfers.
        "bad-indices": _facts("local", False, "indices are out of range, of unequal number or of a wrong dtype"),
        "length-mismatch": _facts("local", False, "a local descriptor and its peer descriptor differ in length"),
        "duplicate-transfer": _facts("local", False, "the transfer id is in use"),
        "transfer-rejected": _facts("local", False, "NIXL refused to make or post the transfer"),
        "transfer-failed": _facts("environment", None, "the backend failed while the transfer was on its way"),
        "deadline-exceeded": _facts("peer", None, "the transfer was not seen to end before its deadline"),
        "cancelled": _facts("local", True, "the transfer was cancelled"),
        "queue-full": _facts("local", True, "too many transfers wait for their turn"),
        "quarantine-full": _facts("peer", True, "too many unfinished transfers of this peer are in quarantine"),
        "bad-fence": _facts("local", False, "a fence slot or generation is out of range, or the peer has no fence"),
        "bad-streams": _facts(
            "local", False, "a stream slot, tag or table is out of range, or there is no stream memory"
        ),
        "fence-mismatch": _facts("peer", False, "the producer ended the lease before the data was read"),
        # NIXL's own statuses, as the port reports them.
        "nixl-invalid-param": _facts("local", False, "NIXL: invalid parameter"),
        "nixl-not-found": _facts("local", False, "NIXL: not found"),
        "nixl-mismatch": _facts("local", False, "NIXL: mismatch"),
        "nixl-not-posted": _facts("local", False, "NIXL: the transfer was never posted"),
        "nixl-not-allowed": _facts("local", False, "NIXL: not allowed"),
        "nixl-not-supported": _facts("environment", False, "NIXL: not supported"),
        "nixl-active": _facts("local", True, "NIXL: the transfer is still active"),
        "nixl-disconnected": _facts("peer", True, "NIXL: the remote agent disconnected"),
        "nixl-cancelled": _facts("local", True, "NIXL: cancelled"),
        "nixl-backend": _facts("environment", None, "NIXL: backend error"),
        "nixl-unknown": _facts("environment", None, "NIXL: unknown error"),
    }
)
"""Every code with its fault, retry safety and meaning. Codes are stable; new ones may be added."""


@final
class AgentError(Exception):
    """A coded failure of this package.

    Args:
        code: Key of `ERROR_CODES`.
        message: The mistake, with its numbers, and the remedy.
        **context: Plain values for logs and metrics.
    """

    def __init__(self, code: str, message: str, **context: object) -> None:
        super().__init__(message)
        facts = ERROR_CODES[code]
        self._code = code
        self._facts = facts
        self._context = MappingProxyType(dict(context))

    @property
    def code(self) -> str:
        """Stable kebab-case code."""
        return self._code

    @property
    def fault(self) -> Fault:
        """Where the cause lies: `local`, `peer` or `environment`."""
        return self._facts.fault

    @property
    def is_retry_safe(self) -> bool | None:
        """Whether the same call may be repeated; None when that depends on the cause."""
        return self._facts.is_retry_safe

    @property
    def context(self) -> Mapping[str, object]:
        """Plain values that belong to the error."""
        return self._context

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self._code, str(self), dict(self._context)))


def _rebuild(code: str, message: str, context: dict[str, object]) -> AgentError:
    return AgentError(code, message, **context)


_REFUSED_BY_NIXL: Final = frozenset(
    {
        "nixl-invalid-param",
        "nixl-mismatch",
        "nixl-not-allowed",
        "nixl-not-supported",
        "nixl-not-posted",
    }
)


def transfer_code(error: AgentError) -> str:
    """Return the code of a transfer that failed by `error`.

    NIXL forgets a peer whose connection has ended, whichever call notices that first, so the next post does not find the peer.
    """
    if error.code in {"nixl-disconnected", "nixl-not-found"}:
        return "peer-disconnected"
    if error.code in _REFUSED_BY_NIXL:
        return "transfer-rejected"
    return "transfer-failed" if error.code.startswith("nixl-") else error.code
