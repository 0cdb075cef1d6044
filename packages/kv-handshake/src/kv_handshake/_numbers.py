"""The bound on numbers that travel through JSON."""

from __future__ import annotations

from kv_handshake._errors import ConfigurationError
from kv_handshake._limits import NUMBER_END

__all__ = ["check_number"]


def check_number(name: str, value: int) -> None:
    """Raise ``invalid-argument`` unless the number is 0 to 2**53 - 1.

    Tickets carry it through routers, many of which keep JSON numbers as 64-bit floats. Example: 2**53 + 1
    comes back as 2**53 from such a router, and the ticket no longer fits its engine.
    """
    if not 0 <= value < NUMBER_END:
        raise ConfigurationError("invalid-argument", f"{name} {value} is not 0 to 2**53 - 1", value=value)
