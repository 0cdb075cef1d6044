"""An engine's host: the scheduler and the steps of vLLM, as far as a connector sees them.

A step: waiting requests get blocks, running ones get tokens, the scheduler side makes the orders, every worker applies them. At
its end the tokens are in the pages, the workers report, and the scheduler side is told; with a lag the next step is ordered
before that. Requests that read from a peer are parked meanwhile. Out of blocks, the youngest running request is
preempted, unless leases are about to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from engine import Engine

from kv_scheduler_state import prompt_digest
from vllm_adapter.scheduler.prefill_chunks import ScheduledTokens
from vllm_adapter.scheduler.values import Arrival, Ending

__all__ = ["Host", "Request"]

_IDLE_STEP_S = 0.1


@final
@dataclass(eq=False, slots=True)
class Request:
    """A request in an engine.

    Attributes:
        ids: Its tokens: the prompt, and what was generated.
        status: waiting, parked (a read is under way), running, held (finished, blocks leased), aborting (parked, given up), gone.
        computed: Tokens whose KV is in its blocks.
        valid: Tokens, from the first one, that were read from a peer.
    """

    request_id: str
    ids: list[int]
    prompt_tokens: int
    most_tokens: int
    params: object
    answer: Callable[[str, Mapping[str, object] | None, list[int]], None]
    next_id: Callable[[], int]
    status: str = "waiting"
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    computed: int = 0
    scheduled: int = 0
    preemptions: int = 0
    valid: int = 0
    is_loaded: bool = False
    is_fresh: bool = True
    is_answered: bool = False
    fence: tuple[int, int] | None = None
    received_ranks: int = 0
    sent_ranks: int = 0
    refusal: str = ""

    def digest(self, tokens: int) -> str | None:
        """Return the digest of the first tokens."""
        return prompt_digest(self.ids[:tokens]) if tokens <= len(self.ids) else None


@final
class Host:
    """Scheduler and step loop of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.world = engine.fleet.world
        self.plan = engine.plan
        self.groups = engine.fleet.plan.fleet.groups
        self.free = list(range(1, self.plan.blocks))
        self.requests: dict[str, Request] = {}
        self.owners: dict[int, str] = {}
        self.pressed: list[int] = []
        self._preempted: list[str] = []
        self._late: Callable[[], None] | None = None
        self._is_stepping = False
        self.steps = 0

    # ------------------------------------------------------------------------------------------------------ doors

    def arrive(self, request: Request) -> None:
        """Take a request in."""
        if request.request_id in self.requests:
            request.answer("duplicate-id", None, request.ids)
            return
        self.requests[request.request_id] = request
        backoff: list[int] = []

        def drop_tail(tail: int) -> bool:
            backoff.append(tail)
            return True

        self.engine.side.arrived(
            Arrival(request.request_id, request.params, request.prompt_tokens, identity=request, drop_tail=drop_tail)
        )
        if backoff:
            request.prompt_tokens -= backoff[0]
            del request.ids[request.prompt_tokens :]
        self.engine.note(f"{request.request_id} arrives, {request.prompt_tokens} tokens")
        self.wake()

    def abort(self, request_id: str) -> None:
        """Give a request up, whatever its state."""
        request = self.requests.get(request_id)
        if request is None or request.status in {"held", "aborting", "gone"}:
            return
        self.engine.note(f"{request_id} is aborted while {request.status}")
        self._finish(request, "abort", "aborted")
        self.wake()

    def wake(self) -> None:
        """Begin to step, unless steps are under way."""
        if not self._is_stepping:
            self._is_stepping = True
            self.world.after(0.0, self._step, self.engine.process)

    # ------------------------------------------------------------------------------------------------------ blocks

    def _take(self, request: Request, tokens: int) -> bool:
        """Give a request blocks for so many tokens; False, and nothing changed, if there are too few."""
        wanted = -(-tokens // self.plan.block_tokens)
        if not request.blocks:
            request.blocks = [[] for _ in self.groups]
        missing = sum(max(0, wanted - len(group)) for group in request.blocks)
        if missing > len(self.free):
            return False
        for group in request.blocks:
            while len(group) < wanted:
                block = self.free.pop(0)
                if block in self.owners:
                    self.world.violated("double-owner", f"{self.engine.name}: block {block} has two owners")
                self.owners[block] = request.request_id
                group.append(block)
        return True

    def _give_back(self, request: Request, blocks: list[int]) -> None:
        """Free blocks, and check that nothing may still write into them."""
        real = [block for block in blocks if block]
        for block in real:
            if self.owners.pop(block, None) != request.request_id:
                self.world.violated(
                    "double-free", f"{self.engine.name}: {request.request_id} frees block {block} twice"
                )
                return
        self.engine.checks.freed(request, set(real))
        self.engine.pages.poison(real)
        self.free += real

    def _free_all(self, request: Request) -> None:
        blocks, request.blocks = request.blocks, []
        self._give_back(request, [block for group in blocks for block in group])

    def _skip_window(self, request: Request) -> None:
        """Null and free the blocks before every window."""
        for number, group in enumerate(self.groups):
            if group.window_tokens and request.blocks:
                first = max(0, request.computed - group.window_tokens + 1) // self.plan.block_tokens
                gone = [block for block in request.blocks[number][:first] if block]
                if gone:
                    request.blocks[number][:first] = [0] * first
                    self._give_back(request, gone)

    # ------------------------------------------------------------------------------------------------------ a step

    def _has_work(self) -> bool:
        return bool(self.requests or self._preempted or self._late or self.engine.side._state.has_work())

    def _step(self) -> None:
        if not self._has_work():
            self._is_stepping = False
            return
        self.steps += 1
        work = self._schedule()
        preempted, self._preempted = self._preempted, []
        orders = self.engine.side.build_step(preempted, [chunk for chunk, _, _ in work])
        late, self._late = self._late, None
        if late is not None:
            late()
        for worker in self.engine.workers:
            worker.apply(orders)
        self.engine.checks.fairness.ordered(orders)
        self._watch_fences(orders)
        duration_s = self.plan.step_s if work or orders.plan.reads else _IDLE_STEP_S
        self.world.after(duration_s, lambda: self._end_step(orders, work), self.engine.process)

    def _watch_fences(self, orders: Any) -> None:
        for order in orders.plan.fences:
            request = self.requests.get(order.request_id)
            if request is not None:
                request.fence = (order.slot, order.generation)

    def _end_step(self, orders: Any, work: list[tuple[ScheduledTokens, Request, list[int]]]) -> None:
        for chunk, request, ids in work:
            if request.status == "running" and request.request_id in self.requests:
                self._compute(request, chunk.computed_tokens, ids)
        reports = []
        for worker in self.engine.workers:
            worker.save(orders)
            reports.append((worker.rank, worker.take_report()))

        def results() -> None:
            self._update(reports, work)

        if self.plan.has_lag:
            self._late = results
        else:
            results()
        self._step()

    def _compute(self, request: Request, first: int, ids: list[int]) -> None:
        size = self.plan.block_tokens
        for number, group in enumerate(request.blocks):
            for place in range(first // size, -(-(first + len(ids)) // size)):
                if place < len(group) and group[place]:
                    start, stop = max(first, place * size), min(first + len(ids), (place + 1) * size)
                    part = np.array(ids[start - first : stop - first], np.uint32)
                    self.engine.pages.write(number, group[place], start - place * size, part)

    def _schedule(self) -> list[tuple[ScheduledTokens, Request, list[int]]]:
        work: list[tuple[ScheduledTokens, Request, list[int]]] = []
        for request in [one for one in self.requests.values() if one.status == "running"]:
            if request.status == "running":
                self._grow(request, work)
        waiting = [one for one in self.requests.values() if one.status == "waiting"]
        # Those that hold blocks come first: behind a request that waits for blocks they would wait for ever.
        for request in sorted(waiting, key=lambda one: not any(one.blocks)):
            if not self._admit(request):
                break
            if request.status == "running":
                self._grow(request, work)
        return work

    def _grow(self, request: Request, work: list[tuple[ScheduledTokens, Request, list[int]]]) -> None:
        """Schedule a running request's next tokens; preempt the youngest if blocks are missing."""
        start = request.scheduled
        if start < len(request.ids):
            stop = min(len(request.ids), start + self.plan.chunk_tokens)
        elif self.plan.has_lag and len(request.ids) < request.most_tokens and start == len(request.ids):
            return  # its next token is not known yet
        else:
            return
        had = [len(group) for group in request.blocks]
        while not self._take(request, stop):
            if self.engine.side.has_pending_block_frees():
                self.engine.checks.relief_promised()
                return
            victim = [one for one in self.requests.values() if one.status == "running"][-1]
            self._preempt(victim, work)
            if victim is request:
                return
        new = [group[count:] for group, count in zip(request.blocks, had, strict=True)]
        blocks = [list(group) for group in request.blocks] if request.is_fresh else new
        chunk = ScheduledTokens(request.request_id, blocks, request.is_fresh, start, stop - start)
        request.is_fresh = False
        request.scheduled = stop
        work.append((chunk, request, request.ids[start:stop]))

    def _preempt(self, request: Request, work: list[Any]) -> None:
        self.engine.fleet.fault("preemption")
        self.engine.note(f"{request.request_id} is preempted")
        work[:] = [item for item in work if item[1] is not request]
        self._free_all(request)
        request.status, request.computed, request.scheduled, request.valid = "waiting", 0, 0, 0
        request.preemptions += 1
        request.is_fresh = True
        self._preempted.append(request.request_id)

    def _admit(self, request: Request) -> bool:
        """Let a waiting request start, or park it for its read; False if blocks are missing."""
        side, request_id = self.engine.side, request.request_id
        if request_id in self._preempted:
            return True
        external = 0
        if not request.computed:
            offered, _ = side.external_tokens(request_id, 0)
            if offered is None:
                return True
            external = offered
        first = min(len(request.ids), self.plan.chunk_tokens)
        if not self._take(request, max(external, request.computed, first)):
            if side.has_pending_block_frees():
                self.engine.checks.relief_promised()
            return False
        if external:
            self._null_before_window(request, external)
        new = [[] for _ in self.groups] if request.computed else request.blocks
        side.allocated(request_id, request.blocks, new, external_tokens=external, preemptions=request.preemptions)
        request.status = "parked" if external else "running"
        if external:
            request.valid = external
            self.engine.note(f"{request_id} reads {external} tokens")
        return True

    def _null_before_window(self, request: Request, tokens: int) -> None:
        request.computed = tokens
        self._skip_window(request)
        request.computed = 0

    # ------------------------------------------------------------------------------------------------------ results

    def _update(self, reports: list[Any], work: list[tuple[ScheduledTokens, Request, list[int]]]) -> None:
        sent, received, failed, registrations, reasons = self.engine.gather(reports)
        self.engine.side.update_output(
            sent=sent, received=received, failed=failed, registrations=registrations or None, reasons=reasons or None
        )
        for request_id in received:
            self._received(request_id, is_good=request_id not in failed)
        for request_id in sent:
            self._sent(request_id)
        for chunk, request, ids in work:
            self._advance(request, chunk.computed_tokens + len(ids))

    def _received(self, request_id: str, *, is_good: bool) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status not in {"parked", "aborting"}:
            status = "unknown" if request is None else request.status
            self.world.violated("ended-twice", f"{self.engine.name}: {request_id} is received while {status}")
            return
        self.engine.note(f"{request_id} is {'received' if is_good else 'failed'}")
        self.engine.checks.fairness.reported(request_id)
        if request.status == "aborting":
            self._free_all(request)
            self._forget(request)
            return
        if is_good:
            self.world.counts["accepted"] += 1
            request.computed = request.valid
            self.engine.checks.accepted(request)
            request.computed = min(request.valid, len(request.ids) - 1)
            request.scheduled, request.is_loaded, request.status = request.computed, True, "waiting"
            return
        self.world.counts["failed-reads"] += 1
        self.engine.checks.failed(request)
        request.valid = 0
        if self.engine.fleet.plan.fleet.policy == "fail":
            self._finish(request, "error", "load-failed")
        else:
            self._free_all(request)
            request.status, request.computed, request.scheduled = "waiting", 0, 0

    def _sent(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status != "held":
            status = "unknown" if request is None else request.status
            self.world.violated("ended-twice", f"{self.engine.name}: {request_id} is sent while {status}")
            return
        self.engine.note(f"{request_id} is sent, its blocks are free")
        self.engine.checks.lease_ended(request)
        self._free_all(request)
        self._forget(request)

    def _advance(self, request: Request, computed: int) -> None:
        if request.status != "running" or self.requests.get(request.request_id) is not request:
            return
        if computed > request.scheduled:
            return  # of a life before its preemption
        request.computed = max(request.computed, computed)
        if request.computed < len(request.ids):
            self._skip_window(request)
            return
        if len(request.ids) < request.most_tokens:
            request.ids.append(request.next_id())
            self._skip_window(request)
            return
        self._finish(request, "length", "done")

    def _finish(self, request: Request, reason: Any, outcome: str) -> None:
        """End a request towards the scheduler side and the client."""
        was_parked = request.status == "parked" and outcome == "aborted"
        if outcome == "done":
            self.engine.checks.finished(request)
        blocks = [list(group) for group in request.blocks] or [[] for _ in self.groups]
        ending = Ending(request.request_id, reason, request.computed, identity=request)
        keeps, params = self.engine.side.finished(ending, blocks)
        self._reply(request, outcome, params)
        if keeps:
            self.engine.checks.handed_over(params)
            request.status = "held"
            self.engine.note(f"{request.request_id} is handed over")
        elif was_parked:
            request.status = "aborting"
        else:
            self._free_all(request)
            self._forget(request)

    def _reply(self, request: Request, outcome: str, params: Mapping[str, object] | None) -> None:
        if request.is_answered:
            self.world.violated("answered-twice", f"{request.request_id} gets a second answer, {outcome}")
            return
        request.is_answered = True
        request.answer(outcome, params, list(request.ids))

    def _forget(self, request: Request) -> None:
        request.status = "gone"
        self.requests.pop(request.request_id, None)
