"""The command `kv-handshake`: probe a listener, serve a recording, write keys, print the conformance vectors.

The only module that imports typer.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, cast

import msgspec
import typer

from kv_handshake import __version__
from kv_handshake.core.endpoint import parse_endpoint
from kv_handshake.errors import ConfigurationError, HandshakeError, shortened
from kv_handshake.inspect import Recording, compare, probe
from kv_handshake.net.listener import Listener
from kv_handshake.security import ClientSecurity, write_keypair
from kv_handshake.testing import load_vectors
from kv_handshake.wire.dialects import dialect_of_vllm
from kv_handshake.wire.replies import decode_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_handshake.inspect import Comparison, ProbeResult
    from kv_handshake.wire.queries import Rank

__all__ = ["app", "main"]

_NAME = "kv-handshake"
_DIFFERENT = 1
_USAGE = 2
_EXIT_BY_FAULT = {"local": _USAGE, "environment": 3, "peer": 4}

_DEFAULT_DIALECT = 5
"""Oldest dialect whose queries have three fields. vLLM's own listeners crash on a query of another shape: from 0.26 on they take
three fields, before that two. So 5 is safe for all since 0.26, and ours answer either shape."""

_SHOWN = 6
_SHOWN_CHARS = 1000

_EXIT_CODES = """\b
exit codes:
  0  done; with --against: no difference that forbids an exchange of KV cache
  1  --against: the engines must not exchange KV cache
  2  wrong usage, unreadable file, port that cannot be bound
  3  the peer cannot be reached or does not answer
  4  the peer refused, or its reply breaks the protocol
"""


def _epilog(*examples: str) -> str:
    return "\n".join(("\b", "examples:", *(f"  {_NAME} {each}" for each in examples), "", _EXIT_CODES))


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
        return 0 if sys.stdout is not stdout else int(ended.code or 0)
    return 0


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
                print(json.dumps({"error": error.code, "fault": error.fault, "message": error.message}))
            else:
                print(f"kv-handshake: {shortened(error.message, 1000)} ({error.code})", file=sys.stderr)
            code = _USAGE if error.code == "bind-failed" else _EXIT_BY_FAULT[error.fault]
        raise typer.Exit(code or 0)

    return run


@app.command(
    "probe",
    epilog=_epilog("probe 10.0.0.1:5600 --vllm 0.32.0", "probe 10.0.0.1:5600 --vllm 0.32.0 --against 10.0.0.2:5600"),
)
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
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE",
            help="The peer's vLLM release, such as 0.32.0; without it the query is one that no vLLM since 0.26 ends on. A wrong "
            "one ends a listener of vLLM itself if only one of the two is older than 0.26.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE|HOST:PORT", help="Compare with a recording or another live engine.")
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
    dialect = dialect_of_vllm(vllm).version if vllm else _DEFAULT_DIALECT
    ranks = list(dict.fromkeys(each for text in rank or ["0"] for each in _ranks_of(text)))
    security = _security_of(secret_key, server_key)

    def fetch(where: str, ranks: Sequence[Rank]) -> ProbeResult:
        at = parse_endpoint(where)
        return probe(at.host, at.port, ranks=ranks, dialect=dialect, timeout_s=timeout, security=security)

    _warn(ranks, has_release=bool(vllm))
    result = fetch(peer, ranks)
    if save:
        result.recording.write(save)
    document, code = _values(peer, result), 0
    text = _text(document)
    if against:
        supposed = _supposed_of(suppose or ())
        other = Recording.read(against) if Path(against).exists() else fetch(against, ranks[:1]).recording
        comparison = compare(result.recording, other, supposed=supposed)
        document["against"] = {"peer": against, **_comparison_values(comparison)}
        text += f"\n{_comparison_text(comparison, peer, against)}"
        code = 0 if comparison.is_compatible else _DIFFERENT
    print(json.dumps(document, default=str) if as_json else text)
    return code


def _warn(ranks: Sequence[Rank], *, has_release: bool) -> None:
    """Warn, before anything is sent, of a query on which vLLM's own listener would crash."""
    if not has_release:
        print(
            "kv-handshake: the query has the shape of vLLM 0.26 and later; a listener of an older vLLM would end on it "
            "(give --vllm)",
            file=sys.stderr,
        )
    if any(rank != (0, 0) for rank in ranks):
        print(
            f"kv-handshake: a listener of vLLM itself ends if it is asked for a rank that it does not serve; {len(ranks)} ranks "
            "are asked for",
            file=sys.stderr,
        )


def _ranks_of(text: str) -> list[Rank]:
    """Return the ranks that `--rank` names. Example: `1:0-2` is ranks 0 to 2 of stage 1."""
    pp, colon, tp = text.rpartition(":")
    first, _, last = tp.partition("-")
    numbers = (pp or "0", first, last or first)
    if not all(each.isascii() and each.isdigit() for each in numbers) or (colon and not pp):
        raise ConfigurationError("invalid-argument", f"--rank {text!r} is not TP, PP:TP or TP-TP")
    ranks = [(int(numbers[0]), each) for each in range(int(first), min(int(numbers[2]), 65_535) + 1)]
    if not ranks:
        raise ConfigurationError("invalid-argument", f"--rank {text!r} names no rank")
    return ranks


