"""Numbers that options take, judged alike by all commands: NaN, infinity and what nobody can wait for are refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_adapter.errors import ConfigurationError
from vllm_adapter.observe.plain_text import plain_text

if TYPE_CHECKING:
    from vllm_adapter.errors import AdapterError

__all__ = ["refuse", "seconds", "within"]

_USAGE = 2
_LEAST_S = 0.001
_MOST_S = 3600.0


def seconds(option: str, given: float, *, least_s: float = _LEAST_S) -> float:
    """Return a time that an option gives, of an hour at most.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    return within(option, given, least_s, _MOST_S, "s")


def within(option: str, given: float, least: float, most: float, unit: str) -> float:
    """Return a number that an option gives.

    Raises:
        ConfigurationError: `out-of-range`: it lies outside, or is NaN.
    """
    if not least <= given <= most:
        raise ConfigurationError(
            f"{option} must be {least:g} {unit} at least and {most:g} {unit} at most, got {given:g}",
            code="out-of-range",
        )
    return given


def refuse(command: str, error: AdapterError) -> int:
    """Say why a command cannot begin, and return the exit code of wrong usage."""
    print(f"vllm-adapter {command}: {plain_text(str(error))} ({error.code})", file=sys.stderr)
    return _USAGE
