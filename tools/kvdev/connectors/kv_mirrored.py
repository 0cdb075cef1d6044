"""A connector that mirrors the cache in host memory on every device: host-buffer mode on CPU engines.

An engine loads it through `"kv_connector_module_path": "kv_mirrored"`, with this folder on its `PYTHONPATH`
(`kvdev.paths.TEST_CONNECTORS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm_adapter
from vllm_adapter.host.vllm import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["KVTransferConnector", "NixlConnector"]

_logger = init_logger("vllm.vllm_adapter")


class KVTransferConnector(vllm_adapter.KVTransferConnector):
    """The production connector in host-buffer mode, whatever the device."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _logger.warning("kv_mirrored: the cache is mirrored in host memory. For tests only.")

    @classmethod
    def _wants_mirror(cls, vllm_config: VllmConfig) -> bool:  # noqa: ARG003  (always)
        return True


class NixlConnector(KVTransferConnector):
    """The same connector under the name that vLLM's own checks look for."""
