"""Sketch: where the four libraries plug into SGLang. Type-checked and tried on plain memory; SGLang itself was not run.

SGLang gives its transfer backends a bag of pointers (`KVArgs`) and polls a sender and a receiver for each request. In its
terms: `geometry_of` is made where a `BaseKVManager` registers memory, `Sender` and `Receiver` stand for `BaseKVSender` and
`BaseKVReceiver`, and a ticket takes the place of the per-request frames. SGLang's own backends push, so a `Receiver` here
needs no address of the decode engine at prefill: it reads.

Source of names: sglang 0.5.23, `sglang/srt/disaggregation/base/conn.py`.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from kv_scheduler_state import SchedulerState, TextPrompt, prefill_request_params
from kv_topology import Group, RankGeometry
from kv_topology.layouts import region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class KVArgs(Protocol):
    """SGLang's description of a rank's cache for a backend: all key buffers, then all value buffers, token by token."""

    @property
    def engine_rank(self) -> int: ...
    @property
    def kv_data_ptrs(self) -> Sequence[int]: ...
    @property
    def kv_data_lens(self) -> Sequence[int]: ...
    @property
    def kv_item_lens(self) -> Sequence[int]: ...
    @property
    def page_size(self) -> int: ...
    @property
    def kv_head_num(self) -> int: ...


class KVPoll(IntEnum):
    """SGLang's states of a transfer."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class _Buffer:
    """A pointer as an array: item_len bytes are a page of (token, head, channel); the array interface is all `region` needs."""

    def __init__(self, pointer: int, shape: tuple[int, ...], element_bytes: int) -> None:
        self.__array_interface__: Mapping[str, object] = {
            "data": (pointer, False), "shape": shape, "typestr": f"|V{element_bytes}", "version": 3,
        }  # fmt: skip


def geometry_of(args: KVArgs, *, tp_size: int, total_heads: int, element_bytes: int) -> RankGeometry:
    """Return the geometry of a rank of SGLang, one region for each buffer.

    Example: item_len 4096 with pages of 16 tokens, 2 heads on this rank and 2 bytes an element: 4096 / (16 * 2 * 2) = 64
    channels.
    """
    layers, tp_rank = len(args.kv_data_ptrs) // 2, args.engine_rank % tp_size
    regions = []
    for place, (pointer, size, item) in enumerate(
        zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)
    ):
        channels = item // (args.page_size * args.kv_head_num * element_bytes)
        buffer = _Buffer(pointer, (size // item, args.page_size, args.kv_head_num, channels), element_bytes)
        name, layer = ("key" if place < layers else "value"), f"layers.{place % layers}"
        where = region(
            "page token head channel",
            buffer,
            layer=layer,
            fields=[name],
            heads=total_heads,
            tp_size=tp_size,
            tp_rank=tp_rank,
        )
        regions.append(where)
    return RankGeometry(tp_size, tp_rank, (Group("attention", args.page_size),), tuple(regions))


class Sender:
    """Prefill's side of one request: keeps its pages under a lease until they are read."""

    def __init__(self, state: SchedulerState, request_id: str, input_ids: Sequence[int]) -> None:
        self._state, self._request_id, self._prompt = state, request_id, TextPrompt(input_ids)
        self.ticket: Mapping[str, object] | None = None
        self._is_over = False
        known: dict[str, Any] = {"prompt_tokens": len(input_ids), "identity": self._prompt, "now_s": time.monotonic()}
        state.arrive(request_id, prefill_request_params(), **known)

    def send(self, kv_indices: Sequence[int]) -> None:
        """Offer the pages. The ticket goes to decode with SGLang's bootstrap message."""
        pages, now_s = [list(kv_indices)], time.monotonic()
        self._state.allocate(self._request_id, block_ids=pages, new_block_ids=pages, external_tokens=0, now_s=now_s)
        decision = self._state.finish(
            self._request_id,
            reason="length",
            block_ids=pages,
            computed_tokens=len(self._prompt.token_ids),
            identity=self._prompt,
            now_s=now_s,
        )
        self.ticket, self._is_over = decision.params, not decision.keep_blocks

    def sent(self) -> None:
        """Take in that every rank's lease has ended: the pages are free."""
        self._state.report(sent=[self._request_id], received=[], failed=[])
        self._is_over = True

    def poll(self) -> KVPoll:
        """Return the state as SGLang's scheduler asks for it."""
        if self._is_over:
            return KVPoll.SUCCESS if self.ticket else KVPoll.FAILED
        return KVPoll.TRANSFERRING if self.ticket else KVPoll.WAITING_FOR_INPUT


class Receiver:
    """Decode's side of one request: its read is ordered with the step's plan, and ends once."""

    def __init__(self, state: SchedulerState, request_id: str, ticket: object, input_ids: Sequence[int]) -> None:
        self._state, self._request_id = state, request_id
        prompt, now_s = TextPrompt(input_ids), time.monotonic()
        admission = state.arrive(request_id, ticket, prompt_tokens=len(input_ids), identity=prompt, now_s=now_s)
        self._now = KVPoll.FAILED if admission.rejected_code else KVPoll.WAITING_FOR_INPUT

    def send_metadata(self, kv_indices: Sequence[int], decode_prefix_tokens: int = 0, page_size: int = 1) -> None:
        """Order the read into these pages; those of a prefix hit are not read again."""
        external = self._state.external_tokens(self._request_id, computed_tokens=decode_prefix_tokens) or 0
        pages, new = [list(kv_indices)], [list(kv_indices)[decode_prefix_tokens // page_size :]]
        self._state.allocate(
            self._request_id, block_ids=pages, new_block_ids=new, external_tokens=external, now_s=time.monotonic()
        )
        self._now = KVPoll.TRANSFERRING if external else KVPoll.SUCCESS

    def ended(self, *, is_good: bool) -> None:
        """Take in the one end of the read, when its pages are quiet."""
        names = ([self._request_id], []) if is_good else ([], [self._request_id])
        self._state.report(sent=[], received=names[0], failed=names[1])
        self._now = KVPoll.SUCCESS if is_good else KVPoll.FAILED

    def poll(self) -> KVPoll:
        """Return the state as SGLang's scheduler asks for it."""
        return self._now
