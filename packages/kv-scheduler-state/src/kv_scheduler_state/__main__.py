"""`python -m kv_scheduler_state`: print the page of state machines, or compare it with a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kv_scheduler_state import __version__
from kv_scheduler_state._diagrams import render_state_machines

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Print the page; with `--check FILE` return 1 if the file differs, 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m kv_scheduler_state",
        description="Print the state machines of a hand-over as Markdown with Mermaid diagrams.",
        epilog="Exit codes: 0 printed or equal, 1 the file differs, 2 wrong usage or an unreadable file.",
    )
    parser.add_argument("--check", metavar="FILE", type=Path, help="compare FILE with the page instead of printing it")
    parser.add_argument("--json", action="store_true", help="answer --check as one JSON object")
    parser.add_argument("--version", action="version", version=f"kv-scheduler-state {__version__}")
    options = parser.parse_args(arguments)
    page = render_state_machines()
    if options.check is None:
        sys.stdout.write(page)
        return 0
    try:
        is_equal = options.check.read_text(encoding="utf-8") == page
    except (OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"cannot read {options.check}: {error}\n")
        return 2
    if options.json:
        sys.stdout.write(json.dumps({"file": str(options.check), "is_equal": is_equal}) + "\n")
    elif not is_equal:
        sys.stdout.write(f"{options.check} differs: run `python -m kv_scheduler_state > {options.check}`\n")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
