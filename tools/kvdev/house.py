"""Check the house rules that no linter knows: module sizes, `__all__`, typed markers, slow tests, the lock."""

from __future__ import annotations

import re
import subprocess

from kvdev.locking import is_neutral
from kvdev.paths import LOCK, PACKAGES, ROOT, SLOW_TESTS
from kvdev.steps import DevError

_MOST_LINES = 500


def house_rules() -> None:
    """Check every Python file and package of this checkout.

    Raises:
        DevError: Every broken rule, with the file.
    """
    broken: list[str] = []
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() or [str(file.relative_to(ROOT)) for file in ROOT.glob("packages/**/*.py")]
    for name in names:
        text = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        if (count := text.count("\n")) > _MOST_LINES:
            broken.append(f"{name}: {count} lines; no module is longer than {_MOST_LINES}")
        if "/src/" in name and text and not re.search(r"^__all__\b", text, re.MULTILINE):
            broken.append(f"{name}: no __all__")
    markers = (ROOT / "packages" / package / "src" / package.replace("-", "_") / "py.typed" for package in PACKAGES)
    broken += [f"{marker}: does not exist" for marker in markers if not marker.exists()]
    slow = SLOW_TESTS.read_text().splitlines() if SLOW_TESTS.exists() else []
    broken += [f"{test}: longer than 5 s in the last short run; mark it `full` or make it smaller" for test in slow]
    if not is_neutral(LOCK.read_text()):
        broken.append("uv.lock names a real index; run `python3 tools/dev.py lock`")
    if broken:
        raise DevError("house rules broken:\n  " + "\n  ".join(broken))
