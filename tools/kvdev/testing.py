"""`dev.py test`: the short run of every change, `--full` with the rest, or the scopes named; counted, with what did not run.

The short run leaves out the tests marked `full`, and runs several calls of pytest at a time. Each package is tested alone in
its environment, with its coverage. `--full` runs the same first and then the rest: the tests marked `full`, those marked `sized`
with more cases, and all tests on real engines. `--rest` is that second half by itself: CI has run the first by the README's
command.
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvdev.checks import run_checks
from kvdev.envs import (
    NEWEST_VLLM,
    fleet_environment,
    host_environment,
    lowest_environment,
    package_environment,
    tools_environment,
)
from kvdev.gpu import cuda_host, gpu_environment, install_beside
from kvdev.paths import PACKAGES, ROOT, SLOW_TESTS, STATE
from kvdev.steps import DevError, fail, last_lines, note, run_step

BUDGET_S = {"quick": 720, "rest": 1680}
"""Seconds on two cores that the short run and the rest of the full run may take, installations included; said, never judged."""
SLOW_S = 5.0
_NO_TESTS_COLLECTED = 5
_REPORTS = STATE / "reports"


@dataclass(frozen=True, slots=True)
class _Suite:
    """One call of pytest; suites.toml describes the attributes."""

    folder: str
    scope: str = ""
    place: Literal["workspace", "host", "engines", "fleet"] = "workspace"
    words: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_newest: bool = False
    timeout_s: float = 1200
    is_alone: bool = False
    is_one_tier: bool = False
    has_long_tests: bool = False


_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("suites.toml").read_text())
_SUITES = {name: _Suite(**row) for name, row in _TABLE.items()}
SCOPES = ("check", *dict.fromkeys(suite.scope for suite in _SUITES.values() if suite.scope), "gpu")


def run_tests(uv: Path, options: Namespace) -> int:
    """Run the scopes named (none: the tier of the options, all scopes); return 0 when nothing failed."""
    scopes: list[str] = options.scope
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        fail(f"no scope named {', '.join(unknown)}; the scopes are {', '.join(SCOPES)}")
    if options.lowest and (wrong := [scope for scope in scopes if scope not in PACKAGES]):
        fail(f"--lowest is for packages ({', '.join(PACKAGES)}), not for {', '.join(wrong)}")
    if options.long:
        os.environ["KVDEV_LONG"], options.tier = "1", "all"
    if scopes or options.lowest or options.long:
        chosen = scopes or (PACKAGES if options.lowest else SCOPES)
        named = [name for name, suite in _SUITES.items() if suite.scope in chosen]
        named += ["host-families"] * (options.long and "host" in chosen)
        names = [*(scope for scope in chosen if scope in {"check", "gpu"}), *named]
        return _Run(uv, options, options.tier).make([[name] for name in names], 1)
    tiers = ("quick", "rest") if options.tier == "all" else (options.tier,)
    return max([_run_tier(uv, options, tier) for tier in tiers])


def _run_tier(uv: Path, options: Namespace, tier: str) -> int:
    started = time.monotonic()
    if tier == "quick":
        note("left to `dev.py test --full`: tests marked `full`, the scopes fleet and gpu")
        tools_environment(uv, "check")  # one environment is made at a time: the checks need not wait for the host's
        late = {"host-engines", "host-families"}
        suites = [name for name, suite in _SUITES.items() if name not in late and not suite.is_one_tier]
        run = _Run(uv, options, tier)
        # Tests of the short run are bound by no clock, and a third of their time they wait.
        code = run.make([["check", "host environment"], suites, ["host-engines"]], 3)
        SLOW_TESTS.write_text("".join(f"{line}\n" for line in run.slow))
    else:
        os.environ["KVDEV_FULL"] = "1"
        shared = [name for name, suite in _SUITES.items() if suite.scope and not suite.is_alone]
        alone = [name for name, suite in _SUITES.items() if suite.is_alone]
        code = _Run(uv, options, tier).make([shared, *([name] for name in (*alone, "gpu"))], 2)
    print(f"budget: {time.monotonic() - started:.0f} of {BUDGET_S[tier]} s on two cores")
    return code


@dataclass(slots=True)
class _Run:
    """Calls of pytest, several at a time, and what they count: only ever appended to, by any thread.

    `tier`: tests without the mark `full`, those with it, or both; of a package that is named, both.
    """

    uv: Path
    options: Namespace
    tier: str
    ends: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    durations: list[str] = field(default_factory=list)

    def make(self, stages: Sequence[Sequence[str]], lanes: int) -> int:
        """Run the suites of each stage, so many at a time in their order; report what they count."""
        started = time.monotonic()
        for stage in stages:
            with ThreadPoolExecutor(lanes) as pool:
                list(pool.map(self._one, stage))
        print("\nseconds: " + ", ".join(self.durations))
        print(f"failed: {', '.join(self.failures) or 'none'} ({time.monotonic() - started:.0f} s in all)")
        for line in self.lines:
            print(line)
        counts = Counter(self.ends)
        failed = max(counts["failed"], len(self.failures))
        print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped", flush=True)
        return 1 if failed else 0

    def _one(self, name: str) -> None:
        begun = time.monotonic()
        try:
            if name == "check" and run_checks(self.uv, Namespace(fix=False, package="")) != 0:
                self.failures.append(name)
            elif name == "check":
                self.ends.append("passed")
            elif name == "gpu":
                self._gpu()
            elif name == "host environment":
                host_environment(self.uv, self.options.vllm)
            elif name in PACKAGES:
                self._package(name)
            else:
                self._suite(name, _SUITES[name])
        except DevError as error:
            self.failures.append(name)
            print(f"\n{name}: {error}\n", flush=True)
        self.durations.append(f"{name} {time.monotonic() - begun:.0f}")

    def _suite(self, name: str, suite: _Suite) -> None:
        for group in suite.groups:
            tools_environment(self.uv, group)
        vllm, python = NEWEST_VLLM if suite.is_newest else self.options.vllm, Path(sys.executable)
        env = {**os.environ, "KVDEV_UV": str(self.uv), "KVDEV_VLLM": vllm, "PYTHONPATH": str(ROOT / "tools")}
        if suite.place == "host":
            python, env = host_environment(self.uv, vllm), dict(os.environ)
        elif suite.place == "engines":
            host_environment(self.uv, vllm)
        elif suite.place == "fleet":
            env["KVDEV_FLEET_PYTHON"] = str(fleet_environment(self.uv, vllm))
        limit_s = suite.timeout_s * (4 if self.options.long else 1)
        words = [*suite.words, *self._words_of(suite)]
        self._pytest(name, python, ROOT / suite.folder, *words, env=env, timeout_s=limit_s)

    def _words_of(self, suite: _Suite) -> list[str]:
        """Return the arguments that select a suite's tests."""
        marks = {"quick": ["-m", "not full"], "rest": ["-m", "full or sized"], "all": []}
        selected = ["-k", self.options.select] if self.options.select else []
        return [*([] if suite.is_one_tier else marks[self.tier]), *selected]

    def _package(self, name: str) -> None:
        """Run a package's tests in an environment that holds it alone, then hold its core to its coverage floor.

        The tests of the short run reach the floor: those of the rest alone would not.
        """
        folder, options = ROOT / "packages" / name, self.options
        rules = folder / "core.coveragerc"
        words = self._words_of(_Suite("", is_one_tier=bool(options.scope or options.lowest)))
        python = (lowest_environment if options.lowest else package_environment)(self.uv, name)
        if options.lowest or options.select or self.tier == "rest" or not rules.exists():
            self._pytest(name, python, folder / "tests", *words)
            return
        environment = {**os.environ, "COVERAGE_FILE": str(_REPORTS / f"{name}.coverage")}
        runner = ["-m", "coverage", "run", f"--rcfile={rules}"]
        self._pytest(name, python, folder / "tests", *words, env=environment, runner=runner)
        report: list[str | Path] = [python, "-m", "coverage", "report", f"--rcfile={rules}", "--skip-covered"]
        run_step(f"coverage of the core of {name}", report, env=environment, timeout_s=120)

    def _gpu(self) -> None:
        """Run the stage in a CUDA vLLM that is found on this machine: NIXL and the agent, the adapter's device code, engines."""
        python, reason = cuda_host()
        if python is None:
            self.lines.append(f"not run: gpu ({reason}; the GPU stage is not green, it did not happen)")
            self.failures += ["gpu"] * ("gpu" in self.options.scope)  # one that was named is expected to run
            return
        site = install_beside(self.uv, python)
        variables = {**os.environ, **gpu_environment(python, site)}
        inside = {**variables, "PYTHONPATH": str(site)}
        engines = {**variables, "PYTHONPATH": str(ROOT / "tools")}
        folder = ROOT / "integration_tests" / "gpu"
        words = self._words_of(_Suite(""))
        self._pytest("gpu", python, folder / "test_gpu.py", *words, env=inside)
        self._pytest("gpu-device", python, folder / "device", "--timeout=300", *words, env=inside)
        here = Path(sys.executable)
        self._pytest("gpu-engines", here, folder / "engines", "--timeout=900", *words, env=engines, timeout_s=2400)

    def _pytest(
        self,
        name: str,
        python: Path,
        folder: Path,
        *words: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 1200,
        runner: Sequence[str] = (),
    ) -> None:
        report = _REPORTS / f"{name}.xml"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        command: list[str | Path] = [
            python, *runner, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT,
            f"--junitxml={report}", "-o", "junit_family=xunit1", "-o", "junit_duration_report=call",
            *words, folder,
        ]  # fmt: skip
        allowed = (0, 1, _NO_TESTS_COLLECTED)
        code, log = run_step(f"test {name}", command, env=env, timeout_s=timeout_s, allowed=allowed)
        if code == _NO_TESTS_COLLECTED and words:
            if "-k" in words:
                self.lines.append(f"not run: {name} (no test matches {' '.join(words)})")
            return
        ends, skips = list[str](), Counter[str]()
        has_long_tests = name not in _SUITES or _SUITES[name].has_long_tests
        for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():
            found = [child for child in case if child.tag in {"failure", "error", "skipped"}]
            ends.append("passed" if not found else "skipped" if found[0].tag == "skipped" else "failed")
            test, taken_s = f"{case.get('classname')}::{case.get('name')}", float(case.get("time", 0))
            if ends[-1] == "skipped":
                skips[f"skipped in {name}: {test.partition('[')[0]}: {found[0].get('message')}"] += 1
            if taken_s > SLOW_S and not has_long_tests:
                self.slow.append(f"{test} ({taken_s:.1f} s)")
        self.ends += ends
        self.lines += [f"{line} ({count} cases)" for line, count in skips.items()]
        if code != 0:
            self.failures.append(name)
            print(f"--- {log}\n{last_lines(log, 120)}", flush=True)
        note(f"      {name}: {', '.join(f'{count} {end}' for end, count in Counter(ends).items())}")
