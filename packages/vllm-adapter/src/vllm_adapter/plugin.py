"""vLLM's plugin entry point: makes the connector known by its own name, without a module path."""

from __future__ import annotations

__all__ = ["CONNECTOR_NAME", "register"]

CONNECTOR_NAME = "KVTransferConnector"


def register() -> None:
    """Register `KVTransferConnector` with vLLM's connector factory; safe to call more than once (vLLM does)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # noqa: SLF001  (the factory has no public look-up)
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "vllm_adapter.host.connector", CONNECTOR_NAME)
