"""Makes the modules beside the tests importable, and keeps the process that engines are forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "fakes"))

from live import Warm, warm_starter


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Import vLLM once, and let one engine alone answer all prompts."""
    with warm_starter() as started:
        yield started
