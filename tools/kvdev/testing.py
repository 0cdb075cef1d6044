"""`dev.py test`: every scope in the environment it is meant for, counted, with what did not run and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.envs import DEFAULT_VLLM, host_environment, package_environment
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.steps import DevError, fail, note, run_step

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SCOPES", "run_tests"]

SCOPES = ("check", "tools", *PACKAGES, "sim", "real-io", "host", "gpu")
_NO_TESTS_COLLECTED = 5


@dataclass(slots=True)
class _Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_run: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def run_tests(uv: Path, scopes: Sequence[str], *, vllm: str = DEFAULT_VLLM, select: str = "") -> int:
    """Run the scopes (none: all that this machine can run); return 0 when nothing failed."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown:
        fail(f"no scope named {', '.join(unknown)}; the scopes are {', '.join(SCOPES)}")
    started = time.monotonic()
    tally = _Tally()
    for scope in scopes or SCOPES:
        try:
            _run_scope(uv, scope, tally, vllm=vllm, select=select, is_asked_for=bool(scopes))
        except DevError as error:
            tally.failed += 1
            tally.failures.append(scope)
            print(f"\n{scope}: {error}\n", flush=True)
    print(f"\nscopes failed: {', '.join(tally.failures) or 'none'} ({time.monotonic() - started:.0f} s in all)")
    for line in (*tally.reasons, *tally.not_run):
        print(line)
    print(f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped")
    return 1 if tally.failed else 0


def _run_scope(uv: Path, scope: str, tally: _Tally, *, vllm: str, select: str, is_asked_for: bool) -> None:
    note(f"scope {scope}")
    if scope == "check":
        from kvdev.checks import run_checks

        if run_checks(fix=False) != 0:
            tally.failed += 1
            tally.failures.append(scope)
        else:
            tally.passed += 1
    elif scope in PACKAGES:
        python = package_environment(uv, scope)
        _pytest(scope, python, [ROOT / "packages" / scope / "tests"], tally, select)
    elif scope == "tools":
        _pytest(scope, _here(), [ROOT / "tools" / "tests"], tally, select)
    elif scope in {"sim", "real-io"}:
        _pytest(scope, _here(), [ROOT / "integration_tests" / scope.replace("-", "_")], tally, select)
    elif scope == "host":
        _host(uv, tally, vllm, select)
    elif not _has_gpu():
        tally.not_run.append(
            "not run: gpu (this machine has no NVIDIA GPU; the GPU stage is not green, it did not happen)"
        )
        if is_asked_for:
            tally.failed += 1
            tally.failures.append(scope)
    else:
        _pytest(scope, _here(), [ROOT / "integration_tests" / "gpu"], tally, select)


def _host(uv: Path, tally: _Tally, vllm: str, select: str) -> None:
    folder = ROOT / "integration_tests" / "host"
    python = host_environment(uv, vllm)
    _pytest("host-inside", python, [folder / "inside"], tally, select)
    env = {**os.environ, "KVDEV_VLLM": vllm, "PYTHONPATH": str(ROOT / "tools")}
    _pytest(
        "host-engines", _here(), [folder / "engines"], tally, select, env=env, timeout_s=2400, more=["--timeout=900"]
    )


def _pytest(
    name: str,
    python: Path,
    paths: Sequence[Path],
    tally: _Tally,
    select: str,
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 1200,
    more: Sequence[str] = (),
) -> None:
    report = STATE / "reports" / f"{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    present = [path for path in paths if any(path.rglob("test_*.py"))]
    if not present:
        tally.not_run.append(f"not run: {name} (no tests in {', '.join(str(p.relative_to(ROOT)) for p in paths)})")
        return
    command = [
        python, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT,
        f"--junitxml={report}", "-o", "junit_family=xunit1", *more,
        *(["-k", select] if select else []), *present,
    ]  # fmt: skip
    code, log = run_step(f"test {name}", command, env=env, timeout_s=timeout_s, allowed=(0, 1, _NO_TESTS_COLLECTED))
    if code == _NO_TESTS_COLLECTED and select:
        tally.not_run.append(f"not run: {name} (no test matches -k {select!r})")
        return
    passed, failed, skipped, reasons = _count(report)
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
        print(_last_part(log), flush=True)
    note(f"      {name}: {passed} passed, {failed} failed, {skipped} skipped")


def _count(report: Path) -> tuple[int, int, int, Counter[tuple[str, str]]]:
    """Return how many cases passed, failed and were skipped, and how many of which test for which reason."""
    reasons: Counter[tuple[str, str]] = Counter()
    if not report.exists():
        return 0, 1, 0, reasons
    passed = failed = skipped = 0
    for case in ET.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped += 1
            test = f"{case.get('classname', '')}::{case.get('name', '').partition('[')[0]}"
            reasons[test, skip.get("message", "")] += 1
        else:
            passed += 1
    return passed, failed, skipped, reasons


def _last_part(log: Path, lines: int = 120) -> str:
    return f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _here() -> Path:
    return Path(sys.executable)


def _has_gpu() -> bool:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    return subprocess.run([command, "-L"], capture_output=True, check=False, timeout=60).returncode == 0
