"""What an error of the port means for the transfer that met it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ._errors import AgentError
    from ._transfer import Transfer

__all__ = ["code_of", "is_off_the_wire", "late_message"]

# Errors that NIXL raises before anything reaches the wire.
_REJECTIONS: Final = frozenset(
    {
        "nixl-invalid-param",
        "nixl-not-found",
        "nixl-mismatch",
        "nixl-not-allowed",
        "nixl-not-supported",
        "nixl-not-posted",
    }
)


def is_off_the_wire(error: AgentError) -> bool:
    """Whether a handle that raised this certainly writes nothing any more."""
    return error.code == "nixl-disconnected" or error.code in _REJECTIONS


def code_of(error: AgentError) -> str:
    """Return the code of a transfer that failed by `error`."""
    if error.code == "nixl-disconnected":
        return "peer-disconnected"
    if error.code in _REJECTIONS:
        return "transfer-rejected"
    return "transfer-failed" if error.code.startswith("nixl-") else error.code


def late_message(transfer: Transfer) -> str:
    """Say what a transfer past its deadline was waiting for."""
    if not transfer.first_post_s:
        where = "in the queue"
    elif transfer.data_done_s:
        where = "while its fence was read"
    else:
        where = f"with {len(transfer.active)} parts in flight and {len(transfer.pending)} to post"
    return (
        f"not seen to end within {transfer.order.deadline_s:.3f} s ({where}); peer {transfer.peer.key!r} may be "
        "stopped or busy"
    )
