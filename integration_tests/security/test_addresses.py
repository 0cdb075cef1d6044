"""H4: what a ticket's host names is one address, and none of one link only, in whatever notation and by whatever name."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest
from figures import Figure

from kv_handshake import Client, LocalOffer, Timing
from kv_scheduler_state import TicketError
from kv_scheduler_state.hosts import HostPolicy

SPECIAL = ("169.254.169.254", "169.254.0.1", "100.100.100.200", "168.63.129.16")
WRITTEN: tuple[Callable[[int], str], ...] = (str, hex, "0{:o}".format, "0X{:X}".format, "000{:o}".format)


def old_notations(address: str) -> Iterator[str]:
    """Yield an IPv4 address as one to four numbers, each decimal, octal or hexadecimal, as the C library reads them."""
    parts = list(map(int, address.split(".")))
    for count in range(1, 5):
        last = sum(part << 8 * (3 - place) for place, part in enumerate(parts) if place >= count - 1)
        for forms in itertools.product(WRITTEN, repeat=count):
            yield ".".join(form(number) for form, number in zip(forms, [*parts[: count - 1], last], strict=True))


def carried(address: str) -> Iterator[str]:
    """Yield the IPv6 addresses behind which a translator or tunnel has an IPv4 address, in two spellings and in brackets."""
    number = int(IPv4Address(address))
    for head in ("::ffff:0:0", "64:ff9b::", "::ffff:0:0:0", "::"):
        whole = IPv6Address(int(IPv6Address(head)) + number)
        yield from (str(whole), whole.exploded, whole.exploded.upper(), f"[{whole}]")
    yield str(IPv6Address((0x2002 << 112) + (number << 80) + 1))


def is_taken(host: str) -> bool:
    try:
        HostPolicy().require(host)
    except TicketError:
        return False
    return True


def test_no_notation_of_a_metadata_address_is_taken(figure: Figure) -> None:
    """The address as such was refused, 2852039166 and 0xa9fea9fe were names, which the C library reads as that address."""
    hosts = [host for address in SPECIAL for host in (*old_notations(address), *carried(address))]
    hosts += [f"{host}." for host in hosts]
    taken = [host for host in hosts if is_taken(host)]
    figure(f"{len(taken)} of {len(hosts)} notations of {len(SPECIAL)} addresses taken")
    assert len(hosts) > 5000
    assert not taken


def test_a_name_leads_to_no_address_of_one_link(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who gives a name also decides its addresses; a good address beside a bad one is used."""
    real = socket.getaddrinfo
    answers = {
        "alone.test": ["169.254.169.254"],
        "mapped.test": ["::ffff:169.254.169.254"],
        "zone.test": ["fe80::1%1"],
        "nat64.test": ["64:ff9b::a9fe:a9fe"],
        "local-nat64.test": ["64:ff9b:1::a9fe:a9fe"],
        "6to4.test": ["2002:a9fe:a9fe::1"],
        "siit.test": ["::ffff:0:a9fe:a9fe"],
        "teredo.test": ["2001::a9fe:a9fe"],
        "odd.test": ["no address"],
        "both.test": ["169.254.169.254", "127.0.0.1"],
    }

    def resolve(host: str, *words: object, **named: object) -> object:
        if host not in answers:
            return real(host, *words, **named)  # type: ignore[arg-type]
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in answers[host]]
        return [
            (family, socket.SOCK_STREAM, 6, "", (each, 0)) for family, each in zip(families, answers[host], strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        client = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=0.5, attempt_s=0.4))
        codes = {
            host: client.fetch(host=host, port=port, ranks=[(0, 0)], engine_id=host, dialect=14).code
            for host in answers
        }
        client.close()
    figure(str(codes))
    assert codes == {**dict.fromkeys(answers, "name-unresolved"), "both.test": "connection-refused"}
