"""H3: one anonymous query gave the place of all KV. With keys, a stranger gets nothing, not even a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from zmtp import connected, frame, read_frame

from kv_handshake import Client, Listener, LocalOffer, Timing
from kv_handshake._cli import main
from kv_handshake.security import ClientSecurity, ServerSecurity, generate_keypair
from kv_handshake.testing import sample_envelopes

TIMING = Timing(deadline_s=3, attempt_s=2)


def test_h3_metadata_is_for_listed_keys_alone(tmp_path: Path, figure: Callable[[str], None]) -> None:
    for folder, name in (("server", "prefill"), ("client", "decode")):
        assert main(["keygen", str(tmp_path / folder), name]) == 0
    (tmp_path / "clients").mkdir()
    public = tmp_path / "client" / "decode.key"
    (tmp_path / "clients" / public.name).write_bytes(public.read_bytes())
    listener = Listener(
        "127.0.0.1",
        0,
        payloads=sample_envelopes([(0, 0)]),
        security=ServerSecurity.read(tmp_path / "server" / "prefill.key_secret", tmp_path / "clients"),
    )
    listener.start()
    listed = ClientSecurity.read(tmp_path / "client" / "decode.key_secret", tmp_path / "server" / "prefill.key")
    stranger = ClientSecurity(*generate_keypair(), listed.server_key)
    codes = {}
    for name, security in (("listed", listed), ("unlisted", stranger), ("without keys", None)):
        client = Client(LocalOffer(policy="off"), timing=TIMING, security=security)
        codes[name] = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14).code
        client.close()
    leaked = _ask_in_the_clear(listener.port)
    listener.close()
    figure(f"{codes}, {len(leaked)} bytes to a raw query")
    assert codes == {"listed": "", "unlisted": "authentication-refused", "without keys": "authentication-refused"}
    assert not leaked


def _ask_in_the_clear(port: int) -> bytes:
    """Return the answer to a query without encryption."""
    try:
        with connected(port) as sock:
            sock.sendall(frame(b"", more=True) + frame(msgspec.msgpack.encode((b"get_meta_msg", 0, 0))))
            return read_frame(sock)[1]
    except OSError:
        return b""
