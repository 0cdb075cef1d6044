"""Cost of the scheduler hooks, against the plain dictionaries that vLLM's own connector keeps.

The baseline below re-implements the scheduler half of that connector (its pull scheduler) hook by hook: look into the
client's dictionary, note the request for heartbeats, put it into one of five dictionaries, build the step's metadata
objects, log at debug level. It validates nothing and knows no fence. Its full scans are the two that it makes per step:
over everything scheduled (host-buffer mode), and over all leases.

Both sides get lists of block ids. The original walks the engine's block objects twice per read for them, which is left
out here: driven through the same life it took 1.7 times as long as this baseline, 1.5 times without the walk that makes
the lists. The ids are from the middle of a pool; a ticket that names block 0 or 1 pays a second pass over them, 1 us.
"""

from __future__ import annotations

import logging
import time
import tracemalloc
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from _rows import by_turns, row, said

from kv_scheduler_state import LeaseTable, SchedulerConfig, SchedulerState, prefill_request_params

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 15
LIVES = 400
BLOCKS = list(range(4096, 4160))
TOKENS = 1024
LIVE = 1_000
LEASES = 10_000
_logger = logging.getLogger("bench.scheduler")


@dataclass
class _PeerMeta:
    block_ids: Any
    host: str
    port: int
    engine_id: str
    request_id: str
    expiry_s: float | None = None
    tokens: int | None = None


@dataclass
class _RequestMeta:
    local_block_ids: Any
    local_physical_block_ids: Any
    tp_size: int
    dcp_size: int = 1
    computed_blocks: tuple[int, ...] = ()
    remote: _PeerMeta | None = None
    peer_block_tokens: int | None = None
    pp_size: int = 1
    is_awaited: bool = False
    blocks_to_zero: Any = None


def _receive_meta(params: dict[str, Any], local: Any, computed: tuple[int, ...], is_awaited: bool) -> _RequestMeta:
    get = params.get
    entry = _RequestMeta(local, local, get("tp_size", 1), get("dcp_size", 1), computed)
    entry.peer_block_tokens, entry.pp_size, entry.is_awaited = get("remote_block_size"), get("pp_size", 1), is_awaited
    where = params["remote_host"], params["remote_port"], params["remote_engine_id"], params["remote_request_id"]
    told = get("remote_blocks_expiry_time"), get("remote_num_tokens")
    entry.remote = _PeerMeta(params["remote_block_ids"], *where, *told)
    return entry


@dataclass
class _Beat:
    request_ids: set[str]
    host: str
    port: int
    tp_size: int
    dcp_size: int = 1
    pp_size: int = 1


class _StepMeta:
    def __init__(self) -> None:
        self.to_receive: dict[str, _RequestMeta] = {}
        self.to_save: dict[str, _RequestMeta] = {}
        self.to_send: dict[str, float] = {}
        self.clock_s = 0.0
        self.in_batch: set[str] = set()
        self.not_processed: set[str] = set()
        self.beats: dict[str, _Beat] = {}
        self.registrations: dict[str, Any] = {}
        self.finished_blocks: dict[str, Any] = {}


@dataclass
class _Request:
    request_id: str
    params: dict[str, Any] | None
    prompt_tokens: int
    status: str = "stop"


