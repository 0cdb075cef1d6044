"""`dev.py test`: the short run of every change, `--full` with the rest, or the scopes named; counted, with what did not run.

The short run leaves out the tests marked `full`, and runs several calls of pytest at a time in the workspace's environment.
`--full` runs the same first and then the rest: the tests marked `full`, those marked `sized` with more cases, each package
alone in its environment with its coverage, and all tests on real engines. `--rest` is that second half by itself: CI has run
the first by the README's command.
"""

from __future__ import annotations

import configparser
import os
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvdev.envs import (
    DEFAULT_VLLM,
    fleet_environment,
    host_environment,
    lowest_environment,
    package_environment,
    tools_environment,
)
from kvdev.gpu import cuda_host, gpu_environment, install_beside
from kvdev.paths import PACKAGES, ROOT, SLOW_TESTS, STATE
from kvdev.steps import DevError, fail, last_lines, note, run_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    _Run = Callable[["_Tally"], object]

__all__ = ["GPU_PAGE", "SCOPES", "RunOptions", "run_tests"]

Tier = Literal["quick", "rest", "all"]
BUDGET_S: dict[Tier, int] = {"quick": 720, "rest": 1980}
"""Seconds on two cores that the short run and the rest of the full run may take, installations included; said, never judged."""
SLOW_S = 5.0
GPU_PAGE = ROOT / "docs" / "gpu-evidence.md"
_GPU_PARTS = ("gpu", "gpu-device", "gpu-engines")
"""Parts of the GPU stage whose outcomes go into its page."""
_NO_TESTS_COLLECTED = 5
_REPORTS = STATE / "reports"


@dataclass(slots=True)
class _Tally:
    """What calls of pytest count: cases by their end, names of suites that failed, lines to print, and slow cases."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    durations: list[str] = field(default_factory=list)

    def add(self, other: _Tally) -> None:
        """Add the counts of another call."""
        self.counts += other.counts
        self.failures += other.failures
        self.lines += other.lines
        self.slow += other.slow
        self.durations += other.durations


@dataclass(frozen=True, slots=True)
class _Suite:
    """One call of pytest.

    Attributes:
        folder: Below the repository.
        place: Environment that it runs in: the workspace's, the host's, or that of other people's engines.
        words: Arguments of pytest.
        groups: Tool chains that its tests start, by dependency group.
        timeout_s: Longest time of the call; four times as long with `--long`.
        is_one_tier: Whether all its tests belong to the rest, without marks.
        has_long_tests: Whether its tests of the short run may take more than `SLOW_S`: those that play as many cases as fit.
    """

    folder: str
    place: Literal["workspace", "host", "fleet"] = "workspace"
    words: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    timeout_s: float = 1200
    is_one_tier: bool = False
    has_long_tests: bool = False


_ENGINES = ("--timeout=900",)
_INTEGRATION = "integration_tests"
_MATRIX = "tools/tests/test_install_matrix.py"
_SUITES = {
    "host-inside": _Suite(f"{_INTEGRATION}/host/inside", "host"),
    # The GPU stage's bodies, on this device: what runs on a GPU is known to work.
    "host-device": _Suite(f"{_INTEGRATION}/gpu/device", "host"),
    # A node, for tickets that JavaScript reads and writes.
    "never-wrong": _Suite(f"{_INTEGRATION}/never_wrong", groups=("go", "check"), has_long_tests=True),
    **{name: _Suite(f"packages/{name}/tests") for name in (PACKAGES[4], PACKAGES[0], PACKAGES[3], *PACKAGES[1:3])},
    "tools": _Suite("tools/tests", words=(f"--ignore={ROOT / _MATRIX}",)),
    "installations": _Suite(_MATRIX, is_one_tier=True),
    "real-io": _Suite(f"{_INTEGRATION}/real_io"),
    "sim": _Suite(f"{_INTEGRATION}/sim"),
    "fleet-sim": _Suite(f"{_INTEGRATION}/fleet_sim", has_long_tests=True),
    "security": _Suite(f"{_INTEGRATION}/security"),
    "wire-in-go": _Suite(f"{_INTEGRATION}/wire_in_go", groups=("go",), is_one_tier=True),
    "chaos": _Suite(f"{_INTEGRATION}/chaos", words=("--durations=5", "-rfEP"), timeout_s=2400),
    # Output of tests that pass, too: the figures that docs/operate/ quotes, in .dev/logs/test-fleet.log.
    "fleet": _Suite(f"{_INTEGRATION}/fleet", "fleet", (*_ENGINES, "-rfEP"), timeout_s=2400, is_one_tier=True),
    "host-engines": _Suite(f"{_INTEGRATION}/host/engines", "host", _ENGINES, timeout_s=2400, has_long_tests=True),
    "host-families": _Suite(f"{_INTEGRATION}/gpu/engines", "host", _ENGINES, timeout_s=2400),
}
"""Every suite, the longest first: so they start where several run at a time."""
SCOPES: dict[str, tuple[str, ...]] = {
    "check": (),
    "tools": ("tools", "installations"),
    **{name: (name,) for name in PACKAGES},
    "never-wrong": ("never-wrong",),
    "sim": ("sim", "fleet-sim"),
    "real-io": ("real-io",),
    "security": ("security", "wire-in-go"),
    "chaos": ("chaos",),
    "host": ("host-inside", "host-device", "host-engines"),
    "fleet": ("fleet",),
    "gpu": (),
}
_SHARED = ("never-wrong", "fleet-sim", "host-inside", "host-device", "tools", "installations", *PACKAGES, "wire-in-go")
_ALONE = ("sim", "real-io", "security", "chaos", "fleet", "gpu", "host-engines")
"""Of the rest: what is bound by no clock and starts no engine runs two at a time, all else by itself."""
_WEEKLY = {"host": ("host-families",)}
"""Suites that `--long` adds to a scope."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Choices that hold for every suite of a run."""

    vllm: str = DEFAULT_VLLM
    select: str = ""
    """pytest's -k."""
    is_long: bool = False
    is_lowest: bool = False
    is_recorded: bool = False
    """Whether the GPU stage writes its page in the documents."""
    tier: Tier = "quick"
    """Tests without the mark `full`, those with it, or both."""
    is_named: bool = False
    """Whether the caller named scopes; a named one that cannot run here is a failure."""

    def words_of(self, suite: _Suite) -> list[str]:
        """Return the arguments that select a suite's tests."""
        marks: dict[Tier, list[str]] = {"quick": ["-m", "not full"], "rest": ["-m", "full or sized"], "all": []}
        return [*([] if suite.is_one_tier else marks[self.tier]), *(["-k", self.select] if self.select else [])]


