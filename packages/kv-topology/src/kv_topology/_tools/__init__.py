"""Dry runs, command line and proofs: whole engines from a few numbers, and reports about pairs of them."""

from kv_topology._tools._engine import build_engine
from kv_topology._tools._engine_values import EngineSpec, ModelSpec, StateSpec

__all__ = ["EngineSpec", "ModelSpec", "StateSpec", "build_engine"]
