"""Our connector with probes for tests, as engines load it: `kv_connector_module_path` is `probe_connector`.

It stands on vLLM's hooks and on NIXL's Python calls, not on the connector's own parts. All that it does is asked for by
environment variables and by files in the folder that `KVDEV_PROBE_FOLDER` names:

- `KVDEV_PROBE_CORRUPT=1`: make one element of the first page of every received hand-over huge: the control of every comparison.
- `KVDEV_PROBE_MIRROR=1`: host-buffer mode on a device that does not need it.
- `KVDEV_PROBE_RECEIVED=1`: write `REQUEST.RANK.npz`, this rank's whole cache, at the moment a hand-over has been received.
- `KVDEV_PROBE_SETTINGS`: a JSON object of settings that are no keys, such as `engine_ttl`.
- a file `dump.RANK`: write `now.RANK.npz`, the same, at the next step, and remove the file.
- a file `disconnect`: report the next read of pages that is complete as a lost connection instead, and remove the file.

Beside them it writes `REQUEST.blocks.json`, the blocks of each request that waits for a hand-over, and `groups.json`.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import msgspec
import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from vllm_adapter import NixlConnector as Connector
from vllm_adapter.config import load_settings
from vllm_adapter.host import connector as host_connector
from vllm_adapter.host import vllm as host_vllm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NixlConnector"]


def _is_set(name: str) -> bool:
    return os.environ.get(f"KVDEV_PROBE_{name}") == "1"


for _name in filter(_is_set, ("CORRUPT", "MIRROR", "RECEIVED")):
    print(f"KVDEV_PROBE_{_name} is set: for tests only", flush=True)


def _load_settings(extra: Mapping[str, object]) -> Any:
    settings, notes = load_settings(extra)
    return msgspec.structs.replace(settings, **json.loads(os.environ.get("KVDEV_PROBE_SETTINGS", "{}"))), notes


vars(host_connector)["load_settings"] = _load_settings


class NixlConnector(Connector):
    """Under the name that vLLM's own checks look for."""

    _is_loaded = False
    _loaded: ClassVar[list[str]] = []
    """Requests whose hand-over was received before the host gave them blocks, in this process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._folder = Path(os.environ["KVDEV_PROBE_FOLDER"])
        self._caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]] = {}
        if _is_set("MIRROR"):
            vars(host_vllm)["wants_host_buffer"] = lambda _config: True
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            _let_connections_be_lost(self._folder / "disconnect")
        else:
            groups = [
                {
                    "block_tokens": group.kv_cache_spec.block_size,
                    "layers": group.layer_names,
                    "state_shapes": getattr(group.kv_cache_spec, "shapes", ()),
                }
                for group in kv_cache_config.kv_cache_groups
            ]
            _write(self._folder / "groups.json", json.dumps(groups).encode())

    # ------------------------------------------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._is_loaded = bool(tokens) and not is_later
        return tokens, is_later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            if self._is_loaded:  # this process has the worker, too
                self._loaded.append(request.request_id)
            ids = [list(group) for group in blocks.get_block_ids()]
            _write(self._file(request.request_id, "blocks.json"), json.dumps(ids).encode())
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    # ---------------------------------------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        asked = self._folder / f"dump.{get_tensor_model_parallel_rank()}"
        if asked.exists():
            self._dump("now")
            asked.unlink()
        self._received(self._loaded)
        self._loaded.clear()
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._received(sorted(results.finished_recving - results.failed_recving))
        return results

    def _received(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if _is_set("RECEIVED"):
                self._dump(quote(request_id, safe=""))
            if _is_set("CORRUPT"):
                self._corrupt_first_page(request_id)

    def _dump(self, name: str) -> None:
        arrays = {
            f"{layer}/{number}": part.numpy()
            for layer, cache in self._caches.items()
            for number, part in enumerate([cache] if isinstance(cache, torch.Tensor) else cache)
        }
        target = self._folder / f"{name}.{get_tensor_model_parallel_rank()}.npz"
        part = _unfinished(target)
        with part.open("wb") as sink:
            np.savez(sink, **arrays)
        part.rename(target)

    def _corrupt_first_page(self, request_id: str) -> None:
        """Three quarters into a page lies a value, not a key, in every layout of vLLM; whatever its weight, it shows."""
        blocks = json.loads(self._file(request_id, "blocks.json").read_bytes())
        cache = next(iter(self._caches.values()))
        assert isinstance(cache, torch.Tensor)
        page = cache[next(group[0] for group in blocks if group)]
        page[tuple(3 * length // 4 for length in page.shape)].view(1).view(torch.uint8)[-1] = 0x7F

    def _file(self, request_id: str, ending: str) -> Path:
        return self._folder / f"{quote(request_id, safe='')}.{ending}"


def _write(path: Path, data: bytes) -> None:
    part = _unfinished(path)
    part.write_bytes(data)
    part.rename(path)


def _unfinished(path: Path) -> Path:
    """Return the name of a file that is being written; engines that share a folder write the same ones at the same time."""
    return path.with_suffix(f".{os.getpid()}.part")


def _let_connections_be_lost(order: Path) -> None:
    """Let NIXL say of one complete read of several descriptors (a fence is one) that its peer is gone, if a file orders it."""
    nixl = importlib.import_module("nixl")
    agent: Any = nixl.nixl_agent
    make, check, post = agent.make_prepped_xfer, agent.check_xfer_state, agent.transfer
    reads: set[int] = set()

    def made(self: Any, operation: str, local: Any, indices: Any, *rest: Any, **more: Any) -> Any:
        handle = make(self, operation, local, indices, *rest, **more)
        (reads.add if operation == "READ" and len(indices) > 1 else reads.discard)(handle._handle)
        return handle

    def seen(handle: Any, state: str) -> str:
        if state == "DONE" and handle._handle in reads and order.exists():
            order.unlink()
            raise nixl.nixlRemoteDisconnectError("injected by a test")
        return state

    agent.make_prepped_xfer = made
    agent.check_xfer_state = lambda self, handle: seen(handle, check(self, handle))
    agent.transfer = lambda self, handle, *rest: seen(handle, post(self, handle, *rest))
