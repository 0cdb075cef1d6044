"""Builds the Go program once; makes the modules of this folder and `kvdev` importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))

from gopher import Gopher

from kvdev.gotool import build_go


@pytest.fixture(scope="session")
def gopher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gopher]:
    """The second implementation of the wire, running."""
    made = Gopher([build_go(Path(__file__).parent / "program", tmp_path_factory.mktemp("go") / "gopher")])
    yield made
    assert made.end() == 0
