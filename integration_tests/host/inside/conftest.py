"""Inside the host: its own deprecation warnings are not ours to fail on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes the scheduler's half of an engine by a name and its options."""
    from engine import Engine

    return lambda name, **options: Engine(tmp_path / name, **options)
