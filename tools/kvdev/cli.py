"""The command line of `tools/dev.py`."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

from kvdev.affected import run_affected
from kvdev.arguments import make_parser
from kvdev.bootstrap import enter_workspace
from kvdev.envs import describe, host_environment
from kvdev.families import families_text
from kvdev.steps import DevError, fail

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run one verb; return its exit code (0 good, 1 failed, 2 bad usage, 130 interrupted)."""
    options = make_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.verb == "affected":  # asked before anything is tested: it needs no environment
            return run_affected(options.base)
        if options.verb == "demo" and not options.family:
            print(families_text())
            return 0
        uv = enter_workspace(arguments)
        return _VERBS[options.verb](uv, options)
    except DevError as error:
        print(f"dev.py {options.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dev.py {options.verb}: interrupted; what it had started is stopped", file=sys.stderr)
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _demo(uv: Path, options: Namespace) -> int:
    from kvdev.demo import run_demo

    return run_demo(uv, options)


def _test(uv: Path, options: Namespace) -> int:
    from kvdev.testing import RunOptions, run_tests

    chosen = RunOptions(
        options.vllm,
        options.select,
        is_long=options.long,
        is_lowest=options.lowest,
        tier=options.tier,
    )
    return run_tests(uv, options.scope, chosen)


def _check(uv: Path, options: Namespace) -> int:
    from kvdev.checks import run_checks

    return run_checks(uv, fix=options.fix)


def _bench(_uv: Path, options: Namespace) -> int:
    if options.against:
        from kvdev.comparing import run_comparison

        return run_comparison(options.name, options.against, runs=options.runs, as_json=options.json)
    from kvdev.benching import run_bench

    return run_bench(options.name, as_json=options.json, size=options.size)


def _lock(uv: Path, options: Namespace) -> int:
    from kvdev.locking import check_lock, renew_lock

    if options.check and options.upgrade:
        fail("--check and --upgrade contradict each other")
    return check_lock(uv) if options.check else renew_lock(uv, upgrade=options.upgrade)


def _release(uv: Path, options: Namespace) -> int:
    from kvdev.release import release

    return release(uv, options.package, tagged=options.tagged)


def _dist(uv: Path, options: Namespace) -> int:
    from kvdev.dist import run_dist

    return run_dist(uv, options.folder)


def _env(uv: Path, options: Namespace) -> int:
    if options.host:
        host_environment(uv, options.vllm)
    facts = describe()
    if options.json:
        print(json.dumps(facts))
    else:
        for key, value in facts.items():
            print(f"{key}: {value}")
    return 0


def _docs(uv: Path, _options: Namespace) -> int:
    from kvdev.site.building import run_docs

    return run_docs(uv)


def _router(_uv: Path, options: Namespace) -> int:
    from kvdev.early import early_tickets
    from kvdev.router import serve_forever

    early = early_tickets(options.prefill, options.concurrent, options.secret_file)
    return serve_forever(options.prefill, options.decode, host=options.host, port=options.port, early=early)


_VERBS: dict[str, Callable[[Path, Namespace], int]] = {
    "demo": _demo,
    "test": _test,
    "check": _check,
    "bench": _bench,
    "lock": _lock,
    "env": _env,
    "router": _router,
    "release": _release,
    "dist": _dist,
    "docs": _docs,
}
