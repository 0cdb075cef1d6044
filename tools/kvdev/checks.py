"""`dev.py check`: format, lint, types (strict for sources, less so for tests), import contracts, house rules, workflows."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvdev.envs import tools_environment
from kvdev.house import house_rules
from kvdev.paths import PACKAGES, ROOT
from kvdev.steps import DevError, note, run_step

_SOURCES = [ROOT / "packages" / name / "src" for name in PACKAGES]
_NEIGHBOURS = {
    "integration_tests/real_io": "packages/kv-nixl-agent/tests",
    "integration_tests/gpu": "packages/kv-nixl-agent/tests",
    "integration_tests/gpu/device": "integration_tests/sim",
    "integration_tests/gpu/engines": "integration_tests/host/engines",
}
"""Folders whose tests import modules of another folder, such as bodies that run on another device."""
_FOLDERS = (
    *(f"packages/{name}/{part}" for name in PACKAGES for part in ("tests", "examples")),
    *(f"integration_tests/{name}" for name in ("fakes", "sim", "fleet_sim", "security", "never_wrong", "wire_in_go")),
    *(f"integration_tests/{name}" for name in ("fleet", "chaos", "chaos/agents", "host/inside", "host/engines")),
    *_NEIGHBOURS,
    *("docs/examples", "docs/upstream", "tools", "tools/bench"),
)
"""What mypy checks folder by folder: several have a `conftest.py`, which is one module to it."""


def run_checks(uv: Path, options: Namespace) -> int:
    """Run every check, report all that failed, return 0 when none did."""
    started = time.monotonic()
    here, apart = Path(sys.executable).parent, tools_environment(uv, "check").parent

    def step(name: str, program: Path, *words: str | Path) -> tuple[str, Callable[[], object]]:
        return name, partial(run_step, name, [program, *words], timeout_s=600)

    def schema(kind: str, *files: Path) -> tuple[str, Callable[[], object]]:
        return step(f"schema of {kind}", apart / "check-jsonschema", "--builtin-schema", f"vendor.{kind}", *files)

    github = ROOT / ".github"
    formats = [
        step("ruff format", here / "ruff", "format", *([] if options.fix else ["--check", "--diff", "--quiet"]), ROOT),
        step("ruff check", here / "ruff", "check", *(["--fix"] if options.fix else []), ROOT),
    ]
    checks = [
        ("mypy", _check_types),
        step("pyright", apart / "pyright", *_SOURCES),
        step("pyright of tests", apart / "pyright", "--project", ROOT / "tools" / "pyright-tests.json"),
        step("import contracts", here / "lint-imports", "--no-logo", "--config", ROOT / "importlinter.toml"),
        ("house rules", house_rules),
        schema("github-workflows", *(github / "workflows").glob("*.yml")),
        schema("dependabot", github / "dependabot.yml"),
        schema("github-issue-forms", *(github / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
        step("workflow lint", apart / "zizmor", "--offline", "--quiet", github),
    ]
    failed: list[str] = []

    def run(named: tuple[str, Callable[[], object]]) -> None:
        name, check = named
        try:
            check()
        except DevError as error:
            failed.append(name)
            print(f"\n{name}: {error}\n", flush=True)

    for each in formats:
        run(each)  # sources are written in order before others read them
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, checks))
    note(f"check: {len(failed)} failed ({time.monotonic() - started:.0f} s) {', '.join(failed)}")
    return 1 if failed else 0


def _check_types() -> None:
    """Run mypy on the sources, then in each folder of tests; one after the other, since they share a cache."""
    mypy, failures = Path(sys.executable).parent / "mypy", list[str]()
    config: list[str | Path] = [
        "--config-file",
        ROOT / "tools" / "mypy-tests.toml",
        "--cache-dir",
        ROOT / ".mypy_cache",
    ]
    try:
        run_step("mypy", [mypy, *_SOURCES], timeout_s=600)
    except DevError as error:
        failures.append(str(error))
    for name in _FOLDERS:
        neighbour = {"MYPYPATH": str(ROOT / _NEIGHBOURS[name])} if name in _NEIGHBOURS else {}
        try:
            if any((ROOT / name).glob("*.py")):
                env = {**os.environ, **neighbour}
                run_step(f"mypy of {name}", [mypy, *config, "."], env=env, cwd=ROOT / name, timeout_s=600)
        except DevError as error:
            failures.append(str(error))
    if failures:
        raise DevError("\n".join(failures))
