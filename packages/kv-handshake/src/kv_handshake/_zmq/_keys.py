"""Optional CURVE keys: the clients that may connect, and certificate files that only their owner can read.

Certificate files are those of pyzmq (`zmq.auth.create_certificates`): ``NAME.key`` holds the public key, ``NAME.key_secret``
both keys. Secret files must belong to their owner alone.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from kv_handshake._errors import ConfigurationError
from kv_handshake._zmq._curve import read_certificate

__all__ = ["ClientSecurity", "ServerSecurity", "read_authorized_keys", "read_keypair", "read_public_key"]

_KEY_CHARS = 40
_Z85 = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@final
@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """A listener's side of an encrypted side channel.

    Attributes:
        public_key: This listener's public key (Z85, 40 characters).
        secret_key: Its secret key.
        authorized: Name by public key of each client that may connect; empty lets every client with any key in, so that
            the channel is encrypted but the client not authenticated.
    """

    public_key: str
    secret_key: str = field(repr=False)
    authorized: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for key in (self.public_key, self.secret_key, *self.authorized):
            _check_key(key, "given directly")

    @staticmethod
    def read(secret_file: str | Path, clients: str | Path | None = None) -> ServerSecurity:
        """Return the keys in a listener's secret certificate, and the clients whose ``*.key`` files lie in a directory.

        Raises:
            ConfigurationError: ``invalid-key-file``, or ``insecure-key-file`` if group or others have any right on the
                secret file.
        """
        public, secret = read_keypair(secret_file)
        return ServerSecurity(public, secret, read_authorized_keys(clients) if clients is not None else {})


@final
@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """A client's side of an encrypted side channel.

    Attributes:
        public_key: This client's public key (Z85, 40 characters).
        secret_key: Its secret key.
        server_key: The public key that every listener it talks to must have.
    """

    public_key: str
    secret_key: str = field(repr=False)
    server_key: str

    def __post_init__(self) -> None:
        for key in (self.public_key, self.secret_key, self.server_key):
            _check_key(key, "given directly")

    @staticmethod
    def read(secret_file: str | Path, server_file: str | Path) -> ClientSecurity:
        """Return the keys in a client's secret certificate and in the listener's public one.

        Raises:
            ConfigurationError: ``invalid-key-file``, or ``insecure-key-file`` if group or others have any right on the
                secret file.
        """
        public, secret = read_keypair(secret_file)
        return ClientSecurity(public, secret, read_public_key(server_file))


def read_public_key(path: str | Path) -> str:
    """Return the public key in a certificate file.

    Raises:
        ConfigurationError: ``invalid-key-file``.
    """
    return _read(Path(path))[0]


def read_keypair(path: str | Path) -> tuple[str, str]:
    """Return the (public, secret) keys in a certificate file that only its owner can read.

    Raises:
        ConfigurationError: ``invalid-key-file``, or ``insecure-key-file`` if group or others have any right on it.
    """
    file = Path(path)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise _unreadable(file, error) from error
    if mode & 0o077:
        raise ConfigurationError(
            "insecure-key-file",
            f"secret key file {file} has mode {mode:04o}; make it 0600 so that only its owner can read it",
            path=str(file),
            mode=mode,
        )
    public, secret = _read(file)
    if secret is None:
        raise ConfigurationError("invalid-key-file", f"{file} holds no secret key", path=str(file))
    return public, secret


def read_authorized_keys(directory: str | Path) -> dict[str, str]:
    """Return the clients that may connect: name by key, from the ``*.key`` files in a directory.

    Raises:
        ConfigurationError: ``invalid-key-file`` if there is none, or one that holds no key.
    """
    folder = Path(directory)
    files = sorted(folder.glob("*.key"))
    if not files:
        raise ConfigurationError("invalid-key-file", f"{folder} holds no *.key file", path=str(folder))
    return {_read(file)[0]: file.stem for file in files}


def _read(file: Path) -> tuple[str, str | None]:
    try:
        public, secret = read_certificate(file)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    for key in (public, *([secret] if secret is not None else [])):
        _check_key(key, f"in {file}")
    return public, secret


def _check_key(key: str, where: str) -> None:
    if len(key) != _KEY_CHARS or not _Z85.issuperset(key):
        raise ConfigurationError("invalid-key-file", f"the key {where} is not 40 characters of Z85")


def _unreadable(file: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError("invalid-key-file", f"key file {file} cannot be read: {error}", path=str(file))
