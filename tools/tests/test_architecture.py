"""Names in docs/architecture.md are those of the code, so that a reader can follow a request by them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"`([A-Z]\w+)\.(\w+)`")


def members() -> dict[str, set[str]]:
    """Return the names that each class of the packages defines or annotates."""
    found: dict[str, set[str]] = {}
    for file in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                mine = found.setdefault(node.name, set())
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        mine.add(part.name)
                    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        mine.add(part.target.id)
    return found


def test_every_method_that_the_page_names_exists() -> None:
    named = NAME.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 20
    known = members()
    assert [f"{owner}.{name}" for owner, name in named if name not in known.get(owner, set())] == []
