"""Policy for the hosts and ports that a ticket may name.

The address in a ticket comes from a client, and a worker connects to it. Without a check, a client could reach whatever the
engine can reach. Names are never resolved here: a resolved name can change between check and use, so a name is
allowed as such or not at all.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, final

from kv_scheduler_state.errors import InvalidConfig, field_error, quote

__all__ = ["HostPolicy", "canonical_host"]

_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_NUMBER: Final = re.compile(r"(?:.*\.)?(?:0[xX][0-9A-Fa-f]*|[0-9]+)\.?\Z")
"""An IPv4 address in one of its old notations: 2852039166, 0xa9fea9fe and 169.254.43518 are all 169.254.169.254 to a resolver. No
name ends in a number, since no top-level domain is one."""
_MAX_HOST_CHARS: Final = 253

_SPECIAL: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("169.254.0.0/16", "fe80::/10", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::254/128"),
            *("64:ff9b:1::/48", "2001::/32"),
        ),
    )
)
"""Addresses of one link only, among them those from which clouds hand out credentials (169.254.169.254; the next three are
Alibaba's, Azure's and Amazon's), and those of local NAT64 and Teredo, which hide an IPv4 address in varying places. No engine is
reached there, and a network around them, such as 0.0.0.0/0, does not allow them."""

_TRANSLATED: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::ffff:0:0:0/96", "::/96")))
"""IPv6 networks whose last 32 bits are an IPv4 address: NAT64, SIIT, and the compatible form of before 2006."""

_IPv4 = ipaddress.IPv4Address
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@final
class HostPolicy:
    """Decides whether a ticket's host may be connected to.

    Args:
        networks: CIDR networks that addresses must lie in; empty allows every address and every well-formed name.
        ports: First and last port that are allowed.
        setting: Name of the setting that holds the networks, for messages.

    Attributes:
        names_peers: Whether networks were given, so that not every well-formed host is allowed.

    Raises:
        InvalidConfig: `invalid-config`, for an invalid network or port range.
    """

    def __init__(
        self,
        networks: tuple[str, ...] = (),
        ports: tuple[int, int] = (1, 65535),
        *,
        setting: str = "peer_networks",
    ) -> None:
        try:
            self._networks = tuple(map(parse_network, networks))
        except ValueError as error:
            raise InvalidConfig(f"{setting}: {error}") from None
        least, most = ports
        if not 1 <= least <= most <= 65535:
            raise InvalidConfig(f"peer_ports: {least} to {most} is not a range within 1 to 65535")
        self._ports = ports
        self._setting = setting
        self.names_peers = bool(networks)

    def require(self, host: str) -> None:
        """Refuse a host that is malformed or not allowed.

        Raises:
            TicketError: `ticket-host`.
        """
        reason = self.refusal(host)
        if reason:
            raise field_error("ticket-host", "remote_host", f"{quote(host)} {reason}")

    def require_port(self, port: int) -> None:
        """Refuse a port outside the allowed range.

        Raises:
            TicketError: `ticket-host`.
        """
        least, most = self._ports
        if not least <= port <= most:
            raise field_error("ticket-host", "remote_port", f"{port} is outside {least} to {most} (peer_ports)")

    def refusal(self, host: str) -> str:
        """Return the reason why a host is not allowed, or an empty text."""
        try:
            address = _parsed(host)
        except ValueError:
            if len(host) > _MAX_HOST_CHARS or not _NAME.match(host) or _NUMBER.match(host):
                return "is neither an IP address nor a host name"
            return "" if not self.names_peers else f"is a name, and only addresses in {self._setting} are allowed"
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            return "names a zone, and libzmq would read what stands there"
        if address.is_unspecified or address.is_multicast:
            return "is an address that no engine can have"
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # otherwise ::ffff:a.b.c.d would bypass an IPv4 rule
        inner = _embedded(address)
        if not self._may_be_special(address) or (inner is not None and not self._may_be_special(inner)):
            return "is link-local or serves a cloud's metadata, and no network within that range allows it"
        if not self.names_peers or any(address in network for network in self._networks):
            return ""
        return f"lies in none of the configured {self._setting}"

    def _may_be_special(self, address: _Address) -> bool:
        """Return False for a special address, unless a network that holds nothing but such addresses allows it."""
        around = next((special for special in _SPECIAL if address in special), None)
        return around is None or any(address in network and _is_within(network, around) for network in self._networks)


def canonical_host(host: str) -> str:
    """Return the one spelling of an IP address that a policy allows; a name stays as it is.

    Example: ``::ffff:10.0.0.1`` and ``10.0.0.1`` are the same engine, which must not count as two.
    """
    try:
        address = _parsed(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _parsed(host: str) -> _Address:
    return ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)


def _embedded(address: _Address) -> _IPv4 | None:
    """Return the IPv4 address to which a translator or a tunnel would forward packets for an IPv6 address."""
    if isinstance(address, _IPv4):
        return None
    return address.sixtofour or next(
        (_IPv4(int(address) & 0xFFFFFFFF) for network in _TRANSLATED if address in network and int(address) > 1), None
    )


def parse_network(text: str) -> _Network:
    """Return the network that CIDR text names.

    Raises:
        ValueError: With the reason in words. Example: ``10.0.0.1/8`` names an address within a network of 8 bits, so it
            could mean ``10.0.0.1/32`` as well as ``10.0.0.0/8``.
    """
    try:
        meant = ipaddress.ip_interface(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network: {error}") from None
    if int(meant.ip) != int(meant.network.network_address):  # the zone of an IPv6 address does not count
        alone = f"{meant.ip}/{meant.max_prefixlen}"
        raise ValueError(f"{text!r} names an address, not a network: write {meant.network} or {alone}")
    return meant.network


def _is_within(network: _Network, around: _Network) -> bool:
    return (
        network.version == around.version
        and network.network_address in around
        and network.prefixlen >= around.prefixlen
    )
