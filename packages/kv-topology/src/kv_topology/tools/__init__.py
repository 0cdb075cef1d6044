"""Dry runs and the command line: whole engines from a few numbers, and reports about pairs of them."""

from kv_topology.tools.engine import EngineSpec, ModelSpec, StateSpec, build_engine
from kv_topology.tools.spec import model_from_config

__all__ = ["EngineSpec", "ModelSpec", "StateSpec", "build_engine", "model_from_config"]
