"""CURVE keys: the check of client keys by pyzmq's own `zmq.auth`, certificate files, and the keys of both ends.

Certificate files are those of pyzmq (`zmq.auth.create_certificates`): ``NAME.key`` holds the public key, ``NAME.key_secret``
both keys. Values that were read from files know them, and `refreshed` reads them again once they have changed: a rotation
replaces files, a revocation deletes one, and nothing is restarted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from kv_handshake.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DOMAIN",
    "ClientKeyCheck",
    "ClientSecurity",
    "ServerSecurity",
    "generate_keypair",
    "read_authorized_keys",
    "read_keypair",
    "read_public_key",
    "write_keypair",
]

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
        routing_id = b"\x01" + secrets.token_bytes(_ID_BYTES)
        metadata = b"\x08Identity" + len(routing_id).to_bytes(4, "big") + routing_id
        reply = [_ZAP_VERSION, request_id, status_code, status_text, name, metadata]
        self.zap_socket.send_multipart(reply)  # pyright: ignore[reportUnknownMemberType]

    def denied(self) -> Mapping[str, int]:
        """Return the refusals so far, by address and key."""
        return dict(self._refusals)


_KEY_CHARS = 40
_MOST_NAME_CHARS = 128
_GROUP_READS = 0o440
_MOST_FILE_BYTES = 64 * 1024

Signature = tuple[tuple[str, int, int, int], ...]
"""(name, inode, time of change, bytes) of files; another one as soon as one of them is written, added or removed."""


def signature_of(*paths: Path | None) -> Signature:
    """Return the signature of files, and of the ``*.key`` files in directories; missing ones are left out."""
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        if path is None:
            continue
        # Unreadable ones are left out too, which is another signature than before: the reading that follows says why.
        with contextlib.suppress(OSError, ValueError):
            for each in sorted(path.glob("*.key")) if path.is_dir() else [path]:
                with contextlib.suppress(OSError, ValueError):
                    status = each.stat()
                    found.append((str(each), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def read_public_key(path: Path) -> str:
    """Return the public key in a certificate file.

    Raises:
        ConfigurationError: ``invalid-key-file``.
    """
    return _read(path)[0]


def read_keypair(path: Path) -> tuple[str, str]:
    """Return the (public, secret) keys in a certificate file that only its owner and a group of this process can read.

    Raises:
        ConfigurationError: ``invalid-key-file``, or ``insecure-key-file``.
    """
    public, secret = _read(path, is_secret=True)
    if secret is None:
        raise ConfigurationError("invalid-key-file", f"{path} holds no secret key", path=str(path))
    return public, secret


def read_authorized_keys(folder: Path) -> dict[str, str]:
    """Return the clients that may connect: name by key, from the ``*.key`` files in a directory.

    Raises:
        ConfigurationError: ``invalid-key-file`` if there is none, or one that holds no key.
    """
    try:
        files = sorted(folder.glob("*.key"))
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not files:
        raise ConfigurationError("invalid-key-file", f"{folder} holds no *.key file", path=str(folder))
    return {read_public_key(file): file.stem for file in files}


def write_keypair(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Write a new pair as ``NAME.key`` and ``NAME.key_secret`` (mode 0600), and return both paths; no file is replaced.

    Raises:
        ConfigurationError: ``invalid-argument`` for a name that is not a plain file name, ``invalid-key-file`` if a file
            exists or cannot be written.
    """
    is_plain = 0 < len(name) <= _MOST_NAME_CHARS and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not is_plain:
        raise ConfigurationError("invalid-argument", f"name {name[:80]!r} is not made of letters, digits, - and _")
    public_file, secret_file = Path(directory, f"{name}.key"), Path(directory, f"{name}.key_secret")
    public, secret = generate_keypair()
    head = f'# CURVE certificate of kv-handshake, in the format of zmq.auth\ncurve\n    public-key = "{public}"\n'
    for file, mode, text in (
        (secret_file, 0o600, f'{head}    secret-key = "{secret}"\n'),
        (public_file, 0o644, head),
    ):
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_whole(file, mode, text)
        except OSError as error:
            raise ConfigurationError(
                "invalid-key-file", f"key file {file} cannot be written: {error.strerror}", path=str(file)
            ) from error
    return public_file, secret_file


def _write_whole(file: Path, mode: int, text: str) -> None:
    """Write a new file that is never seen half written; an existing one is an error."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as target:  # noqa: PTH123 - by descriptor
            target.write(text)
        os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def check_key(key: str, where: str) -> None:
    """Raise ``invalid-key-file`` unless the key is 40 characters of Z85."""
    try:
        is_key = len(key) == _KEY_CHARS and bool(z85.decode(key))
    except (ValueError, KeyError, struct.error):  # struct.error: five digits of base 85 hold more than 32 bits
        is_key = False
    if not is_key:
        raise ConfigurationError("invalid-key-file", f"the key {where} is not 40 characters of Z85")


def check_pair(public: str, secret: str, where: str) -> None:
    """Raise ``invalid-key-file`` unless both are keys and the public one is that of the secret one."""
    check_key(public, where)
    check_key(secret, where)
    if zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
        raise ConfigurationError("invalid-key-file", f"the public key {where} is not that of the secret key")


def _read(file: Path, *, is_secret: bool = False) -> tuple[str, str | None]:
    """Return the (public, secret) key of a certificate file as `zmq.auth.create_certificates` writes it."""
    try:
        _check_file(file, is_secret=is_secret)
        public_bytes, secret_bytes = zmq.auth.load_certificate(file)  # pyright: ignore[reportUnknownMemberType]
        public = public_bytes.decode("ascii")
        secret = secret_bytes.decode("ascii") if secret_bytes is not None else None
    except (OSError, ValueError, IndexError) as error:  # IndexError: a line without "=", half written
        raise _unreadable(file, error) from error
    if secret is None:
        check_key(public, f"in {file}")
    else:
        check_pair(public, secret, f"in {file}")
    return public, secret


def _check_file(file: Path, *, is_secret: bool) -> None:
    status = file.stat()
    mode = stat.S_IMODE(status.st_mode)
    # Kubernetes mounts a secret with fsGroup as 0440: root's file, readable for a group of the process.
    is_own_group = status.st_gid in {os.getegid(), *os.getgroups()}
    if is_secret and mode & 0o077 and not (mode == _GROUP_READS and is_own_group):
        raise ConfigurationError(
            "insecure-key-file",
            f"secret key file {file} has mode {mode:04o} and group {status.st_gid}; make it 0400 or 0600, or 0440 with a group "
            "of this process (in Kubernetes: defaultMode 0440 and fsGroup)",
            path=str(file),
            mode=mode,
        )
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a plain file")  # it could be read without end, or wait for a writer
    if status.st_size > _MOST_FILE_BYTES:
        raise ValueError(f"it has more than {_MOST_FILE_BYTES} bytes")


def _unreadable(file: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError("invalid-key-file", f"key file {file} cannot be read: {error}", path=str(file))


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
        try:
            is_folder = others.is_dir()
        except OSError as error:
            raise _unreadable(others, error) from error
        first, *further = read_authorized_keys(others) if is_folder else [read_public_key(others)]
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
