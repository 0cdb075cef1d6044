"""Cost of the scheduler hooks, against plain dictionaries such as vLLM's own connector keeps.

The baseline does hook by hook what a pull scheduler cannot do without: note an arrival for heartbeats, put a request into the
dictionary of its next step, build the step's metadata, write the ticket. It validates nothing and knows no fence. Its full
scans are the two that vLLM's makes per step: over everything scheduled (host-buffer mode), and over all leases.

Both sides get lists of block ids. The ids are from the middle of a pool; a ticket that names block 0 or 1 pays a second pass over
them, 1 us.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from _rows import by_turns, row

from kv_scheduler_state import UNBOUND, LeaseTable, SchedulerConfig, SchedulerState, prefill_request_params

ROUNDS = 15
LIVES = 400
BLOCKS = list(range(4096, 4160))
TOKENS = 1024
LIVE = 1_000
LEASES = 10_000
_HERE = {"remote_engine_id": "prefill-0", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1}
_OF_A_READ = ("remote_block_ids", *_HERE, "remote_request_id", "remote_num_tokens")


class _Baseline:
    """Dictionaries by request, and the client's own one as the state machine."""

    def __init__(self) -> None:
        self.to_receive: dict[str, tuple[Mapping[str, Any], Any]] = {}
        self.to_save: dict[str, Any] = {}
        self.to_send: dict[str, float] = {}
        self.beats: dict[str, tuple[str, str]] = {}

    def arrived(self, request_id: str, params: dict[str, Any]) -> int:
        """Return how many tokens come from elsewhere."""
        if not params.get("do_remote_prefill"):
            return 0
        self.beats[request_id] = params["remote_engine_id"], params["remote_request_id"]
        return TOKENS

    def allocated(self, request_id: str, params: dict[str, Any], new_blocks: list[list[int]]) -> None:
        if params.get("do_remote_prefill"):
            self.to_receive[request_id] = params, [list(group) for group in new_blocks]
            params["do_remote_prefill"] = False

    def step(self, scheduled: Mapping[str, int]) -> dict[str, Any]:
        reads = {
            request_id: {"local_block_ids": blocks, **{key: params.get(key) for key in _OF_A_READ}}
            for request_id, (params, blocks) in self.to_receive.items()
        }
        saves = [request_id for request_id in scheduled if self.to_save.get(request_id) is not None]
        meta = {"reads": reads, "saves": saves, "sends": self.to_send, "clock_s": time.perf_counter()}
        self.to_receive, self.to_send = {}, {}
        return meta

    def finished(self, request_id: str, params: dict[str, Any], blocks: list[list[int]]) -> dict[str, Any] | None:
        self.beats.pop(request_id, None)
        if not params.get("do_remote_decode"):
            return None
        self.to_send[request_id] = time.perf_counter() + 30
        ticket = {"do_remote_prefill": True, "remote_block_ids": [list(group) for group in blocks], **_HERE}
        return {**ticket, "remote_request_id": request_id, "remote_num_tokens": TOKENS}


def _state(**changes: Any) -> SchedulerState:
    seeds: Any = {"fence_seed": 1, "nonce_seed": "n"}
    return SchedulerState(SchedulerConfig("engine-0", "10.0.0.1", 5600, **seeds, **changes))


