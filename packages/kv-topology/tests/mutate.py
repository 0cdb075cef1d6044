"""Mutation check of the planner: change one operator, comparison or number, and some test must fail.

    python tests/mutate.py [--results FILE] [--keep-found] [--every N] [MODULE ...]

How it works. The package is copied, so that nobody's edits disturb the run and the run alters nothing. One pytest process
collects all tests and runs them once under coverage, which tells for every line the tests that reach it. Then each mutant
gets a forked process, in which only the code of the changed function is exchanged, and the tests that reach its line run
until one fails: a few seconds' worth for every mutant first, the rest for those that are left. A test that never reaches
the line cannot tell the mutant from the original, so a mutant that survives has survived the whole suite.

Results are kept, so a run that was stopped goes on where it was, unless source or tests have changed since. Changes that
make no difference are listed with the reason in `equivalent_mutants.toml`; they are tried too, and one that is found after
all is an error, as is an entry that names no mutant. Exit codes: 0 at least 90 percent found in all; 1 less, or a wrong
entry; 2 the tests fail without any change.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from mutants import CORE, PACKAGE, Mutant, install, mutants, read_equivalents  # noqa: E402

LIMIT_BYTES = 8 << 30
MIN_SCORE = 0.9


def copy_package(into: Path) -> tuple[Path, str]:
    """Copy what the tests need; return the copy and a digest of it."""
    copied = into / "packages" / PACKAGE.name
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    page = PACKAGE.parents[1] / "docs" / "layout-algebra.md"
    if page.exists():
        (into / "docs").mkdir()
        shutil.copy(page, into / "docs")
    digest = hashlib.sha256()
    for path in sorted(copied.rglob("*")):
        if path.is_file() and path.suffix != ".md" and path.name not in {"mutate.py", "equivalent_mutants.toml"}:
            digest.update(str(path.relative_to(copied)).encode() + path.read_bytes())
    return copied, digest.hexdigest()


class Results:
    """Outcomes by mutant in a file of JSON lines; those of other sources or tests are not taken over.

    With `keep_found`, mutants that were found count as found when their module is the same, whatever else has changed:
    for work on the survivors, where tests are only added.
    """

    def __init__(self, path: Path, digest: str, *, keep_found: bool) -> None:
        self.path, self.digest, self.keep_found = path, digest, keep_found
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.known: dict[str, str] = {}

    def recall(self, chosen: list[Mutant]) -> None:
        """Take over what is known of these mutants."""
        modules = {mutant.name: _digest(mutant.text) for mutant in chosen}
        for line in self.lines:
            is_same = line["module"] == modules.get(line["mutant"])
            if is_same and (line["digest"] == self.digest or (self.keep_found and line["found_by"])):
                self.known[line["mutant"]] = line["found_by"]

    def add(self, mutant: Mutant, found_by: str) -> None:
        self.known[mutant.name] = found_by
        line = {"digest": self.digest, "module": _digest(mutant.text), "mutant": mutant.name, "found_by": found_by}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Child:
    """Runs tests in a forked process and reports the first failure through a pipe."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session

    def run(self, job, cpu_limit_s: float = 0) -> bytes | None:
        """Return what a job wrote to the pipe in a process of its own, or None if it died or took too long."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            code = 1
            try:
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
                if cpu_limit_s:
                    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_limit_s) + 1, int(cpu_limit_s) + 2))
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(job())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        try:
            with os.fdopen(reading, "rb") as pipe:
                answer = pipe.read()
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        return answer if os.waitpid(child, 0)[1] == 0 else None

    def first_failure(self, items: list[pytest.Item]) -> str:
        """Run tests until one fails and return its name, or "" when all pass."""
        for number, item in enumerate(items):
            following = items[number + 1] if number + 1 < len(items) else None
            failures: list[str] = []
            watch = _Watch(failures)
            self.session.config.pluginmanager.register(watch)
            self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.session.config.pluginmanager.unregister(watch)
            if failures:
                return failures[0]
        return ""


class _Watch:
    """Collects the names of tests that fail."""

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(report.nodeid)


class Check:
    """The pytest plugin that runs the mutants instead of the tests."""

    def __init__(self, options: argparse.Namespace, package: Path, results: Results) -> None:
        self.options, self.results = options, results
        self.source = package / "src" / "kv_topology"
        self.exit_code = 2
        self.items: dict[str, pytest.Item] = {}
        self.seconds: dict[str, float] = {}
        self.reached: dict[str, dict[int, list[str]]] = {}
        self.breadth: Counter[str] = Counter()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.child = Child(session)
        self.items = {item.nodeid: item for item in session.items}
        baseline = self.child.run(self._baseline)
        if baseline is None:
            print("the tests fail without any change", flush=True)
            return True
        self.seconds, reached = json.loads(baseline)
        self.reached = {module: {int(k): v for k, v in lines.items()} for module, lines in reached.items()}
        self.breadth = Counter(name for lines in self.reached.values() for names in lines.values() for name in names)
        print(f"{len(self.items)} tests pass unchanged in {sum(self.seconds.values()):.0f} s of CPU", flush=True)
        chosen = [m for module in self.options.modules for m in mutants(module, self._text(module))]
        chosen = chosen[:: self.options.every]
        self.results.recall(chosen)
        self._try_all(chosen)
        self.exit_code = _report(chosen, self.results.known, CORE if self.options.every == 1 else ())
        return True

    def _text(self, module: str) -> str:
        return (self.source / f"{module}.py").read_text()

    def _baseline(self) -> bytes:
        """Run all tests unchanged; return CPU seconds by test, and tests by module and line, as JSON."""
        import coverage

        paths = {module: str(self.source / f"{module}.py") for module in self.options.modules}
        tracer = coverage.Coverage(data_file=None, include=list(paths.values()), config_file=False)
        tracer.start()
        seconds = {}
        for name, item in self.items.items():
            _forget()
            tracer.switch_context(name)
            start = time.process_time()
            if self.child.first_failure([item]):
                raise SystemExit(1)
            seconds[name] = time.process_time() - start
        tracer.stop()
        data = tracer.get_data()
        reached = {module: data.contexts_by_lineno(path) for module, path in paths.items()}
        return json.dumps([seconds, reached]).encode()

    def tests_for(self, mutant: Mutant) -> list[pytest.Item]:
        """Return the tests that reach a mutant: quick ones that do little else first, and every test function early.

        Lines that run on import (defaults, constants) have none of their own, so all must do.
        """
        lines = self.reached[mutant.module]
        names = {name for line in mutant.lines for name in lines.get(line, ())} - {""}
        names = names or set(self.items)
        turns: Counter[str] = Counter()
        order = []
        for name in sorted(names, key=lambda name: self.seconds[name]):
            function = name.split("[")[0]
            order.append((turns[function] + self.seconds[name] * self.breadth[name] / 5, name))
            turns[function] += 1
        return [self.items[name] for _, name in sorted(order)]

    def _split(self, tests: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Return the tests of the first pass, and the others."""
        sums = itertools.accumulate(self.seconds[item.nodeid] for item in tests)
        count = max(1, sum(total <= self.options.first_pass_s for total in sums))
        return tests[:count], tests[count:]

    def _job(self, mutant: Mutant, tests: list[pytest.Item]) -> bytes:
        if install(mutant) == 0:
            raise RuntimeError(f"nothing changed: {mutant.name}")
        return self.child.first_failure(tests).encode()

    def _found_by(self, mutant: Mutant, tests: list[pytest.Item]) -> str:
        """Return the test that fails on a mutant, or "" when all pass."""
        limit_s = 10 + 4 * sum(self.seconds[item.nodeid] for item in tests)
        answer = self.child.run(functools.partial(self._job, mutant, tests), limit_s)
        return "crash or time limit" if answer is None else answer.decode()

    def _try_all(self, chosen: list[Mutant]) -> None:
        todo = [mutant for mutant in chosen if mutant.name not in self.results.known]
        if len(todo) < len(chosen):
            print(f"{len(chosen) - len(todo)} of {len(chosen)} are known from an earlier run", flush=True)
        left: list[Mutant] = []
        progress = _Progress("first pass", len(todo))
        for mutant in todo:
            first, rest = self._split(self.tests_for(mutant))
            found_by = self._found_by(mutant, first)
            if found_by or not rest:
                self._settle(mutant, found_by)
            else:
                left.append(mutant)
                print(f"left: {mutant.name}  (line {mutant.lines.start})", flush=True)
            progress.step(f"{len(left)} left")
        progress = _Progress("all tests", len(left))
        for mutant in left:
            self._settle(mutant, self._found_by(mutant, self._split(self.tests_for(mutant))[1]))
            progress.step()

    def _settle(self, mutant: Mutant, found_by: str) -> None:
        self.results.add(mutant, found_by)
        if not found_by:
            print(f"survived: {mutant.name}  (line {mutant.lines.start})", flush=True)


