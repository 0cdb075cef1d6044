"""vLLM's plugin entry point: makes the connector known by its own name, without a module path."""

from __future__ import annotations

__all__ = ["CONNECTOR_NAME", "register"]

CONNECTOR_NAME = "KVTransferConnector"


def register() -> None:
    """Register `KVTransferConnector` with vLLM's connector factory; safe to call more than once (vLLM does)."""
    from vllm_adapter.host.factory import register_connector

    register_connector(CONNECTOR_NAME, "vllm_adapter.host.connector")
