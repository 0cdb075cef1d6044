"""Command line, dry runs and proofs: whole engines from a few numbers, and reports about pairs of them."""

from kv_topology.tools._cli import main

__all__ = ["main"]
