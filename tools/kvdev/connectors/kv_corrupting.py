"""A connector whose every hand-over is wrong: the control of each comparison of texts.

An engine loads it through `"kv_connector_module_path": "kv_corrupting"`, with this folder on its `PYTHONPATH`
(`kvdev.paths.TEST_CONNECTORS`). It flips one byte of the first block that each read brought; a comparison that still calls
the texts equal compares nothing.
"""

from __future__ import annotations

from typing import Any

import torch

import vllm_adapter
from vllm_adapter.host.metadata import StepMetadata
from vllm_adapter.host.vllm import init_logger

__all__ = ["KVTransferConnector", "NixlConnector"]

_logger = init_logger("vllm.vllm_adapter")


class KVTransferConnector(vllm_adapter.KVTransferConnector):
    """The production connector, plus one wrong byte per hand-over."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._first_layer: torch.Tensor | None = None
        self._first_block: dict[str, int] = {}
        _logger.warning("kv_corrupting: one byte of every hand-over will be WRONG. For tests only.")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the first layer's cache, then register all."""
        self._first_layer = next(iter(kv_caches.values()))
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Note where each ordered read lands, then order it."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            for order in metadata.orders.plan.reads:
                ids = [block for blocks in order.local_blocks for block in blocks.ids if block != blocks.null]
                if ids:
                    self._first_block[order.request_id] = ids[0]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Corrupt what was received, then report it as received."""
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            block = self._first_block.pop(request_id, None)
            if block is not None and request_id not in results.failed_recving:
                self._corrupt(block)
        return results

    def _corrupt(self, block: int) -> None:
        """Make one element of a block huge, by its most significant byte.

        Three quarters into a page lies a value, not a key, in every layout that the host has; whatever weight attention
        gives it, it shows. Example: a page of shape (4, 16, 128) changes at (3, 12, 96).
        """
        assert self._first_layer is not None, "reads come after the registration"
        page = self._first_layer[block]
        place = tuple(3 * length // 4 for length in page.shape)
        page[place].view(1).view(torch.uint8)[-1] = 0x7F


class NixlConnector(KVTransferConnector):
    """The same connector under the name that vLLM's own checks look for."""
