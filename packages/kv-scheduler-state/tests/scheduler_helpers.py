"""Builders for the tests of this package."""

from __future__ import annotations

from kv_scheduler_state import GroupConfig, SchedulerConfig, SchedulerState, prefill_request_params

FULL = GroupConfig("full", block_tokens=16)
WINDOW = GroupConfig("window", block_tokens=16, window_tokens=32)
STATE = GroupConfig("state", block_tokens=16)


def config(**changes):
    base = {"engine_id": "engine-0", "host": "10.0.0.1", "port": 5600, "tp": 2, "fence_slots": 4, "fence_seed": 100}
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
    admission = state.arrive(request_id, consumer_params(**changes), prompt_tokens=prompt_tokens, now_s=now_s)
    assert admission.role == "consumer", admission
    return admission


def hand_over(state, blocks, *, tokens=48, prompt_tokens=0, identity=None, name="p1", reason="length"):
    """Compute a prompt and finish it; return the decision."""
    state.arrive(name, prefill_request_params(), prompt_tokens=prompt_tokens or tokens, identity=identity, now_s=0.0)
    state.allocate(name, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
    state.take_step_plan(now_s=0.0)
    return state.finish(name, reason=reason, block_ids=blocks, computed_tokens=tokens, identity=identity, now_s=0.0)
