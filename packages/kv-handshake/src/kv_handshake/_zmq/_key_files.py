"""Certificate files: their keys, the rights on them, and writing a new pair."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kv_handshake._errors import ConfigurationError
from kv_handshake._zmq._curve import generate_keypair, public_key_of, read_certificate

__all__ = [
    "Signature",
    "check_key",
    "check_pair",
    "read_authorized_keys",
    "read_keypair",
    "read_public_key",
    "read_server_keys",
    "signature_of",
    "write_keypair",
]

_KEY_CHARS = 40
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85 = frozenset(_DIGITS)
_MOST_NUMBER = (1 << 32) - 1
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
        try:
            files = sorted(path.glob("*.key")) if path.is_dir() else [path]
        except (OSError, ValueError):
            continue  # another signature than before: the reading that follows says why
        for each in files:
            try:
                status = each.stat()
            except (OSError, ValueError):
                continue
            found.append((str(each), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def read_public_key(path: str | Path) -> str:
    """Return the public key in a certificate file.

    Raises:
        ConfigurationError: ``invalid-key-file``.
    """
    return _read(Path(path))[0]


def read_keypair(path: str | Path) -> tuple[str, str]:
    """Return the (public, secret) keys in a certificate file that only its owner and a group of this process can read.

    Raises:
        ConfigurationError: ``invalid-key-file``, or ``insecure-key-file``.
    """
    file = Path(path)
    try:
        status = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
        raise _unreadable(file, error) from error
    mode = stat.S_IMODE(status.st_mode)
    # Kubernetes mounts a secret with fsGroup as 0440: root's file, readable for a group of the process.
    is_own_group = status.st_gid in {os.getegid(), *os.getgroups()}
    if mode & 0o077 and not (mode == _GROUP_READS and is_own_group):
        raise ConfigurationError(
            "insecure-key-file",
            f"secret key file {file} has mode {mode:04o} and group {status.st_gid}; make it 0400 or 0600, or 0440 with a group "
            "of this process (in Kubernetes: defaultMode 0440 and fsGroup)",
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
    try:
        files = sorted(folder.glob("*.key"))
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not files:
        raise ConfigurationError("invalid-key-file", f"{folder} holds no *.key file", path=str(folder))
    return {_read(file)[0]: file.stem for file in files}


def read_server_keys(path: Path) -> tuple[str, ...]:
    """Return the public keys that a listener may have: of one certificate, or of the ``*.key`` files in a directory.

    Raises:
        ConfigurationError: ``invalid-key-file``.
    """
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise _unreadable(path, error) from error
    return tuple(read_authorized_keys(path)) if is_folder else (read_public_key(path),)


def write_keypair(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Write a new pair as ``NAME.key`` and ``NAME.key_secret`` (mode 0600), and return both paths; no file is replaced.

    Raises:
        ConfigurationError: ``invalid-argument`` for a name that is no plain file name, ``invalid-key-file`` if a file exists or
            cannot be written.
    """
    is_plain = 0 < len(name) <= _MOST_NAME_CHARS and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not is_plain:
        raise ConfigurationError("invalid-argument", f"name {name[:80]!r} is not made of letters, digits, - and _")
    folder = Path(directory)
    public, secret = generate_keypair()
    head = "# CURVE certificate of kv-handshake, in the format of zmq.auth\ncurve\n"
    written: list[Path] = []
    for suffix, mode, lines in (
        (".key_secret", 0o600, f'    public-key = "{public}"\n    secret-key = "{secret}"\n'),
        (".key", 0o644, f'    public-key = "{public}"\n'),
    ):
        file = folder / f"{name}{suffix}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_whole(file, mode, head + lines)
        except OSError as error:
            raise ConfigurationError(
                "invalid-key-file", f"key file {file} cannot be written: {error.strerror}", path=str(file)
            ) from error
        written.append(file)
    return written[1], written[0]


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
    is_written = len(key) == _KEY_CHARS and _Z85.issuperset(key)
    # Five digits of base 85 hold more than 32 bits: "%nSc0" is 2**32 - 1, "%nSc1" stands for no four bytes.
    if not is_written or any(_number(key[at : at + 5]) > _MOST_NUMBER for at in range(0, _KEY_CHARS, 5)):
        raise ConfigurationError("invalid-key-file", f"the key {where} is not 40 characters of Z85")


def check_pair(public: str, secret: str, where: str) -> None:
    """Raise ``invalid-key-file`` unless both are keys and the public one is that of the secret one."""
    check_key(public, where)
    check_key(secret, where)
    if public_key_of(secret) != public:
        raise ConfigurationError("invalid-key-file", f"the public key {where} is not that of the secret key")


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = 85 * number + _DIGITS.index(digit)
    return number


def _read(file: Path) -> tuple[str, str | None]:
    try:
        _require_plain(file)
        public, secret = read_certificate(file)
    except (OSError, ValueError, IndexError) as error:  # IndexError: a line without "=", half written
        raise _unreadable(file, error) from error
    if secret is None:
        check_key(public, f"in {file}")
    else:
        check_pair(public, secret, f"in {file}")
    return public, secret


def _require_plain(file: Path) -> None:
    """Refuse a file that could be read without end, or that waits for a writer; raises ValueError or OSError."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no plain file")
    if status.st_size > _MOST_FILE_BYTES:
        raise ValueError(f"it has more than {_MOST_FILE_BYTES} bytes")


def _unreadable(file: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError("invalid-key-file", f"key file {file} cannot be read: {error}", path=str(file))
