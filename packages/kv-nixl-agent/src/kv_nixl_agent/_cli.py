"""The command `kv-nixl`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

from ._doctor._remote_test import serve_peer
from ._doctor._report import EXIT_CODES, Report, examine

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["main"]

_SIGNS = {"ok": "  ok ", "warning": " WARN", "error": "ERROR"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "serve":
        try:
            serve_peer(options.host, options.port, sessions=options.sessions)
        except OSError as error:
            print(f"kv-nixl: cannot serve on {options.host}:{options.port}: {error}", file=sys.stderr)
            return EXIT_CODES["error"]
        except KeyboardInterrupt:
            return 0
        return 0
    with _foreign_output_to_stderr():
        report = examine(options.peer)
    print(json.dumps(report.as_json()) if options.json else _text(report))
    return EXIT_CODES[report.severity]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kv-nixl", description="Look after NIXL transfers on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say what works, over which transports and how fast",
        description="Exit code 0: all is well. 1: it works, but not as hoped. 2: wrong usage. 3: it does not work.",
    )
    doctor.add_argument(
        "--peer", type=_endpoint, metavar="HOST:PORT", help="read from a `kv-nixl serve` elsewhere, too"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    serve = commands.add_parser("serve", help="serve a test region to another machine's doctor")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    serve.add_argument("--port", type=int, default=5700, help="port to bind (default: %(default)s)")
    serve.add_argument("--sessions", type=int, default=0, help="end after so many doctors (default: never)")
    return parser


def _endpoint(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        message = f"{text!r} is not HOST:PORT"
        raise argparse.ArgumentTypeError(message)
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _foreign_output_to_stderr() -> Generator[None, None, None]:
    """Keep NIXL's log, which goes to standard output, out of the command's own."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _text(report: Report) -> str:
    lines = [f"{_SIGNS[finding.severity]}  {finding.name}: {finding.message}" for finding in report.findings]
    if report.bandwidth:
        lines.append("")
        lines.append("  page KiB   read GB/s   memcpy GB/s   of memcpy   fence us")
        lines += [
            f"  {row.page_bytes >> 10:8}   {row.read_gb_s:9.2f}   {row.memcpy_gb_s:11.2f}"
            f"   {row.read_gb_s / row.memcpy_gb_s:9.0%}   {row.fence_us:8.0f}"
            for row in report.bandwidth
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
