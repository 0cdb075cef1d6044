"""Check the house rules that no linter knows: module sizes, `__all__`, typed markers, the lock."""

from __future__ import annotations

import ast
import subprocess
from typing import TYPE_CHECKING

from kvdev.lockfile import is_neutral
from kvdev.paths import LOCK, PACKAGES, ROOT, SLOW_TESTS
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["house_rules"]

_MOST_LINES = 500
_PARTS = ("packages", "integration_tests", "tools")


def house_rules() -> None:
    """Check every Python file and package of this checkout.

    Raises:
        DevError: Every broken rule, with the file.
    """
    broken: list[str] = []
    for file in _python_files():
        broken += _broken_by(file)
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        if not (folder / "src" / package.replace("-", "_") / "py.typed").exists():
            broken.append(f"{package}: no py.typed")
    slow = SLOW_TESTS.read_text().splitlines() if SLOW_TESTS.exists() else []
    broken += [f"{test}: longer than 5 s in the last short run; mark it `full` or make it smaller" for test in slow]
    if not is_neutral(LOCK.read_text()):
        broken.append("uv.lock names a real index; run `python3 tools/dev.py lock`")
    if broken:
        raise DevError("house rules broken:\n  " + "\n  ".join(broken))


def _broken_by(file: Path) -> list[str]:
    text = file.read_text()
    name = str(file.relative_to(ROOT))
    broken: list[str] = []
    count = len(text.splitlines())
    if count > _MOST_LINES:
        broken.append(f"{name}: {count} lines; no module is longer than {_MOST_LINES}")
    if "/src/" in name and not _declares_all(text):
        broken.append(f"{name}: no __all__")
    return broken


def _python_files() -> list[Path]:
    files = [ROOT / line for line in _tracked() if line.endswith(".py")]
    return [file for file in files if file.exists()]


def _tracked() -> Sequence[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        return [str(p.relative_to(ROOT)) for folder in _PARTS for p in (ROOT / folder).rglob("*.py")]
    return listed.stdout.splitlines()


def _declares_all(text: str) -> bool:
    for node in ast.parse(text).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return True
    return False
