"""`python -m vllm_adapter`: the command line `vllm-adapter`."""

from __future__ import annotations

import sys

from vllm_adapter.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
