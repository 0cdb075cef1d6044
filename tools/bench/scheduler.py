"""Cost of the scheduler hooks, against the plain dictionaries that vLLM's own connector keeps.

The baseline below is a re-implementation of what that connector's scheduler half does per hook: look into the
client's dictionary, put the request into one of five dictionaries, copy them into a metadata object per step, log at
debug level. It validates nothing, knows no fence and sends no heartbeat. Its full scans are the two that it makes per
step: over everything scheduled (host-buffer mode), and over all leases.
"""

from __future__ import annotations

import logging
import statistics
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_scheduler_state import LeaseTable, SchedulerConfig, SchedulerState, prefill_request_params

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 15
LIVES = 400
BLOCKS = list(range(1, 65))
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


@dataclass
class _RequestMeta:
    local_block_ids: Any
    local_physical_block_ids: Any
    tp_size: int
    remote: _PeerMeta | None = None


class _StepMeta:
    def __init__(self) -> None:
        self.to_receive: dict[str, _RequestMeta] = {}
        self.to_save: dict[str, _RequestMeta] = {}
        self.to_send: dict[str, float] = {}
        self.in_batch: set[str] = set()
        self.not_processed: set[str] = set()


@dataclass
class _Request:
    request_id: str
    params: dict[str, Any] | None
    prompt_tokens: int
    status: str = "running"


@dataclass
class _Baseline:
    """Five dictionaries and the client's own one as the state machine."""

    uses_host_buffer: bool = False
    need_receive: dict[str, Any] = field(default_factory=dict)
    need_save: dict[str, _Request] = field(default_factory=dict)
    need_send: dict[str, float] = field(default_factory=dict)
    in_batch: set[str] = field(default_factory=set)
    not_processed: set[str] = field(default_factory=set)

    def matched(self, request: _Request, computed: int) -> tuple[int, bool]:
        params = request.params
        _logger.debug("matched: computed=%s params=%s", computed, params)
        if params is not None and params.get("do_remote_prefill"):
            count = request.prompt_tokens - computed
            if count > 0:
                return count, True
        return 0, False

    def allocated(self, request: _Request, blocks: list[list[int]], external: int) -> None:
        params = request.params
        _logger.debug("allocated: external=%s params=%s", external, params)
        if not params:
            return
        if params.get("do_remote_decode"):
            self.in_batch.add(request.request_id)
        if self.uses_host_buffer and params.get("do_remote_decode"):
            self.need_save[request.request_id] = request
        elif params.get("do_remote_prefill"):
            needed = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
            if params.get("remote_block_ids") and all(name in params for name in needed):
                local = tuple(list(group) for group in blocks) if external > 0 else ()
                self.need_receive[request.request_id] = (request, local)
            params["do_remote_prefill"] = False

    def step(self, scheduled: dict[str, int]) -> _StepMeta:
        meta = _StepMeta()
        for request_id, (request, local) in self.need_receive.items():
            params = request.params
            entry = _RequestMeta(local, local, params.get("tp_size", 1))
            entry.remote = _PeerMeta(
                params["remote_block_ids"],
                params["remote_host"],
                params["remote_port"],
                params["remote_engine_id"],
                params["remote_request_id"],
            )
            meta.to_receive[request_id] = entry
        if self.uses_host_buffer:
            for request_id in scheduled:
                if self.need_save.get(request_id) is None:
                    continue
        meta.to_send, meta.in_batch, meta.not_processed = self.need_send, self.in_batch, self.not_processed
        self.need_receive.clear()
        self.need_send, self.in_batch, self.not_processed = {}, set(), set()
        return meta

    def finished(self, request: _Request, block_ids: list[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        params = request.params
        _logger.debug("finished: %s status=%s params=%s", request.request_id, request.status, params)
        if not params or not params.get("do_remote_decode"):
            return False, None
        delays = any(len(group) > 0 for group in block_ids)
        if delays:
            self.need_send[request.request_id] = time.perf_counter() + 480.0
        return delays, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": tuple(list(group) for group in block_ids),
            "remote_engine_id": "prefill-0",
            "remote_request_id": request.request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }


def _state(**changes: float) -> SchedulerState:
    return SchedulerState(SchedulerConfig("prefill-0", "10.0.0.1", 5600, fence_slots=4096, **changes))


def _ticket() -> dict[str, Any]:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [BLOCKS], "tp_size": 1}
    peer = {"remote_engine_id": "prefill-0", "remote_request_id": "p", "remote_host": "10.0.0.1", "remote_port": 5600}
    return {**params, **peer, "kv_lease_s": 30.0, "kv_fence": [3, 77], "remote_num_tokens": TOKENS}


def _our_lives(state: SchedulerState) -> None:
    blocks = [BLOCKS]
    for index in range(LIVES):
        request_id = f"p{index}"
        state.arrive(request_id, prefill_request_params(), prompt_tokens=TOKENS, now_s=1.0)
        state.external_tokens(request_id, computed_tokens=0)
        state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=1.0)
        state.take_step_plan(now_s=1.0)
        state.finish(request_id, reason="length", block_ids=blocks, computed_tokens=TOKENS, now_s=1.0)
        state.take_step_plan(now_s=1.0)
        state.transfer_results(sent=(request_id,), received=(), failed=())
        request_id = f"d{index}"
        state.arrive(request_id, _ticket(), prompt_tokens=TOKENS, now_s=1.0)
        tokens = state.external_tokens(request_id, computed_tokens=0)
        state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=tokens, now_s=1.0)
        state.take_step_plan(now_s=1.0)
        state.transfer_results(sent=(), received=(request_id,), failed=())
        state.allocate(request_id, block_ids=blocks, new_block_ids=[[]], external_tokens=0, now_s=1.0)
        state.take_step_plan(now_s=1.0)
        state.finish(request_id, reason="stop", block_ids=blocks, computed_tokens=TOKENS, now_s=1.0)


