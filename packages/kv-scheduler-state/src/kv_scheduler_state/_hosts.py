"""Where a ticket may point.

The address in a ticket comes from a client and is connected to by a worker. Without a check it reaches whatever the
engine can reach. Names are never resolved here: a resolved name can change between check and use, so a name is
allowed as such or not at all.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, final

from kv_scheduler_state._errors import InvalidConfig, TicketError, quote

__all__ = ["HostPolicy"]

_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_MAX_HOST_CHARS: Final = 253
_MAX_REMEMBERED: Final = 1024


@final
class HostPolicy:
    """Decides whether a ticket's host may be connected to.

    Args:
        networks: CIDR networks that addresses must lie in; empty allows every address.
        hosts: Names that are allowed besides; with no networks and no names, every well-formed name is.

    Raises:
        InvalidConfig: `invalid-config`, for a network that is none.
    """

    __slots__ = ("_good", "_hosts", "_is_open", "_networks")

    def __init__(self, networks: tuple[str, ...] = (), hosts: tuple[str, ...] = ()) -> None:
        try:
            self._networks = tuple(ipaddress.ip_network(network) for network in networks)
        except ValueError as error:
            raise InvalidConfig(f"peer_networks: {error}") from None
        self._hosts = frozenset(hosts)
        self._is_open = not networks and not hosts
        self._good: set[str] = set()

    def require(self, host: str) -> None:
        """Refuse a host that is malformed or not allowed.

        Raises:
            TicketError: `ticket-host`.
        """
        if host in self._good:
            return
        reason = self._refusal(host)
        if reason:
            raise TicketError(
                "ticket-host", f"remote_host {quote(host)} {reason}", field="remote_host", host=quote(host)
            )
        if len(self._good) >= _MAX_REMEMBERED:
            self._good.clear()
        self._good.add(host)

    def _refusal(self, host: str) -> str:
        if host in self._hosts:
            return ""
        try:
            address = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        except ValueError:
            if len(host) > _MAX_HOST_CHARS or not _NAME.match(host):
                return "is neither an IP address nor a host name"
            return "" if self._is_open else "is a name that peer_hosts does not list"
        if address.is_unspecified or address.is_multicast:
            return "is an address that no engine can have"
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # otherwise ::ffff:a.b.c.d would walk around an IPv4 rule
        if self._is_open or any(address in network for network in self._networks):
            return ""
        return "lies in none of the configured peer_networks"
