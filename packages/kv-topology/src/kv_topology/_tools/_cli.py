"""The command `kv-topology`: dry runs of transfers without an engine, and the byte oracle.

The only module that imports typer and rich.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from typer.core import TyperGroup

from kv_topology import __version__
from kv_topology._errors import InvalidGeometry, TopologyError
from kv_topology._tools._engine_values import KV_LAYOUTS
from kv_topology._tools._explanation import explain_text, explain_values
from kv_topology._tools._hand_over_report import hand_over_json, hand_over_page
from kv_topology._tools._report import Page, estimate_json, estimate_page, report_json, report_page
from kv_topology._tools._spec import load_spec
from kv_topology._tools._survey import survey

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kv_topology._tools._survey import Survey

__all__ = ["main"]

_NAME = "kv-topology"
_OK = 0
_FAILED = 1
_USAGE = 2
_NO_PLAN = 3

_LAYOUTS = "\b\nlayouts:\n" + "".join(f"  {name:<16} {text}\n" for name, text in KV_LAYOUTS.items()) + "\n"
_EXIT_CODES = """\b
exit codes:
  0  done
  1  a proof failed
  2  wrong usage, or a specification that is none
  3  no plan exists
"""
_PLAN_EXAMPLES = """\b
examples:
  kv-topology plan examples/gqa_tp4_from_tp2.toml
  kv-topology plan examples/gqa_tp4_from_tp2.toml --estimate
  kv-topology plan examples/scale_8xh100.toml --estimate

"""
_EXPLAIN_EXAMPLES = """\b
example:
  kv-topology explain examples/gqa_tp4_from_tp2.toml --rank 3

"""
_PROVE_EXAMPLES = """\b
example:
  kv-topology prove windows tp --step 50

"""

Spec = Annotated[
    Path, typer.Argument(metavar="SPEC", help="TOML or JSON file: model, consumer, producer, link, hand_over.")
]


@final
class _Ended(Exception):  # noqa: N818 - an end, not an error
    """End of a command, on its way to `main`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextmanager
def _quiet_pipe() -> Generator[None]:
    """Flush what was printed; end without a word if its reader, such as `head`, has seen enough."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Bytes that Python still wants to flush at its end go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _Ended(_OK) from None


@final
class _Commands(TyperGroup):
    """Commands whose functions return their exit code."""

    def make_context(self, *words: Any, **more: Any) -> Any:  # noqa: ANN401 - typer's own
        """Read the words; help is printed here."""
        with _quiet_pipe():
            return super().make_context(*words, **more)

    def invoke(self, *words: Any, **more: Any) -> Any:  # noqa: ANN401 - typer's own
        """Run the command."""
        with _quiet_pipe():
            code: int = super().invoke(*words, **more)
        raise _Ended(code)


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_LAYOUTS + _EXIT_CODES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; `SystemExit` ends wrong usage and pages of help."""
    try:
        typer.main.get_command(app)(args=arguments, prog_name=_NAME)
    except _Ended as ended:
        return ended.code
    return _OK