def _baseline_lives(state: _Baseline) -> None:
    blocks = [BLOCKS]
    for index in range(LIVES):
        request = _Request(f"p{index}", prefill_request_params(), TOKENS)
        state.matched(request, 0)
        state.allocated(request, blocks, 0)
        state.step({request.request_id: TOKENS})
        state.finished(request, blocks)
        state.step({})
        request = _Request(f"d{index}", _ticket(), TOKENS)
        tokens, _ = state.matched(request, 0)
        state.allocated(request, blocks, tokens)
        state.step({})
        state.allocated(request, blocks, 0)
        state.step({request.request_id: 1})
        state.finished(request, blocks)


def _interleaved(ours: Callable[[], Any], baseline: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Return the median seconds per call of each, taken in turns."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for times, function in zip(samples, (ours, baseline), strict=True):
            begin = time.perf_counter()
            for _ in range(repeat):
                function()
            times.append((time.perf_counter() - begin) / repeat)
    return statistics.median(samples[0]), statistics.median(samples[1])


def _row(name: str, ours: float, baseline: float, target: str, met: bool) -> dict[str, object]:
    ratio = ours / baseline if baseline else 0.0
    return {
        "name": name,
        "unit": "us",
        "ours": round(ours * 1e6, 3),
        "baseline": round(baseline * 1e6, 3),
        "ratio": round(ratio, 3),
        "target": target,
        "met": met,
    }


def _life_row() -> dict[str, object]:
    ours, baseline = _interleaved(lambda: _our_lives(_state()), lambda: _baseline_lives(_Baseline()), 1)
    per_ours, per_baseline = ours / LIVES, baseline / LIVES
    target = "all hooks of one prefill and its decode: at most 2x"
    return _row("request-life", per_ours, per_baseline, target, per_ours <= 2 * per_baseline)


def _live_state(requests: int) -> SchedulerState:
    state = _state(heartbeat_s=29.0)
    for index in range(requests):
        state.arrive(f"d{index}", _ticket(), prompt_tokens=TOKENS, now_s=1.0)
    state.take_step_plan(now_s=1.0)
    return state


def _idle_step_rows() -> list[dict[str, object]]:
    state, small = _live_state(LIVE), _live_state(10)
    baseline = _Baseline(uses_host_buffer=True)
    scheduled = {f"d{index}": 1 for index in range(LIVE)}
    ours, theirs = _interleaved(lambda: state.take_step_plan(now_s=1.0), lambda: baseline.step(scheduled), 300)
    large, little = _interleaved(lambda: state.take_step_plan(now_s=1.0), lambda: small.take_step_plan(now_s=1.0), 3000)
    return [
        _row(f"idle-step-{LIVE}-live", ours, theirs, "at least 5x better than a scan", theirs >= 5 * ours),
        _row(f"idle-step-{LIVE}-live-against-10", large, little, "does not scale: at most 1.5x", large <= 1.5 * little),
    ]


def _lease_row() -> dict[str, object]:
    table = LeaseTable()
    deadlines: dict[str, float] = {}
    for index in range(LEASES):
        table.grant(f"p{index}", lease_s=30.0 + index % 7, fence=(index, index + 1), now_s=1.0)
        deadlines[f"p{index}"] = 31.0 + index % 7
    ours, theirs = _interleaved(
        lambda: table.take_ended(now_s=2.0),
        lambda: [request_id for request_id, deadline in deadlines.items() if deadline <= 2.0],
        50,
    )
    return _row(f"idle-look-{LEASES}-leases", ours, theirs, "at least 5x better than a scan", theirs >= 5 * ours)


def _memory_row() -> dict[str, object]:
    tickets = [_ticket() for _ in range(LIVE)]
    requests = [_Request(f"d{index}", ticket, TOKENS) for index, ticket in enumerate(tickets)]
    sizes: list[int] = []
    for keep in (lambda: _live_with(tickets), lambda: _baseline_with(requests)):
        tracemalloc.start()
        kept = keep()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del kept
    row = _row("memory-per-live-request", sizes[0] / LIVE, sizes[1] / LIVE, "reported", True)
    bytes_each = {"ours": round(sizes[0] / LIVE), "baseline": round(sizes[1] / LIVE)}
    return {**row, **bytes_each, "unit": "bytes"}


def _live_with(tickets: list[dict[str, Any]]) -> SchedulerState:
    state = _state()
    for index, ticket in enumerate(tickets):
        state.arrive(f"d{index}", ticket, prompt_tokens=TOKENS, now_s=1.0)
    return state


def _baseline_with(requests: list[_Request]) -> _Baseline:
    state = _Baseline()
    for request in requests:
        state.allocated(request, [BLOCKS], TOKENS)
    return state


def run(report: Callable[[str], None]) -> list[dict[str, object]]:
    """Measure, report as it goes and return one row per figure (medians of interleaved runs)."""
    rows: list[dict[str, object]] = []
    for measure in (lambda: [_life_row()], _idle_step_rows, lambda: [_lease_row()], lambda: [_memory_row()]):
        for row in measure():
            rows.append(row)
            report(f"{row['name']}: {row['ours']} {row['unit']}, baseline {row['baseline']}, ratio {row['ratio']}")
    return rows


if __name__ == "__main__":
    run(print)
