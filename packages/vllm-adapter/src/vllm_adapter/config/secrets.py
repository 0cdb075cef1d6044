"""The fleet's secrets, from files that are reread when they change, and from the environment.

A mounted Kubernetes Secret changes under a running engine, so its files are read once a second while requests arrive. Files
that cannot be read, or hold nothing usable, leave the secrets unchanged, with one line in the log. No log line or error of this
module contains a secret.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, final

from vllm_adapter.config.keys import VARIABLE_PREFIX
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.config.keys import Settings

__all__ = ["FleetSecrets", "configured_secrets"]

_logger = logging.getLogger("vllm.vllm_adapter")
_LOOK_EVERY_S = 1.0
_LEAST_BYTES = 16
_MOST_SECRETS = 16
"""A ticket that no secret has sealed is compared with all of them."""
_MOST_FILE_BYTES = 64 * 1024
_TOO_OPEN = 0o037
_FINGERPRINT = b"kv-transfer: fingerprint of a fleet secret"


@final
class FleetSecrets:
    """Secrets, in the order of their sources.

    Args:
        sources: Files with one secret per line; white space at either end of a line is ignored. Or `env:NAME`: an environment
            variable with secrets separated by white space, read once.

    Raises:
        ConfigurationError: `invalid-secret`, or `insecure-secret-file` for a file that others can read or its group can write.
    """

    __slots__ = ("_look_s", "_sources", "_trouble", "current")

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = tuple(map(_source, sources))
        self._look_s = 0.0
        self._trouble = ""
        self.current = self._read()

    def __repr__(self) -> str:
        return f"FleetSecrets({len(self.current)} secrets of {len(self._sources)} sources)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("FleetSecrets are not pickled")

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """A digest of each secret, 12 hex digits: it does not reveal the secret, but shows two engines whether they share it."""
        return tuple(hmac.digest(secret, _FINGERPRINT, "sha256").hex()[:12] for secret in self.current)

    def changed(self, now_s: float) -> bool:
        """Return whether the secrets have changed since the last call; reads the files at most once a second."""
        if now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_EVERY_S
        try:
            secrets = self._read()
        except ConfigurationError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _logger.error("the fleet's secrets stay as they were: %s", error)  # noqa: TRY400
            return False
        self._trouble = ""
        is_new, self.current = secrets != self.current, secrets
        if is_new:
            _logger.info("the fleet's secrets have changed: %d now", len(secrets))
        return is_new

    def _read(self) -> tuple[bytes, ...]:
        found = list(dict.fromkeys(secret for read in self._sources for secret in read()))
        if not found:
            raise _invalid("no fleet secret: the files are empty")
        if len(found) > _MOST_SECRETS:
            raise _invalid(f"{len(found)} fleet secrets, {_MOST_SECRETS} are the most: a rotation needs two")
        for number, secret in enumerate(found, 1):
            if len(secret) < _LEAST_BYTES:
                size = f"has {len(secret)} bytes, {_LEAST_BYTES} are the least"
                raise _invalid(f"fleet secret {number} of {len(found)} {size}; make one with: openssl rand -hex 32")
        return tuple(found)


def configured_secrets(settings: Settings) -> FleetSecrets | None:
    """Return the fleet's secrets; None if none are configured.

    Raises:
        ConfigurationError: `invalid-secret` or `insecure-secret-file`.
    """
    return FleetSecrets(settings.secret_sources) if settings.has_secrets else None


def _source(text: str) -> Callable[[], list[bytes]]:
    """Return what reads the secrets of a source."""
    if not text.startswith(VARIABLE_PREFIX):
        return partial(_secrets_in, Path(text))
    variable = text.removeprefix(VARIABLE_PREFIX)
    try:
        words = [os.fsencode(word) for word in os.environ.get(variable, "").split()]
    except UnicodeEncodeError:
        reason = "cannot be the name of an environment variable: it holds half of a surrogate pair"
        raise _invalid(f"ticket_secrets: {variable!a} {reason}") from None
    if not words:
        raise _invalid(f"ticket_secrets: the environment has no {variable}, or it is empty")
    return lambda: words


def _secrets_in(file: Path) -> list[bytes]:
    """Return a file's secrets, without waiting for a writer, as for a pipe, and without reading endlessly."""
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as source:
            mode = os.fstat(source.fileno()).st_mode
            content = source.read(_MOST_FILE_BYTES + 1) if stat.S_ISREG(mode) else None
    except (OSError, ValueError) as error:
        raise _unreadable(file, error.strerror if isinstance(error, OSError) else error) from None
    if content is None:
        raise _unreadable(file, "it is not a regular file")
    if len(content) > _MOST_FILE_BYTES:
        raise _unreadable(file, f"it has more than {_MOST_FILE_BYTES} bytes")
    mode = stat.S_IMODE(mode)
    if mode & _TOO_OPEN:
        raise ConfigurationError(
            f"secret file {file} has mode {mode:04o}; make it 0400 or 0440, so that only its owner and group can read it",
            code="insecure-secret-file",
            context={"path": str(file), "mode": mode},
        )
    return [line.strip() for line in content.splitlines() if line.strip()]


def _unreadable(file: Path, reason: object) -> ConfigurationError:
    return _invalid(f"secret file {file} cannot be read: {reason}", path=str(file))


def _invalid(message: str, **context: object) -> ConfigurationError:
    return ConfigurationError(message, code="invalid-secret", context=context)
