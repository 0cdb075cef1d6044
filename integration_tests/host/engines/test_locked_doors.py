"""Engines with sealed tickets and a keyed side channel: hand-overs as before, nothing forged is used, keys rotate in use."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from fleets import FAILED, REFUSED, TRANSFERS, Fleet, ours, probe_environment, probed, prompt, started_fleet

from kv_handshake import HandshakeError
from kv_handshake.inspect import probe
from kv_handshake.security import ClientSecurity, write_keypair

OLD, NEW = "0123456789abcdef-old-secret", "0123456789abcdef-new-secret"


def write(file: Path, *lines: str) -> None:
    """Replace a secret file at once, as a mounted secret is replaced."""
    fresh = file.with_name(f".{file.name}.fresh")
    fresh.write_text("\n".join(lines))
    fresh.chmod(0o440)
    fresh.replace(file)


class Keys:
    """Secrets and key files of a fleet: certificates of listeners beside the pairs, those of clients in `clients`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers, self.clients = folder, folder / "clients"
        self.clients.mkdir()
        write(self.secrets, OLD)

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    def make(self, name: str, *, admitted: bool = True) -> dict[str, object]:
        """Make an engine's key pair and return its configuration."""
        write_keypair(self.folder, name)
        if admitted:
            shutil.copy(self.folder / f"{name}.key", self.clients)
        return {
            "ticket_secrets": [str(self.secrets)],
            "side_channel_key": str(self.folder / f"{name}.key_secret"),
        }


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def fleet(keys: Keys) -> Iterator[Fleet]:
    roles = {"prefill": "kv_producer", "decode": "kv_both"}
    sealed = {name: probed(role, kv_load_failure_policy="recompute", **keys.make(name)) for name, role in roles.items()}
    probes = {name: probe_environment(keys.folder / f"{name}-probes", engine_ttl=0.2) for name in roles}
    with started_fleet("dense", sealed, environments=probes) as running:
        yield running


class Load:
    """Hand-overs without a pause, on a thread, until stopped; every answer is compared at the end."""

    def __init__(self, fleet: Fleet, texts: list[str]) -> None:
        self._fleet = fleet
        self._texts = texts
        self._stop = threading.Event()
        self.answers: list[str] = []
        self._pool = ThreadPoolExecutor(1)
        self._running = self._pool.submit(self._run)

    def _run(self) -> None:
        while not self._stop.is_set() and len(self.answers) < len(self._texts):
            at = len(self.answers)
            self.answers += self._fleet.answers(
                self._texts[at : at + 2], prefill="prefill", decode="decode", max_tokens=4
            )
            time.sleep(0.4)

    def go_on(self) -> None:
        """Wait until every request of now has its answer, and one more pair has gone through since."""
        self.until(len(self.answers) + 4, lambda: len(self.answers))

    def until(self, wanted: int, count: Callable[[], int], within_s: float = 120) -> None:
        """Wait until a count is there, while requests go on: engines look at their files when requests come."""
        deadline_s = time.monotonic() + within_s
        while count() < wanted:
            if self._running.done():
                raise AssertionError("the texts are used up, or a request has failed") from self._running.exception()
            assert time.monotonic() < deadline_s, f"{count()} of {wanted} after {within_s} s"
            time.sleep(0.2)

    def end(self) -> None:
        self._stop.set()
        self._running.result(timeout=200)
        self._pool.shutdown()


def admits(fleet: Fleet, name: str, client_pair: Path, server_public: Path) -> bool:
    """Return whether an engine's listener has the server's key and admits the client's."""
    security = ClientSecurity.read(client_pair, server_public)
    port = fleet.engines[name].side_channel_port
    try:
        return bool(probe("127.0.0.1", port, ranks=[(0, 0)], dialect=14, timeout_s=10, security=security).peers)
    except HandshakeError as error:
        if error.code not in {"authentication-refused", "connection-lost", "connection-refused", "timed-out"}:
            raise
        return False


