"""Command line, dry runs and proofs: whole engines from a few numbers, and reports about pairs of them."""

from kv_topology._tools._cli import main
from kv_topology._tools._engine import EngineSpec, ModelSpec, StateSpec, build_engine

__all__ = ["EngineSpec", "ModelSpec", "StateSpec", "build_engine", "main"]
