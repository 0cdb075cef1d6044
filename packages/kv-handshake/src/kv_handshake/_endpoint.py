"""Hosts and ports: checking them, and writing them the way the transport wants them."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from kv_handshake._errors import ConfigurationError

__all__ = ["check_endpoint", "is_literal_address", "is_wildcard", "parse_endpoint", "tcp_url"]

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - recognised here, bound only if the operator says so
_MAX_HOST_CHARS = 255


def check_endpoint(host: str, port: int, *, allows_any_port: bool = False) -> None:
    """Raise ``invalid-endpoint`` unless host and port can be put into an address.

    Tickets carry hosts that a client chose, so a host is a literal address or a plain name: no scheme, path, space or
    interface syntax gets through to the transport.
    """
    least = 0 if allows_any_port else 1
    if not least <= port <= 65_535:
        raise ConfigurationError("invalid-endpoint", f"port {port!r} is not {least} to 65535", host=host, port=port)
    if host == "*" or is_literal_address(host):
        return
    labels = host.rstrip(".").split(".")
    is_name = 0 < len(host) <= _MAX_HOST_CHARS and all(
        label and len(label) <= 63 and label.isascii() and label.replace("-", "").replace("_", "").isalnum()
        for label in labels
    )
    if not is_name:
        raise ConfigurationError("invalid-endpoint", f"host {host!r} is neither an address nor a name", host=host)


@lru_cache(maxsize=1024)
def is_literal_address(host: str) -> bool:
    """Return whether the host is an IPv4 or IPv6 address (with or without a zone) instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Return whether the host means "every interface", which a peer cannot connect to."""
    return host in _WILDCARDS


def tcp_url(host: str, port: int) -> str:
    """Return ``tcp://host:port``, with brackets around an IPv6 address and ``*`` for port 0."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{port or '*'}"


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return (host, port) of ``host:port`` or ``[ipv6]:port``.

    Raises:
        ConfigurationError: ``invalid-endpoint``.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5:
        raise ConfigurationError("invalid-endpoint", f"{text!r} is not HOST:PORT", text=text)
    check_endpoint(host, int(port))
    return host, int(port)
