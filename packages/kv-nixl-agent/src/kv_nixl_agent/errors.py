"""The one exception of this package and the table of its codes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, cast, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AgentError",
    "ERROR_CODES",
    "ErrorFacts",
    "Fault",
    "demand",
    "demand_callable",
    "demand_ints",
    "transfer_code",
]

Fault = Literal["local", "peer", "environment"]


@final
@dataclass(frozen=True)
class ErrorFacts:
    """Properties of a code that hold for every error with that code."""

    fault: Fault
    is_retry_safe: bool | None
    """Whether the same call may be repeated later; None when that depends on the cause."""
    meaning: str


ERROR_CODES: Final[Mapping[str, ErrorFacts]] = MappingProxyType(
    {
        # The agent and its thread.
        "wrong-type": ErrorFacts("local", False, "a value is of another type than the call takes"),
        "bad-options": ErrorFacts("local", False, "an option is out of its range"),
        "agent-closed": ErrorFacts("local", False, "the agent was closed"),
        "not-started": ErrorFacts("local", True, "the transfer thread has not been started"),
        "wrong-thread": ErrorFacts("local", False, "an owner method was called on another thread"),
        "thread-dead": ErrorFacts("local", False, "the transfer thread died or did not start"),
        "nixl-missing": ErrorFacts("environment", False, "no NIXL Python package can be imported"),
        "backend-unavailable": ErrorFacts("environment", False, "a NIXL backend is missing or refused its options"),
        # Memory.
        "bad-region": ErrorFacts("local", False, "a region to register is empty, overlaps another one or is malformed"),
        "registration-failed": ErrorFacts("environment", False, "NIXL refused to register or deregister memory"),
        "bad-rows": ErrorFacts("local", False, "rows are malformed: shape, dtype, zero lengths or overlapping strides"),
        "rows-unregistered": ErrorFacts("local", False, "local rows reach outside registered memory"),
        "peer-rows-unregistered": ErrorFacts("peer", False, "peer rows reach outside the peer's registered memory"),
        # Peers.
        "metadata-damaged": ErrorFacts("peer", True, "agent metadata was truncated or changed on its way"),
        "no-descriptors": ErrorFacts("environment", True, "too few descriptors are left to connect to a peer"),
        "metadata-rejected": ErrorFacts("peer", None, "NIXL cannot use the peer's agent metadata"),
        "agent-name": ErrorFacts("peer", False, "the agent metadata names another agent than the peer's"),
        "unknown-peer": ErrorFacts("local", False, "no peer is known under that key"),
        "peer-known": ErrorFacts(
            "local", False, "the peer key, or its agent name with other metadata, is in use; replace or remove it first"
        ),
        "peer-removed": ErrorFacts("local", None, "the peer was removed or replaced while a transfer was on its way"),
        "peer-disconnected": ErrorFacts("peer", True, "the connection to the peer is gone"),
        "notification-failed": ErrorFacts("peer", True, "a notification could not be sent"),
        # Transfers.
        "bad-indices": ErrorFacts("local", False, "indices are out of range, of unequal number or of a wrong dtype"),
        "length-mismatch": ErrorFacts("local", False, "a local descriptor and its peer descriptor differ in length"),
        "duplicate-transfer": ErrorFacts("local", False, "the transfer id is in use"),
        "transfer-rejected": ErrorFacts("local", False, "NIXL refused to make or post the transfer"),
        "transfer-failed": ErrorFacts("environment", None, "the backend failed while the transfer was on its way"),
        "deadline-exceeded": ErrorFacts("peer", None, "the transfer was not seen to end before its deadline"),
        "cancelled": ErrorFacts("local", True, "the transfer was cancelled"),
        "queue-full": ErrorFacts("local", True, "too many transfers wait for their turn"),
        "quarantine-full": ErrorFacts("peer", True, "too many unfinished transfers of this peer are in quarantine"),
        "bad-fence": ErrorFacts("local", False, "a fence slot or generation is out of range, or the peer has no fence"),
        "bad-streams": ErrorFacts(
            "local", False, "a stream slot, tag or table is out of range, or no stream memory exists"
        ),
        "fence-mismatch": ErrorFacts("peer", False, "the producer ended the lease before the data was read"),
        # NIXL's own statuses, as the port reports them.
        "nixl-invalid-param": ErrorFacts("local", False, "NIXL: invalid parameter"),
        "nixl-not-found": ErrorFacts("local", False, "NIXL: not found"),
        "nixl-mismatch": ErrorFacts("local", False, "NIXL: mismatch"),
        "nixl-not-posted": ErrorFacts("local", False, "NIXL: the transfer was never posted"),
        "nixl-not-allowed": ErrorFacts("local", False, "NIXL: not allowed"),
        "nixl-not-supported": ErrorFacts("environment", False, "NIXL: not supported"),
        "nixl-active": ErrorFacts("local", True, "NIXL: the transfer is still active"),
        "nixl-disconnected": ErrorFacts("peer", True, "NIXL: the remote agent disconnected"),
        "nixl-cancelled": ErrorFacts("local", True, "NIXL: cancelled"),
        "nixl-backend": ErrorFacts("environment", None, "NIXL: backend error"),
        "nixl-unknown": ErrorFacts("environment", None, "NIXL: unknown error"),
    }
)
"""Every code with its fault, retry safety and meaning. Codes are stable; new ones may be added."""


@final
class AgentError(Exception):
    """A coded failure of this package; its text is "sentence (code)".

    Args:
        code: Key of `ERROR_CODES`.
        message: The mistake, with its numbers, and the remedy.
        **context: Plain values for logs and metrics.
    """

    def __init__(self, code: str, message: str, **context: object) -> None:
        super().__init__(message)
        facts = ERROR_CODES[code]
        self.message: Final = message
        """The sentence alone."""
        self.code: Final = code
        """Stable kebab-case code."""
        self.fault: Final = facts.fault
        """Where the cause lies: `local`, `peer` or `environment`."""
        self.is_retry_safe: Final = facts.is_retry_safe
        """Whether the same call may be repeated; None when that depends on the cause."""
        self.context: Final[Mapping[str, object]] = MappingProxyType(context)
        """Plain values that belong to the error."""

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.code, self.message, dict(self.context)))


def _rebuild(code: str, message: str, context: dict[str, object]) -> AgentError:
    return AgentError(code, message, **context)


def demand(name: str, value: object, *kinds: type) -> None:
    """Raise `wrong-type` unless a caller's value is of one of these types; a bool is not an int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise AgentError("wrong-type", f"{name} must be {wanted}, not a {type(value).__name__}", name=name)


def demand_callable(*functions: object) -> None:
    """Raise `wrong-type` unless all these are functions."""
    for function in functions:
        if not callable(function):
            raise AgentError("wrong-type", f"a callback must be a function, not a {type(function).__name__}")


def demand_ints(name: str, values: object, count: int) -> None:
    """Raise `wrong-type` unless a caller's value is a tuple or list of as many integers."""
    items = cast("Sequence[object]", values) if isinstance(values, (tuple, list)) else ()
    if len(items) != count or any(type(item) is not int for item in items):
        raise AgentError("wrong-type", f"{name} must be {count} integers, not {values!r:.60}", name=name)


_REFUSED_BY_NIXL: Final = frozenset(
    {"nixl-invalid-param", "nixl-mismatch", "nixl-not-allowed", "nixl-not-supported", "nixl-not-posted"}
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
