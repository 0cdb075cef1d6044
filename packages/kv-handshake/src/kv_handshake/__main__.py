"""The command `kv-handshake`, also as `python -m kv_handshake`: its options need the extra `cli`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; without the extra `cli`, say what to install and return 2."""
    try:
        from kv_handshake.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print("kv-handshake: the command line is not installed: uv pip install 'kv-handshake[cli]'", file=sys.stderr)
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
