"""Pages of failures and of performance name tests that exist, codes that exist, and commands that exist."""

from __future__ import annotations

import re

import pytest

from kvdev.arguments import make_parser
from kvdev.paths import PACKAGES, ROOT
from vllm_adapter.config import describe_keys

FAILURES, PERFORMANCE, TUNE = (
    ROOT / "docs" / name for name in ("failure-modes.md", "performance.md", "operate/tune.md")
)
_FOLDERS = (
    *(ROOT / "packages" / name / "tests" for name in PACKAGES),
    ROOT / "integration_tests",
    ROOT / "tools" / "tests",
)
TESTS = {
    name
    for folder in _FOLDERS
    for file in folder.rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE)
}
SOURCE = "".join(file.read_text() for file in (ROOT / "packages").glob("*/src/**/*.py"))


def rows_of(text: str, columns: int) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == columns for row in cells), [row for row in cells if len(row) != columns]
    return cells


def test_every_fault_has_handling_and_a_test() -> None:
    rows = rows_of(FAILURES.read_text(), 6)
    assert len(rows) > 25
    for fault, _, handling, _, tests, _ in rows:
        assert handling, fault
        assert re.findall(r"`(test_\w+)`", tests), f"{fault}: no test"


def kinds_of(file: str, table: str) -> set[str]:
    """Return the keys of a table of faults, e.g. `"crash": Faults.crash` of `_ACTIONS`."""
    table = (ROOT / "integration_tests" / file).read_text().partition(f"\n{table}")[2].partition("}\n")[0]
    found = set(re.findall(r'(?:^ +|[{ ])"([a-z-]+)": ', table, re.MULTILINE))
    assert len(found) > 3, file
    return found


DRAWN = (
    kinds_of("fleet_sim/faults.py", "_ACTIONS")
    | kinds_of("chaos/agents/test_deaths.py", "HARMS")
    | kinds_of("chaos/faults.py", "KINDS")
    | kinds_of("chaos/faults.py", "MISBEHAVIOURS")
)


def test_every_kind_of_fault_that_is_drawn_has_a_row() -> None:
    shown = {word for row in rows_of(FAILURES.read_text(), 6) for word in re.findall(r"`([a-z-]+)`", row[0])}
    assert DRAWN - shown == set()


@pytest.mark.parametrize("page", [FAILURES, PERFORMANCE], ids=lambda page: page.name)
def test_named_tests_exist(page: object) -> None:
    named = set(re.findall(r"`(test_\w+)`", (FAILURES if page is FAILURES else PERFORMANCE).read_text()))
    assert named
    assert named - TESTS == set()


@pytest.mark.parametrize("page", [FAILURES, TUNE], ids=lambda page: page.name)
def test_named_codes_exist(page: object) -> None:
    text = (FAILURES if page is FAILURES else TUNE).read_text()
    codes = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text)) - {"mlx5-0", "kv-nixl"} - DRAWN
    assert len(codes) > 1
    assert {code for code in codes if f'"{code}"' not in SOURCE} == set()


def test_times_on_the_page_are_the_defaults() -> None:
    defaults = {key.name: key.default for key in describe_keys()}
    page = FAILURES.read_text()
    for words, key in (
        ("`read_timeout_s` (60 s)", "read_timeout_s"),
        ("`kv_lease_duration`, 30 s", "kv_lease_duration"),
    ):
        assert words in page
        assert float(re.findall(r"(\d+) s", words)[0]) == defaults[key]
    assert (defaults["handshake_timeout_s"], defaults["handshake_attempts"]) == (5.0, 2)
    rows = re.findall(r"^\| `(\w+)` \| `?([\w. ]+?)`? \|", TUNE.read_text().split("## Keys of")[1], re.MULTILINE)
    assert len(rows) == 5
    for key, shown in rows:
        told = {"4 GiB": 4 * 2**30}.get(shown, shown)
        assert str(told) in {str(defaults[key]), f"{defaults[key]:g}" if isinstance(defaults[key], float) else ""}, key


def test_benchmarks_that_are_named_exist() -> None:
    named = set(re.findall(r"tools/dev\.py bench (\w+)", PERFORMANCE.read_text()))
    assert named == {file.stem for file in (ROOT / "tools" / "bench").glob("*.py") if not file.stem.startswith("_")}
    assert all(make_parser().parse_args(["bench", name]).verb == "bench" for name in named)
