"""The part of vLLM that vllm-adapter stands on, read from vLLM's source: recorded for one version, compared with another.

Names come from `typings/vllm`, which holds what the adapter uses, and from the connector's base classes, all of whose hooks
count: a new one may have to be answered. Nothing of vLLM is imported, so that any version can be read, for any device, without
its dependencies. Two versions may still differ in what a function *does*; that is for the tests in the host.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["HOOKS", "differences", "interface", "wanted"]

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
HOOKS = (f"{_BASE}:KVConnectorBase_V1", f"{_BASE}:SupportsHMA")
"""Classes of which every public method is part of the record."""
_MISSING = "not found"
_MOST_HOPS = 8


@dataclass(frozen=True, slots=True)
class _Found:
    """A definition, and the module that it stands in."""

    module: str
    node: ast.AST


class _Source:
    """Definitions of a package by module and name, imports followed.

    Args:
        root: Folder that holds `vllm/`.
    """

    def __init__(self, root: Path, suffix: str = ".py") -> None:
        self._root = root
        self._suffix = suffix
        self._known: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return a module's tree, None if there is no such module."""
        if name not in self._known:
            place = self._root.joinpath(*name.split("."))
            files = (place / f"__init__{self._suffix}", place.with_name(place.name + self._suffix))
            file = next((file for file in files if file.is_file()), None)
            self._known[name] = ast.parse(file.read_text(encoding="utf-8")) if file is not None else None
        return self._known[name]

    def is_package(self, name: str) -> bool:
        """Tell whether a module is a folder."""
        return self._root.joinpath(*name.split("."), f"__init__{self._suffix}").is_file()

    def find(self, module: str, name: str, hops: int = _MOST_HOPS) -> _Found | None:
        """Return the definition behind a name, in whatever module it is."""
        tree = self.module(module)
        if tree is None or hops == 0:
            return None
        for node in _statements(tree.body):
            if name in _names_bound(node):
                return _Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._imported(module, node), alias.name, hops - 1)
        return None

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + self.is_package(module)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def member(self, found: _Found, name: str, hops: int = _MOST_HOPS) -> str:
        """Describe a member of a class, inherited or not."""
        assert isinstance(found.node, ast.ClassDef)  # noqa: S101  (its callers look)
        own = _members(found.node).get(name)
        if own is not None or hops == 0:
            return own or _MISSING
        for base in found.node.bases:
            if isinstance(base, ast.Name):
                parent = self.find(found.module, base.id)
                if parent is not None and isinstance(parent.node, ast.ClassDef):
                    described = self.member(parent, name, hops - 1)
                    if described != _MISSING:
                        return described
        return _MISSING


def wanted(stubs: Path) -> dict[str, list[str]]:
    """Return `module:name` -> members, of all that the stubs below this folder declare."""
    found: dict[str, list[str]] = {}
    for file in sorted((stubs / "vllm").rglob("*.pyi")):
        parts = file.relative_to(stubs).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for name in _names_bound(node):
                if len(name) > 1 and (name == "__version__" or not name.startswith("_")):  # `T` is a type variable
                    members = _members(node) if isinstance(node, ast.ClassDef) else {}
                    found[f"{module}:{name}"] = [member for member in members if member != "__init__"]
    return found


def interface(root: Path, names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return what the source below a folder says of every name and member, and of every hook.

    Args:
        root: Folder that holds `vllm/`: an environment's site-packages, or an unpacked wheel.
        names: As `wanted` returns them.
    """
    source = _Source(root)
    record: dict[str, str] = {}
    for key, members in names.items():
        module, _, name = key.partition(":")
        found = source.find(module, name)
        record[key] = _MISSING if found is None else _described(found.node)
        if found is not None and isinstance(found.node, ast.ClassDef):
            hooks = [m for m in _members(found.node) if not m.startswith("_")] if key in HOOKS else []
            for member in sorted({*members, *hooks}):
                record[f"{key}.{member}"] = source.member(found, member)
    return dict(sorted(record.items()))


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Name what is gone, changed and new between two interfaces, one line each."""
    lines: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key, _MISSING), now.get(key, _MISSING)
        if old == new:
            continue
        if new == _MISSING:
            lines.append(f"gone: {key} (was {old})")
        elif old == _MISSING:
            lines.append(f"new: {key}: {new}")
        else:
            lines.append(f"changed: {key}: {old} -> {new}")
    return lines


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those within `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _names_bound(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _members(node: ast.ClassDef) -> dict[str, str]:
    """Describe what a class itself declares, and what its methods assign to `self`."""
    found: dict[str, str] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
            found[inner.attr] = "attribute"
    for statement in _statements(node.body):
        for name in _names_bound(statement):
            found[name] = _described(statement)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _described(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if any(
            isinstance(mark, ast.Name) and mark.id in {"property", "cached_property"} for mark in node.decorator_list
        ):
            return "attribute"
        abstract = any("abstract" in ast.unparse(mark) for mark in node.decorator_list)
        return f"{'abstract ' if abstract else ''}({_parameters(node.args)})"
    if isinstance(node, ast.ClassDef):
        return "class"
    return "attribute"


def _parameters(given: ast.arguments) -> str:
    """Return a signature without types, which say nothing of whether a call works."""
    plain = [*given.posonlyargs, *given.args]
    first_default = len(plain) - len(given.defaults)
    parts = [one.arg + ("=..." if number >= first_default else "") for number, one in enumerate(plain)]
    if given.vararg or given.kwonlyargs:
        parts.append("*" + (given.vararg.arg if given.vararg else ""))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(one.arg + ("" if default is None else "=..."))
    if given.kwarg:
        parts.append("**" + given.kwarg.arg)
    return ", ".join(parts)
