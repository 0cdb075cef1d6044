"""Every exception of this package.

Outcomes that belong to normal life (a refused ticket at admission, an expired lease, a duplicate notification) are values.
Exceptions are for a caller's mistake, or for a bad ticket that is read outside admission.
"""
# ruff: noqa: N818 -- the exceptions are named after what happened; their base says Error.

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DuplicateRequest",
    "Fault",
    "IllegalTransition",
    "InvalidConfig",
    "InvalidEvent",
    "SchedulerStateError",
    "TicketError",
    "UnknownRequest",
    "field_error",
    "quote",
    "require_count",
]

Fault = Literal["local", "peer", "environment"]

_QUOTE_CHARS = 80


def quote(value: object) -> str:
    """Return a short, printable form of an untrusted value for a message."""
    if isinstance(value, str):
        text = ascii(value[:_QUOTE_CHARS])
    elif isinstance(value, bool | int | float) and not (isinstance(value, int) and value.bit_length() > 128):
        text = repr(value)
    elif value is None:
        text = "None"
    else:
        # The repr of a hostile container can be as large as the container.
        text = f"a {type(value).__name__}"
    return text if len(text) <= _QUOTE_CHARS else text[:_QUOTE_CHARS] + "..."


class SchedulerStateError(Exception):
    """Base of every exception of this package; its text is "message (code)".

    Attributes:
        code: Stable, kebab-case reason.
        fault: Side that has to change something: "local", "peer" or "environment".
        is_retry_safe: Whether the same call may succeed later unchanged; None when that is not known.
        message: The problem as a sentence, without the code.
        context: Plain values that the message was made from.
    """

    code: str
    message: str
    fault: Fault = "local"
    is_retry_safe: bool | None = False
    context: Mapping[str, object]

    def __init__(self, message: str, *, code: str, context: Mapping[str, object]) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.context = MappingProxyType(dict(context))

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"

    def __reduce__(self) -> tuple[object, ...]:
        # A mappingproxy is not picklable, and subclasses have other arguments than the message.
        return type(self).__new__, (type(self), *self.args), {**self.__dict__, "context": dict(self.context)}

    def __setstate__(self, state: dict[str, object] | None) -> None:
        self.__dict__.update(state or {})
        self.context = MappingProxyType(dict(self.context))


@final
class IllegalTransition(SchedulerStateError):
    """An event that the request's state has no transition for; nothing was changed (`illegal-transition`)."""

    def __init__(self, machine: str, request_id: str, state: str, event: str) -> None:
        super().__init__(
            f"{machine} request {quote(request_id)} in state '{state}' has no transition for event '{event}'; "
            "nothing was changed. Compare the order of the calls with the package's README",
            code="illegal-transition",
            context={"machine": machine, "request_id": request_id, "state": state, "event": event},
        )
        self.request_id = request_id
        self.state = state
        self.event = event


@final
class UnknownRequest(SchedulerStateError):
    """An event for a request that never arrived, or has ended (`unknown-request`)."""

    def __init__(self, request_id: object, event: str) -> None:
        super().__init__(
            f"no live request {quote(request_id)} for event '{event}'; it never arrived or has already ended",
            code="unknown-request",
            context={"request_id": request_id, "event": event},
        )


@final
class DuplicateRequest(SchedulerStateError):
    """An arrival under the id of a live request (`duplicate-request`)."""

    def __init__(self, request_id: str, state: str) -> None:
        super().__init__(
            f"request {quote(request_id)} arrived twice: the first is still '{state}'; give every request its own id",
            code="duplicate-request",
            context={"request_id": request_id, "state": state},
        )


@final
class InvalidEvent(SchedulerStateError):
    """An argument that no event can carry, such as a negative time (`invalid-event`)."""

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message, code="invalid-event", context=context)


@final
class InvalidConfig(SchedulerStateError):
    """A configuration that contradicts itself or is out of range (`invalid-config`)."""

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message, code="invalid-config", context=context)


@final
class TicketError(SchedulerStateError):
    """A `kv_transfer_params` object that cannot be trusted; the code (`ticket-...`) says which rule it broke."""

    fault: Fault = "peer"

    def __init__(self, code: str, message: str, **context: object) -> None:
        super().__init__(message, code=code, context=context)


def field_error(code: str, field: str, problem: str) -> TicketError:
    """Return the error for one field of a ticket; its message begins with the name of the field."""
    return TicketError(code, f"{field} {problem}", field=field)


def require_count(name: str, value: object) -> None:
    """Refuse an argument that is not an integer of zero or more.

    Raises:
        InvalidEvent: `invalid-event`.
    """
    if type(value) is not int or value < 0:
        raise InvalidEvent(f"{name} is {quote(value)}, must be an integer of zero or more")