_SIZES = {"tp_size": 1, "dcp_size": 1, "pp_size": 1, "transfer_mode": "pull"}
_HERE = {"remote_engine_id": "prefill-0", "remote_host": "10.0.0.1", "remote_port": 5600, **_SIZES}
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass
class _Baseline:
    """Five dictionaries, two more for heartbeats, and the client's own one as the state machine."""

    uses_host_buffer: bool = False
    has_state: bool = False
    is_bidirectional: bool = False
    lookahead_tokens: int = 0
    need_receive: dict[str, Any] = field(default_factory=dict)
    need_save: dict[str, _Request] = field(default_factory=dict)
    need_send: dict[str, float] = field(default_factory=dict)
    in_batch: set[str] = field(default_factory=set)
    not_processed: set[str] = field(default_factory=set)
    beats: dict[str, _Beat] = field(default_factory=dict)
    beat_keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    beaten_s: float = 0.0

    def backoff(self) -> int:
        return max(1 if self.has_state else 0, self.lookahead_tokens - 1)

    def arrived(self, request: _Request) -> None:
        params = request.params
        if params is not None and params.get("do_remote_decode"):
            backoff = self.backoff()
            if backoff and not params.get("_p_side_truncated") and request.prompt_tokens > backoff:
                request.prompt_tokens -= backoff
                params["_p_side_truncated"] = True
        if params is None or not params.get("do_remote_prefill"):
            return
        engine_id, peer_request_id = params.get("remote_engine_id"), params.get("remote_request_id")
        host, port, tp_size = params.get("remote_host"), params.get("remote_port"), params.get("tp_size")
        dcp_size, pp_size = params.get("dcp_size", 1), params.get("pp_size", 1)
        if engine_id is None or peer_request_id is None or host is None or port is None or tp_size is None:
            return
        if engine_id not in self.beats:
            self.beats[engine_id] = _Beat(set(), host, port, tp_size, dcp_size, pp_size)
        self.beats[engine_id].request_ids.add(peer_request_id)
        self.beat_keys[request.request_id] = (engine_id, peer_request_id)

    def stop_beat(self, request_id: str) -> None:
        if (key := self.beat_keys.pop(request_id, None)) and (beat := self.beats.get(key[0])):
            beat.request_ids.discard(key[1])
            if not beat.request_ids:
                del self.beats[key[0]]

    def matched(self, request: _Request, computed: int) -> tuple[int, bool]:
        params = request.params
        _logger.debug("matched: computed=%s params=%s", computed, params)
        if params is not None and params.get("do_remote_prefill"):
            backoff = self.backoff()
            tokens = request.prompt_tokens
            count = (tokens - backoff if backoff and tokens > backoff else tokens) - computed
            if count > 0:
                return count, True
        is_readback = params is not None and params.get("do_remote_decode") and params.get("remote_block_ids")
        return (request.prompt_tokens, True) if is_readback else (0, False)

    def clip(self, blocks: Any) -> Any:
        return blocks if len(blocks) == 0 else tuple(blocks[group] for group in (0,))

    def allocated(self, request: _Request, blocks: list[list[int]], new: list[list[int]], external: int) -> None:
        params = request.params
        _logger.debug("allocated: external=%s params=%s", external, params)
        if not params:
            return
        if params.get("do_remote_decode") or (params.get("do_remote_prefill") and self.is_bidirectional):
            self.in_batch.add(request.request_id)
        if self.uses_host_buffer and params.get("do_remote_decode"):
            self.need_save[request.request_id] = request
        elif params.get("do_remote_prefill"):
            if params.get("remote_block_ids") and all(name in params for name in _NEEDED):
                local = self.clip(new if external > 0 else ())
                computed = tuple(len(group) - len(fresh) for group, fresh in zip(blocks, new, strict=True))
                self.need_receive[request.request_id] = (request, local, computed, external > 0)
            params["do_remote_prefill"] = False
            params["_remote_blocks_processed"] = True

    def step(self, scheduled: dict[str, int]) -> _StepMeta:
        meta = _StepMeta()
        for request_id, (request, local, computed, is_awaited) in self.need_receive.items():
            meta.to_receive[request_id] = _receive_meta(request.params, local, computed, is_awaited)
        if self.uses_host_buffer:
            for request_id in scheduled:
                if self.need_save.get(request_id) is None:
                    continue
        meta.to_send = self.need_send
        meta.clock_s = time.perf_counter()
        meta.in_batch, meta.not_processed = self.in_batch, self.not_processed
        if self.beats:
            now_s = time.perf_counter()
            if now_s - self.beaten_s >= 5.0:
                self.beaten_s = now_s
                meta.beats = self.beats
        self.need_receive.clear()
        self.need_send, self.in_batch, self.not_processed = {}, set(), set()
        return meta

    def reported(self, received: tuple[str, ...]) -> None:
        for request_id in received:
            self.stop_beat(request_id)

    def finished(self, request: _Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        from concurrent.futures._base import FINISHED  # theirs, too, imports the statuses in the hook

        params = request.params
        _logger.debug("finished: %s status=%s params=%s", request.request_id, request.status, params)
        if not params:
            return False, None
        is_producer = bool(params.get("do_remote_decode"))
        self.stop_beat(request.request_id)
        if params.get("do_remote_prefill"):
            self.need_receive[request.request_id] = (request, [], (), False)
            params["do_remote_prefill"] = False
            return False, None
        if not is_producer and not self.is_bidirectional:
            return False, None
        if request.status not in ("length", "stop", FINISHED):
            self.not_processed.add(request.request_id)
            self.need_save.pop(request.request_id, None)
            return False, None
        delays = any(len(group) > 0 for group in block_ids)
        if delays:
            _logger.debug("finished: %s waits for %d seconds", request.request_id, 30)
            self.need_send[request.request_id] = time.perf_counter() + 30
            block_ids = self.clip(block_ids)
        return delays, {
            "do_remote_prefill": is_producer,
            "do_remote_decode": not is_producer,
            "remote_block_ids": block_ids,
            "remote_request_id": request.request_id,
            "remote_num_tokens": TOKENS,
            "remote_blocks_expiry_time": None,
            **_HERE,
        }


def _state(**changes: Any) -> SchedulerState:
    return SchedulerState(SchedulerConfig("engine-0", "10.0.0.1", 5600, fence_slots=4096, **changes))


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
        state.arrive(request_id, prefill_request_params(), prompt_tokens=TOKENS, now_s=clock())
        state.external_tokens(request_id, computed_tokens=0)
        state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.finish(request_id, reason="length", block_ids=blocks, computed_tokens=TOKENS, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.report(sent=(request_id,), received=(), failed=())
        request_id = f"d{index}"
        state.arrive(request_id, _ticket(index), prompt_tokens=TOKENS, now_s=clock())
        tokens = state.external_tokens(request_id, computed_tokens=0)
        state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=tokens or 0, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.report(sent=(), received=(request_id,), failed=())
        state.allocate(request_id, block_ids=blocks, new_block_ids=[[]], external_tokens=0, now_s=clock())
        state.take_step_plan(now_s=clock())
        state.finish(request_id, reason="stop", block_ids=blocks, computed_tokens=TOKENS, now_s=clock())


def _baseline_lives(state: _Baseline) -> None:
    blocks = [BLOCKS]
    for index in range(LIVES):
        request = _Request(f"p{index}", prefill_request_params(), TOKENS)
        state.arrived(request)
        state.matched(request, 0)
        state.allocated(request, blocks, blocks, 0)
        state.step({request.request_id: TOKENS})
        state.finished(request, blocks)
        state.step({})
        state.reported(())
        request = _Request(f"d{index}", _ticket(index), TOKENS)
        state.arrived(request)
        tokens, _ = state.matched(request, 0)
        state.allocated(request, blocks, blocks, tokens)
        state.step({})
        state.reported((request.request_id,))
        state.allocated(request, blocks, [[]], 0)
        state.step({request.request_id: 1})
        state.finished(request, blocks)


def _row(name: str, ours: float, baseline: float, target: str, *, met: bool) -> dict[str, object]:
    return row(name, "us", round(ours * 1e6, 3), round(baseline * 1e6, 3), target, met=met, ratio=ours / baseline)


def _life_rows() -> list[dict[str, object]]:
    ours, baseline = by_turns(ROUNDS, lambda: _our_lives(_state()), lambda: _baseline_lives(_Baseline()))
    target = "all hooks of one prefill and its decode: at most 2x"
    return [_row("request-life", ours / LIVES, baseline / LIVES, target, met=ours <= 2 * baseline)]


def _live_state(requests: int) -> SchedulerState:
    state = _live_with([_ticket(number) for number in range(requests)], heartbeat_s=29.0)
    state.take_step_plan(now_s=1.0)
    return state


def _idle_step_rows() -> list[dict[str, object]]:
    state, small = _live_state(LIVE), _live_state(10)
    baseline = _Baseline(uses_host_buffer=True)
    scheduled = {f"d{index}": 1 for index in range(LIVE)}
    step = partial(state.take_step_plan, now_s=1.0)
    ours, theirs = by_turns(ROUNDS, step, lambda: baseline.step(scheduled), repeat=300)
    large, little = by_turns(ROUNDS, step, partial(small.take_step_plan, now_s=1.0), repeat=3000)
    beside = f"idle-step-{LIVE}-live-against-10"
    return [
        _row(f"idle-step-{LIVE}-live", ours, theirs, "at least 5x better than a scan", met=theirs >= 5 * ours),
        _row(beside, large, little, "does not scale: at most 1.5x", met=large <= 1.5 * little),
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
    target = "at least 5x better than a scan"
    return [_row(f"idle-look-{LEASES}-leases", ours, theirs, target, met=theirs >= 5 * ours)]


def _memory_rows() -> list[dict[str, object]]:
    tickets = [_ticket(number) for number in range(LIVE)]
    requests = [_Request(f"d{index}", ticket, TOKENS) for index, ticket in enumerate(tickets)]
    sizes: list[int] = []
    for keep in (lambda: _live_with(tickets), lambda: _baseline_with(requests)):
        tracemalloc.start()
        kept = keep()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del kept
    ours, baseline = (size / LIVE for size in sizes)
    return [row("memory-per-live-request", "bytes", ours, baseline)]


def _live_with(tickets: list[dict[str, Any]], **changes: float) -> SchedulerState:
    state = _state(**changes)
    for index, ticket in enumerate(tickets):
        state.arrive(f"d{index}", ticket, prompt_tokens=TOKENS, now_s=1.0)
    return state


def _baseline_with(requests: list[_Request]) -> _Baseline:
    state = _Baseline()
    for request in requests:
        state.arrived(request)
        new = [list(BLOCKS)]  # the engine makes them for this hook
        state.allocated(request, new, new, TOKENS)
    return state


def run(report: Callable[[str], None]) -> list[dict[str, object]]:
    """Measure, report as it goes and return one row per figure (medians of interleaved runs)."""
    measures = (_life_rows, _idle_step_rows, _lease_rows, _memory_rows)
    return [one for measure in measures for one in said(measure(), report)]
