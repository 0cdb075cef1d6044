"""CURVE keys and the check of client keys, by pyzmq's own `zmq.auth`."""

from __future__ import annotations

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


@final
class ClientKeyCheck(ThreadAuthenticator):
    """Lets listed client keys in, on a thread of its own, and counts refusals by address and key.

    Args:
        context: The context of the listening socket.
        authorized: Name by public key in Z85.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], authorized: Mapping[str, str]) -> None:
        super().__init__(context)  # pyright: ignore[reportUnknownMemberType]
        self._authorized = dict(authorized)
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
        if text in self._authorized:
            return True
        client = f"{self._client_address} {text}"
        self._refusals[client if client in self._refusals or len(self._refusals) < _MAX_NAMES else "others"] += 1
        return False

    def denied(self) -> Mapping[str, int]:
        """Return the refusals so far, by address and key."""
        return dict(self._refusals)
