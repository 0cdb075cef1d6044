"""The command `kv-topology`: dry runs of transfers without an engine. The only module that imports typer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kv_topology import __version__
from kv_topology.errors import InvalidGeometry, TopologyError
from kv_topology.tools.engine import KV_LAYOUTS
from kv_topology.tools.report import explain_text, explain_values, report_text, report_values, survey
from kv_topology.tools.spec import load_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology.tools.report import Survey

__all__ = ["app", "main"]

_USAGE = 2
_NO_PLAN = 3

_LAYOUTS = "\b\nlayouts:\n" + "".join(
    f"  {name:<16} {layout.text}{f' (vLLM: {layout.alias})' if layout.alias else ''}\n"
    for name, layout in KV_LAYOUTS.items()
)
_EXIT_CODES = """\b
exit codes:
  0  done
  2  wrong usage, or an invalid specification
  3  no plan exists
"""
_PLAN_EXAMPLES = """\b
examples:
  kv-topology plan examples/gqa_tp4_from_tp2.toml
  kv-topology plan examples/gqa_tp4_from_tp2.toml --estimate

"""
_EXPLAIN_EXAMPLES = """\b
example:
  kv-topology explain examples/gqa_tp4_from_tp2.toml --rank 3

"""

Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="TOML or JSON file: model, consumer, producer, link.")]

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=f"{_LAYOUTS}\n{_EXIT_CODES}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; ends by `SystemExit` with its exit code."""
    app(args=arguments, prog_name="kv-topology")
    raise SystemExit(0)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kv-topology {__version__}")
        raise typer.Exit


@app.callback()
def _describe(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan a KV-cache transfer and explain it: which bytes of which peer rank land where."""


def _fail(message: str, code: int) -> NoReturn:
    print(f"kv-topology: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _survey(spec: Path, rank: int | None) -> Survey:
    """Return all plans of a specification."""
    try:
        run = load_spec(spec)
    except InvalidGeometry as error:
        _fail(f"invalid specification ({error.code}): {error}", _USAGE)
    if rank is not None and not 0 <= rank < run.consumer.tp:
        _fail(f"--rank {rank}: the consumer has ranks 0 to {run.consumer.tp - 1}", _USAGE)
    try:
        return survey(run)
    except InvalidGeometry as error:
        _fail(f"the specification makes no engine ({error.code}): {error}", _USAGE)
    except TopologyError as error:
        _fail(f"no plan ({error.code}): {error}", _NO_PLAN)


@app.command("plan", epilog=_PLAN_EXAMPLES + _EXIT_CODES)
def _plan(
    spec: Spec,
    *,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only what it costs, direct and staged.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only the consumer rank with this tp rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, without --estimate with all slices.")] = False,
) -> None:
    """Plan a transfer between two engines, without any."""
    values = report_values(_survey(spec, rank), only=rank, slices=as_json and not estimate)
    _print(json.dumps(values, indent=1) if as_json else report_text(values, estimate=estimate))


@app.command("explain", epilog=_EXPLAIN_EXAMPLES + _EXIT_CODES)
def _explain(
    spec: Spec,
    *,
    rank: Annotated[int, typer.Option(metavar="R", help="The consumer rank with this tp rank.")] = 0,
    stage: Annotated[int, typer.Option(metavar="PP", help="Its pipeline stage.")] = 0,
    slices: Annotated[int, typer.Option(metavar="N", help="Slices to show of each producer rank.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a rank's plan, slice by slice."""
    found = _survey(spec, rank)
    if (stage, rank) not in found.plans:
        _fail(f"--stage {stage}: the consumer has stages 0 to {found.run.consumer.pp - 1}", _USAGE)
    values = explain_values(found, (stage, rank), most=max(slices, 0))
    _print(json.dumps(values, indent=1) if as_json else explain_text(values))


def _print(text: str) -> None:
    """Print, and exit quietly on a closed pipe (`... | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Discard the output that Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
