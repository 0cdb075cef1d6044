"""Keys that change while a listener and its clients run."""

import os
import select
import socket
import struct
import threading

import pytest
from handshake_helpers import until as happened

from kv_handshake import Timing
from kv_handshake.security import ClientSecurity, ServerSecurity, write_keypair

TIMING = Timing(deadline_s=30, attempt_s=10, hold_first_s=0.01, hold_most_s=0.02)


@pytest.fixture
def keys(tmp_path):
    """Give folders with the keys of a listener and of one client that it knows."""
    for folder in ("server", "client", "known-clients", "known-servers"):
        (tmp_path / folder).mkdir()
    for role in ("server", "client"):
        publish(tmp_path, f"{role}-1", role=role, known=f"known-{role}s")
    return tmp_path


@pytest.fixture
def served(keys, serve):
    """A factory of listeners with the keys of a file."""

    def start(secret=keys / "server" / "server-1.key_secret"):
        return serve(security=ServerSecurity.read(secret, keys / "known-clients"))

    return start


@pytest.fixture
def client_of(keys, connect):
    """A factory of clients."""

    def make(name="client-1", servers=keys / "known-servers"):
        security = ClientSecurity.read(keys / "client" / f"{name}.key_secret", servers)
        return connect(timing=TIMING, security=security)

    return make


def publish(keys, name, *, role="server", known="known-servers"):
    """Make a pair, and let the other side know it; return its files."""
    public, secret = write_keypair(keys / role, name)
    (keys / known / public.name).write_bytes(public.read_bytes())
    return public, secret


def on_opening(client, monkeypatch, before=lambda _: None, after=lambda _: None):
    """Call these around the opening of the client's n-th connection; return the keys that were tried before each."""
    hub = client._loop._hub
    opened, attempts = hub.open, []

    def noting(address, port, tried):
        attempts.append(tried)
        before(len(attempts))
        connection = opened(address, port, tried)
        after(len(attempts))
        return connection

    monkeypatch.setattr(hub, "open", noting)
    return attempts


def code(client, listener):
    return client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14).code


def until(client, listener, wanted):
    happened(lambda: code(client, listener) in wanted, seconds=20)


def test_a_deleted_client_is_locked_out_and_a_new_one_let_in(keys, served, client_of):
    listener, first = served(), client_of()
    assert code(first, listener) == ""
    public, _ = write_keypair(keys / "client", "client-2")
    second = client_of("client-2")
    assert code(second, listener) == "authentication-refused"
    (keys / "known-clients" / public.name).write_bytes(public.read_bytes())
    until(second, listener, {""})
    (keys / "known-clients" / "client-1.key").unlink()
    until(first, listener, {"authentication-refused", "recently-failed"})
    assert code(second, listener) == ""
    (keys / "known-clients" / public.name).unlink()  # nobody is left: nobody is let in
    until(second, listener, {"authentication-refused", "recently-failed"})
    assert listener.statistics()["restarts"] == 0


def test_new_keys_are_never_seen_half_written(tmp_path, monkeypatch):
    seen = []
    link = os.link

    def noting(source, target):
        seen.append(sorted(file.name for file in tmp_path.iterdir() if not file.name.startswith(".")))
        link(source, target)

    monkeypatch.setattr(os, "link", noting)
    write_keypair(tmp_path, "fleet")
    assert seen == [[], ["fleet.key_secret"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fleet.key", "fleet.key_secret"]


def test_a_key_that_goes_between_two_attempts_costs_no_handshake(keys, served, client_of, monkeypatch):
    """The listener has the new key alone; the client tries the old one, and the old one goes before it tries the next."""
    _, secret = publish(keys, "server-2")
    listener, client = served(secret), client_of()

    def rotate(number):
        if number > 1:
            (keys / "known-servers" / "server-1.key").unlink()
            client._loop._hub._next_refresh_s = 0.0

    on_opening(client, monkeypatch, before=rotate)
    assert code(client, listener) == ""


def test_keys_that_go_do_not_hide_the_one_that_is_left(keys, served, client_of, monkeypatch):
    """Of four known keys two go while the second is tried: the listener's own becomes the second, and is tried, too."""
    *_, secret = [publish(keys, f"server-{number}")[1] for number in (2, 3, 4)]
    listener, client = served(secret), client_of()

    def rotate(number):
        if number == 2:
            for gone in (1, 3):
                (keys / "known-servers" / f"server-{gone}.key").unlink()
            client._loop._hub._next_refresh_s = 0.0
            client._loop._hub._refresh_keys()  # as another request does meanwhile

    attempts = on_opening(client, monkeypatch, after=rotate)
    assert code(client, listener) == ""
    assert len(attempts) == 3


def test_a_listener_that_changes_its_pair_between_two_tries_fails_no_handshake(keys, served, client_of, monkeypatch):
    """It refuses the new key, changes to it, and refuses the old one: the new one is tried again."""
    listener, client = served(), client_of()
    _, secret = publish(keys, "server-0")  # is tried first, by its name
    client._loop._hub._next_refresh_s = 0.0

    def change(number):
        if number == 2:
            former = listener._socket
            secret.replace(keys / "server" / "server-1.key_secret")
            happened(lambda: listener._socket is not former)

    attempts = on_opening(client, monkeypatch, before=change)
    assert code(client, listener) == ""
    # a listener that changes its socket may also end an opening: the handshake's own next attempt begins anew
    assert [len(tried) for tried in attempts[:2]] == [0, 1]


@pytest.mark.parametrize(("is_keyed", "is_reset"), [(True, True), (True, False), (False, False)])
def test_an_opening_that_a_listener_ends_is_tried_again(served, client_of, serve, connect, is_keyed, is_reset):
    """As by a listener that takes a new pair, or has too many: it ends connections that it has just accepted."""
    listener, client = (served(), client_of()) if is_keyed else (serve(), connect(timing=Timing()))
    ended = []
    with socket.create_server(("127.0.0.1", 0)) as front:

        def relay():
            first, _ = front.accept()
            ended.append(first)
            select.select([first], [], [], 20)  # else the client may not know yet that it was accepted
            if is_reset:
                first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif not is_keyed:
                first.recv(65536)  # else what it sent is unread, and the end is a reset
            first.close()
            second, _ = front.accept()
            with second, socket.create_connection(("127.0.0.1", listener.port)) as back:
                while ready := select.select([second, back], [], [], 20)[0]:
                    for each in ready:
                        if not (data := each.recv(65536)):
                            return
                        (back if each is second else second).sendall(data)

        front.settimeout(60)
        relaying = threading.Thread(target=relay)
        relaying.start()
        outcome = client.fetch(host="127.0.0.1", port=front.getsockname()[1], ranks=[(0, 0)], dialect=14)
        client.close()
        relaying.join(timeout=120)
    assert (outcome.code, len(ended)) == ("", 1)


def test_keys_that_are_wrong_are_refused_after_two_rounds(keys, served, client_of, monkeypatch):
    listener, client = served(), client_of()
    (keys / "known-servers" / "server-1.key").unlink()
    for number in (7, 8):
        publish(keys, f"other-{number}", role="client")
    client._loop._hub._next_refresh_s = 0.0
    attempts = on_opening(client, monkeypatch)
    assert code(client, listener) == "authentication-refused"
    assert [len(tried) for tried in attempts[:4]] == [0, 1, 2, 3], "then in the background"