class _Progress:
    """Prints a line every twenty seconds."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.start = self.said = time.monotonic()

    def step(self, more: str = "") -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.said > 20 or self.done == self.total:
            self.said = now
            left_s = (now - self.start) / self.done * (self.total - self.done)
            print(
                f"{self.what} {self.done}/{self.total} {more} {now - self.start:.0f} s, {left_s:.0f} s to go",
                flush=True,
            )


def _forget() -> None:
    """Empty all caches of the package, so that every test reaches what it needs."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("kv_topology"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _report(chosen: list[Mutant], known: dict[str, str], all_of: tuple[str, ...]) -> int:
    """Print the score per module and what is wrong with the list of equivalent mutants; return the exit code."""
    listed = read_equivalents()
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in chosen:
        by_module[mutant.module].append(mutant)
    print(f"\n{'module':<12} {'mutants':>8} {'found':>6} {'equivalent':>11} {'survived':>9} {'score':>7}")
    total: Counter[str] = Counter()
    for module, group in [*by_module.items(), ("all", [])]:
        count = Counter("found" if known[m.name] else "equivalent" if m.name in listed else "survived" for m in group)
        total += count
        count = total if module == "all" else count
        judged = count["found"] + count["survived"]
        score = 100 * count["found"] / max(1, judged)
        print(
            f"{module:<12} {sum(count.values()):>8} {count['found']:>6} {count['equivalent']:>11} "
            f"{count['survived']:>9} {score:>6.1f}%"
        )
    killed = [name for name in known if known[name] == "crash or time limit"]
    print(f"{len(killed)} of those found crashed or ran into the limit of time or memory")
    names = {mutant.name for mutant in chosen}
    wrong = [f"listed as equivalent, but found by {known[n]}: {n}" for n in sorted(listed.keys() & names) if known[n]]
    if set(all_of) == set(by_module):
        wrong += [f"listed as equivalent, but there is no such change: {n}" for n in sorted(listed.keys() - names)]
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong) or total["found"] < MIN_SCORE * (total["found"] + total["survived"]))


