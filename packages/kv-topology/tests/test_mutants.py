"""The mutation check itself: every change changes code, and the list of equivalent mutants names real changes."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import CORE, PACKAGE, Mutant, install, mutants, read_equivalents


def text_of(module):
    return (PACKAGE / "src" / "kv_topology" / f"{module}.py").read_text()


def test_equivalent_mutants_name_changes_of_this_source():
    names = [mutant.name for module in CORE for mutant in mutants(module, text_of(module))]
    assert len(set(names)) == len(names) > 700
    listed = read_equivalents()
    assert sorted(listed.keys() - set(names)) == []
    assert all(len(reason) > 20 for reason in listed.values())


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a = b + c", ["b + c -> b - c"]),
        ("a[-1] -= 2", ["a[-1] -= 2 -> a[-1] += 2", "-1 -> +1", "-1 -> -2", "a[-1] -= 2 -> a[-1] -= 3"]),
        ("def f(x: int = 1) -> 'y < 2':\n    raise V(f'{x + 1}', 2 * x)", ["1 -> 2"]),
        ("a = b < c <= d", ["b < c <= d -> b <= c <= d", "b < c <= d -> b < c < d"]),
        ("if not a and b:\n    c = 1.5", ["not a and b -> not a or b", "not a -> not not a", "c = 1.5 -> c = 2.5"]),
        ("f(1, 1)", ["f(1, 1) -> f(2, 1)", "f(1, 1) -> f(1, 2)"]),
        ("x(y == 1) + x(y == 1)", None),
    ],
)
def test_changes(text, changes):
    found = mutants("m", text)
    assert len({mutant.name for mutant in found}) == len(found)
    assert all(ast.dump(mutant.tree()) != ast.dump(ast.parse(text)) for mutant in found)
    assert changes is None or [mutant.change for mutant in found] == changes


@pytest.mark.parametrize("module", CORE)
def test_an_unchanged_module_is_no_mutant(module):
    importlib.import_module(f"kv_topology.{module}")
    assert install(Mutant(module, "", "", range(1), text_of(module), None)) == 0
