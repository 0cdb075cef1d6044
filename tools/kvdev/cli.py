"""The command line of `tools/dev.py`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.bootstrap import enter_workspace
from kvdev.envs import DEFAULT_VLLM, describe, host_environment
from kvdev.steps import DevError, fail

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run one verb; return its exit code (0 good, 1 failed, 2 bad usage, 130 interrupted)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        uv = enter_workspace(arguments)
        verb: Callable[[Path, argparse.Namespace], int] = options.run
        return verb(uv, options)
    except DevError as error:
        print(f"dev.py {options.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dev.py {options.verb}: interrupted; what it had started is stopped", file=sys.stderr)
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dev.py", description="The verbs of this repository. Each has --help.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    demo = verbs.add_parser(
        "demo", help="two real vLLM engines hand a prompt over, beside one engine that does it alone"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    demo.add_argument("--keep", action="store_true", help="leave the engines and the router up and print curl lines")
    demo.add_argument("--vllm", default=DEFAULT_VLLM, help="vLLM version to run (default %(default)s)")
    demo.add_argument(
        "--corrupt", action="store_true", help="control: flip one byte of one received page; texts must differ"
    )
    demo.add_argument("--family", default="dense", help="model family (default %(default)s)")
    demo.set_defaults(run=_demo)

    test = verbs.add_parser("test", help="run the tests: all that this machine can run, or the scopes named")
    test.add_argument("scope", nargs="*", help="a package name, check, tools, never-wrong, sim, real-io, host, gpu")
    test.add_argument("--vllm", default=DEFAULT_VLLM, help="vLLM version for the scope host (default %(default)s)")
    test.add_argument("-k", dest="select", default="", help="passed to pytest")
    test.add_argument("--long", action="store_true", help="long variants of tests that have one (KVDEV_LONG=1)")
    test.add_argument("--lowest", action="store_true", help="packages with the lowest versions that they allow")
    test.set_defaults(run=_test)

    check = verbs.add_parser("check", help="format, lint, types, import contracts, house rules, workflow files")
    check.add_argument("--fix", action="store_true", help="let ruff rewrite what it can")
    check.set_defaults(run=_check)

    bench = verbs.add_parser("bench", help="measure against a baseline, interleaved in the same run")
    bench.add_argument("name", help="handshake, topology, transfer or scheduler")
    bench.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    bench.add_argument(
        "--against", metavar="PATH_OR_REV", help="compare with another checkout or commit, runs interleaved"
    )
    bench.add_argument("--runs", type=int, default=7, help="with --against: runs of each side (default %(default)s)")
    bench.set_defaults(run=_bench)

    release = verbs.add_parser("release", help="fold the change fragments of one package, or build it as released")
    release.add_argument("package", help="the package to release")
    how = release.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="fold, build and check on a copy; change nothing here")
    how.add_argument("--tagged", action="store_true", help="build and check what a tag holds (the release workflow)")
    release.set_defaults(run=_release)

    metrics = verbs.add_parser("metrics", help="structure of the packages in numbers")
    metrics.add_argument("checkout", nargs="?", type=Path, help="another checkout (default: this one)")
    metrics.add_argument("--json", action="store_true", help="print one JSON array instead of the table")
    metrics.set_defaults(run=_metrics)

    lock = verbs.add_parser("lock", help="renew uv.lock and keep it index-neutral")
    lock.add_argument(
        "--check", action="store_true", help="prove that a re-resolution gives the same versions and hashes"
    )
    lock.add_argument("--upgrade", action="store_true", help="take the newest versions that the requirements allow")
    lock.set_defaults(run=_lock)

    env = verbs.add_parser("env", help="make the environments and say what there is")
    env.add_argument("--host", action="store_true", help="make the host environment (real vLLM) too")
    env.add_argument("--vllm", default=DEFAULT_VLLM, help="vLLM version of the host environment (default %(default)s)")
    env.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    env.set_defaults(run=_env)

    router = verbs.add_parser("router", help="run the router alone, in front of engines that are already up")
    router.add_argument(
        "--prefill", action="append", required=True, metavar="URL", help="a prefill engine (repeatable)"
    )
    router.add_argument("--decode", action="append", required=True, metavar="URL", help="a decode engine (repeatable)")
    router.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    router.add_argument("--port", type=int, default=8000, help="port to listen on (default %(default)s)")
    router.set_defaults(run=_router)
    return parser


def _demo(uv: Path, options: argparse.Namespace) -> int:
    from kvdev.demo import run_demo

    return run_demo(uv, options)


def _test(uv: Path, options: argparse.Namespace) -> int:
    from kvdev.testing import RunOptions, run_tests

    chosen = RunOptions(options.vllm, options.select, is_long=options.long, is_lowest=options.lowest)
    return run_tests(uv, options.scope, chosen)


def _check(_uv: Path, options: argparse.Namespace) -> int:
    from kvdev.checks import run_checks

    return run_checks(fix=options.fix)


def _bench(_uv: Path, options: argparse.Namespace) -> int:
    if options.against:
        from kvdev.comparing import run_comparison

        return run_comparison(options.name, options.against, runs=options.runs, as_json=options.json)
    from kvdev.benching import run_bench

    return run_bench(options.name, as_json=options.json)


def _lock(uv: Path, options: argparse.Namespace) -> int:
    from kvdev.locking import check_lock, renew_lock

    if options.check and options.upgrade:
        fail("--check and --upgrade contradict each other")
    return check_lock(uv) if options.check else renew_lock(uv, upgrade=options.upgrade)


def _release(uv: Path, options: argparse.Namespace) -> int:
    from kvdev.release import release

    return release(uv, options.package, dry_run=options.dry_run, tagged=options.tagged)


def _metrics(_uv: Path, options: argparse.Namespace) -> int:
    from kvdev.metrics import run_metrics

    return run_metrics(options.checkout, as_json=options.json)


def _env(uv: Path, options: argparse.Namespace) -> int:
    if options.host:
        host_environment(uv, options.vllm)
    facts = describe()
    if options.json:
        print(json.dumps(facts))
    else:
        for key, value in facts.items():
            print(f"{key}: {value}")
    return 0


def _router(_uv: Path, options: argparse.Namespace) -> int:
    from kvdev.router import serve_forever

    return serve_forever(options.prefill, options.decode, host=options.host, port=options.port)
