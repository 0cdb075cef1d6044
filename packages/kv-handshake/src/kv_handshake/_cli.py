"""The command `kv-handshake`: probe a listener, serve a recording, write keys, print the conformance vectors.

The only module that imports typer and rich.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kv_handshake import __version__
from kv_handshake._errors import HandshakeError
from kv_handshake._listener import Listener
from kv_handshake._probing import DEFAULT_DIALECT, ProbeOptions, run_probe
from kv_handshake._recording import Recording
from kv_handshake._text import printable
from kv_handshake._vectors import load_vectors, vectors_text
from kv_handshake._zmq import write_keypair

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

__all__ = ["main"]

_NAME = "kv-handshake"
_OK = 0
_USAGE = 2
_PIPE_COLUMNS = 100_000
"""Wider than any row."""
_EXIT_BY_FAULT = {"local": _USAGE, "environment": 3, "peer": 4}

_EXIT_CODES = """\b
exit codes:
  0  done; with --against: no difference that forbids an exchange of KV cache
  1  --against: the engines must not exchange KV cache
  2  wrong usage, unreadable file, port that cannot be bound
  3  the peer cannot be reached or does not answer
  4  the peer refused, or its reply breaks the protocol
"""
_PROBE_EXAMPLES = """\b
examples:
  kv-handshake probe 10.0.0.1:5600 --vllm 0.32.0
  kv-handshake probe 10.0.0.1:5600 --vllm 0.32.0 --against 10.0.0.2:5600

"""
_SERVE_EXAMPLES = """\b
example:
  kv-handshake serve engine.json --port 5600

"""
_KEYGEN_EXAMPLES = """\b
example:
  kv-handshake keygen keys prefill-0

"""
_VECTORS_EXAMPLES = """\b
example:
  kv-handshake vectors --json

"""

Arguments = ParamSpec("Arguments")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_EXIT_CODES)


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
    """Look at, serve and compare the metadata by which inference engines agree to move a KV cache."""


def _coded(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Print a coded error, as JSON after `--json`, and return its exit code."""

    @wraps(command)
    def run(*words: Arguments.args, **options: Arguments.kwargs) -> int:
        try:
            return command(*words, **options)
        except HandshakeError as error:
            if options["as_json"]:
                print(json.dumps({"error": error.code, "fault": error.fault, "message": str(error)}))
            else:
                print(f"kv-handshake: {error.code}: {printable(str(error))}", file=sys.stderr)
            return _USAGE if error.code == "bind-failed" else _EXIT_BY_FAULT[error.fault]

    return run


@app.command("probe", epilog=_PROBE_EXAMPLES + _EXIT_CODES)
@_coded
def _probe(  # noqa: PLR0913 - one for each option
    peer: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Side channel of the engine ([ADDRESS]:PORT for IPv6).")
    ],
    *,
    rank: Annotated[
        list[str] | None,
        typer.Option(metavar="TP|PP:TP|TP-TP", help="Rank or tp range to ask for; default 0. Repeat it for more."),
    ] = None,
    dialect: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"The peer's connector version (default {DEFAULT_DIALECT}, the oldest on which no vLLM since 0.26 ends). A "
            "wrong one ends a listener of vLLM itself: before vLLM 0.26 it must be 4 or less, from then on 5 or more.",
        ),
    ] = None,
    vllm: Annotated[
        str | None, typer.Option(metavar="RELEASE", help="Take the connector version from the peer's vLLM release.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE|HOST:PORT", help="Compare with a recording or another live engine.")
    ] = None,
    against_dialect: Annotated[
        int | None, typer.Option(metavar="N", help="Its connector version, if it is another one.")
    ] = None,
    suppose: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACTOR=VALUE",
            help="A value to try where an engine sends only its hash, such as model=NAME; repeat it for further factors "
            "and values, all combinations are tried.",
        ),
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Write the received frames as a recording.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait per reply.")] = 5.0,
    secret_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Certificate file with this client's keys, for an encrypted side channel."),
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate file with the engine's public key.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print a live engine's metadata, and compare it with another's."""
    if dialect is not None and vllm is not None:
        raise typer.BadParameter("--dialect and --vllm exclude each other")
    return run_probe(
        ProbeOptions(
            peer,
            tuple(rank or ()),
            dialect,
            vllm,
            against,
            against_dialect,
            tuple(suppose or ()),
            save,
            timeout,
            (secret_key, server_key),
            as_json=as_json,
        )
    )


@app.command("serve", epilog=_SERVE_EXAMPLES + _EXIT_CODES)
@_coded
def _serve(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording, as probe --save writes it.")],
    *,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 for any free one.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Stop after this time; default: when interrupted.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Serve a recording, to test other implementations."""
    recording = Recording.read(file)
    listener = Listener(host, port, payloads=recording.payloads)
    listener.start()
    try:
        ranks = sorted(recording.payloads)
        if as_json:
            print(json.dumps({"host": host, "port": listener.port, "ranks": ranks}), flush=True)
        else:
            print(f"serving {len(ranks)} ranks of {file} on {host} port {listener.port}", flush=True)
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return _OK
    finally:
        listener.close()
    return _OK


@app.command("keygen", epilog=_KEYGEN_EXAMPLES + _EXIT_CODES)
@_coded
def _keygen(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Where NAME.key and NAME.key_secret go.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the engine, as it will stand in logs.")],
    *,
    as_json: AsJson = False,
) -> int:
    """Write a new pair of keys for an encrypted side channel."""
    public, secret = write_keypair(directory, name)
    if as_json:
        print(json.dumps({"public": str(public), "secret": str(secret)}))
    else:
        print(f"{secret}: both keys, mode 0600, for this engine alone")
        print(f"{public}: the public key, for its peers")
    return _OK


@app.command("vectors", epilog=_VECTORS_EXAMPLES + _EXIT_CODES)
def _vectors(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print the data file instead of a table.")] = False
) -> int:
    """Print the conformance vectors."""
    if as_json:
        print(vectors_text())
    else:
        _print_table(("kind", "name", "meaning", "bytes"), _rows())
    return _OK


def _rows() -> Iterable[tuple[str, ...]]:
    return ((each.kind, each.name, each.meaning, each.data.hex()) for each in load_vectors())


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in the columns of a terminal; elsewhere a line a row."""
    table = Table(*headings, box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    # Printed by ourselves: at a pipe that is closed, rich would end the process with 1.
    with console.capture() as drawn:
        console.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))