def _supposed_of(texts: Sequence[str]) -> dict[str, list[object]]:
    """Return the values that `--suppose` gives by factor name: FACTOR=VALUE, JSON or else plain text."""
    supposed: dict[str, list[object]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError("invalid-argument", f"--suppose {text!r} is not FACTOR=VALUE")
        try:
            parsed: object = json.loads(value)
        except ValueError:
            parsed = value
        supposed.setdefault(name, []).append(parsed)
    return supposed


def _security_of(secret: str | None, server: str | None) -> ClientSecurity | None:
    """Return the keys in the files of `--secret-key` and `--server-key`, None without both."""
    if (secret is None) != (server is None):
        raise ConfigurationError("invalid-argument", "give --secret-key and --server-key together")
    return None if secret is None or server is None else ClientSecurity.read(secret, server)


def _values(peer: str, result: ProbeResult) -> dict[str, Any]:
    """Return a probe as JSON values; opaque blobs become their length and SHA-256."""
    ranks: list[dict[str, Any]] = []
    for rank, metadata in result.peers.items():
        envelope = decode_envelope(result.recording.payloads[rank])
        outer: dict[str, Any] = {"compatibility_hash": envelope.compatibility_hash, "protocol": envelope.protocol}
        if envelope.protocol is not None:
            outer |= {"factors": envelope.factors, "capabilities": envelope.capabilities}
        inner: dict[str, Any] = msgspec.structs.asdict(metadata)
        del inner["factors"]
        inner |= {
            name: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
            for name, blob in inner.items()
            if isinstance(blob, bytes)
        }
        ranks.append({"pp": rank[0], "tp": rank[1], "rtt_s": result.rtts_s[rank], "envelope": outer, "metadata": inner})
    return {
        "peer": peer,
        "dialect": result.recording.dialect,
        "connect_s": result.connect_s,
        "clock_offset_s": result.clock_offset_s,
        "ranks": ranks,
    }


def _text(document: dict[str, Any]) -> str:
    """Return the values of a probe as lines for a person; long lists are cut and counted."""
    first_ms = document["connect_s"] * 1000
    lines = [f"{document['peer']}: version {document['dialect']}, first reply after {first_ms:.1f} ms"]
    if document["clock_offset_s"] is not None:
        lines.append(f"  clock offset {document['clock_offset_s']:+.6f} s")
    for rank in document["ranks"]:
        lines.append(f"  pp rank {rank['pp']}, tp rank {rank['tp']}: {rank['rtt_s'] * 1000:.1f} ms")
        lines += [
            f"    {key:38} {_shorten(value)}"
            for key, value in {**rank["envelope"], **rank["metadata"]}.items()
            if value is not None
        ]
    return "\n".join(lines)


def _comparison_values(comparison: Comparison) -> dict[str, object]:
    return {
        "equal": comparison.is_equal,
        "compatible": comparison.is_compatible,
        "same_hash": comparison.is_same_hash,
        "basis": comparison.basis,
        "suspects": list(comparison.suspects),
        "differences": [
            {"name": each.name, "first": each.local, "second": each.peer, "group": each.group}
            for each in comparison.differences
        ],
    }


def _comparison_text(comparison: Comparison, first: str, second: str) -> str:
    verdict = "may exchange KV cache" if comparison.is_compatible else "must not exchange KV cache"
    if comparison.is_equal:
        verdict = "no difference"
    lines = [f"{first} and {second}: {verdict} (compared by {comparison.basis})"]
    lines += [
        f"  {each.name} ({each.group}): {_shorten(each.local)} against {_shorten(each.peer)}"
        for each in comparison.differences
    ]
    if comparison.suspects:
        lines.append(
            "  the hashes differ and no value that could be tried explains it; suspect: "
            f"{', '.join(comparison.suspects)} (--suppose FACTOR=VALUE gives further values to try)"
        )
    return "\n".join(lines)


def _shorten(value: object) -> str:
    """Return a value as text; of a long list the first six entries and their number."""
    if not isinstance(value, (tuple, list)):
        return shortened(str(value), _SHOWN_CHARS)
    items = [shortened(str(each), _SHOWN_CHARS) for each in cast("Sequence[object]", value)]
    if len(items) <= _SHOWN:
        return f"[{', '.join(items)}]"
    return f"[{', '.join(items[:_SHOWN])}, ... {len(items)} in all]"


@app.command("serve", epilog=_epilog("serve engine.json --port 5600"))
@_coded
def _serve(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording, as probe --save writes it.")],
    *,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 for any free one.")] = 0,
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
        threading.Event().wait()
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        listener.close()


@app.command("keygen", epilog=_epilog("keygen keys prefill-0"))
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


@app.command("vectors", epilog=_epilog("vectors --json"))
@_coded
def _vectors(*, as_json: AsJson = False) -> None:
    """Print the conformance vectors, as a table or as the data file."""
    if as_json:
        print(files("kv_handshake").joinpath("vectors.json").read_text("utf-8").rstrip())
    else:
        for each in load_vectors():
            print(f"{each.kind:16} {each.name:36} {each.data.hex()}  {each.meaning}")