def run_tests(uv: Path, scopes: Sequence[str], options: RunOptions) -> int:
    """Run the scopes (none: the tier of the options, all scopes); return 0 when nothing failed."""
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        fail(f"no scope named {', '.join(unknown)}; the scopes are {', '.join(SCOPES)}")
    if options.is_lowest and (wrong := [scope for scope in scopes if scope not in PACKAGES]):
        fail(f"--lowest is for packages ({', '.join(PACKAGES)}), not for {', '.join(wrong)}")
    if options.is_recorded and list(scopes) != ["gpu"]:
        fail("--record is for the scope gpu alone: dev.py test gpu --record")
    options = replace(options, is_named=bool(scopes))
    if options.is_long:
        os.environ["KVDEV_LONG"] = "1"
        options = replace(options, tier="all")
    if scopes or options.is_lowest or options.is_long:
        chosen = scopes or (PACKAGES if options.is_lowest else tuple(SCOPES))
        more = _WEEKLY if options.is_long else {}
        names = [name for scope in chosen for name in (SCOPES[scope] or (scope,)) + more.get(scope, ())]
        return _run_stages([{name: _alone(uv, name, options)} for name in names], 1)
    tiers: tuple[Tier, ...] = ("quick", "rest") if options.tier == "all" else (options.tier,)
    return max([_run_tier(uv, replace(options, tier=tier)) for tier in tiers])


