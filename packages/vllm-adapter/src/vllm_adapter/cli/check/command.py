"""`vllm-adapter check`: whether two live engines can hand over, and why not, before a request tries it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from vllm_adapter.cli.check.findings import Findings
from vllm_adapter.cli.values import Json, Timeout, json_text, within

__all__ = ["check"]

_NO_GO = 1
_MOST_TP = 1024
_SPEED = within(1e-3, 1e6, "GB/s")
Config = Annotated[
    str | None, typer.Option(metavar="CONFIG", help="That engine's --kv-transfer-config, as text or file.")
]
"""Lease, keys and seals of an engine of another machine."""


def check(  # noqa: PLR0913 - one for each option
    prefill: Annotated[str, typer.Argument(metavar="PREFILL", help="The engine that computes prompts.")],
    decode: Annotated[str, typer.Argument(metavar="DECODE", help="The engine that reads them.")],
    *,
    prefill_config: Config = None,
    decode_config: Config = None,
    policy: Annotated[
        Literal["exact", "negotiated", "off"] | None,
        typer.Option(help="How decode compares peers; default: as its configuration or its process says, else exact."),
    ] = None,
    dialect: Annotated[int | None, typer.Option(metavar="N", help="Connector version of the engines' vLLM.")] = None,
    vllm: Annotated[
        str | None, typer.Option(metavar="RELEASE", help="The engines' vLLM; default: the one installed here.")
    ] = None,
    prefill_tp: Annotated[
        int, typer.Option(metavar="N", min=0, max=_MOST_TP, help="Ranks of a prefill engine of vLLM's own connector.")
    ] = 0,
    trust_prefill_tp: Annotated[
        bool, typer.Option("--trust-prefill-tp", help="Ask for all those ranks, even if nothing proves them.")
    ] = False,
    gbps: Annotated[float | None, typer.Option(metavar="GB/S", help="Speed of the network.", callback=_SPEED)] = None,
    timeout: Timeout = 5.0,
    read: Annotated[bool, typer.Option(help="Read probe pages, never the cache: transport, speed, checksum.")] = True,
    allow_tcp: Annotated[bool, typer.Option("--allow-tcp", help="Reads over TCP are a note, not a no-go.")] = False,
    as_json: Json = False,
) -> None:
    """Tell whether two live engines can hand over, and why not.

    An engine is named by its side channel, HOST:PORT ([ADDRESS]:PORT for IPv6). One that runs on this machine
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
    """  # noqa: D301 - a backslash keeps the lines of the help
    # The four libraries, with NumPy and ZMQ, load for this command alone.
    from vllm_adapter.cli.check.pair import check_pair, dialect_of

    if dialect is not None and vllm is not None:
        raise typer.BadParameter("--dialect and --vllm exclude each other")
    findings = Findings()
    if allow_tcp:
        findings.allow("tcp-fallback", "tcp-only")
    check_pair(
        (prefill, decode),
        (prefill_config, decode_config),
        findings,
        policy=policy,
        dialect=dialect_of(dialect, vllm),
        prefill_tp=prefill_tp,
        is_tp_trusted=trust_prefill_tp,
        gigabytes_per_s=gbps,
        timeout_s=timeout,
        reads=read,
    )
    typer.echo(
        json_text({"is_go": findings.is_go, "findings": findings.made}, indent=2) if as_json else findings.as_text()
    )
    if not findings.is_go:
        raise typer.Exit(_NO_GO)
