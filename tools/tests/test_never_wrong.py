"""The page of promises against the tests: every row has a test that carries its number, every number has a row."""

from __future__ import annotations

import re

import pytest

from kvdev.paths import ROOT

PAGE = (ROOT / "docs" / "never-wrong.md").read_text()
ROWS = re.findall(r"^\| ([A-C]\d+) \|", PAGE, re.MULTILINE)
MARK = re.compile(r"never_wrong\(([^)]*)\)")


def _carried() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for folder in (ROOT / "packages", ROOT / "integration_tests"):
        for file in folder.rglob("test_*.py"):
            for numbers in MARK.findall(file.read_text()):
                for number in re.findall(r"[A-Z]\d+", numbers):
                    found.setdefault(number, []).append(str(file.relative_to(ROOT)))
    return found


CARRIED = _carried()


@pytest.mark.parametrize("row", ROWS)
def test_every_promise_has_a_test(row: str) -> None:
    assert row in CARRIED, f"no test is marked never_wrong({row!r})"


def test_every_number_has_a_row() -> None:
    assert set(CARRIED) <= set(ROWS), {number: files for number, files in CARRIED.items() if number not in ROWS}