def test_secrets_and_keys_rotate_under_load_without_a_failed_request(fleet: Fleet, keys: Keys) -> None:
    """Each step waits until both engines have taken the one before, as docs/security.md says, however slow they are."""
    texts = [prompt(3000 + n, 16) for n in range(400)]
    before = {name: fleet.count("decode", name) for name in (TRANSFERS, FAILED, REFUSED)}
    taken = {name: fleet.log(name).count("the fleet's secrets have changed") for name in fleet.engines}
    load = Load(fleet, texts)
    try:
        for step, secrets in enumerate(((OLD, NEW), (NEW, OLD), (NEW,)), start=1):
            write(keys.secrets, *secrets)
            for name in fleet.engines:
                log = partial(fleet.log, name)
                load.until(taken[name] + step, lambda log=log: log().count("the fleet's secrets have changed"))  # type: ignore[misc]
            load.go_on()  # tickets of before are used up
        rotate_keys(fleet, keys, load)
    finally:
        load.end()
    used = texts[: len(load.answers)]
    assert len(used) >= 20
    assert load.answers == fleet.answers(used, decode="prefill", max_tokens=4)
    after = {name: fleet.count("decode", name) - before[name] for name in before}
    assert after == {TRANSFERS: len(used), FAILED: 0, REFUSED: 0}
    for name in fleet.engines:
        assert "the fleet's secrets have changed: 1 now" in fleet.log(name)
    print(f"\n  {len(used)} requests while secrets and keys were rotated, none failed")


def rotate_keys(fleet: Fleet, keys: Keys, load: Load) -> None:
    """Admit the new keys beside the old ones, replace both engines' pairs, revoke the old ones."""
    for name in fleet.engines:
        write_keypair(keys.folder, f"{name}-new")
        shutil.copy(keys.folder / f"{name}.key_secret", keys.folder / f"{name}-old.key_secret")
        for folder in (keys.clients, keys.servers):
            write(folder / f"{name}-new.key", (keys.folder / f"{name}-new.key").read_text())
    old, new = keys.folder / "decode-old.key_secret", keys.folder / "decode-new.key_secret"
    for name in fleet.engines:
        load.until(1, lambda name=name: admits(fleet, name, new, keys.servers))  # type: ignore[misc]
    load.go_on()
    for name in fleet.engines:
        write(keys.folder / f"{name}.key_secret", (keys.folder / f"{name}-new.key_secret").read_text())
        load.until(1, lambda name=name: admits(fleet, name, new, keys.folder / f"{name}-new.key"))  # type: ignore[misc]
        load.go_on()
    assert all(admits(fleet, name, old, keys.servers) for name in fleet.engines), "not revoked yet"
    for name in fleet.engines:
        for folder in (keys.clients, keys.servers):
            (folder / f"{name}.key").unlink()
    for name in fleet.engines:
        load.until(1, lambda name=name: not admits(fleet, name, old, keys.servers))  # type: ignore[misc]
        assert admits(fleet, name, new, keys.servers)
    load.go_on()


def test_an_engine_without_a_listed_key_is_refused_by_code(keys: Keys, fleet: Fleet) -> None:
    """It holds the fleet's secret, so its tickets are good, but it gets no agent metadata."""
    stranger = {**keys.make("stranger", admitted=False), "read_timeout_s": 24}
    plain = {"ticket_secrets": [str(keys.secrets)], "read_timeout_s": 24}
    config = ours("kv_consumer", kv_load_failure_policy="recompute", **stranger)
    unkeyed = ours("kv_consumer", kv_load_failure_policy="recompute", **plain)
    fleet.only("prefill")
    with started_fleet("dense", {"stranger": config, "unkeyed": unkeyed}) as other:
        other.engines["prefill"] = fleet.engines["prefill"]
        text = prompt(4000, 30)
        (expected,) = fleet.answers([text], decode="prefill")
        for name in ("stranger", "unkeyed"):
            other.only(name, "prefill")
            (answer,) = other.answers([text], prefill="prefill", decode=name)
            assert answer == expected, "computed locally"
            assert other.count(name, TRANSFERS) == 0
            assert "(authentication-refused)" in other.log(name)
        del other.engines["prefill"]