def main() -> int:
    """Run the mutants of the chosen modules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=CORE, metavar="MODULE", help=f"of {', '.join(CORE)}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every N-th mutant only")
    parser.add_argument("--keep-found", action="store_true", help="do not try again what earlier tests have found")
    parser.add_argument(
        "--first-pass-s", type=float, default=3, metavar="S", help="tests of the first pass, CPU seconds"
    )
    parser.add_argument(
        "--results", type=Path, default=Path(tempfile.gettempdir()) / "kv-topology-mutants.jsonl", metavar="FILE"
    )
    options = parser.parse_args()
    # Time is no failure here: machines that run this for long are loaded.
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    with tempfile.TemporaryDirectory() as folder:
        package, digest = copy_package(Path(folder))
        sys.path.insert(0, str(package / "src"))
        check = Check(options, package, Results(options.results, digest, keep_found=options.keep_found))
        arguments = [
            "--rootdir",
            str(package),
            "-c",
            os.devnull,
            "-W",
            "error",
            "--import-mode=importlib",
            "--assert=plain",
        ]
        # The tests of this check compare modules with their source, so every mutant would fail them.
        arguments += [
            "--ignore",
            str(package / "tests" / "test_mutants.py"),
            "-p",
            "no:cacheprovider",
            "-p",
            "no:terminal",
            "-s",
            "--hypothesis-profile",
            "mutants",
        ]
        collected = pytest.main([*arguments, str(package / "tests")], plugins=[check])
        return check.exit_code if collected == 0 else 2


if __name__ == "__main__":
    sys.exit(main())
