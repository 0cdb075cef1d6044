"""The command `kv-nixl`: what works on this machine, and a test region for another machine's doctor.

The only module that imports typer.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kv_nixl_agent import __version__
from kv_nixl_agent.tools.remote import serve_peer
from kv_nixl_agent.tools.report import EXIT_CODES, examine, report_lines

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["main"]

_NAME = "kv-nixl"
_OK = 0
_MOST_PORT = 65535

_EXIT_CODES = """\b
exit codes:
  0  all is well
  1  works, with warnings
  2  wrong usage
  3  it does not work
"""


def _epilog(*examples: str) -> str:
    return "\n".join(["\b", "examples:", *(f"  kv-nixl {each}" for each in examples), "", _EXIT_CODES])


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_EXIT_CODES)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; ends by `SystemExit` with its exit code."""
    try:
        app(args=arguments, prog_name=_NAME)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # `... | head`: typer exits with 1
            raise SystemExit(_OK) from None
        raise
    raise SystemExit(_OK)


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
    """Check NIXL transfers on this machine."""


@app.command("doctor", epilog=_epilog("doctor --quick", "doctor --peer 10.0.0.1:5700"))
def _doctor(
    *,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Read from a `kv-nixl serve` elsewhere, too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One page size, no transport by itself: 5 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what works, over which transports and how fast; takes about half a minute."""
    endpoint = None if peer is None else _endpoint(peer)
    report = examine(endpoint, is_quick=quick)
    print(json.dumps(report.as_json()) if as_json else "\n".join(report_lines(report)), flush=True)
    raise typer.Exit(report.exit_code)


@app.command("serve", epilog=_epilog("serve --host 10.0.0.1 --sessions 1"))
def _serve(
    *,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=_MOST_PORT, help="Port to bind; 0 for any free one.")] = 5700,
    sessions: Annotated[int, typer.Option(min=0, help="End after so many doctors; 0 for never.")] = 0,
) -> None:
    """Serve a test region to another machine's doctor."""
    try:
        serve_peer(host, port, sessions=sessions)
    except (OSError, ValueError) as error:  # ValueError: a name that no host can have
        print(f"kv-nixl: cannot serve on {host}:{port}: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CODES["error"]) from error
    except KeyboardInterrupt:
        return


def _endpoint(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= len(str(_MOST_PORT))
    if not separator or not host or not is_number or not 0 < int(port) <= _MOST_PORT:
        raise typer.BadParameter(f"--peer {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    main()
