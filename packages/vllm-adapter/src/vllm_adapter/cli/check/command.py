"""`vllm-adapter check`: whether two live engines can hand over, and why not, before a request tries it."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_adapter.cli.check.findings import Findings
from vllm_adapter.cli.values import coded_errors, json_text, seconds, within
from vllm_adapter.observe.cause_log import plain_text

__all__ = ["add_check"]

_NO_GO = 1
_MOST_TP = 1024
_SPEEDS = (1e-3, 1e6)
"""GB/s of a network, at least and at most."""
_STYLES = {"ok": "green", "note": "yellow", "no-go": "bold red"}
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
) -> None:
    """Tell whether two live engines can hand over, and why not."""
    # The four libraries, with NumPy and ZMQ, load for this command alone.
    from vllm_adapter.cli.check.pair import Choices, check_pair, dialect_of

    if dialect is not None and vllm is not None:
        raise typer.BadParameter("--dialect and --vllm exclude each other")
    findings = Findings()
    with coded_errors("check"):
        choices = Choices(
            prefill=prefill,
            decode=decode,
            prefill_config=prefill_config,
            decode_config=decode_config,
            prefill_tp=prefill_tp,
            is_tp_trusted=trust_prefill_tp,
            policy=policy,
            gigabytes_per_s=None if gbps is None else within("--gbps", gbps, *_SPEEDS, "GB/s"),
            dialect=dialect_of(dialect, vllm),
            timeout_s=seconds("--timeout", timeout),
            reads=read,
            allows_tcp=allow_tcp,
        )
        check_pair(choices, findings)
    if as_json:
        print(json_text({"is_go": findings.is_go, "findings": findings.as_values()}, indent=2))
    elif sys.stdout.isatty():
        _draw(findings)
    else:
        print(findings.as_text())
    if not findings.is_go:
        raise typer.Exit(_NO_GO)


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
