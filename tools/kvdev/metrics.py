"""`dev.py metrics`: the structure of the packages in numbers, of this checkout or of another one.

Everything is read from the syntax trees, nothing is imported, so that an older checkout is measured by the same rules.

- *public names*: entries of `__all__` of a package's top level and of its public submodules (no part of the path starts with
  an underscore). `testing` modules are counted apart.
- *complexity*: 1 + branches, loops, handlers, conditional expressions, comprehension clauses, match cases, and each
  further operand of `and` and `or`.
- *import cycle*: modules of one package that import each other in a circle, imports for types only included.
- *duplicated definitions*: functions that differ in nothing but their docstring (at least 25 syntax nodes); argument lists
  of five names or more that stand in several functions; runs of six fields or properties or more that two classes share.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from kvdev.paths import PACKAGES, ROOT

__all__ = ["Metrics", "format_table", "measure", "run_metrics"]

_LONG_MODULE = 300
_COMPLEX = 10
_MANY_ARGUMENTS = 7
_SAME_ARGUMENTS = 5
_SAME_FIELDS = 6
_SMALLEST_DUPLICATE = 25
_BRANCHES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case, ast.Assert,
)  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Metrics:
    """Figures of one package."""

    package: str
    modules: int = 0
    lines: int = 0
    top_level_names: int = 0
    submodule_names: int = 0
    testing_names: int = 0
    long_modules: list[tuple[str, int]] = field(default_factory=list)
    signatures: list[tuple[str, int]] = field(default_factory=list)
    complex_functions: list[tuple[str, int]] = field(default_factory=list)
    cycles: list[list[str]] = field(default_factory=list)
    duplicates: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    tree: ast.Module
    lines: int


def run_metrics(root: Path | None, *, as_json: bool) -> int:
    """Print the table of this checkout or of the one at `root`; return 0."""
    measured = [measure(root or ROOT, package) for package in PACKAGES]
    if as_json:
        keys = Metrics.__slots__
        print(json.dumps([{key: getattr(one, key) for key in keys} for one in measured]))
    else:
        print(format_table(measured))
    return 0


def measure(root: Path, package: str) -> Metrics:
    """Measure one package of the checkout at `root`."""
    source = root / "packages" / package / "src"
    modules = [_load(source, path) for path in sorted(source.rglob("*.py"))]
    found = Metrics(package, len(modules), sum(module.lines for module in modules))
    for module in modules:
        _count_names(found, module)
        if module.lines > _LONG_MODULE:
            found.long_modules.append((module.name, module.lines))
        for name, function in _functions(module):
            if (arguments := len(_arguments(function))) >= _MANY_ARGUMENTS:
                found.signatures.append((name, arguments))
            if (complexity := _complexity(function)) > _COMPLEX:
                found.complex_functions.append((name, complexity))
    for rows in (found.long_modules, found.signatures, found.complex_functions):
        rows.sort(key=lambda row: (-row[1], row[0]))
    found.cycles = _cycles(modules)
    found.duplicates = _duplicates(modules)
    return found


def format_table(measured: list[Metrics]) -> str:
    """Lay the figures out as Markdown: one table of counts, then each finding by name."""
    counts: list[tuple[str, list[int]]] = [
        ("modules", [one.modules for one in measured]),
        ("lines", [one.lines for one in measured]),
        ("public names, top level", [one.top_level_names for one in measured]),
        ("public names, submodules", [one.submodule_names for one in measured]),
        ("public names, testing", [one.testing_names for one in measured]),
        (f"modules above {_LONG_MODULE} lines", [len(one.long_modules) for one in measured]),
        ("longest module", [max((rows for _, rows in one.long_modules), default=0) for one in measured]),
        (f"signatures of {_MANY_ARGUMENTS} arguments or more", [len(one.signatures) for one in measured]),
        ("longest signature", [max((n for _, n in one.signatures), default=0) for one in measured]),
        (f"functions above complexity {_COMPLEX}", [len(one.complex_functions) for one in measured]),
        ("import cycles", [len(one.cycles) for one in measured]),
        ("duplicated definitions", [len(one.duplicates) for one in measured]),
    ]
    lines = ["| | " + " | ".join(one.package for one in measured) + " | sum |"]
    lines.append("|---|" + "---:|" * (len(measured) + 1))
    for name, values in counts:
        total = max(values) if name.startswith("longest") else sum(values)
        lines.append(f"| {name} | " + " | ".join(map(str, values)) + f" | {total} |")
    for one in measured:
        lines += ["", f"{one.package}:"]
        lines += [f"  {count} lines: {name}" for name, count in one.long_modules]
        lines += [f"  {count} arguments: {name}" for name, count in one.signatures]
        lines += [f"  complexity {count}: {name}" for name, count in one.complex_functions]
        lines += [f"  import cycle: {' <-> '.join(names)}" for names in one.cycles]
        lines += [f"  duplicate: {' = '.join(names)}" for names in one.duplicates]
    return "\n".join(lines)


def _load(source: Path, path: Path) -> _Module:
    parts = list(path.relative_to(source).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    text = path.read_text()
    return _Module(".".join(parts), ast.parse(text), len(text.splitlines()))


def _count_names(found: Metrics, module: _Module) -> None:
    _, *inner = module.name.split(".")
    if any(part.startswith("_") for part in inner):
        return
    names = _exported(module.tree)
    if not inner:
        found.top_level_names += names
    elif inner[0] == "testing":
        found.testing_names += names
    else:
        found.submodule_names += names


def _exported(tree: ast.Module) -> int:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.List | ast.Tuple):
                return len([one for one in value.elts if getattr(one, "value", "") != "__version__"])
    return 0


def _functions(module: _Module) -> list[tuple[str, _Function]]:
    found: list[tuple[str, _Function]] = []

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((f"{name}.{child.name}", child))
                walk(child, f"{name}.{child.name}")
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{name}.{child.name}")
            else:
                walk(child, name)

    walk(module.tree, module.name)
    return found


def _arguments(function: _Function) -> tuple[str, ...]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return tuple(name for name in names if name not in {"self", "cls"})


def _complexity(function: _Function) -> int:
    total = 1
    pending: list[ast.AST] = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, _BRANCHES):
            total += 1
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        pending += ast.iter_child_nodes(node)
    return total


def _imports(module: _Module, known: set[str], *, is_package: bool) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, *([base] if base else [])])
            found |= {base} | {f"{base}.{one.name}" for one in node.names}
    # `from package import name` means the package only where `name` is no module of its own.
    return {name for name in found if name in known and name != module.name}


def _cycles(modules: list[_Module]) -> list[list[str]]:
    """Return the groups of modules that reach each other, leaving out package `__init__` files: they only re-export."""
    known = {module.name for module in modules}
    packages = {name for name in known if any(other.startswith(name + ".") for other in known)}
    edges = {
        one.name: _imports(one, known, is_package=one.name in packages) - packages
        for one in modules
        if one.name not in packages
    }
    reached = {name: _reach(name, edges) for name in edges}
    groups: set[frozenset[str]] = set()
    for name in edges:
        group = frozenset(other for other in reached[name] if name in reached[other])
        if len(group) > 1:
            groups.add(group)
    return sorted(sorted(group) for group in groups)


def _reach(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in edges.get(pending.pop(), ()):
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return seen


def _duplicates(modules: list[_Module]) -> list[list[str]]:
    same: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        for name, function in _functions(module):
            body = _without_docstring(function.body)
            if sum(1 for part in body for _ in ast.walk(part)) >= _SMALLEST_DUPLICATE:
                same["body", "".join(ast.dump(part) for part in body)].append(name)
            arguments = _arguments(function)
            if len(arguments) >= _SAME_ARGUMENTS:
                same["arguments", ",".join(arguments)].append(f"{name}({', '.join(arguments)})")
    found = [names for names in same.values() if len(names) > 1]
    return sorted(found + _shared_fields(modules))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    has_one = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if has_one else body


def _shared_fields(modules: list[_Module]) -> list[list[str]]:
    classes: list[tuple[str, tuple[str, ...]]] = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names = tuple(name for part in node.body if (name := _field_name(part)))
                if len(names) >= _SAME_FIELDS:
                    classes.append((f"{module.name}.{node.name}", names))
    found: list[list[str]] = []
    for number, (name, fields) in enumerate(classes):
        for other, others in classes[number + 1 :]:
            run = _longest_run(fields, others)
            if run >= _SAME_FIELDS:
                found.append([f"{name} ({run} fields)", other])
    return found


def _field_name(part: ast.stmt) -> str:
    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
        return part.target.id
    if isinstance(part, ast.FunctionDef) and any(getattr(one, "id", "") == "property" for one in part.decorator_list):
        return part.name
    return ""


def _longest_run(fields: tuple[str, ...], others: tuple[str, ...]) -> int:
    """Return the length of the longest run of names that both have, in the same order without a gap."""
    best = 0
    before = [0] * (len(others) + 1)
    for one in fields:
        row = [0] * (len(others) + 1)
        for place, other in enumerate(others, 1):
            if one == other:
                row[place] = before[place - 1] + 1
                best = max(best, row[place])
        before = row
    return best
