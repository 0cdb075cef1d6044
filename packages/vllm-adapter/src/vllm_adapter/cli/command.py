"""The command `vllm-adapter`: what all its commands share, and the list of them.

A command's module has a function that registers it, `add_NAME(app)`. The command's function returns its exit code.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from typer.core import TyperGroup

from vllm_adapter import __version__
from vllm_adapter.cli.check import add_check
from vllm_adapter.cli.config import add_config
from vllm_adapter.cli.revoke import add_revoke
from vllm_adapter.cli.status import add_status
from vllm_adapter.cli.trace import add_trace

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["app", "main"]

_NAME = "vllm-adapter"
_WELL = 0


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
        raise _Ended(_WELL) from None


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


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False)
for _add in (add_check, add_config, add_revoke, add_status, add_trace):
    _add(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; `SystemExit` ends wrong usage and pages of help."""
    try:
        typer.main.get_command(app)(args=arguments, prog_name=_NAME)
    except _Ended as ended:
        return ended.code
    return _WELL


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
    """Tools for operators of the vLLM adapter."""
