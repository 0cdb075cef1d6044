"""`dev.py affected BASE`: the packages whose tests a change can break, for the matrix of the workflow `ci`.

A package is affected by a change in its own folder, in the folder of a package that it depends on, and in a file that all
share (the lock, the configuration of the tools, the tools that run tests, the workflow itself).
"""

from __future__ import annotations

import json
import re
import subprocess
from argparse import Namespace
from collections.abc import Iterable

from kvdev.paths import PACKAGES, ROOT, siblings_of

_SHARED = re.compile(r"(pyproject\.toml|uv\.toml|uv\.lock|\.github/workflows/ci\.yml)$|tools/")


def run_affected(_uv: object, options: Namespace) -> int:
    """Print a JSON list of the packages affected between `options.base` and HEAD; an unknown base affects all."""
    command = ["git", "diff", "--name-only", f"{options.base}...HEAD"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    is_known = bool(options.base) and listed.returncode == 0
    print(json.dumps(affected_by(listed.stdout.splitlines()) if is_known else PACKAGES))
    return 0


def affected_by(files: Iterable[str]) -> list[str]:
    """Return the packages that a change of these files affects, in their usual order."""
    changed = list(files)
    if any(map(_SHARED.match, changed)):
        return list(PACKAGES)
    touched = {name for name in PACKAGES for file in changed if file.startswith(f"packages/{name}/")}
    return [name for name in PACKAGES if touched & {name, *siblings_of(name)}]
