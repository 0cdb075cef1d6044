"""Words of the command line, and the way to each command's module."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import TYPE_CHECKING, NoReturn, final

from vllm_adapter import __version__
from vllm_adapter.cli.check import add_check
from vllm_adapter.cli.config import add_config
from vllm_adapter.cli.status import add_status

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "make_parser"]

_COMMANDS = {
    "config": ("explain the connector's own keys, or check a --kv-transfer-config", add_config),
    "check": ("tell whether two live engines can hand over, and why not", add_check),
    "status": ("show what live engines of this machine hold: leases, reads, peers, stalls, health", add_status),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code, which each command's help lists."""
    try:
        options = make_parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What Python still wants to flush at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def make_parser() -> argparse.ArgumentParser:
    """Return what reads the words."""
    parser = _Parser(prog="vllm-adapter", description="Tools for operators of the vLLM adapter.")
    parser.add_argument("--version", action="version", version=f"vllm-adapter {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, (text, add) in _COMMANDS.items():
        add(commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter))
    return parser


@final
class _Parser(argparse.ArgumentParser):
    """A parser that names the word which was perhaps meant."""

    def error(self, message: str) -> NoReturn:
        """Say what was wrong, and what is nearest to it; exit with 2."""
        super().error(message + _nearest(message))


def _nearest(message: str) -> str:
    """Return a hint for argparse's message about a word that it does not know, if a command is near."""
    _, quote, rest = message.partition("invalid choice: '")
    near = difflib.get_close_matches(rest.partition("'")[0], _COMMANDS, n=1) if quote else []
    return f"; did you mean '{near[0]}'?" if near else ""
