"""An encrypted side channel between the Go program and our listener and client, by files of `kv-handshake keygen`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gopher import Gopher
from wire_values import FACTORS, METADATA, envelope, fetch

from kv_handshake import Listener, Timing
from kv_handshake.security import ClientSecurity, ServerSecurity

NAMES = ("prefill", "decode", "stranger")
RANKS = [(0, 0), (0, 1)]
TIMING = Timing(deadline_s=3, attempt_s=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key pairs of two engines that know each other, and of a stranger."""
    made = tmp_path_factory.mktemp("keys")
    for name in NAMES:
        command = [str(Path(sys.executable).with_name("kv-handshake")), "keygen", str(made), name]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        (made / f"only-{name}").mkdir()
        (made / f"only-{name}" / f"{name}.key").write_bytes((made / f"{name}.key").read_bytes())
    return made


Certificate = Callable[..., str]


@pytest.fixture(scope="module")
def certificate(folder: Path) -> Certificate:
    """Return a function that returns the text of a file."""
    return lambda name, suffix="key": (folder / f"{name}.{suffix}").read_text()


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """The port of a listener of ours that admits `decode`."""
    security = ServerSecurity.read(folder / "prefill.key_secret", folder / "only-decode")
    payloads = {rank: envelope(15, rank) for rank in RANKS}
    with closing(Listener("127.0.0.1", 0, payloads=payloads, security=security)) as listener:
        listener.start()
        yield listener.port


def ask(gopher: Gopher, port: int, **keys: object) -> dict[str, Any]:
    return gopher.ask(do="ask", address=f"127.0.0.1:{port}", dialect=15, ranks=RANKS, factors=FACTORS, **keys)


def test_go_asks_our_keyed_listener(gopher: Gopher, port: int, certificate: Certificate) -> None:
    answer = ask(gopher, port, own=certificate("decode", "key_secret"), others=[certificate("prefill")])
    assert [reply["metadata"]["engine_id"] for reply in answer["ok"]] == [METADATA["engine_id"]] * 2
    assert [reply["metadata"]["kv_caches_base_addr"][0] for reply in answer["ok"]] == [4096, 4097]


@pytest.mark.parametrize(
    ("own", "server"), [("stranger", "prefill"), ("decode", "stranger"), ("", "")], ids=["unlisted", "server", "plain"]
)
def test_our_keyed_listener_tells_go_nothing_without_the_right_keys(
    gopher: Gopher, port: int, certificate: Certificate, own: str, server: str
) -> None:
    keys = {"own": certificate(own, "key_secret"), "others": [certificate(server)]} if own else {}
    answer = ask(gopher, port, **keys)
    assert "ok" not in answer
    assert answer["code"] == "authentication-refused"


@pytest.mark.parametrize("admitted", ["decode", "stranger"])
@pytest.mark.parametrize("expected", ["prefill", "stranger"])
def test_our_keyed_client_asks_go(
    gopher: Gopher, folder: Path, certificate: Certificate, admitted: str, expected: str
) -> None:
    """The Go listener has the key of `prefill`; only with the right keys at both ends is anything said."""
    serve = {f"{pp},{tp}": envelope(15, (pp, tp)).hex() for pp, tp in RANKS}
    own, others = certificate("prefill", "key_secret"), [certificate(admitted)]
    port = gopher.ok("listen", serve=serve, own=own, others=others)
    security = ClientSecurity.read(folder / "decode.key_secret", folder / f"{expected}.key")
    outcome = fetch(port, RANKS, timing=TIMING, security=security)
    if (admitted, expected) == ("decode", "prefill"):
        assert outcome.is_ok, outcome.message
        assert outcome.peers[0, 1].kv_caches_base_addr == (4097, 1 << 40)
    else:
        assert outcome.code == "authentication-refused"


def test_a_plain_client_gets_nothing_from_a_keyed_listener_in_go(gopher: Gopher, certificate: Certificate) -> None:
    serve = {"0,0": envelope(15, (0, 0)).hex()}
    own, others = certificate("prefill", "key_secret"), [certificate("decode")]
    port = gopher.ok("listen", serve=serve, own=own, others=others)
    assert fetch(port, [(0, 0)], timing=TIMING).code == "authentication-refused"
