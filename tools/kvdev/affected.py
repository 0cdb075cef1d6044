"""`dev.py affected BASE`: the packages whose tests a change can break, for the matrix of the workflow `ci`.

A package is affected by a change in its own folder, in the folder of a package that it depends on, and in a file that all
share (the lock, the configuration of the tools, the tools that run tests, the workflow itself).
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

from kvdev.paths import PACKAGES, ROOT
from kvdev.steps import fail

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["affected_by", "run_affected", "siblings_of"]

_SHARED = (
    "pyproject.toml",
    "uv.toml",
    "uv.lock",
    "tools/",
    ".github/workflows/ci.yml",
)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def run_affected(base: str) -> int:
    """Print a JSON list of the packages affected between `base` and the work tree; an unknown base affects all."""
    known = ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
    if base and subprocess.run(known, cwd=ROOT, capture_output=True, check=False).returncode == 0:
        command = ["git", "diff", "--name-only", f"{base}...HEAD"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode != 0:
            fail(f"git cannot compare {base} with HEAD: {listed.stderr.strip()}")
        names = affected_by(ROOT, listed.stdout.splitlines())
    else:
        names = list(PACKAGES)
    print(json.dumps(names))
    return 0


def affected_by(root: Path, files: Iterable[str]) -> list[str]:
    """Return the packages that a change of these files affects, in their usual order."""
    changed = list(files)
    if any(
        file == shared or (shared.endswith("/") and file.startswith(shared)) for file in changed for shared in _SHARED
    ):
        return list(PACKAGES)
    touched = {name for name in PACKAGES for file in changed if file.startswith(f"packages/{name}/")}
    return [name for name in PACKAGES if touched & {name, *siblings_of(root, name)}]


def siblings_of(root: Path, package: str) -> list[str]:
    """Return the packages of this repository that one of them depends on."""
    project = tomllib.loads((root / "packages" / package / "pyproject.toml").read_text())["project"]
    found = [match.group() for text in project["dependencies"] if (match := _NAME.match(text))]
    return [name for name in found if name in PACKAGES]
