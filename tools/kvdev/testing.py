"""`dev.py test`: the short run of every change, `--full` with the rest, or the scopes named; counted, with what did not run.

The short run leaves out the tests marked `full`, and runs several calls of pytest at a time in the workspace's environment.
`--full` runs the same first and then the rest: the tests marked `full`, those marked `sized` with more cases, each package
alone in its environment with its coverage, and all tests on real engines. `--rest` is that second half by itself: CI has run
the first by the README's command.
"""

from __future__ import annotations

import configparser
import math
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvdev.envs import (
    DEFAULT_VLLM,
    check_environment,
    fleet_environment,
    go_environment,
    host_environment,
    host_python,
    lowest_environment,
    package_environment,
)
from kvdev.gpu import cuda_host, gpu_environment, has_gpu, install_beside
from kvdev.paths import PACKAGES, ROOT, SLOW_TESTS, STATE
from kvdev.steps import DevError, fail, note, run_step
from kvdev.tallies import Tally, count_cases, last_part, slow_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    _Run = Callable[["Tally"], None]

__all__ = ["SCOPES", "RunOptions", "run_tests"]

Tier = Literal["quick", "rest", "all"]
BUDGET_S: dict[Tier, int] = {"quick": 720, "rest": 1980}
"""Seconds on two cores that the short run and the rest of the full run may take, installations included; said, never judged."""
SLOW_S = 5.0
SCOPES = ("check", "tools", *PACKAGES, "never-wrong", "sim", "real-io", "security", "chaos", "host", "fleet", "gpu")
_ALONE = ("never-wrong", "real-io", "security", "chaos", "fleet", "gpu")
_LONGEST_FIRST = (
    "host-inside",
    "never-wrong",
    "vllm-adapter",
    "kv-handshake",
    "tools",
    "kv-scheduler-state",
    "kv-nixl-agent",
)
GPU_PAGE = ROOT / "docs" / "gpu-evidence.md"
_GPU_PARTS = ("gpu", "gpu-device", "gpu-engines")
"""Parts of the GPU stage whose outcomes go into its page."""
_NO_TESTS_COLLECTED = 5


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Choices that hold for every scope of a run: vLLM's version, pytest's -k, long variants, lowest versions."""

    vllm: str = DEFAULT_VLLM
    select: str = ""
    is_long: bool = False
    is_lowest: bool = False
    is_recorded: bool = False
    """Whether the GPU stage writes its page in the documents."""
    tier: Tier = "quick"
    """Tests without the mark `full`, those with it, or both."""
    is_named: bool = False
    """Whether the caller named scopes; a named one that cannot run here is a failure."""

    @property
    def words(self) -> list[str]:
        """Arguments that every call of pytest gets."""
        return [*self._marks, *self.names]

    @property
    def names(self) -> list[str]:
        """The part of `words` that selects by name alone, for calls that belong to one tier as a whole."""
        return ["-k", self.select] if self.select else []

    @property
    def _marks(self) -> list[str]:
        marks: dict[Tier, list[str]] = {"quick": ["-m", "not full"], "rest": ["-m", "full or sized"], "all": []}
        return marks[self.tier]


def run_tests(uv: Path, scopes: Sequence[str], options: RunOptions | None = None) -> int:
    """Run the scopes (none: the tier of the options, all scopes); return 0 when nothing failed."""
    options = options or RunOptions()
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown:
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
        return _run_scopes(uv, scopes or (PACKAGES if options.is_lowest else SCOPES), options)
    tiers: tuple[Tier, ...] = ("quick", "rest") if options.tier == "all" else (options.tier,)
    codes = [_run_tier(uv, replace(options, tier=tier)) for tier in tiers]
    return max(codes)


def _run_scopes(uv: Path, scopes: Sequence[str], options: RunOptions) -> int:
    tally, started = Tally(), time.monotonic()
    for scope in scopes:
        begun = time.monotonic()
        try:
            _run_scope(uv, scope, tally, options)
        except DevError as error:
            _note_failure(tally, scope, error)
        tally.durations.append((scope, time.monotonic() - begun))
    return _report(tally, started)


def _run_tier(uv: Path, options: RunOptions) -> int:
    tally, started = Tally(), time.monotonic()
    is_quick = options.tier == "quick"
    for stage in _quick_stages(uv, options) if is_quick else _rest_stages(uv, options):
        # Tests of the short run are bound by no clock, and a third of their time they wait.
        _side_by_side(tally, stage, 3 if is_quick else 2)
    if is_quick:
        SLOW_TESTS.write_text("".join(f"{line}\n" for line in tally.slow))
        tally.not_run.append("left to `dev.py test --full`: tests marked `full`, the scopes fleet and gpu")
    code = _report(tally, started)
    print(f"budget: {time.monotonic() - started:.0f} of {BUDGET_S[options.tier]} s on two cores")
    return code


def _quick_stages(uv: Path, options: RunOptions) -> list[dict[str, _Run]]:
    """Return what runs one stage after the other; within a stage several at a time, the longest first."""
    words = options.words
    python = host_python(options.vllm)
    check_environment(uv)  # one environment is made at a time: the checks need not wait for the host's

    def here(name: str, folder: str, *more: str) -> _Run:
        # Suites that play as many cases as fit are one long test each.
        slow_s = math.inf if folder.endswith(("never_wrong", "fleet_sim")) else SLOW_S
        return lambda mine: _pytest(
            name, _here(), ROOT / folder, mine, *more, *words, env=_with_tools(uv), slow_s=slow_s
        )

    inside = {
        "host-inside": lambda mine: _pytest(
            "host-inside", python, ROOT / "integration_tests/host/inside", mine, *words
        ),
        "host-device": lambda mine: _pytest("host-device", python, ROOT / "integration_tests/gpu/device", mine, *words),
    }
    units = {name: here(name, f"packages/{name}/tests") for name in PACKAGES}
    folders = ("never_wrong", "real_io", "sim", "security", "fleet_sim", "chaos")
    systems = {name.replace("_", "-"): here(name.replace("_", "-"), f"integration_tests/{name}") for name in folders}
    every = {**inside, **systems, **units, "tools": here("tools", "tools/tests")}
    rest = {name: every[name] for name in (*_LONGEST_FIRST, *every)}
    engines: dict[str, _Run] = {"host-engines": lambda mine: _engines(uv, mine, options)}
    first: dict[str, _Run] = {
        "check": lambda mine: _check(uv, mine),
        "host environment": lambda _: _prepare_host(uv, options),
    }
    return [first, rest, engines]


def _prepare_host(uv: Path, options: RunOptions) -> None:
    host_environment(uv, options.vllm)


def _rest_stages(uv: Path, options: RunOptions) -> list[dict[str, _Run]]:
    """Return the same of the rest: what watches a clock or starts engines runs alone."""
    os.environ["KVDEV_FULL"] = "1"
    matrix = ROOT / "tools" / "tests" / "test_install_matrix.py"
    first: dict[str, _Run] = {
        "tools": lambda mine: _pytest(
            "tools", _here(), matrix.parent, mine, f"--ignore={matrix}", *options.words, env=_with_tools(uv)
        ),
        "installations": lambda mine: _pytest("installations", _here(), matrix, mine, *options.words),
        "fleet-sim": lambda mine: _in_folder("fleet_sim", mine, options),
        "host-inside": lambda mine: _inside(uv, mine, options),
        **{name: _of_package(uv, name, options) for name in PACKAGES},
    }
    engines: dict[str, _Run] = {"host-engines": lambda mine: _engines(uv, mine, options)}
    alone = [{scope: _of_scope(uv, scope, options)} for scope in _ALONE]
    return [first, {"sim": lambda mine: _in_folder("sim", mine, options)}, *alone, engines]


def _of_package(uv: Path, name: str, options: RunOptions) -> _Run:
    return lambda mine: _package(uv, name, mine, options)


def _of_scope(uv: Path, scope: str, options: RunOptions) -> _Run:
    return lambda mine: _run_scope(uv, scope, mine, options)


def _report(tally: Tally, started: float) -> int:
    print("\nseconds by scope: " + ", ".join(f"{scope} {seconds:.0f}" for scope, seconds in tally.durations))
    print(f"scopes failed: {', '.join(tally.failures) or 'none'} ({time.monotonic() - started:.0f} s in all)")
    for line in (*tally.reasons, *tally.not_run):
        print(line)
    print(f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped", flush=True)
    return 1 if tally.failed else 0


def _note_failure(tally: Tally, scope: str, error: DevError) -> None:
    tally.failed += 1
    tally.failures.append(scope)
    print(f"\n{scope}: {error}\n", flush=True)


def _run_scope(uv: Path, scope: str, tally: Tally, options: RunOptions) -> None:
    note(f"scope {scope}")
    if scope == "check":
        _check(uv, tally)
    elif scope in PACKAGES:
        _package(uv, scope, tally, options)
    elif scope == "never-wrong":
        _never_wrong(uv, tally, options)
    elif scope == "tools":
        _pytest("tools", _here(), ROOT / "tools" / "tests", tally, *options.words, env=_with_tools(uv))
    elif scope in {"sim", "real-io", "security"}:
        for name in {"sim": ("sim", "fleet_sim"), "real-io": ("real_io",), "security": ("security",)}[scope]:
            _in_folder(name, tally, options)
        if scope == "security":
            go_environment(uv)
            _pytest("wire-in-go", _here(), ROOT / "integration_tests" / "wire_in_go", tally, *options.names)
    elif scope in {"host", "fleet", "chaos"}:
        {"host": _host, "fleet": _fleet, "chaos": _chaos}[scope](uv, tally, options)
    else:
        _gpu(uv, tally, options)


def _in_folder(name: str, tally: Tally, options: RunOptions) -> None:
    """Run a folder of `integration_tests` in the workspace's environment."""
    # 10^6 random frames take a quarter of an hour each way.
    limit_s = 7200 if options.is_long else 1200
    folder = ROOT / "integration_tests" / name
    _pytest(name.replace("_", "-"), _here(), folder, tally, *options.words, timeout_s=limit_s)


