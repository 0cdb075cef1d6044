"""Plug the KV-transfer packages into an unmodified vLLM.

Importing this package does not import vLLM: the connector classes are loaded when vLLM asks for them by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.host.connector import KVTransferConnector as KVTransferConnector
    from vllm_adapter.host.connector import NixlConnector as NixlConnector
    from vllm_adapter.host.connector import NixlPullConnector as NixlPullConnector

__version__ = "0.3.0"

__all__ = ["KVTransferConnector", "NixlConnector", "NixlPullConnector", "__version__"]


def __getattr__(name: str) -> object:
    if name in {"KVTransferConnector", "NixlConnector", "NixlPullConnector"}:
        from vllm_adapter.host import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
