"""The ways through the code in docs/architecture.md: every function is where the page says, and calls the next one."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from kvdev.paths import PACKAGES, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAME = r"`([A-Z]\w*)\.(\w+)`"
WHERE = re.compile(r"^\| `(\w+)` \| `([\w/]+\.py)` \|$", re.MULTILINE)

Function = tuple[str, str]


def functions_of(text: str) -> list[Function]:
    """Return (class, function) of every `Class.function` of a text."""
    return [(match[1], match[2]) for match in re.finditer(NAME, text)]


def calls_of(text: str) -> list[tuple[Function, Function]]:
    """Return the pairs of neighbours of every chain `A.f` -> `B.g` -> ..., also of one that is broken over lines."""
    chains = re.findall(rf"{NAME}(?=\s*->\s*{NAME})", text)
    return [((first, f), (second, g)) for first, f, second, g in chains]


@cache
def functions_in(source: str) -> dict[Function, ast.AST]:
    """Return the methods of a source file, by (class, function)."""
    files = [ROOT / "packages" / name / "src" / source for name in PACKAGES]
    tree = ast.parse(next(file for file in files if file.is_file()).read_text())
    return {
        (one.name, part.name): part
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef)
        for part in one.body
        if isinstance(part, ast.FunctionDef)
    }


def names_in(function: ast.AST) -> set[str]:
    """Return the names of everything that a function calls or gives away."""
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}


SOURCE_OF = dict(WHERE.findall(PAGE))
CALLS = calls_of(PAGE)


def test_chains_are_read_as_pairs_of_neighbours() -> None:
    text = "x `A.f` ->\n`B.g` -> `C.h`, `D.i` and `E.j`"
    assert calls_of(text) == [(("A", "f"), ("B", "g")), (("B", "g"), ("C", "h"))]
    assert len(CALLS) >= 30


def test_every_class_has_its_source_in_the_list() -> None:
    assert sorted({name for name, _ in functions_of(PAGE)} - SOURCE_OF.keys()) == []


@pytest.mark.parametrize("function", sorted(set(functions_of(PAGE))), ids=".".join)
def test_every_function_is_where_the_page_says(function: Function) -> None:
    assert function in functions_in(SOURCE_OF[function[0]])


@pytest.mark.parametrize(("first", "second"), CALLS, ids=".".join)
def test_every_arrow_is_a_call(first: Function, second: Function) -> None:
    assert second[1] in names_in(functions_in(SOURCE_OF[first[0]])[first])