def _gpu(uv: Path, tally: Tally, options: RunOptions) -> None:
    """Run the stage in a CUDA vLLM that is found on this machine: NIXL and the agent, the adapter's device code, engines."""
    python, reason = cuda_host() if has_gpu() else (None, "this machine has no NVIDIA GPU")
    if python is None:
        tally.not_run.append(f"not run: gpu ({reason}; the GPU stage is not green, it did not happen)")
        if options.is_named:
            tally.failed += 1
            tally.failures.append("gpu")
        return
    site, reports = install_beside(uv, python), STATE / "reports"
    figures = reports / "gpu-figures.jsonl"
    for old in (figures, *(reports / f"{name}.xml" for name in _GPU_PARTS)):
        old.unlink(missing_ok=True)
    variables = {**os.environ, **gpu_environment(python, site, figures)}
    inside = {**variables, "PYTHONPATH": str(site)}
    folder = ROOT / "integration_tests" / "gpu"
    _pytest("gpu", python, folder / "test_gpu.py", tally, *options.words, env=inside)
    _pytest("gpu-device", python, folder / "device", tally, "--timeout=300", *options.words, env=inside)
    engines = {**variables, "PYTHONPATH": str(ROOT / "tools")}
    _pytest(
        "gpu-engines",
        _here(),
        folder / "engines",
        tally,
        "--timeout=900",
        *options.words,
        env=engines,
        timeout_s=2400,
    )
    if options.is_recorded:
        _record_gpu(python, inside, figures)


