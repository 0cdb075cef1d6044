"""Pacing, endpoints, keys and names."""

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import ConfigurationError
from kv_handshake.core import pacing
from kv_handshake.core.endpoint import endpoint_of, parse_endpoint
from kv_handshake.core.pacing import FailureMemory, GatedLog, TokenBuckets, backoff_s
from kv_handshake.errors import shortened
from kv_handshake.security import ClientSecurity, ServerSecurity, write_keypair
from kv_handshake.sockets.names import _is_reachable_for_strangers


def test_buckets():
    buckets = TokenBuckets(rate_per_s=10, burst=3, capacity=2)
    assert [buckets.wait_s("a", 0.0) for _ in range(4)] == [0, 0, 0, 0.1]
    assert buckets.wait_s("a", 0.1) == 0
    assert buckets.wait_s("b", 0.1) == 0
    assert buckets.wait_s("c", 0.1) == 0  # "a" is forgotten: it was not seen for longest
    assert buckets.wait_s("a", 0.1) == 0
    assert TokenBuckets(rate_per_s=0, burst=0).wait_s("a", 0.0) == 0


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_is_bounded(failures, chance):
    assert 0.05 <= backoff_s(0.1, 5.0, failures=failures, chance=chance) <= 5.0


def test_failures_are_remembered_for_longer_and_longer():
    memory = FailureMemory(1.0, 8.0, capacity=2)
    for failures, hold_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0)):
        memory.record("p", code="timed-out", message="m", now_s=100.0, chance=1.0)
        blocking = memory.blocking("p", 100.0 + hold_s - 0.01)
        assert (blocking.failures, blocking.code) == (failures, "timed-out")
        assert memory.blocking("p", 100.0 + hold_s) is None
    memory.forget("p")
    assert memory.blocking("p", 100.0) is None
    for peer in "abc":
        memory.record(peer, code="timed-out", message="m", now_s=100.0, chance=0.0)
    assert len(memory) == 2
    assert memory.blocking("a", 100.0) is None


def test_a_log_has_one_line_per_topic_and_ten_seconds(caplog, monkeypatch):
    gated, now_s = GatedLog(), 0.0
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: now_s))
    for now_s in (0.0, 1.0, 2.0, 10.0, 11.0):
        gated.warning("t", f"at {now_s}")
    gated.warning("other", "another topic")
    assert caplog.messages == ["at 0.0", "at 10.0 (2 more like this not logged)", "another topic"]
    assert gated.held_back == 3


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "localhost", "node-1.rack_2.example", "*", "0.0.0.0", "10.example", "1a", "0xg"]
)
def test_hosts_that_are_fine(host):
    assert endpoint_of(host, 1).host == host


