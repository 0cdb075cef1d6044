"""Relative links of all Markdown pages lead to files that exist, and pages of docs/ are reachable from its index."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvdev.paths import ROOT

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(?:#[^)\s]*)?\)")
_LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT, capture_output=True, text=True, check=False,
)  # fmt: skip
PAGES = sorted(ROOT / line for line in _LISTED.stdout.splitlines()) or sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []


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