def _record_gpu(python: Path, environment: Mapping[str, str], figures: Path) -> None:
    """Write the page from all parts, also where one failed or did not run."""
    reports = STATE / "reports"
    command: list[str | Path] = [python, ROOT / "integration_tests" / "gpu" / "record.py"]
    for name in _GPU_PARTS:
        command += ["--report", reports / f"{name}.xml"]
    command += ["--figures", figures, "--record", GPU_PAGE]
    run_step("record the GPU stage", command, env=environment, timeout_s=1200)


def _check(uv: Path, tally: Tally) -> None:
    from kvdev.checks import run_checks

    if run_checks(uv, fix=False) != 0:
        tally.failed += 1
        tally.failures.append("check")
    else:
        tally.passed += 1


def _side_by_side(tally: Tally, runs: Mapping[str, _Run], lanes: int) -> None:
    """Make named runs that share nothing, so many at a time in their order; add what they count."""

    def counted(name: str) -> Tally:
        mine, begun = Tally(), time.monotonic()
        try:
            runs[name](mine)
        except DevError as error:
            _note_failure(mine, name, error)
        mine.durations.append((name, time.monotonic() - begun))
        return mine

    with ThreadPoolExecutor(lanes) as pool:
        for mine in pool.map(counted, runs):
            tally.add(mine)


