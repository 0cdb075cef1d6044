"""Sketch: where the four libraries plug into TensorRT-LLM. Type-checked and tried on plain memory; TensorRT-LLM was not run.

TensorRT-LLM drives a `KvCacheTransceiver`: context ranks *respond*, generation ranks *request*, and both are asked which
requests are done. `geometry_of` is made from its `RankInfo` and pool pointers; the ticket travels as the `opaque_state` of
its `DisaggregatedParams`, and `Transceiver` has the calls that its executor makes.

Source of names: TensorRT-LLM, `tensorrt_llm/_torch/pyexecutor/kv_cache_transceiver.py` and `_torch/disaggregation/native/`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Protocol

from kv_scheduler_state import SchedulerState, TextPrompt, prefill_request_params
from kv_topology import Group, RankGeometry
from kv_topology.layouts import region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class AttentionInfo(Protocol):
    """The attention part of TensorRT-LLM's `RankInfo`."""

    @property
    def kv_heads_per_rank(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def dims_per_head(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def is_mla(self) -> bool: ...


class LlmRequest(Protocol):
    """The members of TensorRT-LLM's request that a transceiver needs."""

    @property
    def py_request_id(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def block_ids(self) -> Sequence[int]: ...

    opaque_state: bytes | None


class _Pool:
    """A pool's memory by CUDA's array interface."""

    def __init__(self, pointer: int, shape: tuple[int, ...], element_bytes: int) -> None:
        self.__cuda_array_interface__: Mapping[str, object] = {
            "data": (pointer, False), "shape": shape, "typestr": f"|V{element_bytes}", "version": 3,
        }  # fmt: skip


def geometry_of(
    info: AttentionInfo, pools: Mapping[str, int], blocks: int, *, total_heads: int, tp_size: int, tp_rank: int
) -> RankGeometry:
    """Return the geometry of a rank with one pool for each layer, a block's keys before its values, heads before tokens.

    Example: 2 heads, 32 tokens and 128 dims of 2 bytes: a block is 2 * 2 * 32 * 128 * 2 = 32768 bytes.
    """
    tail = (info.tokens_per_block, info.dims_per_head)
    regions = []
    for layer, pointer in pools.items():
        if info.is_mla:
            pool = _Pool(pointer, (blocks, *tail), info.element_bytes)
            regions.append(region("page token channel", pool, layer=layer, fields=["latent"]))
        else:
            pool = _Pool(pointer, (blocks, 2, info.kv_heads_per_rank, *tail), info.element_bytes)
            axes = "page kv head token channel"
            regions.append(region(axes, pool, layer=layer, heads=total_heads, tp_size=tp_size, tp_rank=tp_rank))
    group = Group("latent" if info.is_mla else "attention", info.tokens_per_block)
    return RankGeometry(tp_size, tp_rank, (group,), tuple(regions))


class Transceiver:
    """The calls of TensorRT-LLM's executor, over the request machines of one engine."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._sent: list[int] = []
        self._received: list[int] = []
        self._failed: list[int] = []

    def respond_and_send_async(self, req: LlmRequest) -> None:
        """Offer a computed prompt: the ticket goes out as the request's opaque state."""
        name, pages, now_s = str(req.py_request_id), [list(req.block_ids)], time.monotonic()
        prompt = TextPrompt(req.prompt_token_ids)
        self._state.arrive(name, prefill_request_params(), prompt_tokens=req.prompt_len, identity=prompt, now_s=now_s)
        self._state.allocate(name, block_ids=pages, new_block_ids=pages, external_tokens=0, now_s=now_s)
        decision = self._state.finish(
            name, reason="length", block_ids=pages, computed_tokens=req.prompt_len, identity=prompt, now_s=now_s
        )
        req.opaque_state = None if decision.params is None else json.dumps(dict(decision.params)).encode()
        if not decision.keep_blocks:
            self._sent.append(req.py_request_id)

    def request_and_receive_async(self, req: LlmRequest) -> None:
        """Order the read of a prompt; a bad ticket ends at once as failed, and the prompt is computed here."""
        name, now_s = str(req.py_request_id), time.monotonic()
        ticket = json.loads(req.opaque_state) if req.opaque_state else None
        prompt = TextPrompt(req.prompt_token_ids)
        self._state.arrive(name, ticket, prompt_tokens=req.prompt_len, identity=prompt, now_s=now_s)
        external, pages = self._state.external_tokens(name, computed_tokens=0) or 0, [list(req.block_ids)]
        self._state.allocate(name, block_ids=pages, new_block_ids=pages, external_tokens=external, now_s=now_s)
        if not external:
            self._failed.append(req.py_request_id)

    def ended(self, *, sent: Sequence[str] = (), received: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        """Take in what the ranks' transfer threads report."""
        self._state.report(sent=sent, received=received, failed=failed)
        for mine, reported in ((self._sent, sent), (self._received, received), (self._failed, failed)):
            mine.extend(int(name) for name in reported)

    def check_context_transfer_status(self, at_least_request_num: int) -> list[int]:
        """Return the requests whose blocks may be given back."""
        del at_least_request_num  # nothing is waited for here: the executor asks again
        done, self._sent = self._sent, []
        return done

    def check_gen_transfer_status(self, at_least_request_num: int) -> tuple[list[int], list[int]]:
        """Return the requests whose prompt has arrived, and those that must compute it."""
        del at_least_request_num
        (received, failed), self._received, self._failed = (self._received, self._failed), [], []
        return received, failed
