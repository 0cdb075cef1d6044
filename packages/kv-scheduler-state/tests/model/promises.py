"""Definitions that the models share."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state import SchedulerStateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ModelViolation", "Step", "demand", "demand_refusal"]

Step = tuple[str, ...]
"""An event in a model: its name and the objects that it affects."""


@final
class ModelViolation(AssertionError):  # noqa: N818 -- named after what happened
    """The code under test broke a promise that an engine, or a reader, relies on."""


def demand(is_kept: bool, promise: str) -> None:
    """Raise unless the promise is kept.

    Raises:
        ModelViolation: with the promise that was broken.
    """
    if not is_kept:
        raise ModelViolation(promise)


def demand_refusal(what: str, call: Callable[[], object]) -> None:
    """Raise unless the call is refused with a code.

    Raises:
        ModelViolation: if the call was accepted.
    """
    try:
        call()
    except SchedulerStateError:
        return
    raise ModelViolation(f"{what} was accepted")
