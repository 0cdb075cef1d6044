"""The command ``kv-handshake``: probe a listener, serve a recording, print the conformance vectors."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kv_handshake._compare import Snapshot, compare
from kv_handshake._dialect import dialect_of, dialect_of_vllm
from kv_handshake._endpoint import parse_endpoint
from kv_handshake._errors import ConfigurationError, HandshakeError
from kv_handshake._listener import Listener
from kv_handshake._probe import probe, probe_advertisement
from kv_handshake._recording import Recording
from kv_handshake._render import comparison_text, comparison_values, probe_text, probe_values
from kv_handshake._text import printable
from kv_handshake._vectors import vectors_text
from kv_handshake._zmq import ClientSecurity, write_keypair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake._queries import Rank

__all__ = ["main"]

EXIT_OK = 0
EXIT_DIFFERENT = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4

_EPILOG = """exit codes:
  0  done; with --against: no difference that forbids an exchange of KV cache
  1  --against: the engines must not exchange KV cache
  2  wrong usage, unreadable file, port that cannot be bound
  3  the peer cannot be reached or does not answer
  4  the peer refused, or its reply breaks the protocol
"""
_DEFAULT_DIALECT = 5
_EXIT_BY_FAULT = {"local": EXIT_USAGE, "environment": EXIT_UNREACHABLE, "peer": EXIT_REFUSED}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except HandshakeError as error:
        if options.json:
            print(json.dumps({"error": error.code, "fault": error.fault, "message": str(error)}))
        else:
            print(f"kv-handshake: {error.code}: {printable(str(error))}", file=sys.stderr)
        return EXIT_USAGE if error.code == "bind-failed" else _EXIT_BY_FAULT[error.fault]
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_OK
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kv-handshake",
        description="Look at, serve and compare the metadata by which inference engines agree to move a KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_probe(commands.add_parser("probe", help="print a live engine's metadata, and compare it with another's"))
    _add_serve(commands.add_parser("serve", help="serve a recorded metadata file, for testing other implementations"))
    listing = commands.add_parser("vectors", help="print the conformance vectors")
    listing.add_argument("--json", action="store_true", help="print the data file instead of a table")
    listing.set_defaults(run=_run_vectors)
    keygen = commands.add_parser("keygen", help="write a new pair of keys for an encrypted side channel")
    keygen.add_argument("directory", metavar="DIRECTORY", help="where NAME.key and NAME.key_secret go")
    keygen.add_argument("name", metavar="NAME", help="name of the engine, as it will stand in logs")
    keygen.add_argument("--json", action="store_true", help="print JSON")
    keygen.set_defaults(run=_run_keygen)
    return parser


def _add_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="HOST:PORT", help="side channel of the engine ([ADDRESS]:PORT for IPv6)")
    parser.add_argument(
        "--rank", action="append", default=[], metavar="TP|PP:TP|TP-TP", help="rank or tp range to ask for; default 0"
    )
    version = parser.add_mutually_exclusive_group()
    version.add_argument(
        "--dialect",
        type=int,
        metavar="N",
        help=f"the peer's connector version (default {_DEFAULT_DIALECT}, the oldest on which no vLLM since 0.26 ends). A wrong "
        "one ends a listener of vLLM itself: before vLLM 0.26 it must be 4 or less, from then on 5 or more",
    )
    version.add_argument("--vllm", metavar="RELEASE", help="take the connector version from the peer's vLLM release")
    parser.add_argument("--against", metavar="FILE|HOST:PORT", help="compare with a recording or another live engine")
    parser.add_argument("--against-dialect", type=int, metavar="N", help="its connector version, if it is another one")
    parser.add_argument(
        "--suppose",
        action="append",
        default=[],
        metavar="FACTOR=VALUE",
        help="a value to try where an engine sends only its hash, such as model=NAME; repeat it for further factors "
        "and values, all combinations are tried",
    )
    parser.add_argument("--save", metavar="FILE", help="write the received frames as a recording")
    parser.add_argument(
        "--advertisement", action="store_true", help="ask for the advertisement too; never of vLLM itself"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="wait per reply (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, text in (
        ("--secret-key", "certificate file with this client's keys, for an encrypted side channel"),
        ("--server-key", "certificate file with the engine's public key"),
    ):
        parser.add_argument(name, metavar="FILE", help=text)
    parser.set_defaults(run=_run_probe)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording, as probe --save writes it")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to bind (default: any free one)")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after this time; default: when interrupted")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_serve)


def _run_probe(options: argparse.Namespace) -> int:
    endpoint = parse_endpoint(options.peer)
    host, port = endpoint.host, endpoint.port
    asked = _DEFAULT_DIALECT if options.dialect is None else options.dialect
    version = dialect_of_vllm(options.vllm) if options.vllm else dialect_of(asked)
    security = _security(options)
    ranks = _ranks(options.rank)
    _warn(options, ranks)
    advertisement = b""
    if options.advertisement:
        _, advertisement = probe_advertisement(host, port, timeout_s=options.timeout, security=security)
    result = probe(host, port, ranks=ranks, dialect=version.version, timeout_s=options.timeout, security=security)
    if options.save:
        Recording(
            version.version, result.recording.payloads, result.recording.factors, advertisement=advertisement
        ).write(options.save)
    document = probe_values(options.peer, result)
    text = probe_text(options.peer, result)
    if advertisement:
        document["advertisement"] = json.loads(advertisement)
        text += f"\n  advertisement {advertisement.decode()}"
    code = EXIT_OK
    if options.against:
        other = _snapshot_against(options, ranks[:1], version.version, security)
        comparison = compare(Snapshot.of(options.peer, result.recording), other, supposed=_supposed(options.suppose))
        document["against"] = {"peer": options.against, **comparison_values(comparison)}
        text += "\n" + comparison_text(comparison, options.peer, options.against)
        code = EXIT_OK if comparison.is_compatible else EXIT_DIFFERENT
    print(json.dumps(document, default=str) if options.json else text)
    return code


def _warn(options: argparse.Namespace, ranks: Sequence[Rank]) -> None:
    """Say, before anything is sent, which question would end a listener of vLLM itself."""
    if not options.vllm and options.dialect is None:
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


def _snapshot_against(
    options: argparse.Namespace, ranks: Sequence[Rank], version: int, security: ClientSecurity | None
) -> Snapshot:
    if Path(options.against).exists():
        return Snapshot.of(options.against, Recording.read(options.against))
    endpoint = parse_endpoint(options.against)
    dialect = options.against_dialect or version
    result = probe(
        endpoint.host, endpoint.port, ranks=ranks, dialect=dialect, timeout_s=options.timeout, security=security
    )
    return Snapshot.of(options.against, result.recording)


def _ranks(texts: Sequence[str]) -> list[Rank]:
    ranks: dict[Rank, None] = {}
    for text in texts or ["0"]:
        pp, colon, tp = text.rpartition(":")
        first, _, last = tp.partition("-")
        numbers = (pp or "0", first, last or first)
        if not all(each.isascii() and each.isdigit() for each in numbers) or (colon and not pp):
            raise ConfigurationError("invalid-argument", f"--rank {text!r} is not TP, PP:TP or TP-TP")
        ranks |= dict.fromkeys((int(numbers[0]), each) for each in range(int(first), min(int(numbers[2]), 65_535) + 1))
    if not ranks:
        raise ConfigurationError("invalid-argument", "--rank names no rank")
    return list(ranks)


def _supposed(texts: Sequence[str]) -> dict[str, list[object]]:
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


def _security(options: argparse.Namespace) -> ClientSecurity | None:
    given = (options.secret_key, options.server_key)
    if not any(given):
        return None
    if not all(given):
        raise ConfigurationError("invalid-argument", "give --secret-key and --server-key together")
    return ClientSecurity.read(options.secret_key, options.server_key)


def _run_serve(options: argparse.Namespace) -> int:
    recording = Recording.read(options.file)
    listener = Listener(
        options.host, options.port, payloads=recording.payloads, advertisement=recording.advertisement or None
    )
    listener.start()
    try:
        ranks = sorted(recording.payloads)
        if options.json:
            print(json.dumps({"host": options.host, "port": listener.port, "ranks": ranks}), flush=True)
        else:
            print(f"serving {len(ranks)} ranks of {options.file} on {options.host} port {listener.port}", flush=True)
        threading.Event().wait(options.seconds)
    finally:
        listener.close()
    return EXIT_OK


def _run_keygen(options: argparse.Namespace) -> int:
    public, secret = write_keypair(options.directory, options.name)
    if options.json:
        print(json.dumps({"public": str(public), "secret": str(secret)}))
    else:
        print(f"{secret}: both keys, mode 0600, for this engine alone\n{public}: the public key, for its peers")
    return EXIT_OK


def _run_vectors(options: argparse.Namespace) -> int:
    print(vectors_text(as_json=options.json))
    return EXIT_OK
