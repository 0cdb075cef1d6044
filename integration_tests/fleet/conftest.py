"""Makes the modules beside the tests importable, and keeps one plain engine, which answers for all fleets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from judging import Alone, started_alone


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """Answers of an engine without a connector: they are right."""
    with started_alone() as engine:
        yield engine
