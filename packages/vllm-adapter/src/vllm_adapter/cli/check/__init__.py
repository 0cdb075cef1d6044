"""`vllm-adapter check`: whether two live engines can hand over, and why not."""

from vllm_adapter.cli.check.command import check

__all__ = ["check"]
