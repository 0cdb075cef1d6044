"""Files of secrets and keys in every odd form, at start and midway: a coded refusal at once, or the former ones go on."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from figures import Figure

from kv_handshake import Client, ConfigurationError, Listener, LocalOffer, Timing
from kv_handshake.security import ClientSecurity, ServerSecurity, generate_keypair
from kv_handshake.testing import sample_envelopes
from vllm_adapter.config.secrets import FleetSecrets
from vllm_adapter.errors import ConfigurationError as AdapterConfigurationError

GOOD = b"a secret of the whole fleet\n"
Make = Callable[[Path], object]


def plain(content: bytes, mode: int = 0o400) -> Make:
    def make(file: Path) -> None:
        file.write_bytes(content)
        file.chmod(mode)

    return make


def unix_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(file))  # such addresses are short


def sparse(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(1 << 40)
    file.chmod(0o400)


ODD: dict[str, Make] = {
    "nothing": lambda _: None,
    "empty": plain(b""),
    "blank": plain(b" \n\t\r\n"),
    "short": plain(b"short"),
    "cut": plain(b"metadata\ncurve\n    public-key"),
    "a tebibyte": sparse,
    "endless": lambda file: file.symlink_to("/dev/zero"),
    "pipe": lambda file: os.mkfifo(file, 0o400),
    "socket": unix_socket,
    "folder": lambda file: file.mkdir(),
    "link to itself": lambda file: file.symlink_to(file.name),
    "link to nothing": lambda file: file.symlink_to("nowhere"),
}
"""Neither a secret nor a key can be read from these."""


def certificate(public: str, secret: str = "") -> bytes:
    more = f'    secret-key = "{secret}"\n' if secret else ""
    return f'metadata\ncurve\n    public-key = "{public}"\n{more}'.encode()


def pairs() -> tuple[tuple[str, str], tuple[str, str]]:
    return generate_keypair(), generate_keypair()


PAIRS = pairs()
ODD_KEYS: dict[str, Make] = {
    **ODD,
    "another's public key": plain(certificate(PAIRS[0][0], PAIRS[1][1])),
    "no secret key": plain(certificate(PAIRS[0][0])),
    "no key at all": plain(certificate("#" * 40, "#" * 40)),
    "UTF-16": plain(certificate(*PAIRS[0]).decode().encode("utf-16")),
    "readable by all": plain(certificate(*PAIRS[0]), 0o644),
    "for a group to write": plain(certificate(*PAIRS[0]), 0o660),
}
ODD_SECRETS: dict[str, Make] = {
    **ODD,
    "a thousand secrets": plain(b"".join(b"secret number %06d\n" % number for number in range(1000))),
    "readable by all": plain(GOOD, 0o644),
    "for a group to write": plain(GOOD, 0o460),
}


def replace(file: Path, make: Make) -> None:
    """Put another file in a file's place, at once as a mounted secret is replaced."""
    fresh = file.with_name("fresh")
    make(fresh)
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    if fresh.is_symlink() or fresh.exists():
        file.unlink(missing_ok=True)
        fresh.rename(file)
    else:
        file.unlink(missing_ok=True)


def ends_soon(action: Callable[[], object], within_s: float = 5.0) -> object:
    """Return what an action returned or raised; one that hangs fails the test."""
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(action())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    assert ended, "it hangs"
    return ended[0]


@pytest.mark.parametrize("odd", ODD_SECRETS)
def test_no_odd_secret_file_starts_or_stops_an_engine(
    tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "secrets"
    ODD_SECRETS[odd](file)
    error = ends_soon(lambda: FleetSecrets([str(file)]))
    assert isinstance(error, AdapterConfigurationError)
    assert error.code in {"invalid-secret", "insecure-secret-file"}
    replace(file, plain(GOOD))
    secrets = FleetSecrets([str(file)])
    replace(file, ODD_SECRETS[odd])
    assert [ends_soon(lambda now_s=now_s: secrets.changed(now_s)) for now_s in (1.0, 3.0)] == [False, False]  # type: ignore[misc]
    assert secrets.current == (GOOD.strip(),)
    replace(file, plain(b"the next secret of the fleet"))
    assert secrets.changed(5.0)
    assert secrets.current == (b"the next secret of the fleet",)


@pytest.mark.parametrize("odd", ODD_KEYS)
def test_no_odd_key_file_starts_or_stops_an_engine(tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, server = tmp_path / "engine.key_secret", tmp_path / "server.key"
    plain(certificate(PAIRS[1][0]))(server)
    ODD_KEYS[odd](file)
    error = ends_soon(lambda: ClientSecurity.read(file, server))
    assert isinstance(error, ConfigurationError)
    assert error.code in {"invalid-key-file", "insecure-key-file"}
    replace(file, plain(certificate(*PAIRS[0])))
    security = ClientSecurity.read(file, server)
    replace(file, ODD_KEYS[odd])
    error = ends_soon(security.refreshed)
    assert isinstance(error, ConfigurationError)
    replace(file, plain(certificate(*PAIRS[0])))
    assert security.refreshed() == security


@pytest.mark.full
def test_an_odd_file_among_the_clients_admits_no_client_and_delays_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    """A listener that runs meets one, turns new clients away meanwhile, and goes on as soon as it is gone."""
    monkeypatch.chdir(tmp_path)
    clients, own = tmp_path / "clients", tmp_path / "own.key_secret"
    clients.mkdir()
    plain(certificate(*PAIRS[0]))(own)
    plain(certificate(PAIRS[1][0]))(clients / "decode.key")
    security = ServerSecurity.read(own, clients)
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes([(0, 0)]), security=security)
    listener.start()
    timing = Timing(deadline_s=30, attempt_s=20, hold_first_s=0.01, hold_most_s=0.02)
    keys = ClientSecurity(PAIRS[1][0], PAIRS[1][1], PAIRS[0][0])

    def until(is_wanted: bool) -> None:
        end_s = time.monotonic() + 60
        while True:
            client = Client(LocalOffer(policy="off"), timing=timing, security=keys)
            outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14)
            client.close()
            if outcome.is_ok is is_wanted:
                return
            assert time.monotonic() < end_s, outcome
            time.sleep(0.05)

    until(True)
    began_s = time.monotonic()
    ODD["pipe"](clients / "odd.key")
    until(False)
    (clients / "odd.key").unlink()
    until(True)
    seconds = (time.monotonic() - began_s) / 2
    assert listener.statistics()["restarts"] == 0
    began_s = time.monotonic()
    listener.close()
    figure(f"{seconds:.2f} s until a change of the folder counts, closed within {time.monotonic() - began_s:.2f} s")
    assert not listener.is_alive
