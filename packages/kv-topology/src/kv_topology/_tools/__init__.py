"""Command line, dry runs and proofs: whole engines from a few numbers, and reports about pairs of them."""

from kv_topology._tools._cli import main
from kv_topology._tools._engine import build_engine
from kv_topology._tools._engine_values import EngineSpec, ModelSpec, StateSpec

__all__ = ["EngineSpec", "ModelSpec", "StateSpec", "build_engine", "main"]