def _ticket(number: int) -> dict[str, Any]:
    """Return a ticket of another engine; each is of a request of its own, as one that was read is not read again."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [BLOCKS], "tp_size": 1}
    peer = {"remote_engine_id": "prefill-0", "remote_request_id": f"r{number}", "remote_host": "10.0.0.2"}
    fence = [number % 4096, 77 + number]
    return {**params, **peer, "remote_port": 5600, "kv_lease_s": 30.0, "kv_fence": fence, "remote_num_tokens": TOKENS}


def _our_lives(state: SchedulerState) -> None:
    blocks, clock = [BLOCKS], time.monotonic
    for index in range(LIVES):
        request_id = f"p{index}"
        state.arrive(request_id, prefill_request_params(), prompt_tokens=TOKENS, identity=UNBOUND, now_s=clock())
        state.external_tokens(request_id, computed_tokens=0)
        state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.finish(
            request_id, reason="length", block_ids=blocks, computed_tokens=TOKENS, identity=UNBOUND, now_s=clock()
        )
        state.take_step_plan(now_s=clock())
        state.report(sent=(request_id,), received=(), failed=())
        request_id = f"d{index}"
        state.arrive(request_id, _ticket(index), prompt_tokens=TOKENS, identity=UNBOUND, now_s=clock())
        tokens = state.external_tokens(request_id, computed_tokens=0)
        state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=tokens or 0, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.report(sent=(), received=(request_id,), failed=())
        state.allocate(request_id, block_ids=blocks, new_block_ids=[[]], external_tokens=0, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.finish(
            request_id, reason="stop", block_ids=blocks, computed_tokens=TOKENS, identity=UNBOUND, now_s=clock()
        )


def _baseline_lives(state: _Baseline) -> None:
    blocks = [BLOCKS]
    for index in range(LIVES):
        request_id, params = f"p{index}", prefill_request_params()
        state.arrived(request_id, params)
        state.allocated(request_id, params, blocks)
        state.step({request_id: TOKENS})
        state.finished(request_id, params, blocks)
        state.step({})
        request_id, params = f"d{index}", _ticket(index)
        state.arrived(request_id, params)
        state.allocated(request_id, params, blocks)
        state.step({})
        state.beats.pop(request_id)
        state.allocated(request_id, params, [[]])
        state.step({request_id: 1})
        state.finished(request_id, params, blocks)


def _life_rows() -> list[dict[str, object]]:
    ours, baseline = by_turns(ROUNDS, lambda: _our_lives(_state()), lambda: _baseline_lives(_Baseline()))
    return [row("request-life", "us", ours / LIVES, baseline / LIVES)]


def _live_state(requests: int) -> SchedulerState:
    state = _state(heartbeat_s=29.0)
    for number in range(requests):
        state.arrive(f"d{number}", _ticket(number), prompt_tokens=TOKENS, identity=UNBOUND, now_s=1.0)
    state.take_step_plan(now_s=1.0)
    return state


def _idle_step_rows() -> list[dict[str, object]]:
    state, small = _live_state(LIVE), _live_state(10)
    baseline = _Baseline()
    scheduled = {f"d{index}": 1 for index in range(LIVE)}
    step = partial(state.take_step_plan, now_s=1.0)
    ours, theirs = by_turns(ROUNDS, step, lambda: baseline.step(scheduled), repeat=300)
    large, little = by_turns(ROUNDS, step, partial(small.take_step_plan, now_s=1.0), repeat=3000)
    return [
        row(f"idle-step-{LIVE}-live", "us", ours, theirs, "<= 0.2"),
        row(f"idle-step-{LIVE}-live-against-10", "us", large, little, "<= 1.5"),
    ]


def _lease_rows() -> list[dict[str, object]]:
    table = LeaseTable()
    deadlines: dict[str, float] = {}
    for index in range(LEASES):
        table.grant(f"p{index}", lease_s=30.0 + index % 7, fence=(index, index + 1), now_s=1.0)
        deadlines[f"p{index}"] = 31.0 + index % 7
    ours, theirs = by_turns(
        ROUNDS,
        lambda: table.take_ended(now_s=2.0),
        lambda: [request_id for request_id, deadline in deadlines.items() if deadline <= 2.0],
        repeat=50,
    )
    return [row(f"idle-look-{LEASES}-leases", "us", ours, theirs, "<= 0.2")]


def run() -> Iterator[dict[str, object]]:
    """Yield one row per figure (medians of interleaved runs)."""
    for measure in (_life_rows, _idle_step_rows, _lease_rows):
        yield from measure()