def _print_version(asked: bool) -> None:
    if asked:
        print(f"{_NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _describe(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan a KV-cache transfer, explain it, prove it: which bytes of which peer rank land where."""


@final
class _RefusalError(Exception):
    """A reason for which a command cannot be carried out, and its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _survey(spec: Path, rank: int | None) -> Survey:
    """Return all plans of a specification."""
    try:
        run = load_spec(spec)
    except InvalidGeometry as error:
        raise _RefusalError(f"kv-topology: the specification is none ({error.code}): {error}", _USAGE) from error
    if rank is not None and not 0 <= rank < run.consumer.tp:
        raise _RefusalError(f"kv-topology: --rank {rank} is no rank of a consumer with tp {run.consumer.tp}", _USAGE)
    try:
        return survey(run)
    except InvalidGeometry as error:
        raise _RefusalError(
            f"kv-topology: the specification makes no engine ({error.code}): {error}", _USAGE
        ) from error
    except TopologyError as error:
        raise _RefusalError(f"kv-topology: no plan ({error.code}): {error}", _NO_PLAN) from error


def _refuse(refused: _RefusalError) -> int:
    print(refused, file=sys.stderr)
    return refused.code


@app.command("plan", epilog=_PLAN_EXAMPLES + _EXIT_CODES)
def _plan(
    spec: Spec,
    *,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Only what it costs, direct and staged; with a section hand_over plain and streamed, too.",
        ),
    ] = False,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only the consumer rank with this tp rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans with all slices as JSON.")] = False,
) -> int:
    """Plan a transfer between two engines, without any."""
    try:
        found = _survey(spec, rank)
    except _RefusalError as refused:
        return _refuse(refused)
    if as_json:
        values = _estimate_values(found, rank) if estimate else report_json(found, only=rank)
        print(json.dumps(values, indent=1))
        return _OK
    _show(estimate_page(found, only=rank) if estimate else report_page(found, only=rank))
    if estimate and found.run.hand_over is not None:
        _show(hand_over_page(found, found.run.hand_over))
    return _OK


def _estimate_values(found: Survey, rank: int | None) -> dict[str, object]:
    values = estimate_json(found, only=rank)
    return (
        values if found.run.hand_over is None else {**values, "hand_over": hand_over_json(found, found.run.hand_over)}
    )


@app.command("explain", epilog=_EXPLAIN_EXAMPLES + _EXIT_CODES)
def _explain(
    spec: Spec,
    *,
    rank: Annotated[int, typer.Option(metavar="R", help="The consumer rank with this tp rank.")] = 0,
    stage: Annotated[int, typer.Option(metavar="PP", help="Its pipeline stage.")] = 0,
    slices: Annotated[int, typer.Option(metavar="N", help="Slices to show of each producer rank.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Explain a rank's plan, slice by slice."""
    try:
        found = _survey(spec, rank)
    except _RefusalError as refused:
        return _refuse(refused)
    if (stage, rank) not in found.plans:
        return _refuse(
            _RefusalError(
                f"kv-topology: --stage {stage} is no stage of a consumer with pp {found.run.consumer.pp}", _USAGE
            )
        )
    most = max(slices, 0)
    if as_json:
        print(json.dumps(explain_values(found, (stage, rank), most=most), indent=1))
    else:
        print(explain_text(found, (stage, rank), most=most))
    return _OK


@app.command("prove", epilog=_PROVE_EXAMPLES + _EXIT_CODES)
def _prove(
    families: Annotated[list[str] | None, typer.Argument(metavar="FAMILY", help="What to vary; default: all.")] = None,
    *,
    step: Annotated[int, typer.Option(metavar="N", help="Prove every N-th pair only.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> int:
    """Prove plans: copy and compare every byte."""
    from kv_topology._tools._proof_cases import FAMILIES, run_proofs
    from kv_topology.testing import OracleFailure

    chosen = families or list(FAMILIES)
    if step < 1 or not set(chosen) <= set(FAMILIES):
        given = f"{' '.join(chosen)} --step {step}"
        text = f"kv-topology: prove takes the families {', '.join(FAMILIES)}, and a --step of 1 or more, not {given}"
        return _refuse(_RefusalError(text, _USAGE))
    counts: dict[str, dict[str, int]] = {}
    for name in chosen:
        try:
            pairs, proof = run_proofs((name,), step=step)[name]
        except OracleFailure as error:
            return _refuse(_RefusalError(f"kv-topology: a proof of {name} failed: {error}", _FAILED))
        counts[name] = {"pairs": pairs, "plans": proof.plans, "copies": proof.copies, "bytes": proof.bytes_proved}
        if not as_json:
            print(f"{name:<14} {pairs:>6} pairs {proof.plans:>7} plans {proof.bytes_proved:>11} bytes", flush=True)
    _print_total(counts, as_json=as_json)
    return _OK


def _print_total(counts: dict[str, dict[str, int]], *, as_json: bool) -> None:
    total = {key: sum(count[key] for count in counts.values()) for key in ("pairs", "plans", "copies", "bytes")}
    if as_json:
        print(json.dumps({**counts, "total": total}))
    else:
        print(f"proved {total['pairs']} pairs of engines, {total['plans']} plans, {total['bytes']} bytes: no mismatch")


def _show(page: Page) -> None:
    """Draw a page on a terminal; elsewhere print it as it always was."""
    if not sys.stdout.isatty():
        print(page.as_text())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE)
    for heading, width in page.columns:
        table.add_column(heading, justify="left" if width < 0 else "right", overflow="fold")
    for row in page.rows:
        table.add_row(*map(Text, row))
    for part in (*map(Text, page.head), table, *map(Text, page.tail)):
        console.print(part)
