"""Pages lead somewhere: their links, and the tests, promises, error codes, metrics and configurations that they name."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kvdev.paths import ROOT
from kvdev.support import fill, read_claims
from vllm_adapter.cli.explain import load_codes
from vllm_adapter.config.whole import check_transfer_config
from vllm_adapter.observe import metric_tables as tables

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(?:#[^)\s]*)?\)")
_LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "docs/*.yaml"],
    cwd=ROOT, capture_output=True, text=True, check=False,
)  # fmt: skip
_FILES = sorted(ROOT / line for line in _LISTED.stdout.splitlines()) or sorted((ROOT / "docs").rglob("*.md"))
TESTS = "".join(
    file.read_text()
    for folder in (*ROOT.glob("packages/*/tests"), ROOT / "integration_tests", ROOT / "tools" / "tests")
    for file in folder.rglob("test_*.py")
)
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in _FILES if file.exists()}


def test_links_lead_somewhere() -> None:
    links = [(page, target) for page, text in PAGES.items() for target in LINK.findall(text)]
    assert len(links) > 200
    assert [(page, target) for page, target in links if not (ROOT / page).parent.joinpath(target).exists()] == []


def test_every_file_that_a_module_names_exists() -> None:
    pattern = re.compile(r"\b(?:docs/[\w/-]+\.md|(?:integration_tests|packages)/[\w/-]+\.py)\b")
    named = {
        (str(module.relative_to(ROOT)), name)
        for module in ROOT.glob("packages/*/src/**/*.py")
        for name in pattern.findall(module.read_text())
    }
    assert len(named) >= 5
    assert [(module, name) for module, name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    pending = [ROOT / "docs" / "README.md"]
    while pending:
        page = pending.pop().resolve()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        pending += [page.parent / target for target in LINK.findall(page.read_text())]
    assert sorted(set((ROOT / "docs").rglob("*.md")) - seen) == []


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    for page in (ROOT / "docs" / "adr").glob("0*.md"):
        title = page.read_text().splitlines()[0].partition(": ")[2]
        assert f"]({page.name}) | {title} |" in index, page.name


def test_every_test_that_a_page_names_exists() -> None:
    existing = set(re.findall(r"^(?:async )?def (test_\w+)", TESTS, re.MULTILINE))
    named = {
        (page, name)
        for page, text in PAGES.items()
        if "CHANGELOG" not in page
        for name in re.findall(r"`(test_\w+)`", text)
    }
    assert len(named) > 150
    assert [(page, name) for page, name in sorted(named) if name not in existing] == []


def test_every_promise_has_a_test_and_every_marked_test_a_promise() -> None:
    rows = set(re.findall(r"^\| ([A-C]\d+) \|", PAGES["docs/never-wrong.md"], re.MULTILINE))
    marks = " ".join(re.findall(r"never_wrong\(([^)]*)\)", TESTS))
    assert set(re.findall(r'"([A-Z]\d+)"', marks)) == rows


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    page, own = PAGES["docs/metrics.md"], "vllm:kv_transfer_"
    names = {tables.INFO.name, *(metric.name for metric in tables.METRICS)}
    table = page[page.index(f"| `{own}") :].split("\n\n", 1)[0].splitlines()[2:]
    rows = [name for line in table for name in re.findall(r"`([a-z_]+)", line.split("|")[1])]
    assert sorted(own + name for name in rows) == sorted(name for name in names if name.startswith(own))
    assert [name for name in names if not name.startswith(own) and f"`{name}`" not in page] == []


def test_every_row_of_failure_modes_names_a_test() -> None:
    rows = re.findall(r"^\| (?!fault|---)(.+) \|$", PAGES["docs/failure-modes.md"], re.MULTILINE)
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`test_\w+`", row)] == []


@pytest.mark.parametrize("page", ["failure-modes", "troubleshoot", "metrics", "operate/tune", "operate/check"])
def test_every_code_that_a_page_names_exists(page: str) -> None:
    codes = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", PAGES[f"docs/{page}.md"]))
    scenarios = "".join(file.read_text() for file in ROOT.glob("integration_tests/**/*.py"))
    unknown = codes - {entry.code for entry in load_codes()} - {"kv-nixl", "kv-nixl-agent"}
    assert [code for code in unknown if f'"{code}"' not in scenarios] == []


def test_configurations_on_pages_are_valid() -> None:
    configurations = [
        (page, one)
        for page, text in PAGES.items()
        for one in re.findall(r"'(\{\"kv_connector\".*?\})'", text, re.DOTALL)
    ]
    assert len(configurations) >= 8
    for page, text in configurations:
        problems = [problem.code for problem in check_transfer_config(json.loads(text.replace("\n>", "\n"))).problems]
        # The tutorial misspells a key on purpose.
        assert problems == (["unknown-key"] if "lease_duraton" in text else []), page


def test_a_cell_of_the_support_matrix_has_the_strongest_proofs_of_its_tests() -> None:
    text = '@pytest.mark.newest\n@pytest.mark.parametrize("", [pytest.param(1, marks=[LONG_ONLY, pytest.mark.proves("a: b")])])\n'
    assert [*read_claims(f"{text}def test_x(): ...", "host/engines/test_x.py")] == [("a: b", "e+")]
    assert (
        fill("|case|b (x)|c|\n|-|-|-|\n|a (y)|old|old|\n", {("a", "b"): {"E", "E+", "e", "B"}}).splitlines()[2]
        == "|a (y)|E+,B|\u2013|"
    )
