"""CURVE keys of both ends of an encrypted side channel, and the certificate files that hold them.

Certificate files are those of pyzmq (`zmq.auth.create_certificates`): ``NAME.key`` holds the public key, ``NAME.key_secret``
both keys. Values that were read from files know them, and `refreshed` reads them again once they have changed: a rotation
replaces files, a revocation deletes one, and nothing is restarted.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

import zmq
import zmq.auth
from zmq.utils import z85

from kv_handshake.errors import ConfigurationError, require

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ClientSecurity", "ServerSecurity", "generate_keypair"]

_KEY_CHARS = 40
_MOST_NAME_CHARS = 128
_GROUP_READS = 0o440
_MOST_FILE_BYTES = 64 * 1024


def generate_keypair() -> tuple[str, str]:
    """Return a new CURVE (public, secret) key pair in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def write_keypair(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Write a new pair as ``NAME.key`` and ``NAME.key_secret`` (mode 0600), and return both paths; no file is replaced.

    Raises:
        ConfigurationError: ``invalid-argument`` for a name that is not a plain file name, ``invalid-key-file`` if a file
            exists or cannot be written.
    """
    require((str, Path), directory=directory)
    require(str, name=name)
    is_plain = 0 < len(name) <= _MOST_NAME_CHARS and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not is_plain:
        raise ConfigurationError("invalid-argument", f"name {name[:80]!r} is not made of letters, digits, - and _")
    public_file, secret_file = Path(directory, f"{name}.key"), Path(directory, f"{name}.key_secret")
    public, secret = generate_keypair()
    head = f'# CURVE certificate of kv-handshake, in the format of zmq.auth\ncurve\n    public-key = "{public}"\n'
    for file, mode, text in ((secret_file, 0o600, f'{head}    secret-key = "{secret}"\n'), (public_file, 0o644, head)):
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


@final
@dataclass(frozen=True, slots=True)
class _Files:
    """The files that a value was read from, and their signature then."""

    secret: Path
    public: Path | None
    signature: tuple[tuple[str, int, int, int], ...]

    @staticmethod
    def of(secret: str | Path, public: str | Path | None) -> _Files:
        """Return the files as they are now."""
        paths = Path(secret), None if public is None else Path(public)
        return _Files(*paths, _signature_of(*paths))

    def have_changed(self) -> bool:
        """Return whether a file has another content, time or name now."""
        return _signature_of(self.secret, self.public) != self.signature

    def keypair(self) -> tuple[str, str]:
        """Return the (public, secret) keys in a certificate file that only its owner and a group of this process can read."""
        return _read(self.secret, is_secret=True)

    def public_keys(self) -> dict[str, str]:
        """Return names by public key, from a certificate file or from the ``*.key`` files in a directory."""
        if self.public is None:
            return {}
        try:
            files = _key_files(self.public)
        except OSError as error:
            raise _unreadable(self.public, error) from error
        if not files:
            raise ConfigurationError("invalid-key-file", f"{self.public} holds no *.key file", path=str(self.public))
        return {_read(file)[0]: file.stem for file in files}


def _signature_of(*paths: Path | None) -> tuple[tuple[str, int, int, int], ...]:
    """Return (name, inode, time of change, bytes) of files, and of the ``*.key`` files in directories.

    Missing and unreadable ones are left out, which is another signature than before: the reading that follows says why.
    """
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            for each in _key_files(path) if path is not None else ():
                with contextlib.suppress(OSError, ValueError):
                    status = each.stat()
                    found.append((str(each), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _key_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.key")) if path.is_dir() else [path]


def _read(file: Path, *, is_secret: bool = False) -> tuple[str, str]:
    """Return the (public, secret) keys of a certificate file; the latter is empty in a public certificate."""
    try:
        _check_file(file, is_secret=is_secret)
        keys = zmq.auth.load_certificate(file)  # pyright: ignore[reportUnknownMemberType]
        public, secret = ((key or b"").decode("ascii") for key in keys)
    except (OSError, ValueError, IndexError) as error:  # IndexError: a line without "=", half written
        raise _unreadable(file, error) from error
    if is_secret and not secret:
        raise ConfigurationError("invalid-key-file", f"{file} holds no secret key", path=str(file))
    _check_keys(f"in {file}", public, secret or None)
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


def _check_keys(where: str, public: str, secret: str | None = None) -> None:
    """Raise ``invalid-key-file`` unless each is 40 characters of Z85, and the public one is that of the secret one."""
    for key in (public,) if secret is None else (public, secret):
        try:
            is_key = len(key) == _KEY_CHARS and bool(z85.decode(key))
        except (ValueError, KeyError, struct.error):  # struct.error: five digits of base 85 hold more than 32 bits
            is_key = False
        if not is_key:
            raise ConfigurationError("invalid-key-file", f"the key {where} is not 40 characters of Z85")
    if secret is not None and zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
        raise ConfigurationError("invalid-key-file", f"the public key {where} is not that of the secret key")


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
        # Copied: a listener that runs admits the clients of this value, whatever becomes of the caller's.
        object.__setattr__(self, "authorized", dict(self.authorized))
        _check_keys("given directly", self.public_key, self.secret_key)
        for key in self.authorized:
            _check_keys("given directly", key)
        if bool(self.authorized) == self.admits_any_client:
            raise ConfigurationError(
                "invalid-argument", "give either the clients that may connect, or admits_any_client=True to admit all"
            )

    @staticmethod
    def read(
        secret_file: str | Path, clients: str | Path | None = None, *, admits_any_client: bool = False
    ) -> ServerSecurity:
        """Return the keys in a listener's secret certificate, and the clients whose ``*.key`` files lie in a directory.

        Raises:
            ConfigurationError: ``invalid-key-file``; ``insecure-key-file`` if anybody but the owner and a group of this process
                has a right on the secret file; ``invalid-argument`` without clients, unless any client is admitted.
        """
        files = _Files.of(secret_file, clients)
        if files.public is not None and files.public.exists() and not files.public.is_dir():
            raise ConfigurationError(
                "invalid-key-file", f"{files.public} is not a folder of *.key files", path=str(files.public)
            )
        return ServerSecurity(*files.keypair(), files.public_keys(), admits_any_client, files)

    def refreshed(self) -> ServerSecurity:
        """Return the keys as their files are now; this value if nothing has changed, or if it came from no files.

        Raises:
            ConfigurationError: As `read`.
        """
        files = self._files
        if files is None or not files.have_changed():
            return self
        return ServerSecurity.read(files.secret, files.public, admits_any_client=self.admits_any_client)


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
        _check_keys("given directly", self.public_key, self.secret_key)
        for key in self.server_keys:
            _check_keys("given directly", key)

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
        files = _Files.of(secret_file, server_file)
        pair, (first, *further) = files.keypair(), files.public_keys()
        return ClientSecurity(*pair, first, tuple(further), files)

    def refreshed(self) -> ClientSecurity:
        """Return the keys as their files are now; this value if nothing has changed, or if it came from no files.

        Raises:
            ConfigurationError: As `read`.
        """
        files = self._files
        if files is None or not files.have_changed():
            return self
        return ClientSecurity.read(files.secret, files.public or files.secret)
