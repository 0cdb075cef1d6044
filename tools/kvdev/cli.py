"""The command line of `tools/dev.py`. It is read by a bare Python, so verbs import what they need themselves."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from kvdev.envs import DEFAULT_VLLM, workspace_environment
from kvdev.paths import PACKAGES, ROOT
from kvdev.steps import DevError
from kvdev.uvtool import find_or_install_uv

_ENTERED = "KVDEV_UV"
"""Names uv where this program already runs in the workspace's environment."""
FAMILIES: dict[str, str] = {
    name: family["about"]
    for name, family in tomllib.loads((ROOT / "tools/kvdev/models.toml").read_text()).items()
    if "about" in family
}
"""Families of tiny models that the demo and the tests make."""
_SCOPES = "a package name, check, tools, never-wrong, sim, real-io, security, chaos, host, newest, fleet, gpu"
_ABOUT_ROUTER = (
    "A demo tool, not for service: round robin, no load balancing, no access control. Routers for service that speak the same "
    "protocol: vllm-router, llm-d, Ray Serve LLM, Dynamo."
)


def main(arguments: list[str]) -> int:
    """Run one verb; return its exit code (0 good, 1 failed, 2 bad usage, 130 interrupted)."""
    options = make_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.verb == "demo" and options.list_families:
            print("\n".join(f"  {name:16}  {about}" for name, about in FAMILIES.items()))
            return 0
        uv = None if options.verb == "affected" else _enter_workspace(arguments)
        module, _, function = options.run.partition(":")
        return int(getattr(importlib.import_module(f"kvdev.{module}"), function)(uv, options))
    except DevError as error:
        print(f"dev.py {options.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dev.py {options.verb}: interrupted; what it had started is stopped", file=sys.stderr)
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _enter_workspace(arguments: list[str]) -> Path:
    """Return uv when already inside the workspace's environment; otherwise make it and start again there (does not return)."""
    if _ENTERED in os.environ:
        return Path(os.environ[_ENTERED])
    uv = find_or_install_uv()
    python = workspace_environment(uv)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, [str(python), str(ROOT / "tools" / "dev.py"), *arguments], {**os.environ, _ENTERED: str(uv)})


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; `options.run` is the module and function that run a verb, called with uv and the options."""
    parser = argparse.ArgumentParser(prog="dev.py", description="The verbs of this repository. Each has --help.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, about: str, run: str) -> Callable[..., argparse.Action]:
        added = verbs.add_parser(name, help=about, description=about)
        added.set_defaults(run=run)
        return added.add_argument

    about = "two real vLLM engines hand a prompt over, beside one engine that does it alone"
    add = verb("demo", about, "demo:run_demo")
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--keep", action="store_true", help="leave the engines and the router up and print curl lines")
    add("--vllm", default=DEFAULT_VLLM, help="vLLM version to run (default %(default)s)")
    add("--corrupt", action="store_true", help="control: flip one byte of one received page; texts must differ")
    add("--family", default="words", choices=FAMILIES, help="model family (default %(default)s)")
    add("--list-families", action="store_true", help="list the model families and end")

    about = "run the tests: the short run of every change, all with --full, or the scopes named"
    add = verb("test", about, "testing:run_tests")
    add("scope", nargs="*", help=_SCOPES)
    add("--vllm", default=DEFAULT_VLLM, help="vLLM version for the scopes host and fleet (default %(default)s)")
    add("-k", dest="select", default="", help="passed to pytest")
    tier: dict[str, Any] = {"action": "store_const", "dest": "tier", "default": "quick"}
    add("--full", const="all", help="the short run, then all the rest", **tier)
    add("--rest", const="rest", help="what --full runs after the short run", **tier)
    add("--long", action="store_true", help="weekly: everything, in the long variants (KVDEV_LONG=1)")
    add("--lowest", action="store_true", help="packages with the lowest versions that they allow")

    add = verb("check", "format, lint, types, import contracts, house rules, workflow files", "checks:run_checks")
    add("package", nargs="?", default="", choices=["", *PACKAGES], metavar="PACKAGE", help="only this one")
    add("--fix", action="store_true", help="let ruff rewrite what it can")

    add = verb("bench", "measure against a baseline, interleaved in the same run", "benching:run_bench")
    add("name", help="connector, hand-over or handshake")
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--against", metavar="PATH_OR_REV", help="compare with another checkout or commit, runs interleaved")
    add("--runs", type=int, default=7, help="with --against: runs of each side (default %(default)s)")
    add("--vllm", default="", help=f"hand-over: version to run (default {DEFAULT_VLLM})")
    add("--gates", action="store_true", help="connector: judge each of its bounds; two hours")

    add = verb("lock", "renew uv.lock and keep it index-neutral", "locking:run_lock")
    add("--check", action="store_true", help="prove that a re-resolution gives the same versions and hashes")
    add("--upgrade", action="store_true", help="take the newest versions that the requirements allow")

    add = verb("env", "make the environments and say what there is", "envs:run_env")
    add("--host", action="store_true", help="make the host environment (real vLLM) too")
    add("--vllm", default=DEFAULT_VLLM, help="vLLM version of the host environment (default %(default)s)")

    add = verb("router", _ABOUT_ROUTER, "router:run_router")
    _add_router_options(add)

    add = verb("release", "build one package as it is released, and judge the files", "release:run_release")
    add("package", help="the package to release")
    add("--tagged", action="store_true", help="the tag must fit (the release workflow); else a rehearsal")

    add = verb("dist", "build wheels and source archives of all five packages", "release:run_dist")
    add("folder", nargs="?", type=Path, default=ROOT / "dist", help="where to put them (default: dist in the checkout)")

    verb("docs", "build the site in .dev/site; any warning is an error", "site:run_docs")

    add = verb("affected", "the packages that the commits since BASE affect, as JSON", "affected:run_affected")
    add("base", nargs="?", default="", help="a commit (default or unknown: all packages)")
    return parser


def _add_router_options(add: Callable[..., argparse.Action]) -> None:
    engine: dict[str, Any] = {"action": "append", "required": True, "metavar": "URL", "type": engine_url}
    add("--prefill", help="a prefill engine (repeatable)", **engine)
    add("--decode", help="a decode engine (repeatable)", **engine)
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default %(default)s)")
    both = "send each request to both engines at once; the side channel of each prefill engine, in their order (repeatable)"
    add("--concurrent", action="append", default=[], metavar="HOST:PORT", type=side_channel, help=both)
    add("--secret-file", type=Path, metavar="FILE", help="a file with a fleet secret, which covers these addresses")


def engine_url(text: str) -> str:
    """Return the base URL of an engine without a trailing slash; raises `ValueError`."""
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
        raise ValueError(text)
    return text.rstrip("/")


def side_channel(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPv6]:PORT``; raises `ValueError`."""
    parts = urlsplit(f"tcp://{text}")
    if not parts.hostname or not parts.port:
        raise ValueError(text)
    return parts.hostname, parts.port
