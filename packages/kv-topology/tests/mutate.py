"""Mutation check of the planner's arithmetic: change one operator or number, and some test must fail.

    python tests/mutate.py [--every N] [MODULE ...]

Each mutant runs in a forked process: the package is imported with one changed module, and the tests of block maths, slices and
conventions, then a sample of the byte oracle, are called directly until one fails. That is far quicker than a test
runner that collects anew for every mutant. Words of errors are left alone. Prints survivors and the score; exit code 1
below 90 percent.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import inspect
import itertools
import os
import resource
import signal
import sys
import time
from pathlib import Path

import hypothesis  # noqa: F401 - loaded once, before the forks
import numpy as np  # noqa: F401
import pytest  # noqa: F401

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "kv_topology"
CORE = (
    "_shards",
    "_select",
    "_runs",
    "_boxes",
    "_slices",
    "_rows",
    "_blocks",
    "_readers",
    "_link",
    "_staged",
    "_reshard",
)
SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def _sites(tree: ast.AST):
    """Yield (node, kind, place) of everything that can be changed, leaving out annotations and raised words."""
    for name, value in ast.iter_fields(tree):
        if name in {"annotation", "returns", "decorator_list", "exc"} or isinstance(value, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.Raise, ast.JoinedStr)) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(child.op) in SWAPS:
                yield child, "op", 0
            if isinstance(child, ast.Compare):
                yield from ((child, "compare", n) for n, op in enumerate(child.ops) if type(op) in SWAPS)
            if isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.USub):
                yield child, "sign", 0
            if isinstance(child, ast.Constant) and type(child.value) is int:
                yield child, "number", 0
            yield from _sites(child)


def _is_module_level_limit(node: ast.AST, limits: set[int]) -> bool:
    return getattr(node, "lineno", 0) in limits


def mutants(module: str):
    """Yield (description, source) of every mutant of a module."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    limits = {
        line
        for item in tree.body
        if isinstance(item, (ast.Assign, ast.Expr))
        for line in range(item.lineno, (item.end_lineno or 0) + 1)
    }
    count = sum(1 for _ in _sites(tree))
    for number in range(count):
        changed = copy.deepcopy(tree)
        node, kind, place = next(itertools.islice(_sites(changed), number, None))
        if _is_module_level_limit(node, limits):
            continue
        before = ast.unparse(node)
        if kind == "op":
            node.op = SWAPS[type(node.op)]()
        elif kind == "compare":
            node.ops[place] = SWAPS[type(node.ops[place])]()
        elif kind == "sign":
            node.op = ast.UAdd()
        else:
            node.value += 1
        yield f"{module}:{node.lineno}: {before} -> {ast.unparse(node)}", ast.unparse(changed)


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the package one changed module."""

    def __init__(self, module: str, source: str) -> None:
        self.name, self.source = f"kv_topology.{module}", source

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module):
        exec(compile(self.source, self.name, "exec"), module.__dict__)


def _calls(path: Path):
    """Yield calls of the test functions of a file that need no fixture and no generated input."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, function in vars(module).items():
        if name.startswith("test_") and not hasattr(function, "hypothesis"):
            axes = []
            for mark in getattr(function, "pytestmark", []):
                names, values = mark.args[0], mark.args[1]
                keys = [names] if isinstance(names, str) and "," not in names else list(names)
                axes.append([dict(zip(keys, v if len(keys) > 1 else (v,), strict=True)) for v in values])
            chosen_all = list(itertools.product(*axes))
            for chosen in chosen_all[:: max(1, len(chosen_all) // 9)]:
                if "monkeypatch" not in inspect.signature(function).parameters:
                    yield lambda f=function, c=chosen: f(**{k: v for part in c for k, v in part.items()})


def run_tests() -> None:
    """Call tests until one fails; the quick and sharp ones first."""
    for name in ("test_blocks.py", "test_slices.py", "test_conventions.py"):
        for call in _calls(HERE / name):
            call()
    from kv_topology._proof_cases import FAMILIES

    for make in FAMILIES.values():
        cases = list(make())
        for case in cases[:: max(1, len(cases) // 5)]:
            case.run()
    for call in itertools.islice(_calls(HERE / "test_staged.py"), 0, None, 2):
        call()
    for call in itertools.islice(_calls(HERE / "test_vllm_peer.py"), 0, None, 2):
        call()


def survives(module: str, source: str, limit_s: int) -> bool:
    """Return whether all tests pass on a mutant, in a process of its own."""
    child = os.fork()
    if child == 0:
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        signal.alarm(limit_s)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            sys.meta_path.insert(0, _Loader(module, source))
            run_tests()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    """Run all mutants of the chosen modules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=CORE)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every N-th mutant only")
    parser.add_argument("--limit-s", type=int, default=30, help="a mutant that takes longer counts as found")
    options = parser.parse_args()
    tried = killed = 0
    start = time.monotonic()
    if not survives("_shards", (SOURCE / "_shards.py").read_text(), 10 * options.limit_s):
        print("the tests fail without any change")
        return 2
    for module in options.modules:
        for number, (what, source) in enumerate(mutants(module)):
            if number % options.every:
                continue
            tried += 1
            if survives(module, source, options.limit_s):
                print(f"survived {what}", flush=True)
            else:
                killed += 1
            if tried % 20 == 0:
                print(f"{killed} of {tried} found so far, {time.monotonic() - start:.0f} s", flush=True)
        print(f"{module}: {killed} of {tried} found so far, {time.monotonic() - start:.0f} s", flush=True)
    print(f"score {100 * killed / max(1, tried):.1f} % of {tried} mutants")
    return 0 if killed >= 0.9 * tried else 1


if __name__ == "__main__":
    sys.exit(main())