def _with_tools(uv: Path) -> dict[str, str]:
    return {**os.environ, "KVDEV_UV": str(uv), "PYTHONPATH": str(ROOT / "tools")}


def _package(uv: Path, name: str, tally: Tally, options: RunOptions) -> None:
    """Run all tests of a package in an environment that holds it alone, then hold its core to its coverage floor."""
    folder = ROOT / "packages" / name
    if options.is_lowest:
        python = lowest_environment(uv, name)
        _pytest(f"{name}-lowest", python, folder / "tests", tally, *options.names)
        return
    python = package_environment(uv, name)
    rules = folder / "core.coveragerc"
    if not rules.exists() or options.select:
        _pytest(name, python, folder / "tests", tally, *options.names)
        return
    # Explorations and the like would take several times as long under coverage, and add nothing to it.
    slow = _tests_without_coverage(rules)

    for file in slow:
        _pytest(f"{name} ({file.stem})", python, file, tally)
    data = STATE / "reports" / f"{name}.coverage"
    environment = {**os.environ, "COVERAGE_FILE": str(data)}
    runner = ["-m", "coverage", "run", f"--rcfile={rules}"]
    rest = [f"--ignore={file}" for file in slow]
    _pytest(name, python, folder / "tests", tally, *rest, env=environment, runner=runner)
    report: list[str | Path] = [python, "-m", "coverage", "report", f"--rcfile={rules}", "--skip-covered"]
    run_step(f"coverage of the core of {name}", report, env=environment, timeout_s=120)


def _tests_without_coverage(rules: Path) -> list[Path]:
    """Return the test files that the coverage configuration of a package names under `[kvdev] without_coverage`."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(rules)
    names = parser.get("kvdev", "without_coverage", fallback="").split()
    return [rules.parent / "tests" / name for name in names]


def _never_wrong(uv: Path, tally: Tally, options: RunOptions) -> None:
    """Run the named case of every defect that must not come back; in the rest of a full run the packages' part ran already."""
    go_environment(uv)
    check_environment(uv)  # a node, for tickets that JavaScript reads and writes
    if options.tier != "rest":
        for name in PACKAGES:
            tests = ROOT / "packages" / name / "tests"
            if any("mark.never_wrong" in file.read_text() for file in tests.rglob("*.py")):
                python = package_environment(uv, name)
                _pytest(f"never-wrong-{name}", python, tests, tally, *options.words, "-m", "never_wrong")
    folder = ROOT / "integration_tests" / "never_wrong"
    _pytest("never-wrong", _here(), folder, tally, "--durations=5", *options.words)


def _host(uv: Path, tally: Tally, options: RunOptions) -> None:
    _inside(uv, tally, options)
    _engines(uv, tally, options)


def _inside(uv: Path, tally: Tally, options: RunOptions) -> None:
    """Run the tests inside vLLM's own scheduler, and those of device memory."""
    python = host_environment(uv, options.vllm)
    _pytest("host-inside", python, ROOT / "integration_tests" / "host" / "inside", tally, *options.words)
    # The GPU stage's bodies, on this device: what runs on a GPU is known to work.
    _pytest("host-device", python, ROOT / "integration_tests" / "gpu" / "device", tally, *options.words)


