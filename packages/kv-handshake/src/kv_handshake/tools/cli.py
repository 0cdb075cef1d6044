"""The command `kv-handshake`: probe a listener, serve a recording, write keys, print the conformance vectors.

The only module that imports typer.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import wraps
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from kv_handshake import __version__
from kv_handshake.core.endpoint import parse_endpoint
from kv_handshake.errors import HandshakeError, shortened
from kv_handshake.net.listener import Listener
from kv_handshake.sockets import write_keypair
from kv_handshake.testing import load_vectors
from kv_handshake.tools.probe import (
    DEFAULT_DIALECT,
    probe,
    probe_text,
    probe_values,
    ranks_of,
    recording_of,
    security_of,
    supposed_of,
)
from kv_handshake.tools.recording import Recording, compare, comparison_text, comparison_values
from kv_handshake.wire.dialects import dialect_of, dialect_of_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_handshake.wire.queries import Rank

__all__ = ["app", "main"]

_NAME = "kv-handshake"
_OK = 0
_DIFFERENT = 1
_USAGE = 2
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

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_EXIT_CODES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    stdout = sys.stdout
    try:
        app(args=arguments, prog_name=_NAME)
    except SystemExit as ended:
        # typer replaces `sys.stdout` when the reader of a pipe, such as `head`, has gone: the command has not failed.
        return _OK if sys.stdout is not stdout else int(ended.code or _OK)
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


def _coded(command: Callable[Arguments, int | None]) -> Callable[Arguments, None]:
    """Exit with the code that a command returns; print a coded error, as JSON after `--json`, and exit with its code."""

    @wraps(command)
    def run(*words: Arguments.args, **options: Arguments.kwargs) -> None:
        try:
            code = command(*words, **options)
            sys.stdout.flush()
        except HandshakeError as error:
            if options["as_json"]:
                print(json.dumps({"error": error.code, "fault": error.fault, "message": str(error)}))
            else:
                print(f"kv-handshake: {error.code}: {shortened(str(error), 1000)}", file=sys.stderr)
            code = _USAGE if error.code == "bind-failed" else _EXIT_BY_FAULT[error.fault]
        raise typer.Exit(code or _OK)

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
    endpoint = parse_endpoint(peer)
    version = dialect_of_vllm(vllm) if vllm else dialect_of(DEFAULT_DIALECT if dialect is None else dialect)
    security = security_of(secret_key, server_key)
    ranks = ranks_of(rank or ())
    _warn(ranks, has_dialect=bool(vllm) or dialect is not None)
    result = probe(
        endpoint.host, endpoint.port, ranks=ranks, dialect=version.version, timeout_s=timeout, security=security
    )
    if save:
        result.recording.write(save)
    document, text, code = probe_values(peer, result), probe_text(peer, result), _OK
    if against:
        supposed = supposed_of(suppose or ())
        recording = recording_of(
            against, ranks[:1], dialect=against_dialect or version.version, timeout_s=timeout, security=security
        )
        comparison = compare(result.recording, recording, supposed=supposed)
        document["against"] = {"peer": against, **comparison_values(comparison)}
        text += "\n" + comparison_text(comparison, peer, against)
        code = _OK if comparison.is_compatible else _DIFFERENT
    print(json.dumps(document, default=str) if as_json else text)
    return code


def _warn(ranks: Sequence[Rank], *, has_dialect: bool) -> None:
    """Warn, before anything is sent, of a query on which vLLM's own listener would crash."""
    if not has_dialect:
        print(
            "kv-handshake: the query has the shape of vLLM 0.26 and later; a listener of an older vLLM would end on it "
            "(give --vllm or --dialect)",
            file=sys.stderr,
        )
    if any(rank != (0, 0) for rank in ranks):
        print(
            f"kv-handshake: a listener of vLLM itself ends if it is asked for a rank that it does not serve; {len(ranks)} ranks "
            "are asked for",
            file=sys.stderr,
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
) -> None:
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
        pass  # the usual end
    finally:
        listener.close()


@app.command("keygen", epilog=_KEYGEN_EXAMPLES + _EXIT_CODES)
@_coded
def _keygen(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Where NAME.key and NAME.key_secret go.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the engine, as it will stand in logs.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Write a new pair of keys for an encrypted side channel."""
    public, secret = write_keypair(directory, name)
    if as_json:
        print(json.dumps({"public": str(public), "secret": str(secret)}))
    else:
        print(f"{secret}: both keys, mode 0600, for this engine alone")
        print(f"{public}: the public key, for its peers")


@app.command("vectors", epilog=_VECTORS_EXAMPLES + _EXIT_CODES)
@_coded
def _vectors(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print the data file instead of a table.")] = False
) -> None:
    """Print the conformance vectors."""
    if as_json:
        print(files("kv_handshake").joinpath("vectors.json").read_text("utf-8").rstrip())
    else:
        for each in load_vectors():
            print(f"{each.kind:16} {each.name:36} {each.data.hex()}  {each.meaning}")
