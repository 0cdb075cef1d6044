"""Hosts and ports: checked once into a value, and written as the transport needs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import final

from kv_handshake.errors import ConfigurationError, require

__all__ = ["Endpoint", "endpoint_of", "parse_endpoint"]

_MAX_HOST_CHARS = 255
_NUMBER = re.compile(r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)\Z")
"""Last label of an IPv4 address in one of its old notations: 2852039166, 0xa9fea9fe and 169.254.43518 are all 169.254.169.254 to
`getaddrinfo`. No name ends so, since no top-level domain is a number."""


@final
@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port that are safe to put into a transport address.

    Attributes:
        host: Name, ``*``, or the address written anew from `address`.
        port: TCP port; 0 for any free one of a listener.
        address: The parsed address; None for a name or ``*``.
    """

    host: str
    port: int
    address: IPv4Address | IPv6Address | None = None

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"

    @property
    def url(self) -> str:
        """``tcp://host:port``, with brackets around an IPv6 address and ``*`` for port 0."""
        shown = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return f"tcp://{shown}:{self.port or '*'}"


def endpoint_of(host: str, port: int, *, allows_any_port: bool = False) -> Endpoint:
    """Return the endpoint of a host and a port.

    Tickets carry hosts that a client chose, and the transport gives characters such as ``;`` and ``]`` a meaning. So a host
    is a literal address, which is parsed and written anew, or a plain name: no scheme, path, space, zone or interface syntax, and
    no number that a resolver would take for an address.

    Raises:
        ConfigurationError: ``invalid-endpoint``.
    """
    least = 0 if allows_any_port else 1
    require(str, host=host)
    if type(port) is not int or not least <= port <= 65_535:
        raise ConfigurationError("invalid-endpoint", f"port {port!r} is not {least} to 65535", port=port)
    if host == "*":
        return Endpoint(host, port)
    address = _address_of(host) if len(host) <= _MAX_HOST_CHARS else None
    if address is not None:
        return Endpoint(str(address), port, address)
    labels = host.rstrip(".").split(".")
    is_name = 0 < len(host) <= _MAX_HOST_CHARS and all(
        label and len(label) <= 63 and label.isascii() and label.replace("-", "").replace("_", "").isalnum()
        for label in labels
    )
    is_name = is_name and not _NUMBER.match(labels[-1])
    if not is_name:
        raise ConfigurationError(
            "invalid-endpoint", f"host {host[:_MAX_HOST_CHARS]!r} is neither an address nor a name", port=port
        )
    return Endpoint(host, port)


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint that ``host:port`` or ``[ipv6]:port`` names.

    Raises:
        ConfigurationError: ``invalid-endpoint``.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5:
        raise ConfigurationError("invalid-endpoint", f"{text!r} is not HOST:PORT", text=text)
    return endpoint_of(host, int(port))


@lru_cache(maxsize=1024)
def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    # ipaddress takes any text for a zone, also one that closes the bracket of the transport's address.
    return None if isinstance(address, IPv6Address) and address.scope_id is not None else address
