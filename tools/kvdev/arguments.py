"""The arguments of each verb of `tools/dev.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.backends import ABOUT
from kvdev.early import add_early_options
from kvdev.envs import DEFAULT_VLLM
from kvdev.paths import ROOT

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - argparse has no public name for it

__all__ = ["make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; the verb it finds is `options.verb`."""
    parser = argparse.ArgumentParser(prog="dev.py", description="The verbs of this repository. Each has --help.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (
        _demo,
        _test,
        _check,
        _bench,
        _lock,
        _env,
        _router,
        _release,
        _dist,
        _docs,
        _affected,
    ):
        add(verbs)
    return parser


def _demo(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "demo", help="two real vLLM engines hand a prompt over, beside one engine that does it alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--keep", action="store_true", help="leave the engines and the router up and print curl lines")
    parser.add_argument("--vllm", default=DEFAULT_VLLM, help="vLLM version to run (default %(default)s)")
    parser.add_argument(
        "--corrupt", action="store_true", help="control: flip one byte of one received page; texts must differ"
    )
    parser.add_argument(
        "--family",
        nargs="?",
        default="words",
        const="",
        help="model family (default %(default)s); without a name: list them",
    )
    parser.add_argument("--list-families", action="store_const", const="", dest="family", help="list them and end")


def _test(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "test", help="run the tests: the short run of every change, all with --full, or the scopes named"
    )
    parser.add_argument(
        "scope",
        nargs="*",
        help="a package name, check, tools, never-wrong, sim, real-io, security, chaos, host, fleet, gpu",
    )
    parser.add_argument(
        "--vllm", default=DEFAULT_VLLM, help="vLLM version for the scopes host and fleet (default %(default)s)"
    )
    parser.add_argument("-k", dest="select", default="", help="passed to pytest")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--full", action="store_const", dest="tier", const="all", help="the short run, then all the rest")
    tier.add_argument(
        "--rest", action="store_const", dest="tier", const="rest", help="what --full runs after the short run"
    )
    parser.set_defaults(tier="quick")
    parser.add_argument("--long", action="store_true", help="weekly: everything, in the long variants (KVDEV_LONG=1)")
    parser.add_argument("--lowest", action="store_true", help="packages with the lowest versions that they allow")


def _check(verbs: Verbs) -> None:
    parser = verbs.add_parser("check", help="format, lint, types, import contracts, house rules, workflow files")
    parser.add_argument("--fix", action="store_true", help="let ruff rewrite what it can")


def _bench(verbs: Verbs) -> None:
    parser = verbs.add_parser("bench", help="measure against a baseline, interleaved in the same run")
    parser.add_argument("name", help="connector, handshake, scheduler, seals, topology or transfer")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--against", metavar="PATH_OR_REV", help="compare with another checkout or commit, runs interleaved"
    )
    parser.add_argument("--runs", type=int, default=7, help="with --against: runs of each side (default %(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        default="quick",
        help="connector: minutes (default)",
    )
    size.add_argument(
        "--gates",
        dest="size",
        action="store_const",
        const="gates",
        help="connector: what its bounds are about, each of them judged; most of an hour",
    )


def _release(verbs: Verbs) -> None:
    parser = verbs.add_parser("release", help="build one package as it is released, and judge the files")
    parser.add_argument("package", help="the package to release")
    parser.add_argument(
        "--tagged", action="store_true", help="the tag must fit (the release workflow); else a rehearsal"
    )


def _dist(verbs: Verbs) -> None:
    parser = verbs.add_parser("dist", help="build wheels and source archives of all five packages")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT / "dist", help="where to put them (default: dist in the checkout)"
    )


def _docs(verbs: Verbs) -> None:
    verbs.add_parser("docs", help="build the site in .dev/site; any warning is an error")


def _affected(verbs: Verbs) -> None:
    parser = verbs.add_parser("affected", help="the packages that the commits since BASE affect, as JSON")
    parser.add_argument("base", nargs="?", default="", help="a commit (default or unknown: all packages)")


def _lock(verbs: Verbs) -> None:
    parser = verbs.add_parser("lock", help="renew uv.lock and keep it index-neutral")
    parser.add_argument(
        "--check", action="store_true", help="prove that a re-resolution gives the same versions and hashes"
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the requirements allow")


def _env(verbs: Verbs) -> None:
    parser = verbs.add_parser("env", help="make the environments and say what there is")
    parser.add_argument("--host", action="store_true", help="make the host environment (real vLLM) too")
    parser.add_argument(
        "--vllm", default=DEFAULT_VLLM, help="vLLM version of the host environment (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _router(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "router", help="run the demo router alone, in front of engines that are already up", description=ABOUT
    )
    parser.add_argument(
        "--prefill", action="append", required=True, metavar="URL", help="a prefill engine (repeatable)"
    )
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="a decode engine (repeatable)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default %(default)s)")
    add_early_options(parser)
