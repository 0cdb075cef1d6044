"""`vllm-adapter check`: whether two engines can hand over, and why not, before a request tries it, or before they start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vllm_adapter.cli.check.findings import Findings
from vllm_adapter.cli.engines import ask_all
from vllm_adapter.cli.values import Json, Timeout, json_text, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.observe.answers import Answer

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
    """Tell whether two engines can hand over, and why not.

    An engine is named by its side channel, HOST:PORT ([ADDRESS]:PORT for IPv6). One that runs on this machine
    may be given by name, as `vllm-adapter status` shows it. It is asked as a peer would ask it; its cache is not read.
    Engines that do not run yet are given by JSON of `vllm serve` options; "model" is a folder with config.json.

    \b
    examples:
      vllm-adapter check 10.0.0.1:5600 10.0.1.1:5600
      vllm-adapter check '{"model": "llama", "tensor-parallel-size": 2}' '{"model": "llama"}'
      vllm-adapter check 10.0.0.1:5600 10.0.1.1:5600 --prefill-config prefill.json --decode-config decode.json

    \b
    exit codes:
      0  go
      1  no go: at least one reason, each named
      2  wrong usage, or a configuration that is wrong
    """  # noqa: D301 - a backslash keeps the lines of the help
    # The four libraries, with NumPy and ZMQ, load for this command alone.
    from vllm_adapter.cli.check import pair, planned
    from vllm_adapter.cli.check.engine import Channel, ask_engine, ask_further_ranks

    findings = Findings()
    if allow_tcp:
        findings.allow("tcp-fallback", "tcp-only")
    version = pair.dialect_of(vllm)
    answers: Sequence[Answer] = ()
    if planned.is_planned(prefill) or planned.is_planned(decode):
        source, reader, configs = planned.plan_pair(prefill, decode, vllm, findings)
        read = False
        prefill_terms, decode_terms = (
            pair.terms_of_config(given or each)[0]
            for given, each in zip((prefill_config, decode_config), configs, strict=True)
        )
    else:
        answers = [answer for answer in ask_all() if answer.get("part") == "scheduler"]
        prefill_at, decode_at = pair.address_of(prefill, answers), pair.address_of(decode, answers)
        prefill_terms, prefill_keys = pair.terms_of_config(prefill_config)
        decode_terms, decode_keys = pair.terms_of_config(decode_config)
        # The decode engine connects with keys of its own. To ask it, the prefill engine's do, or its own again.
        to_prefill = Channel("prefill", *prefill_at, version, timeout, decode_keys or prefill_keys)
        to_decode = Channel("decode", *decode_at, version, timeout, prefill_keys or decode_keys)
        source, reader = ask_engine(to_prefill, findings, tp=prefill_tp), ask_engine(to_decode, findings)
        if source is not None:
            source = ask_further_ranks(source, reader, findings, is_trusted=trust_prefill_tp)
    prefill_terms = prefill_terms or pair.terms_of_process(source, answers)
    decode_terms = decode_terms or pair.terms_of_process(reader, answers)
    if source is not None and reader is not None:
        terms = decode_terms or {}
        rule = policy or terms.get("compatibility_policy") or "exact"
        pair.check_factors(source, reader, rule, decode_terms, findings)
        if read:
            ucx_tls = terms.get("ucx_tls") or ""
            measured = pair.check_reads(source, reader, findings, ucx_tls=ucx_tls, timeout_s=timeout)
            gbps = gbps or measured
        pair.check_plan(source, reader, gbps, findings)
        pair.check_rest(source, reader, findings)
    pair.check_terms(prefill_terms, decode_terms, findings)
    typer.echo(
        json_text({"is_go": findings.is_go, "findings": findings.made}, indent=2) if as_json else findings.as_text()
    )
    if not findings.is_go:
        raise typer.Exit(_NO_GO)
