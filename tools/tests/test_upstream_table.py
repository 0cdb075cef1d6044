"""The table of vLLM's tests and ours names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "upstream-tests.md"
FOLDERS = dict(re.findall(r"\*\*([A-Z])\*\*\s+`([^`]+)`", PAGE.read_text()))
NAMED = sorted(set(re.findall(r"`([A-Z])/(\w+\.py)::(\w+)`", PAGE.read_text())))
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| vLLM's")]


@pytest.mark.parametrize(("folder", "file", "name"), NAMED)
def test_a_named_test_exists(folder: str, file: str, name: str) -> None:
    source = (ROOT / FOLDERS[folder] / file).read_text()
    assert re.search(rf"^\s*(async )?def {name}\(", source, re.MULTILINE), f"{FOLDERS[folder]}/{file} has no {name}"


def test_every_row_names_a_test_or_says_why_not() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert "::" in row or "Not applicable" in row or "Not covered" in row, row


def test_nothing_that_looks_like_a_test_is_left_unchecked() -> None:
    assert PAGE.read_text().count("::") == len(re.findall(r"`[A-Z]/\w+\.py::\w+`", PAGE.read_text()))
