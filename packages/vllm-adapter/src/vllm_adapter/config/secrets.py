"""The fleet's secrets, from files that are reread when they change, and from the environment.

A mounted Kubernetes Secret changes under a running engine, so its files are checked once a second while requests arrive. Files
that cannot be read, or hold nothing usable, leave the secrets unchanged, with one line in the log. No log line or error of this
module contains a secret.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, final

from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FleetSecrets", "configured_secrets", "secrets_in_variable"]

_logger = logging.getLogger("vllm.vllm_adapter")
_LOOK_EVERY_S = 1.0
_LEAST_BYTES = 16
_MOST_SECRETS = 16
"""A ticket that no secret has sealed is compared with all of them."""
_MOST_FILE_BYTES = 64 * 1024
_TOO_OPEN = 0o037
_FINGERPRINT = b"kv-transfer: fingerprint of a fleet secret"

_Marks = tuple[tuple[int, int, int], ...]


@final
class FleetSecrets:
    """Secrets in order: those of the files, line by line, then those of the environment.

    Args:
        files: Files with one secret per line; white space at either end of a line is ignored.
        words: Secrets separated by white space, as an environment variable holds them.

    Raises:
        ConfigurationError: `invalid-secret`, or `insecure-secret-file` for a file that others can read or its group can write.
    """

    __slots__ = ("_files", "_look_s", "_marks", "_trouble", "_words", "current")

    def __init__(self, files: Sequence[str], words: str = "") -> None:
        self._files = tuple(map(Path, files))
        self._words = tuple(map(os.fsencode, words.split()))
        self._look_s = 0.0
        self._trouble = ""
        self._marks = self._look()
        self.current = self._read()

    def __repr__(self) -> str:
        return f"FleetSecrets({len(self.current)} secrets of {len(self._files)} files)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("FleetSecrets are not pickled")

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """A digest of each secret, 12 hex digits: it does not reveal the secret, but shows two engines whether they share it."""
        return tuple(hmac.digest(secret, _FINGERPRINT, "sha256").hex()[:12] for secret in self.current)

    def changed(self, now_s: float) -> bool:
        """Return whether the secrets have changed since the last call; checks the files at most once a second."""
        if now_s < self._look_s or not self._files:
            return False
        self._look_s = now_s + _LOOK_EVERY_S
        marks = self._look()
        if marks == self._marks:
            return False
        try:
            secrets = self._read()
        except ConfigurationError as error:
            # Keep the marks of the last good content, so that the files are read until they are good again.
            if str(error) != self._trouble:
                self._trouble = str(error)
                _logger.error("the fleet's secrets stay as they were: %s (%s)", error, error.code)  # noqa: TRY400
            return False
        self._marks, self._trouble = marks, ""
        is_new, self.current = secrets != self.current, secrets
        if is_new:
            _logger.info("the fleet's secrets have changed: %d now", len(secrets))
        return is_new

    def _look(self) -> _Marks:
        """Return marks that differ when the content of a file may differ; a missing file has no time."""
        marks: list[tuple[int, int, int]] = []
        for file in self._files:
            try:
                found = file.stat()
                marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
            except (OSError, ValueError):  # ValueError: a path that holds a zero byte
                marks.append((0, 0, 0))
        return tuple(marks)

    def _read(self) -> tuple[bytes, ...]:
        found = [secret for file in self._files for secret in _secrets_in(file)] + list(self._words)
        if not found:
            raise ConfigurationError(
                "no fleet secret: the files are empty, and so is the environment variable", code="invalid-secret"
            )
        found = list(dict.fromkeys(found))
        if len(found) > _MOST_SECRETS:
            raise ConfigurationError(
                f"{len(found)} fleet secrets, {_MOST_SECRETS} are the most: a rotation needs two", code="invalid-secret"
            )
        for number, secret in enumerate(found, 1):
            if len(secret) < _LEAST_BYTES:
                raise ConfigurationError(
                    f"fleet secret {number} of {len(found)} has {len(secret)} bytes, {_LEAST_BYTES} are the least; make one "
                    "with: openssl rand -hex 32",
                    code="invalid-secret",
                )
        return tuple(found)


def configured_secrets(files: Sequence[str], variable: str) -> FleetSecrets | None:
    """Return the secrets of these files and of an environment variable; None if neither is configured.

    Raises:
        ConfigurationError: `invalid-secret` or `insecure-secret-file`.
    """
    if not files and not variable:
        return None
    words = secrets_in_variable(variable)
    if variable and not words.split():
        raise ConfigurationError(
            f"ticket_secret_variable: the environment has no {variable}, or it is empty", code="invalid-secret"
        )
    return FleetSecrets(files, words)


def secrets_in_variable(variable: str) -> str:
    """Return the value of an environment variable; empty if it is not set or no name is given.

    Raises:
        ConfigurationError: `invalid-secret`: no variable can have this name.
    """
    try:
        return os.environ.get(variable, "") if variable else ""
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"ticket_secret_variable: {variable!a} cannot be the name of an environment variable: it holds half of a "
            "surrogate pair",
            code="invalid-secret",
        ) from None


def _secrets_in(file: Path) -> list[bytes]:
    try:
        mode, content = _read_plain(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"secret file {file} cannot be read: {reason}", code="invalid-secret", context={"path": str(file)}
        ) from None
    if mode & _TOO_OPEN:
        raise ConfigurationError(
            f"secret file {file} has mode {mode:04o}; make it 0400 or 0440, so that only its owner and group can read it",
            code="insecure-secret-file",
            context={"path": str(file), "mode": mode},
        )
    return [line.strip() for line in content.splitlines() if line.strip()]


def _read_plain(file: Path) -> tuple[int, bytes]:
    """Return a file's mode and content, without waiting for a writer, as for a pipe, and without reading endlessly.

    Raises:
        OSError, ValueError: With the reason.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("it is no plain file")
        with open(descriptor, "rb", closefd=False) as source:
            content = source.read(_MOST_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MOST_FILE_BYTES:
        raise ValueError(f"it has more than {_MOST_FILE_BYTES} bytes")
    return stat.S_IMODE(mode), content
