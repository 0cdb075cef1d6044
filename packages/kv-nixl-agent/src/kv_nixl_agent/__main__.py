"""The command `kv-nixl`, also as `python -m kv_nixl_agent`: its options need the extra `cli`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, which ends by `SystemExit`; without the extra `cli`, say what to install and exit with 2."""
    try:
        from kv_nixl_agent.tools.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print("kv-nixl: the command line is not installed: uv pip install 'kv-nixl-agent[cli]'", file=sys.stderr)
        sys.exit(2)
    run(arguments)


if __name__ == "__main__":
    main()
