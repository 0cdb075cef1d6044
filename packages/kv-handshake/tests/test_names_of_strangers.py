"""Addresses to which a name that a stranger gave must not lead, in every form that carries them."""

from ipaddress import IPv4Address, IPv6Address

import pytest
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


@pytest.mark.parametrize("address", METADATA)
def test_no_form_of_a_metadata_address_is_reachable(address):
    assert not any(map(_is_reachable_for_strangers, forms(address)))


@pytest.mark.parametrize(
    "text", ["fe80::1%1", "fd00:ec2::254", "64:ff9b:1::1", "2001::1", "no address", "10.0.0.1/8", ""]
)
def test_addresses_of_one_link_hidden_ones_and_noise_are_not_reachable(text):
    assert not _is_reachable_for_strangers(text)


@given(st.ip_addresses(v=4).filter(lambda each: not each.is_link_local and str(each) not in METADATA))
def test_every_form_of_another_address_is_reachable(address):
    assert all(map(_is_reachable_for_strangers, forms(str(address))))
