"""Builders for the tests of this package."""

from __future__ import annotations

from typing import Any

from kv_scheduler_state import (
    UNBOUND,
    GroupConfig,
    SchedulerConfig,
    SchedulerState,
    prefill_request_params,
    prompt_digest,
)

FULL = GroupConfig("full", block_tokens=16)
WINDOW = GroupConfig("window", block_tokens=16, window_tokens=32)
STATE = GroupConfig("state", block_tokens=16)
BLOCKS = [[1, 2, 3]]


class TokenPrompt:
    """A prompt with these tokens and images."""

    def __init__(self, tokens, images=(), *, refusal=""):
        self.tokens, self.images, self.refusal = tokens, images, refusal

    def digest(self, tokens):
        return prompt_digest(self.tokens[:tokens], media=self.images) if tokens <= len(self.tokens) else None

    def media(self, tokens):
        return (len(self.images), prompt_digest(self.tokens[:tokens])) if self.images else None


SEEDS: Any = {"fence_seed": 100, "nonce_seed": "s"}


def config(**changes):
    base = {"engine_id": "engine-0", "host": "10.0.0.1", "port": 5600, "tp": 2, "fence_slots": 4, **SEEDS}
    return SchedulerConfig(**{**base, **changes})


def scheduler(**changes):
    return SchedulerState(config(**changes))


def ids(lists):
    """The block ids of block lists, group by group."""
    return tuple(tuple(blocks.ids) for blocks in lists)


def renewed(beat):
    """The peer's requests that a heartbeat is about."""
    return tuple(request_id for request_id, _ in beat.readers)


def consumer_params(**changes):
    """The hand-over of vLLM's own connector 0.32, as a router passes it on."""
    base = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "prefill-0",
        "remote_request_id": "cmpl-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 48,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    return {**base, **changes}


def with_ticket(state, request_id="d1", *, prompt_tokens=48, now_s=0.0, **changes):
    """Let a request arrive with a good ticket."""
    admission = state.arrive(
        request_id, consumer_params(**changes), prompt_tokens=prompt_tokens, identity=UNBOUND, now_s=now_s
    )
    assert admission.role == "consumer", admission
    return admission


def allocate(state, name, blocks, new=None, *, external=0, now_s=0.0):
    """Give a request blocks, all of them new if none are named."""
    new = blocks if new is None else new
    state.allocate(name, block_ids=blocks, new_block_ids=new, external_tokens=external, now_s=now_s)


def begin(state, name="p1", blocks=BLOCKS, *, tokens=48, identity=UNBOUND):
    """Let the prompt of a router's first request arrive and get blocks."""
    state.arrive(name, prefill_request_params(), prompt_tokens=tokens, identity=identity, now_s=0.0)
    allocate(state, name, blocks)


def finish(state, name="p1", reason="length", blocks=BLOCKS, tokens=48, *, identity=UNBOUND, now_s=0.0):
    """Finish a request; return the decision."""
    return state.finish(name, reason=reason, block_ids=blocks, computed_tokens=tokens, identity=identity, now_s=now_s)


def hand_over(state, blocks, *, tokens=48, prompt_tokens=0, identity=UNBOUND, name="p1"):
    """Compute a prompt and finish it; return the decision."""
    begin(state, name, blocks, tokens=prompt_tokens or tokens, identity=identity)
    state.take_step_plan(now_s=0.0)
    return finish(state, name, "length", blocks, tokens, identity=identity)
