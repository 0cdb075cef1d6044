"""The examples in the README and on the algebra's page are run as they stand."""

import doctest
import re
from pathlib import Path

import pytest

from kv_topology.checks import LIMITS
from kv_topology.document import MAX_VALUES

PACKAGE = Path(__file__).parents[1]
DOCS = PACKAGE.parents[1] / "docs"
GEOMETRY = DOCS / "wire" / "geometry.md"
PAGES = [PACKAGE / "README.md", DOCS / "layout-algebra.md", GEOMETRY]
needs_docs = pytest.mark.skipif(
    not GEOMETRY.exists(), reason="the page is not part of a source distribution of the package alone"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page):
    if not page.exists():
        pytest.skip("the page is not part of a source distribution of the package alone")
    results = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0


@needs_docs
def test_geometry_page_has_the_limits():
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|$", GEOMETRY.read_text().split("## Limits")[1], re.MULTILINE)
    assert {name: int(most) for name, most in listed} == LIMITS
    assert f"{MAX_VALUES} values" in GEOMETRY.read_text()
