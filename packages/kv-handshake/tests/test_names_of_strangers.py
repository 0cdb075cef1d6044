"""Addresses to which a name that a stranger gave must not lead, in every form that carries them."""

from ipaddress import IPv4Address, IPv6Address

from hypothesis import given
from hypothesis import strategies as st

from kv_handshake.sockets.names import _is_reachable_for_strangers

METADATA = ["169.254.169.254", "100.100.100.200", "168.63.129.16"]


def forms(address):
    """Return an IPv4 address as it is, mapped, behind NAT64 and SIIT, in the old compatible form and behind 6to4."""
    number = int(IPv4Address(address))
    carried = [int(IPv6Address(head)) + number for head in ("::ffff:0:0", "64:ff9b::", "::ffff:0:0:0", "::")]
    return [
        address,
        *(str(IPv6Address(each)) for each in carried),
        str(IPv6Address((0x2002 << 112) + (number << 80) + 1)),
    ]


@given(st.ip_addresses(v=4).filter(lambda each: not each.is_link_local and str(each) not in METADATA))
def test_every_form_of_another_address_is_reachable(address):
    assert all(map(_is_reachable_for_strangers, forms(str(address))))
