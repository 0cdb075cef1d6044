"""`dev.py check`: format, lint, types (strict for sources, less so for tests), import contracts, house rules, workflows."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvdev.envs import tools_environment
from kvdev.house import house_rules
from kvdev.paths import PACKAGES, ROOT
from kvdev.steps import DevError, note, run_step
from kvdev.support import check_support

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
    """Run every check, or those of one package, report all that failed, return 0 when none did."""
    part = f"packages/{options.package}" if options.package else ""
    sources = [ROOT / "packages" / name / "src" for name in ([options.package] if part else PACKAGES)]
    started, failed = time.monotonic(), list[str]()
    here, apart, github = Path(sys.executable).parent, tools_environment(uv, "check").parent, ROOT / ".github"

    def attempt(name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except DevError as error:
            failed.append(name)
            print(f"\n{name}: {error}\n", flush=True)

    def run(name: str, program: Path, *words: str | Path, cwd: Path = ROOT, **variables: str) -> None:
        env = {**os.environ, **variables}
        attempt(name, lambda: run_step(name, [program, *words], cwd=cwd, env=env, timeout_s=600))

    def types() -> None:
        """Run mypy on the sources, then in each folder of tests; one after the other, since they share a cache."""
        run("mypy", here / "mypy", *sources)
        words = f"--config-file={ROOT}/tools/mypy-tests.toml", f"--cache-dir={ROOT}/.mypy_cache", "."
        for name in _FOLDERS:
            if name.startswith(part) and any((ROOT / name).glob("*.py")):
                neighbour = {"MYPYPATH": str(ROOT / _NEIGHBOURS[name])} if name in _NEIGHBOURS else {}
                run(f"mypy of {name}", here / "mypy", *words, cwd=ROOT / name, **neighbour)

    def schema(kind: str, *files: Path) -> None:
        run(f"schema of {kind}", apart / "check-jsonschema", "--builtin-schema", f"vendor.{kind}", *files)

    # Sources are written in order before others read them; after that two checks run at a time.
    run("ruff format", here / "ruff", "format", *([] if options.fix else ["--check", "--diff", "--quiet"]), ROOT / part)
    run("ruff check", here / "ruff", "check", *(["--fix"] if options.fix else []), ROOT / part)
    attempt("support matrix", lambda: check_support(fix=options.fix))
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(types),
            pool.submit(run, "pyright", apart / "pyright", *sources),
            pool.submit(
                run, "import contracts", here / "lint-imports", "--no-logo", f"--config={ROOT}/importlinter.toml"
            ),
            pool.submit(attempt, "house rules", house_rules),
        ]
        if not part:
            project = ROOT / "tools" / "pyright-tests.json"
            jobs += [
                pool.submit(run, "pyright of tests", apart / "pyright", "--project", project),
                pool.submit(schema, "github-workflows", *(github / "workflows").glob("*.yml")),
                pool.submit(schema, "dependabot", github / "dependabot.yml"),
                pool.submit(schema, "github-issue-forms", *(github / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
                pool.submit(run, "workflow lint", apart / "zizmor", "--offline", "--quiet", github),
            ]
    for job in jobs:
        job.result()  # raises what is not the check's own error
    note(f"check: {len(failed)} failed ({time.monotonic() - started:.0f} s) {', '.join(failed)}")
    return 1 if failed else 0
