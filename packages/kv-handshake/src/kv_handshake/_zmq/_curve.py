"""CURVE keys and the check of client keys, by pyzmq's own `zmq.auth`."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import TYPE_CHECKING, final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["DOMAIN", "ClientKeyCheck", "generate_keypair", "public_key_of", "read_certificate"]

DOMAIN = "kv-handshake"
_MAX_NAMES = 256
_ADDRESS_FRAME = 3
"""Index of the client's address in a ZAP request: version, request id, domain, address, identity, mechanism, key."""

_ZAP_VERSION = b"1.0"
_LET_IN = b"200"
_ID_BYTES = 16
"""Random bytes of a routing id, so that no peer can choose another's. The first byte is not zero, unlike in libzmq's own ids."""


def generate_keypair() -> tuple[str, str]:
    """Return a new CURVE (public, secret) key pair in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def public_key_of(secret: str) -> str:
    """Return the public key (Z85) of a secret one."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def read_certificate(path: Path) -> tuple[str, str | None]:
    """Return the (public, secret) key of a certificate file as `zmq.auth.create_certificates` writes it.

    The secret key is None in a public certificate.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no public key.
    """
    public, secret = zmq.auth.load_certificate(path)  # pyright: ignore[reportUnknownMemberType]
    return public.decode("ascii"), secret.decode("ascii") if secret is not None else None


def _routing_id_property(routing_id: bytes) -> bytes:
    name = b"Identity"
    return bytes((len(name),)) + name + len(routing_id).to_bytes(4, "big") + routing_id


@final
class ClientKeyCheck(ThreadAuthenticator):
    """Lets listed client keys in, on a thread of its own, and counts refusals by address and key.

    Each connection that is let in gets its routing id here, since libzmq accepts any id that a peer chooses. The id given here
    counts if it comes last, as it does except for 2 in 1000 connections to a machine without a free core (measured with
    libzmq 4.3.5).

    Args:
        context: The context of the listening socket.
        authorized: Name by public key in Z85.
        admits_any_client: Whether every key is let in.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        authorized: Mapping[str, str],
        *,
        admits_any_client: bool = False,
    ) -> None:
        super().__init__(context)  # pyright: ignore[reportUnknownMemberType]
        self._authorized = dict(authorized)
        self._admits_any_client = admits_any_client
        self._refusals: Counter[str] = Counter()
        self._client_address = ""
        self.configure_curve_callback(domain=DOMAIN, credentials_provider=self)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Note the client's address, which `callback` does not get, and answer the request."""
        self._client_address = msg[_ADDRESS_FRAME].decode("ascii", "replace") if len(msg) > _ADDRESS_FRAME else ""
        await super().handle_zap_message(msg)

    def admit(self, authorized: Mapping[str, str]) -> bool:
        """Let these clients in from now on; return whether one of the former ones is not among them."""
        former, self._authorized = self._authorized, dict(authorized)
        return not former.keys() <= authorized.keys()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of a public key may connect."""
        del domain
        text = key.decode("ascii", "replace")
        if self._admits_any_client or text in self._authorized:
            return True
        client = f"{self._client_address} {text}"
        self._refusals[client if client in self._refusals or len(self._refusals) < _MAX_NAMES else "others"] += 1
        return False

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        """Answer a request, with the routing id of the connection."""
        name = user_id.encode("ascii", "replace") if status_code == _LET_IN else b""
        routing_id = _routing_id_property(b"\x01" + secrets.token_bytes(_ID_BYTES))
        reply = [_ZAP_VERSION, request_id, status_code, status_text, name, routing_id]
        self.zap_socket.send_multipart(reply)  # pyright: ignore[reportUnknownMemberType]

    def denied(self) -> Mapping[str, int]:
        """Return the refusals so far, by address and key."""
        return dict(self._refusals)
