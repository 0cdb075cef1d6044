"""The command `kv-topology`, also as `python -m kv_topology`: its options need the extra `cli`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, which ends by `SystemExit`; without the extra `cli`, say what to install and exit with 2."""
    try:
        from kv_topology.tools.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print("kv-topology: the command line is not installed: uv pip install 'kv-topology[cli]'", file=sys.stderr)
        sys.exit(2)
    run(arguments)


if __name__ == "__main__":
    main()
