"""vLLM's plugin entry point: registers the connector under its own name, so that no module path is needed."""

from __future__ import annotations

from vllm_adapter.cores import allowed_cores

__all__ = ["CONNECTOR_NAME", "register"]

CONNECTOR_NAME = "KVTransferConnector"


def register() -> None:
    """Register `KVTransferConnector` with vLLM's connector factory; safe to call more than once (vLLM does).

    vLLM calls this early in every process. So the process's cores are recorded here, and checks are set up that stop an engine
    before its weights load.
    """
    from vllm_adapter.host.early_checks import check_new_configurations
    from vllm_adapter.host.factory import register_connector

    allowed_cores()
    register_connector(CONNECTOR_NAME, "vllm_adapter.host.connector")
    check_new_configurations()