def _engines(uv: Path, tally: Tally, options: RunOptions) -> None:
    """Run the tests on real engines; in the short run those of the main job alone."""
    host_environment(uv, options.vllm)
    env = {**_with_tools(uv), "KVDEV_VLLM": options.vllm}
    words = ["--timeout=900", *options.words]
    folder = ROOT / "integration_tests" / "host" / "engines"
    _pytest("host-engines", _here(), folder, tally, *words, env=env, timeout_s=2400, slow_s=math.inf)
    if options.is_long:
        families = ROOT / "integration_tests" / "gpu" / "engines"
        _pytest("host-families", _here(), families, tally, *words, env=env, timeout_s=2400)


def _fleet(uv: Path, tally: Tally, options: RunOptions) -> None:
    """Run our connector in other people's engines: a real vLLM in Ray Serve LLM and behind vllm-router."""
    python = fleet_environment(uv, options.vllm)
    env = {
        **os.environ,
        "KVDEV_VLLM": options.vllm,
        "KVDEV_FLEET_PYTHON": str(python),
        "PYTHONPATH": str(ROOT / "tools"),
    }
    # Output of tests that pass, too: the figures that docs/operate/ quotes, in .dev/logs/test-fleet.log.
    words = ["--timeout=900", "--durations=15", "-rfEP", *options.names]
    _pytest("fleet", _here(), ROOT / "integration_tests" / "fleet", tally, *words, env=env, timeout_s=2400)


def _chaos(uv: Path, tally: Tally, options: RunOptions) -> None:
    """Test the tools that do harm; in a long run do it to real engines and to bare agents, in an hour and a half."""
    folder = ROOT / "integration_tests" / "chaos"
    env = {**os.environ, "KVDEV_VLLM": options.vllm, "KVDEV_UV": str(uv), "PYTHONPATH": str(ROOT / "tools")}
    limit_s = 9000 if options.is_long else 1200
    words = ["--durations=5", "-rfEP"] if options.is_long else []
    agents = folder / "agents"
    _pytest("chaos", _here(), folder, tally, f"--ignore={agents}", *words, *options.words, env=env, timeout_s=limit_s)
    if agents.exists():
        _pytest("chaos-agents", _here(), agents, tally, *words, *options.words, env=env, timeout_s=limit_s)


def _pytest(
    name: str,
    python: Path,
    folder: Path,
    tally: Tally,
    *words: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 1200,
    runner: Sequence[str] = (),
    slow_s: float = SLOW_S,
) -> None:
    report = STATE / "reports" / f"{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    if not folder.is_file() and not any(folder.rglob("test_*.py")):
        tally.not_run.append(f"not run: {name} (no tests in {folder.relative_to(ROOT)})")
        return
    command: list[str | Path] = [
        python, *runner, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT,
        f"--junitxml={report}", "-o", "junit_family=xunit1", "-o", "junit_duration_report=call",
        *words, folder,
    ]  # fmt: skip
    code, log = run_step(f"test {name}", command, env=env, timeout_s=timeout_s, allowed=(0, 1, _NO_TESTS_COLLECTED))
    if code == _NO_TESTS_COLLECTED and words:
        if "-k" in words:
            tally.not_run.append(f"not run: {name} (no test matches {shlex.join(words)})")
        return
    passed, failed, skipped, reasons = count_cases(report)
    tally.slow += slow_cases(report, slow_s)
    tally.passed += passed
    tally.failed += failed
    tally.skipped += skipped
    tally.reasons += [
        f"skipped in {name}: {test}{f' ({count} cases)' if count > 1 else ''}: {why}"
        for (test, why), count in reasons.items()
    ]
    if code != 0:
        tally.failed += 0 if failed else 1
        tally.failures.append(name)
        print(last_part(log), flush=True)
    note(f"      {name}: {passed} passed, {failed} failed, {skipped} skipped")


def _here() -> Path:
    return Path(sys.executable)
