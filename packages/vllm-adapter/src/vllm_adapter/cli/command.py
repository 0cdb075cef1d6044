"""The command `vllm-adapter`: what all its commands share, and the list of them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_adapter import __version__
from vllm_adapter.cli.check import check
from vllm_adapter.cli.config import config
from vllm_adapter.cli.explain import explain
from vllm_adapter.cli.status import revoke, status
from vllm_adapter.cli.trace import trace
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.recorder import plain_text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["app", "main"]

_NAME = "vllm-adapter"
_USAGE = 2

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
for _command in (check, config, explain, status, revoke, trace):
    app.command()(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; that of wrong usage for a coded error."""
    out = sys.stdout
    try:
        try:
            app(args=arguments, prog_name=_NAME)
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):
                raise end.__context__ from None
            out.flush()
            return int(end.code or 0)
    except AdapterError as error:
        print(f"{_NAME}: {plain_text(str(error))}", file=sys.stderr)
        return _USAGE
    except BrokenPipeError:  # its reader, such as `head`, has seen enough
        # Bytes that Python flushes at its end go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return 0


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"{_NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _describe(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tools for operators of the vLLM adapter."""
