"""Fixtures of all parts of the GPU stage: a way to note figures for its page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Return a function that notes a figure of this test for the page (a line of JSON in `KVDEV_FIGURES`)."""
    path = os.environ.get("KVDEV_FIGURES")

    def note(name: str, value: object) -> None:
        print(f"{name}: {value}")
        if path:
            with Path(path).open("a") as file:
                file.write(json.dumps({"test": request.node.name, "name": name, "value": str(value)}) + "\n")

    return note
