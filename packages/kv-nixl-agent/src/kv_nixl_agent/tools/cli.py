"""The command `kv-nixl`: what works on this machine, and a test region for another machine's doctor.

The only module that imports typer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kv_nixl_agent import __version__
from kv_nixl_agent.tools.remote import Measurement, measure_ranks, read_ranks, serve_peer
from kv_nixl_agent.tools.report import EXIT_CODES, examine, report_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_nixl_agent.tools.machine import Severity

__all__ = ["main"]

_NAME = "kv-nixl"
_OK = 0
_USAGE = 2
_MOST_PORT = 65535
_MOST_BYTES = 1 << 40
_LEAST_S, _MOST_S = 0.001, 3600.0

_EXIT_CODES = """\b
exit codes:
  0  all is well
  1  works, with warnings
  2  wrong usage
  3  it does not work
"""
_DOCTOR_EXAMPLES = """\b
examples:
  kv-nixl doctor
  kv-nixl doctor --peer 10.0.0.1:5700

"""
_MEASURE_EXAMPLES = """\b
example:
  kv-nixl measure ranks.json --json

"""
_SERVE_EXAMPLES = """\b
example:
  kv-nixl serve --host 10.0.0.1 --sessions 1

"""


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


def _seconds(given: float) -> float:
    if not _LEAST_S <= given <= _MOST_S:
        raise typer.BadParameter(f"{given:g} s is not between {_LEAST_S:g} s and {_MOST_S:g} s (out-of-range)")
    return given


@app.command("doctor", epilog=_DOCTOR_EXAMPLES + _EXIT_CODES)
def _doctor(
    *,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Read from a `kv-nixl serve` elsewhere, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what works, over which transports and how fast."""
    endpoint = None if peer is None else _endpoint(peer)
    report = examine(endpoint)
    print(json.dumps(report.as_json()) if as_json else "\n".join(report_lines(report)), flush=True)
    raise typer.Exit(report.exit_code)


@app.command("measure", epilog=_MEASURE_EXAMPLES + _EXIT_CODES)
def _measure(
    ranks: Annotated[
        str, typer.Argument(metavar="RANKS", help="JSON file with the ranks, - for standard input.")
    ] = "-",
    *,
    most_bytes: Annotated[
        int,
        typer.Option("--bytes", metavar="N", min=0, max=_MOST_BYTES, help="Bytes to read from each rank, at most."),
    ] = 64 << 20,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", callback=_seconds, help="Wait per read.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read from the probe pages of live ranks: speed, transport, checksum.

    A rank is an object with name, agent_metadata (Base64) and fence (address, device, words), as its side channel sends them.
    """
    try:
        described = read_ranks(sys.stdin.read() if ranks == "-" else Path(ranks).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"kv-nixl: {ranks} describes no ranks: {error} (invalid-ranks)", file=sys.stderr)
        raise typer.Exit(_USAGE) from error
    found = measure_ranks(described, most_bytes=most_bytes, timeout_s=timeout)
    print(json.dumps(found.as_json()) if as_json else _measured(found), flush=True)
    severity: Severity = "error" if not found.is_good else "warning" if found.is_tcp else "ok"
    raise typer.Exit(EXIT_CODES[severity])


def _measured(found: Measurement) -> str:
    lines = [
        f"{rank.name}: {rank.message} ({rank.code})"
        if rank.code
        else f"{rank.name}: {rank.read_gb_s:.2f} GB/s, a word in {rank.word_us:.0f} us, checksum {rank.checksum:08x}"
        for rank in found.ranks
    ]
    lines += [f"{path.sizes}: {path.method} {path.config}" for path in found.paths]
    return "\n".join([*lines, found.error] if found.error else lines)


@app.command("serve", epilog=_SERVE_EXAMPLES + _EXIT_CODES)
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