def _run_tier(uv: Path, options: RunOptions) -> int:
    started = time.monotonic()
    if options.tier == "quick":
        note("left to `dev.py test --full`: tests marked `full`, the scopes fleet and gpu")
        tools_environment(uv, "check")  # one environment is made at a time: the checks need not wait for the host's
        host: dict[str, _Run] = {"host environment": lambda _: host_environment(uv, options.vllm)}
        engines, late = "host-engines", {"installations", "wire-in-go", "fleet", "host-families"}
        suites = {name: _suite(uv, name, options) for name in _SUITES if name not in {engines, *late}}
        stages = [{"check": _alone(uv, "check", options), **host}, suites, {engines: _suite(uv, engines, options)}]
        # Tests of the short run are bound by no clock, and a third of their time they wait.
        code = _run_stages(stages, 3, slow_tests=SLOW_TESTS)
    else:
        os.environ["KVDEV_FULL"] = "1"
        shared = {name: _alone(uv, name, options) for name in _SHARED}
        code = _run_stages([shared, *({name: _alone(uv, name, options)} for name in _ALONE)], 2)
    print(f"budget: {time.monotonic() - started:.0f} of {BUDGET_S[options.tier]} s on two cores")
    return code


def _run_stages(stages: Sequence[Mapping[str, _Run]], lanes: int, *, slow_tests: Path | None = None) -> int:
    """Make the named runs of each stage, so many at a time in their order; report what they count, and list slow tests."""
    total, started = _Tally(), time.monotonic()

    def counted(named: tuple[str, _Run]) -> _Tally:
        (name, run), tally, begun = named, _Tally(), time.monotonic()
        try:
            run(tally)
        except DevError as error:
            tally.failures.append(name)
            print(f"\n{name}: {error}\n", flush=True)
        tally.durations.append(f"{name} {time.monotonic() - begun:.0f}")
        return tally

    for stage in stages:
        with ThreadPoolExecutor(lanes) as pool:
            for tally in pool.map(counted, stage.items()):
                total.add(tally)
    if slow_tests is not None:
        slow_tests.write_text("".join(f"{line}\n" for line in total.slow))
    print("\nseconds: " + ", ".join(total.durations))
    print(f"failed: {', '.join(total.failures) or 'none'} ({time.monotonic() - started:.0f} s in all)")
    for line in total.lines:
        print(line)
    failed = max(total.counts["failed"], len(total.failures))
    print(f"{total.counts['passed']} passed, {failed} failed, {total.counts['skipped']} skipped", flush=True)
    return 1 if failed else 0


def _alone(uv: Path, name: str, options: RunOptions) -> _Run:
    """Return a run in the environment that proves most: a package by itself, everything else as in the short run."""
    if name in PACKAGES:
        return lambda mine: _package(uv, name, mine, options)
    if name == "gpu":
        return lambda mine: _gpu(uv, mine, options)
    return (lambda _: _check(uv)) if name == "check" else _suite(uv, name, options)


def _check(uv: Path) -> None:
    from kvdev.checks import run_checks

    if run_checks(uv, fix=False) != 0:
        fail("the checks failed")


def _suite(uv: Path, name: str, options: RunOptions) -> _Run:
    suite = _SUITES[name]

    def run(tally: _Tally) -> None:
        for group in suite.groups:
            tools_environment(uv, group)
        env = {**os.environ, "KVDEV_UV": str(uv), "KVDEV_VLLM": options.vllm, "PYTHONPATH": str(ROOT / "tools")}
        python = Path(sys.executable)
        if suite.place == "host":
            hosts = host_environment(uv, options.vllm)
            if not name.endswith(("engines", "families")):
                python, env = hosts, dict(os.environ)
        elif suite.place == "fleet":
            env["KVDEV_FLEET_PYTHON"] = str(fleet_environment(uv, options.vllm))
        limit_s = suite.timeout_s * (4 if options.is_long else 1)
        words = [*suite.words, *options.words_of(suite)]
        is_timed = options.tier == "quick" and not suite.has_long_tests
        _pytest(name, python, ROOT / suite.folder, tally, *words, env=env, timeout_s=limit_s, is_timed=is_timed)

    return run


