"""`dev.py check`: format, lint, types (strict for sources, less so for tests), import contracts, house rules, workflows."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.envs import tools_environment
from kvdev.house import house_rules
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.steps import DevError, note, run_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Check = tuple[str, Callable[[], object]]

__all__ = ["run_checks"]

_BIN = Path(sys.executable).parent
_APART = ("pyright", "check-jsonschema", "zizmor")
"""Programs of the environment `check-tools`."""
_NEIGHBOURS = {
    "fleet_sim": "integration_tests/sim",
    "security": "integration_tests/sim",
    "never_wrong": "integration_tests/sim",
    "real_io": "packages/kv-nixl-agent/tests",
    "gpu": "packages/kv-nixl-agent/tests",
    "gpu/device": "integration_tests/sim",
    "gpu/engines": "integration_tests/host/engines",
}
"""Folders of `integration_tests` whose tests import modules of another folder, such as bodies that run on another device."""


def run_checks(uv: Path, *, fix: bool) -> int:
    """Run every check, report all that failed, return 0 when none did."""
    started = time.monotonic()
    tools_environment(uv, "check")
    with ThreadPoolExecutor(2) as pool:
        # Sources are written in order before others read them; after that two checks run at a time.
        errors = [*map(_error_of, _formats(fix=fix)), *pool.map(_error_of, _checks())]
    failed: list[str] = []
    for name, error in filter(None, errors):
        failed.append(name)
        print(f"\n{name}: {error}\n", flush=True)
    note(
        f"check: {len(failed)} failed ({time.monotonic() - started:.0f} s)"
        + (f": {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def _error_of(named: _Check) -> tuple[str, DevError] | None:
    name, check = named
    try:
        check()
    except DevError as error:
        return name, error
    return None


def _formats(*, fix: bool) -> list[_Check]:
    return [
        _tool("ruff format", "ruff", "format", *([] if fix else ["--check", "--diff", "--quiet"]), ROOT),
        _tool("ruff check", "ruff", "check", *(["--fix"] if fix else []), ROOT),
    ]


def _checks() -> list[_Check]:
    sources = [ROOT / "packages" / name / "src" for name in PACKAGES]
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    tool = _tool
    return [
        ("mypy", lambda: _check_types(sources)),
        tool("pyright", "pyright", *sources),
        tool("pyright of tests", "pyright", "--project", ROOT / "tools" / "pyright-tests.json"),
        tool("import contracts", "lint-imports", "--no-logo", "--config", ROOT / "importlinter.toml"),
        ("house rules", house_rules),
        tool("workflow schema", "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows),
        tool("workflow lint", "zizmor", "--offline", "--quiet", ROOT / ".github"),
        tool(
            "dependabot schema", "check-jsonschema", "--builtin-schema", "vendor.dependabot", ROOT / ".github" / "dependabot.yml"
        ),
        tool(
            "issue form schema", "check-jsonschema", "--builtin-schema", "vendor.github-issue-forms",
            *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
        ),
    ]  # fmt: skip


def _tool(name: str, program: str, *words: str | Path) -> _Check:
    folder = STATE / "venvs" / "check-tools" / "bin" if program in _APART else _BIN
    return name, lambda: run_step(name, [folder / program, *words], timeout_s=600)


def _check_types(sources: Sequence[Path]) -> None:
    """Run mypy on the sources, then in each folder of tests by itself: several have a `conftest.py`, which is one module to mypy.

    One after the other, since they share a cache.
    """
    failures: list[str] = []
    try:
        run_step("mypy", [_BIN / "mypy", *sources], timeout_s=600)
    except DevError as error:
        failures.append(str(error))
    for folder in _folders_of_tests():
        name = f"mypy of {folder.relative_to(ROOT)}"
        command: list[str | Path] = [
            _BIN / "mypy",
            "--config-file",
            ROOT / "tools" / "mypy-tests.toml",
            "--cache-dir",
            ROOT / ".mypy_cache",
            ".",
        ]
        try:
            run_step(name, command, env=_variables_of(folder), cwd=folder, timeout_s=600)
        except DevError as error:
            failures.append(str(error))
    if failures:
        raise DevError("\n".join(failures))


def _variables_of(folder: Path) -> dict[str, str] | None:
    """Return the variables under which mypy also finds the folder whose modules this one imports."""
    for name, neighbour in _NEIGHBOURS.items():
        if folder == ROOT / "integration_tests" / name:
            return {**os.environ, "MYPYPATH": str(ROOT / neighbour)}
    return None


def _folders_of_tests() -> list[Path]:
    packages = [ROOT / "packages" / name / part for name in PACKAGES for part in ("tests", "examples")]
    shared = ROOT / "integration_tests"
    plain = ("sim", "wire_in_go", "fleet", "chaos", "chaos/agents")
    names = (*plain, *_NEIGHBOURS, "host/inside", "host/engines")
    inner = [shared / name for name in names]
    return [
        folder
        for folder in (
            *packages,
            *inner,
            ROOT / "docs" / "examples",
            ROOT / "docs" / "upstream",
            ROOT / "tools",
            ROOT / "tools" / "bench",
        )
        if any(folder.glob("*.py"))
    ]
