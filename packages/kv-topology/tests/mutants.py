"""Mutants of a module: copies of its syntax tree in which one operator, comparison or number is changed."""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
CORE = (
    "_arrays",
    "_shards",
    "_select",
    "_runs",
    "_boxes",
    "_slices",
    "_rows",
    "_lists",
    "_blocks",
    "_aliases",
    "_disjoint",
    "_canonical",
    "_readers",
    "_link",
    "_staged",
    "_reshard",
    "_compare",
    "_estimate",
    "_plan",
    "_planner",
)
"""The planner: all that lies between two geometries and descriptor indices."""

SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LEFT_OUT = {"annotation", "returns", "decorator_list", "exc"}
"""Fields of syntax nodes that are no arithmetic: types, decorators, and the words of errors."""


SHOWN_WHOLE = (ast.expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
"""Text with which a changed number is shown."""


@dataclass(frozen=True)
class Mutant:
    """A change.

    Attributes:
        module: Name of the module without the package.
        where: Qualified name of the function or class, "" for the module itself.
        change: "before -> after", with " #n" for the n-th such change in the same place.
        lines: Lines of the statement that is changed.
        text: Source of the module without the change.
        number: Number of the changed site among the module's sites, None for no change.
    """

    module: str
    where: str
    change: str
    lines: range
    text: str
    number: int | None

    @property
    def name(self) -> str:
        """A name that stays when lines are added elsewhere."""
        return f"{self.module}.{self.where}: {self.change}"

    def tree(self) -> ast.Module:
        """Return the changed module."""
        tree = ast.parse(self.text)
        if self.number is not None:
            _apply(list(_sites(tree))[self.number])
        return tree


@dataclass
class _Site:
    """A node that can be changed, with what is around it."""

    node: Any
    kind: str
    place: int
    around: ast.AST
    statement: ast.stmt | None
    where: str


def _kinds(node: ast.AST):
    """Yield (kind, place) of every change of a node."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPS:
        yield "operator", 0
    if isinstance(node, ast.Compare):
        yield from (("compare", n) for n, op in enumerate(node.ops) if type(op) in SWAPS)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield "unary", 0
    if isinstance(node, ast.Constant) and type(node.value) in {int, float}:
        yield "number", 0


def _sites(node: ast.AST, where: str = "", statement: ast.stmt | None = None):
    """Yield the sites of a tree in a fixed order."""
    for name, value in ast.iter_fields(node):
        if name in LEFT_OUT:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            inner = statement
            place = where
            if isinstance(child, ast.stmt):
                inner = child
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                place = f"{where}.{child.name}" if where else child.name
            for kind, number in _kinds(child):
                around = node if kind == "number" and isinstance(node, SHOWN_WHOLE) else child
                assert inner is not None
                yield _Site(child, kind, number, around, inner, where)
            yield from _sites(child, place, inner)


def _apply(site: _Site):
    """Change a node in its tree and return a function that undoes it."""
    node: Any = site.node
    if site.kind == "compare":
        old = node.ops[site.place]
        node.ops[site.place] = SWAPS[type(old)]()
        return lambda: node.ops.__setitem__(site.place, old)
    name = "value" if site.kind == "number" else "op"
    old = getattr(node, name)
    if site.kind == "operator":
        new = SWAPS[type(old)]()
    elif site.kind == "number":
        new = old + 1
    elif isinstance(old, ast.USub):
        new = ast.UAdd()
    else:
        # `not x` becomes `not not x`, which is x as far as an `if` can tell.
        name, old = "operand", node.operand
        new = ast.copy_location(ast.UnaryOp(ast.Not(), old), old)
    setattr(node, name, new)
    return lambda: setattr(node, name, old)


def _lines(statement: ast.stmt) -> range:
    """Return the lines of a statement, of a compound one only its head."""
    body = getattr(statement, "body", None)
    stop = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(stop, statement.lineno + 1))


def mutants(module: str, text: str) -> list[Mutant]:
    """Return every mutant of a module."""
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    for number, site in enumerate(list(_sites(ast.parse(text)))):
        before = ast.unparse(site.around)
        undo = _apply(site)
        change = f"{before} -> {ast.unparse(site.around)}"
        undo()
        seen[site.where, change] += 1
        again = seen[site.where, change]
        label = change if again == 1 else f"{change} #{again}"
        found.append(Mutant(module, site.where, label, _lines(site.statement), text, number))
    return found


def read_equivalents() -> dict[str, str]:
    """Return the reason by name of all changes that no test can find, because they change nothing that counts."""
    entries = tomllib.loads(Path(__file__).with_name("equivalent_mutants.toml").read_text())["mutant"]
    listed = {f"{entry['in']}: {change}": entry["reason"] for entry in entries for change in entry["changes"]}
    if len(listed) != sum(len(entry["changes"]) for entry in entries):
        raise ValueError("a mutant is listed twice")
    return listed


def _unwrapped(thing: object) -> object:
    for name in ("fget", "func", "__func__", "__wrapped__"):
        if not isinstance(thing, types.FunctionType) and hasattr(thing, name):
            return getattr(thing, name)
    return thing


def _functions(namespace: Mapping[str, Any], module: str, prefix: str = ""):
    """Yield (qualified name, function) of everything that a module defines."""
    for name, value in namespace.items():
        thing = _unwrapped(value)
        if isinstance(thing, types.FunctionType) and thing.__module__ == module:
            yield f"{prefix}{name}", thing
        elif isinstance(thing, type) and thing.__module__ == module and not prefix:
            yield from _functions(vars(thing), module, f"{name}.")


def install(mutant: Mutant) -> int:
    """Change the loaded module into the mutant, without loading it anew; returns how many functions or values changed.

    Code and defaults of functions are exchanged in place, so that whoever holds such a function has the changed one.
    """
    name = f"kv_topology.{mutant.module}"
    live: Any = sys.modules[name]
    fresh = types.ModuleType(name)
    vars(fresh).update(__package__="kv_topology", __file__=live.__file__)
    exec(compile(mutant.tree(), live.__file__ or name, "exec"), vars(fresh))
    changed = 0
    old = dict(_functions(vars(live), name))
    for label, function in _functions(vars(fresh), name):
        target = old[label]
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            if getattr(target, part) != getattr(function, part):
                setattr(target, part, getattr(function, part))
                changed += 1
    for label, value in vars(fresh).items():
        before = vars(live).get(label)
        if type(value) in {int, float} and value != before:
            changed += 1
            for module in list(sys.modules.values()):
                if label in vars(module) and vars(module)[label] == before:
                    setattr(module, label, value)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("kv_topology"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    return changed
