"""Definitions that the models share."""

from __future__ import annotations

Step = tuple[str, ...]
"""An event in a model: its name and the objects that it affects."""


class ModelViolation(AssertionError):  # noqa: N818 -- named after what happened
    """The code under test broke a promise that an engine, or a reader, relies on."""


def demand(is_kept: bool, promise: str) -> None:
    """Raise unless the promise is kept.

    Raises:
        ModelViolation: with the promise that was broken.
    """
    if not is_kept:
        raise ModelViolation(promise)
