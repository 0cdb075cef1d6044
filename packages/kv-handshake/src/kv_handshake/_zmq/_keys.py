"""Optional CURVE keys: the clients that may connect, and certificate files that only their owner and its group can read.

Certificate files are those of pyzmq (`zmq.auth.create_certificates`): ``NAME.key`` holds the public key, ``NAME.key_secret``
both keys. Values that were read from files know them, and `refreshed` reads them again once they have changed: a rotation
replaces files, a revocation deletes one, and nothing is restarted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake._errors import ConfigurationError
from kv_handshake._zmq._key_files import (
    check_key,
    check_pair,
    read_authorized_keys,
    read_keypair,
    read_server_keys,
    signature_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._zmq._key_files import Signature

__all__ = ["ClientSecurity", "ServerSecurity"]


@final
@dataclass(frozen=True, slots=True)
class _Files:
    """The files that a value was read from, as they were then."""

    secret: Path
    others: Path | None
    signature: Signature

    def have_changed(self) -> bool:
        """Return whether a file has another content, time or name now."""
        return signature_of(self.secret, self.others) != self.signature


@final
@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """A listener's side of an encrypted side channel.

    Attributes:
        public_key: This listener's public key (Z85, 40 characters).
        secret_key: Its secret key.
        authorized: Name by public key of each client that may connect.
        admits_any_client: Whether every client with any key may connect, so that the channel is encrypted but its clients are
            not known. Without it, an empty `authorized` is refused.
    """

    public_key: str
    secret_key: str = field(repr=False)
    authorized: Mapping[str, str] = field(default_factory=dict[str, str])
    admits_any_client: bool = False
    _files: _Files | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_pair(self.public_key, self.secret_key, "given directly")
        for key in self.authorized:
            check_key(key, "given directly")
        if bool(self.authorized) == self.admits_any_client:
            raise ConfigurationError(
                "invalid-argument", "give either the clients that may connect, or admits_any_client=True to admit all"
            )
        object.__setattr__(self, "authorized", MappingProxyType(dict(self.authorized)))

    @staticmethod
    def read(
        secret_file: str | Path, clients: str | Path | None = None, *, admits_any_client: bool = False
    ) -> ServerSecurity:
        """Return the keys in a listener's secret certificate, and the clients whose ``*.key`` files lie in a directory.

        Raises:
            ConfigurationError: ``invalid-key-file``; ``insecure-key-file`` if anybody but the owner and a group of this process
                has a right on the secret file; ``invalid-argument`` without clients, unless any client is admitted.
        """
        secret, others = Path(secret_file), Path(clients) if clients is not None else None
        signature = signature_of(secret, others)
        public_key, secret_key = read_keypair(secret)
        authorized = read_authorized_keys(others) if others is not None else {}
        return ServerSecurity(public_key, secret_key, authorized, admits_any_client, _Files(secret, others, signature))

    def refreshed(self) -> ServerSecurity:
        """Return the keys as their files are now; this value if nothing has changed, or if it came from no files.

        Raises:
            ConfigurationError: As `read`.
        """
        files = self._files
        if files is None or not files.have_changed():
            return self
        return ServerSecurity.read(files.secret, files.others, admits_any_client=self.admits_any_client)


@final
@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """A client's side of an encrypted side channel.

    Attributes:
        public_key: This client's public key (Z85, 40 characters).
        secret_key: Its secret key.
        server_key: The public key that every listener it talks to must have.
        further_server_keys: Keys that a listener may have instead, tried in this order: those of a rotation under way.
    """

    public_key: str
    secret_key: str = field(repr=False)
    server_key: str
    further_server_keys: tuple[str, ...] = ()
    _files: _Files | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_pair(self.public_key, self.secret_key, "given directly")
        for key in self.server_keys:
            check_key(key, "given directly")

    @property
    def server_keys(self) -> tuple[str, ...]:
        """All keys that a listener may have, in the order in which they are tried."""
        return (self.server_key, *self.further_server_keys)

    @staticmethod
    def read(secret_file: str | Path, server_file: str | Path) -> ClientSecurity:
        """Return the keys in a client's secret certificate and in the listener's public one, or in a directory of them.

        Raises:
            ConfigurationError: ``invalid-key-file``, or ``insecure-key-file`` if anybody but the owner and a group of this
                process has a right on the secret file.
        """
        secret, others = Path(secret_file), Path(server_file)
        signature = signature_of(secret, others)
        public_key, secret_key = read_keypair(secret)
        first, *further = read_server_keys(others)
        return ClientSecurity(public_key, secret_key, first, tuple(further), _Files(secret, others, signature))

    def refreshed(self) -> ClientSecurity:
        """Return the keys as their files are now; this value if nothing has changed, or if it came from no files.

        Raises:
            ConfigurationError: As `read`.
        """
        files = self._files
        if files is None or not files.have_changed():
            return self
        return ClientSecurity.read(files.secret, files.others or files.secret)
