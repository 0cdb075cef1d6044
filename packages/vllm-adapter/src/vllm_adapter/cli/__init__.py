"""Command line `vllm-adapter`, for operators."""

from vllm_adapter.cli.command import main

__all__ = ["main"]
