"""Blocks that the first token after a hand-over sees, by vLLM's own allocation and by plain arithmetic, at every prompt length.

vLLM computes the last token of a prompt again where all of it was loaded, in blocks that it laid out for the token behind it.
Example: a window of 32, blocks of 16, a prompt of 47 tokens. Token 46 sees tokens 15 to 46; for token 47, which sees 16 to 47,
vLLM would keep no block of tokens 0 to 15.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import BLOCK, FULL, hand_over, prompt
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from kv_scheduler_state import SchedulerConfig

_HEADS = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
_LONGEST = 6 * BLOCK + 2


def _window(tokens: int) -> Any:
    return SlidingWindowSpec(block_size=BLOCK, sliding_window=tokens, **_HEADS)


def _chunked(tokens: int) -> Any:
    return ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=tokens, **_HEADS)


def _first_seen(spec: Any, token: int) -> int:
    """Return the first token that a token sees in a layer of this kind."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, token - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return token // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


@pytest.mark.never_wrong("A8")
@pytest.mark.parametrize("peer", ["ours", "of vLLM's kind"])
@pytest.mark.parametrize(
    "reach",
    [_window(1), _window(BLOCK), _window(20), _window(2 * BLOCK), _window(33), _chunked(BLOCK), _chunked(3 * BLOCK)],
    ids=lambda spec: (
        f"{type(spec).__name__}-{getattr(spec, 'sliding_window', getattr(spec, 'attention_chunk_size', 0))}"
    ),
)
def test_every_token_that_the_first_one_sees_was_handed_over(
    make_engine: Any, reach: Any, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peer != "ours":  # computes every token of a prompt
        monkeypatch.setattr(SchedulerConfig, "left_tokens", lambda _config, _tokens: 0)
    specs = (FULL, reach)
    producer, consumer = (make_engine(name, specs=specs, prefix_caching=False) for name in "PD")
    loaded = 0
    for length in range(1, _LONGEST):
        name = f"r{length}"
        ticket = hand_over(producer, name, prompt(length, seed=length))
        if peer != "ours":
            ticket = {key: value for key, value in ticket.items() if not key.startswith("kv_")}
        request = consumer.add(name, prompt(length, seed=length), max_tokens=1, params=ticket)
        loaded += _run_to_first_token(consumer, request, specs)
        producer.step(sent=[name])
    # A peer that computes every token has lost the last window's first block at one length of each block's.
    assert loaded >= (_LONGEST - 2) * (1 if peer == "ours" else 14 / 16), "nearly all of them were handed over"
    consumer.assert_nothing_left()
    producer.assert_nothing_left()


def _run_to_first_token(consumer: Any, request: Any, specs: tuple[Any, ...]) -> bool:
    """Run a request until it has computed its prompt, and look at the blocks of that step; return whether it was read."""
    name, steps = request.request_id, 0
    scheduled = consumer.step()
    reads = [order for order in consumer.plans[-1].plan.reads if order.is_reported]
    if reads:
        consumer.step(received=[name])
        held: dict[str, Any] = {}
        manager = consumer.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def noting(asked: Any, *args: Any, **more: Any) -> Any:
            held["first"] = asked.num_computed_tokens
            found = allocate(asked, *args, **more)
            held["blocks"] = consumer.blocks(name)
            return found

        manager.allocate_slots = noting
        try:
            scheduled = consumer.step()
        finally:
            manager.allocate_slots = allocate
        (read,) = reads
        first = held["first"]
        assert first + scheduled[name] == request.num_prompt_tokens
        for spec, blocks, local, there in zip(
            specs, held["blocks"], read.local_blocks, read.ticket.peer_blocks, strict=True
        ):
            for token in range(first, request.num_prompt_tokens):
                seen = range(_first_seen(spec, token), token + 1)
                missing = [each for each in seen if not blocks[each // BLOCK]]
                assert not missing, f"{type(spec).__name__}: token {token} of {len(blocks)} blocks sees {missing}"
                unread = [each for each in seen if each < first and blocks[each // BLOCK] not in local.ids]
                assert not unread, f"{type(spec).__name__}: token {token} sees {unread}, which were not read"
                lost = [each for each in seen if each < first and not _is_held(there, each)]
                assert not lost, f"{type(spec).__name__}: token {token} sees {lost}, which the peer has not kept"
    while consumer.scheduler.has_requests():
        consumer.step()
        steps += 1
        assert steps < 16
    return bool(reads)


def _is_held(there: Any, token: int) -> bool:
    """Return whether the peer lists a real block for a token; 0 is vLLM's block for none."""
    at = (token - there.first_token) // BLOCK
    return 0 <= at < len(there.ids) and there.ids[at] != 0
