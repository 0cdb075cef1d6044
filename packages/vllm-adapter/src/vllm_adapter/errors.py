"""The adapter's coded errors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["AdapterError", "ConfigurationError", "UnsupportedHost", "code_of", "message_of"]


class AdapterError(Exception):
    """Base of all errors of this package; its text is "sentence (code)".

    Attributes:
        message: The sentence alone.
        code: Stable, kebab-case.
        fault: `"local"`, `"peer"` or `"environment"`.
        is_retry_safe: Whether the same call may succeed later; None if unknown.
        context: Plain values that the message contains.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        fault: Literal["local", "peer", "environment"] = "local",
        is_retry_safe: bool | None = False,
        context: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.fault: Literal["local", "peer", "environment"] = fault
        self.is_retry_safe = is_retry_safe
        self.context: Mapping[str, object] = dict(context or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"

    def __reduce__(self) -> tuple[Callable[[], AdapterError], tuple[()]]:
        """Pickle the constructor's arguments, so that an error crosses processes with its code."""
        about: dict[str, Any] = {**vars(self), "context": dict(self.context)}
        return partial(type(self), about.pop("message"), **about), ()


class ConfigurationError(AdapterError):
    """A key or value of the configuration is wrong."""


class UnsupportedHost(AdapterError):  # noqa: N818  (a state of the host, named as operators read it)
    """The installed vLLM cannot carry this adapter."""


def code_of(error: Exception) -> str:
    """Return the code of a coded error, or the class name of any other error."""
    code: object = getattr(error, "code", None)
    return code if isinstance(code, str) and code else type(error).__name__


def message_of(error: Exception) -> str:
    """Return the text of an error without the code that the texts of coded errors end with; see `code_of`."""
    message: object = getattr(error, "message", None)
    return message if isinstance(message, str) else str(error)
