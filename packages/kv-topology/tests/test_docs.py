"""The examples in the README and on the algebra's page are run as they stand."""

import doctest
import re
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import DENSE

from kv_topology import Axis, Member, from_document, to_document
from kv_topology.checks import LIMITS
from kv_topology.document import MAX_VALUES
from kv_topology.errors import InvalidGeometry
from kv_topology.tools import EngineSpec, build_engine

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


def document():
    return to_document(build_engine(DENSE, EngineSpec())[0, 0])


def section(title):
    """Return the rows of the tables under a heading of the page, cell by cell."""
    (part,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", GEOMETRY.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `?(\w+)`? \|(.*?)\| ?([^|]*?) \|$", part, re.MULTILINE)


PLACES = {
    "The document": lambda made: made,
    "Groups": lambda made: made["groups"][0],
    "Fields": lambda made: made["layouts"][0][0],
    "Regions": lambda made: made["regions"][0],
}


@needs_docs
@pytest.mark.parametrize("title", PLACES)
def test_geometry_page_lists_the_keys_that_are_written(title):
    listed = [key for key, *_ in section(title) if not key.isdigit() and key not in {"key", "place"}]
    assert listed == list(PLACES[title](document()))


@needs_docs
@pytest.mark.parametrize("title", PLACES)
def test_geometry_page_says_what_may_be_absent(title):
    for key, _, absent in section(title):
        if key.isdigit() or key in {"key", "place"}:
            continue
        made = document()
        del PLACES[title](made)[key]
        if absent == "refused":
            with pytest.raises(InvalidGeometry):
                from_document(made)
        else:
            assert from_document(made) == from_document(document()), key


@needs_docs
@pytest.mark.parametrize(("title", "made"), [("Fields", Axis), ("Regions", Member)])
def test_geometry_page_lists_the_places_of_a_list(title, made):
    listed = [re.findall(r"`(\w+)`", rest)[0] for key, rest, _ in section(title) if key.isdigit()]
    assert listed == [each.name for each in fields(made)]


@needs_docs
def test_geometry_page_has_the_limits():
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|$", GEOMETRY.read_text().split("## Limits")[1], re.MULTILINE)
    assert {name: int(most) for name, most in listed} == LIMITS
    assert f"{MAX_VALUES} values" in GEOMETRY.read_text()
