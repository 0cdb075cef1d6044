"""Look-ups of host names on other threads, each name once at a time."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Names"]

_LOOKUPS = 32
"""Names looked up at once. A thread is made only if all others are busy."""

_MOST_KNOWN = 256

_LINK_LOCAL = tuple(
    map(
        ip_network,
        (
            *("169.254.0.0/16", "fe80::/10", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::254/128"),
            *("64:ff9b:1::/48", "2001::/32"),
        ),
    )
)
"""Addresses of one link only, among them those from which clouds hand out credentials (the next three are Alibaba's, Azure's and
Amazon's), and those of local NAT64 and Teredo, which hide an IPv4 address in varying places."""

_TRANSLATED = tuple(map(ip_network, ("64:ff9b::/96", "::ffff:0:0:0/96", "::/96")))
"""IPv6 networks whose last 32 bits are an IPv4 address: NAT64, SIIT, and the compatible form of before 2006."""


@final
class Names:
    """Finds the addresses of host names for one thread, without making it wait for a slow name server.

    Requests for the same name share one look-up, so a name in many tickets takes only one of the 32 threads.

    Addresses of one link only are left out: tickets name hosts, strangers write tickets, and a stranger who gives a name also
    decides what it resolves to. Such an address would let a name lead to services that trust the machine alone.

    Args:
        wake: Called when a look-up has ended, from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="kv-handshake-names")
        self._known: dict[str, Future[list[str]]] = {}

    def look_up(self, host: str) -> Future[list[str]]:
        """Return the look-up of a name, new or under way; its result is empty if the name has no address."""
        lookup = self._known.get(host)
        if lookup is None or lookup.done():
            # The oldest is forgotten; if it is under way, it still ends for those who wait for it.
            if host not in self._known and len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            lookup = self._known[host] = self._pool.submit(_addresses_of, host)
        lookup.add_done_callback(lambda _: self._wake())  # at once if it has ended already
        return lookup

    def close(self) -> None:
        """Drop look-ups that have not begun; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _addresses_of(host: str) -> list[str]:
    """Return the addresses of a name that strangers may use, IPv4 first, because vLLM binds only IPv4; empty if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    addresses = dict.fromkeys(str(each[4][0]) for each in ordered)
    return [each for each in addresses if _is_reachable_for_strangers(each)]


def _is_reachable_for_strangers(text: str) -> bool:
    """Return whether an address neither is nor leads to an address of one link only; False if it does not parse.

    Examples: 169.254.169.254, ::ffff:169.254.169.254, 64:ff9b::a9fe:a9fe (NAT64) and 2002:a9fe:a9fe::1 (6to4) all lead to
    169.254.169.254.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    led_to: list[IPv4Address | IPv6Address] = [address]
    if isinstance(address, IPv6Address):
        led_to += [inner for inner in (address.ipv4_mapped, address.sixtofour) if inner is not None]
        led_to += [IPv4Address(int(address) & 0xFFFFFFFF) for network in _TRANSLATED if address in network]
    return not any(each in network for each in led_to for network in _LINK_LOCAL)