@pytest.mark.parametrize(
    "host",
    [
        *("", ".", "a b", "tcp://a", "a/b", "a;b", "a..b", "\u6f22", "x" * 64, "a." * 200, "a:b", "[::1]"),
        *("eth0;127.0.0.1:1", "::ffff:127.0.0.1%1]:0;[127.0.0.77", "fe80::1%", "fe80::1%eth0;x", "127.0.0.1%1"),
        *("127.0.0.1;127.0.0.77", "fe80::1%eth0.7", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376"),
        *("169.254.43518", "169.254.169.254.", "name.0x7f"),
    ],
)
def test_hosts_that_are_not(host):
    with pytest.raises(ConfigurationError) as caught:
        endpoint_of(host, 1)
    assert caught.value.code == "invalid-endpoint"


@pytest.mark.parametrize(("port", "is_server"), [(0, False), (-1, True), (65_536, True)])
def test_ports_that_are_not(port, is_server):
    with pytest.raises(ConfigurationError):
        endpoint_of("127.0.0.1", port, allows_any_port=is_server)


def test_endpoint_texts():
    assert parse_endpoint("[::1]:5600") == endpoint_of("::1", 5600)
    assert parse_endpoint("host:1") == endpoint_of("host", 1)
    assert endpoint_of("0:0:0:0:0:0:0:1", 1).url == "tcp://[::1]:1", "written anew"
    assert endpoint_of("*", 0, allows_any_port=True).url == "tcp://*:*"
    for text in ("host", "host:", "host:x", ":1", "host:123456"):
        with pytest.raises(ConfigurationError):
            parse_endpoint(text)


def write_certificate(folder, name):
    public_file, secret_file = (Path(each) for each in zmq.auth.create_certificates(folder, name))
    secret_file.chmod(0o600)
    return public_file, secret_file


def keys_in(secret_file):
    read = ServerSecurity.read(secret_file, admits_any_client=True)
    return read.public_key, read.secret_key


def test_key_files(tmp_path):
    public_file, secret_file = write_certificate(tmp_path, "engine-a")
    public, secret = keys_in(secret_file)
    assert ServerSecurity.read(secret_file, tmp_path) == ServerSecurity(public, secret, {public: "engine-a"})
    assert ClientSecurity.read(secret_file, public_file) == ClientSecurity(public, secret, public)
    assert ClientSecurity.read(secret_file, tmp_path).server_keys == (public,)
    assert secret not in repr(ServerSecurity(public, secret, {public: "a"})) + repr(
        ClientSecurity(public, secret, public)
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o440])
def test_secret_files_that_others_may_read_are_refused(tmp_path, monkeypatch, mode):
    _, secret_file = write_certificate(tmp_path, "engine-a")
    secret_file.chmod(mode)
    if mode == 0o440:  # Kubernetes mounts secrets so with fsGroup: a group of the process may read them
        keys_in(secret_file)
        group = secret_file.stat().st_gid
        monkeypatch.setattr("os.getegid", lambda: group + 1)
        monkeypatch.setattr("os.getgroups", lambda: [group + 2])
    with pytest.raises(ConfigurationError, match=f"{mode:04o}") as caught:
        keys_in(secret_file)
    assert caught.value.code == "insecure-key-file"


def test_no_list_of_clients_admits_nobody_by_accident(tmp_path):
    _, secret_file = write_certificate(tmp_path, "engine-a")
    public, secret = keys_in(secret_file)
    for make in (
        lambda: ServerSecurity(public, secret),
        lambda: ServerSecurity.read(secret_file),
        lambda: ServerSecurity(public, secret, {public: "a"}, admits_any_client=True),
    ):
        with pytest.raises(ConfigurationError, match="admits_any_client"):
            make()
    empty = tmp_path / "clients"
    empty.mkdir()
    with pytest.raises(ConfigurationError, match=r"no \*\.key file"):
        ServerSecurity.read(secret_file, empty)


def test_a_new_pair_is_the_owners_alone_and_replaces_nothing(tmp_path):
    public_file, secret_file = write_keypair(tmp_path / "new", "engine-b")
    assert (public_file.name, secret_file.name) == ("engine-b.key", "engine-b.key_secret")
    assert secret_file.stat().st_mode & 0o777 == 0o600
    assert ClientSecurity.read(secret_file, public_file).server_key == keys_in(secret_file)[0]
    before = secret_file.read_bytes()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_keypair(tmp_path / "new", "engine-b")
    assert secret_file.read_bytes() == before
    for name in ("", "../x", "a b", "x" * 129):
        with pytest.raises(ConfigurationError, match="letters"):
            write_keypair(tmp_path, name)


def test_bad_key_files(tmp_path):
    public_file, secret_file = write_certificate(tmp_path, "good")
    public_file.chmod(0o600)
    bad, certificate = tmp_path / "k", b'curve\n    public-key = "%b"\n'
    contents = (b"", b"short", b"\xff" * 40, certificate % b"short", certificate % (b"~" * 40), None)
    for content in contents:
        bad.unlink() if content is None else bad.write_bytes(content)
        if content is not None:
            bad.chmod(0o600)
        for secret, public in ((bad, public_file), (secret_file, bad)):
            with pytest.raises(ConfigurationError) as caught:
                ClientSecurity.read(secret, public)
            assert caught.value.code == "invalid-key-file"
    with pytest.raises(ConfigurationError, match="no secret key"):
        keys_in(public_file)
    with pytest.raises(ConfigurationError):
        ServerSecurity("x", "y")


def test_texts_of_peers_are_short_and_on_one_line():
    assert shortened("a\nb\x1b[31m\u202e\ud800") == "a\\nb\\x1b[31m\\u202e\\ud800"
    assert shortened("\u6f22") == "\u6f22"
    assert len(shortened("x" * 1_000_000, 1000)) < 1100
    assert shortened("x" * 201).endswith("(201 characters)")


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
