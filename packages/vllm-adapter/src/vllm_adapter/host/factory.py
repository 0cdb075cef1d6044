"""Registration with vLLM's connector factory."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["register_connector"]


def register_connector(name: str, module: str) -> None:
    """Register a connector class by name; its module is loaded on first use; idempotent."""
    if name not in KVConnectorFactory._registry:  # noqa: SLF001  (the factory has no public look-up)
        KVConnectorFactory.register_connector(name, module, name)
