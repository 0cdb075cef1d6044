"""`dev.py check`: format, lint, types twice, import contracts, house rules, workflow files."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.lockfile import is_neutral
from kvdev.paths import LOCK, PACKAGES, ROOT
from kvdev.steps import DevError, note, run_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["house_rules", "run_checks"]

_MOST_LINES = 450
_BIN = Path(sys.executable).parent


def run_checks(*, fix: bool) -> int:
    """Run every check, report all that failed, return 0 when none did."""
    started = time.monotonic()
    failed: list[str] = []
    for name, check in _checks(fix=fix):
        try:
            check()
        except DevError as error:
            failed.append(name)
            print(f"\n{name}: {error}\n", flush=True)
    note(
        f"check: {len(failed)} failed ({time.monotonic() - started:.0f} s)"
        + (f": {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def _checks(*, fix: bool) -> list[tuple[str, Callable[[], object]]]:
    sources = [ROOT / "packages" / name / "src" for name in PACKAGES]
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

    def tool(name: str, *words: str | Path) -> tuple[str, Callable[[], object]]:
        return name, lambda: run_step(name, [_BIN / words[0], *words[1:]], timeout_s=600)

    return [
        tool("ruff format", "ruff", "format", *([] if fix else ["--check", "--diff", "--quiet"]), ROOT),
        tool("ruff check", "ruff", "check", *(["--fix"] if fix else []), ROOT),
        tool("mypy", "mypy", *sources),
        tool("pyright", "pyright", *sources),
        tool("import contracts", "lint-imports", "--config", ROOT / "importlinter.toml"),
        ("house rules", house_rules),
        tool("workflow schema", "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows),
        tool("workflow lint", "zizmor", "--offline", "--quiet", *workflows),
    ]


def house_rules() -> None:
    """Check what no linter knows: module sizes, `__all__`, typed markers, neutral addresses.

    Raises:
        DevError: Every broken rule, with the file.
    """
    broken: list[str] = []
    files = [ROOT / line for line in _tracked() if line.endswith(".py")]
    for file in files:
        if not file.exists():
            continue
        text = file.read_text()
        name = file.relative_to(ROOT)
        count = len(text.splitlines())
        if count > _MOST_LINES:
            broken.append(f"{name}: {count} lines; no module is longer than {_MOST_LINES}")
        if "/src/" in str(name) and not _declares_all(text):
            broken.append(f"{name}: no __all__")
    for package in PACKAGES:
        module = package.replace("-", "_")
        if not (ROOT / "packages" / package / "src" / module / "py.typed").exists():
            broken.append(f"{package}: no py.typed")
    if not is_neutral(LOCK.read_text()):
        broken.append("uv.lock names a real index; run `python3 tools/dev.py lock`")
    if broken:
        raise DevError("house rules broken:\n  " + "\n  ".join(broken))


def _tracked() -> Sequence[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        return [str(p.relative_to(ROOT)) for folder in ("packages", "tools") for p in (ROOT / folder).rglob("*.py")]
    return listed.stdout.splitlines()


def _declares_all(text: str) -> bool:
    for node in ast.parse(text).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return True
    return False
