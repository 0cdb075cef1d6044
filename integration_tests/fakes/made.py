"""Things that a test makes, as many as it needs, and that are closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any


def maker(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes what `make` does; a fixture that yields from here closes all of them, the last one first."""
    with ExitStack() as made:
        yield lambda *given, **options: made.enter_context(closing(make(*given, **options)))
