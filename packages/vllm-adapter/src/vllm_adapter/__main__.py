"""The command `vllm-adapter`, also as `python -m vllm_adapter`: its options need the extra `cli`."""

from __future__ import annotations

import faulthandler
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; without the extra `cli`, say what to install and return 2.

    A crash of native code prints the stack on standard error: without it, an operator sees a bare -11.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    try:
        from vllm_adapter.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print("vllm-adapter: the command line is not installed: uv pip install 'vllm-adapter[cli]'", file=sys.stderr)
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