def _package(uv: Path, name: str, tally: _Tally, options: RunOptions) -> None:
    """Run all tests of a package in an environment that holds it alone, then hold its core to its coverage floor."""
    folder = ROOT / "packages" / name
    rules, words = folder / "core.coveragerc", ["-k", options.select] if options.select else []
    python = lowest_environment(uv, name) if options.is_lowest else package_environment(uv, name)
    if options.is_lowest or options.select or not rules.exists():
        _pytest(name, python, folder / "tests", tally, *words)
        return
    # Explorations and the like would take several times as long under coverage, and add nothing to it.
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(rules)
    slow = [folder / "tests" / file for file in parser.get("kvdev", "without_coverage", fallback="").split()]
    for file in slow:
        _pytest(f"{name} ({file.stem})", python, file, tally)
    environment = {**os.environ, "COVERAGE_FILE": str(_REPORTS / f"{name}.coverage")}
    runner = ["-m", "coverage", "run", f"--rcfile={rules}"]
    rest = [f"--ignore={file}" for file in slow]
    _pytest(name, python, folder / "tests", tally, *rest, env=environment, runner=runner)
    report: list[str | Path] = [python, "-m", "coverage", "report", f"--rcfile={rules}", "--skip-covered"]
    run_step(f"coverage of the core of {name}", report, env=environment, timeout_s=120)


def _gpu(uv: Path, tally: _Tally, options: RunOptions) -> None:
    """Run the stage in a CUDA vLLM that is found on this machine: NIXL and the agent, the adapter's device code, engines."""
    python, reason = cuda_host()
    if python is None:
        tally.lines.append(f"not run: gpu ({reason}; the GPU stage is not green, it did not happen)")
        if options.is_named:
            tally.failures.append("gpu")
        return
    site, figures = install_beside(uv, python), _REPORTS / "gpu-figures.jsonl"
    for old in (figures, *(_REPORTS / f"{name}.xml" for name in _GPU_PARTS)):
        old.unlink(missing_ok=True)
    variables = {**os.environ, **gpu_environment(python, site, figures)}
    inside = {**variables, "PYTHONPATH": str(site)}
    engines = {**variables, "PYTHONPATH": str(ROOT / "tools")}
    folder = ROOT / "integration_tests" / "gpu"
    words = options.words_of(_Suite(""))
    _pytest("gpu", python, folder / "test_gpu.py", tally, *words, env=inside)
    _pytest("gpu-device", python, folder / "device", tally, "--timeout=300", *words, env=inside)
    here = Path(sys.executable)
    _pytest("gpu-engines", here, folder / "engines", tally, *_ENGINES, *words, env=engines, timeout_s=2400)
    if options.is_recorded:
        # The page is written from all parts, also where one failed or did not run.
        reports = [word for name in _GPU_PARTS for word in ("--report", _REPORTS / f"{name}.xml")]
        command = [python, folder / "record.py", *reports, "--figures", figures, "--record", GPU_PAGE]
        run_step("record the GPU stage", command, env=inside, timeout_s=1200)


def _pytest(
    name: str,
    python: Path,
    folder: Path,
    tally: _Tally,
    *words: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 1200,
    runner: Sequence[str] = (),
    is_timed: bool = False,
) -> None:
    report = _REPORTS / f"{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command: list[str | Path] = [
        python, *runner, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT,
        f"--junitxml={report}", "-o", "junit_family=xunit1", "-o", "junit_duration_report=call",
        *words, folder,
    ]  # fmt: skip
    code, log = run_step(f"test {name}", command, env=env, timeout_s=timeout_s, allowed=(0, 1, _NO_TESTS_COLLECTED))
    if code == _NO_TESTS_COLLECTED and words:
        if "-k" in words:
            tally.lines.append(f"not run: {name} (no test matches {' '.join(words)})")
        return
    counts, skips = Counter[str](), Counter[str]()
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():
        found = [child for child in case if child.tag in {"failure", "error", "skipped"}]
        end = "passed" if not found else "skipped" if found[0].tag == "skipped" else "failed"
        counts[end] += 1
        test, taken_s = f"{case.get('classname')}::{case.get('name')}", float(case.get("time", 0))
        if end == "skipped":
            skips[f"skipped in {name}: {test.partition('[')[0]}: {found[0].get('message')}"] += 1
        if is_timed and taken_s > SLOW_S:
            tally.slow.append(f"{test} ({taken_s:.1f} s)")
    tally.counts += counts
    tally.lines += [f"{line} ({count} cases)" for line, count in skips.items()]
    if code != 0:
        tally.failures.append(name)
        print(f"--- {log}\n{last_lines(log, 120)}", flush=True)
    note(f"      {name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
