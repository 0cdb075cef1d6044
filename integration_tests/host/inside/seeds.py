"""One test over many seeds: the report of a failure shows the seed as the test's argument."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

IS_FULL = bool({"KVDEV_FULL", "KVDEV_LONG"} & os.environ.keys())
_BY_DEFAULT = 10


def for_seeds(count: int) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Return a decorator that runs a test of a seed with the seeds 0 to count - 1; the first ten in a run that is not full."""

    def decorated(test: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for seed in range(count if IS_FULL else min(count, _BY_DEFAULT)):
                test(seed)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.sized(run)

    return decorated
