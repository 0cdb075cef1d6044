"""An engine's host: the scheduler and the steps of vLLM, as far as a connector sees them.

A step: waiting requests get blocks, running ones get tokens, the scheduler side makes the orders, every worker applies them. At
its end the tokens are in the pages, the workers report, and the scheduler side is notified; with a lag the next step is ordered
before that. Requests that read from a peer are parked meanwhile. Out of blocks, the youngest running request is
preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from blocks import BlockPool
from engine import Engine
from holdings import Holdings, Work
from outages import Outages
from prompts import Prompt
from request import Request

from vllm_adapter.scheduler.chunks import ScheduledTokens
from vllm_adapter.scheduler.followed import Arrival, Ending

__all__ = ["Host", "Request"]

_IDLE_STEP_S = 0.1
_GIVEN_PART = 0.3
"""Part of a step after which everything was given to a device, and the workers are done with it."""
_ASKING_STEP_S = 0.01
"""While the connector says "ask again", the host steps faster: vLLM makes about 1000 such steps a second."""


@final
class Host:
    """Scheduler and step loop of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.world = engine.fleet.world
        self.plan = engine.plan
        self.groups = engine.fleet.plan.fleet.groups
        self.holdings = Holdings(engine)
        self.outages = Outages(self)
        self.requests: dict[str, Request] = {}
        self.reset_preempted: list[str] = []
        self.shortages: set[str] = set()
        self._is_asking = False
        self._preempted: list[str] = []
        self._serials = 0
        self.ends_at_sample = engine.fleet.plan.fleet.ends_at_sample
        self._late: Callable[[], None] | None = None
        self._is_stepping = False
        self.steps = 0

    def arrive(self, request: Request) -> None:
        """Take a request in."""
        if self.outages.delays(lambda: self.arrive(request)):
            return
        if request.request_id in self.requests:
            request.answer("duplicate-id", None, request.ids)
            return
        self._serials += 1
        request.serial = self._serials
        self.requests[request.request_id] = request
        backoff: list[int] = []
        self.engine.side.arrived(
            Arrival(
                request.request_id,
                request.params,
                request.prompt_tokens,
                identity=Prompt(request.ids),
                drop_tail=lambda tail: backoff.append(tail) is None,
                max_tokens=request.most_tokens - request.prompt_tokens,
            )
        )
        if backoff:
            request.prompt_tokens -= backoff[0]
            del request.ids[request.prompt_tokens :]
            request.most_tokens = request.prompt_tokens + 1
        self.engine.note(f"{request.request_id} arrives, {request.prompt_tokens} tokens")
        self.wake()

    def abort(self, request_id: str) -> None:
        """Give a request up, whatever its state."""
        if self.outages.delays(lambda: self.abort(request_id)):
            return
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

    @property
    def pool(self) -> BlockPool:
        """All blocks."""
        return self.holdings.pool

    # ------------------------------------------------------------------------------------------------------ a step

    def _has_work(self) -> bool:
        return bool(
            self.requests
            or self._preempted
            or self._late
            or self.outages.has_work
            or self.engine.side._state.has_work()
        )

    def _step(self) -> None:
        if not self.outages.may_step():
            self._is_stepping = False
            return
        if not self._has_work():
            self._is_stepping = False
            return
        self.steps += 1
        work = self._schedule()
        preempted, self._preempted = self._preempted + self.reset_preempted, []
        self.reset_preempted = []
        orders = self.engine.side.build_step(preempted, [item.chunk for item in work], is_empty=not work)
        orders = replace(orders, rest_s=0.0)  # workers would wait for it in real time
        self.settle()
        self.engine.on_workers("before_forward", orders)
        if not self.plan.applies_late:
            self.engine.on_workers("apply", orders)
        self.engine.checks.orders_made(orders)
        self.engine.fleet.chunks_scheduled(work)
        idle_s = _ASKING_STEP_S if self._is_asking else _IDLE_STEP_S
        duration_s = self.plan.step_s if work or orders.plan.reads else idle_s
        if self.engine.device is not None:
            self.engine.device.given()
            self.world.after(
                duration_s * _GIVEN_PART, lambda: self.engine.on_workers("save", orders), self.engine.process
            )
        self.world.after(duration_s, lambda: self._end_step(orders, work), self.engine.process)

    def settle(self) -> None:
        """Take in the results of the last step, if they have not been yet."""
        late, self._late = self._late, None
        if late is not None:
            late()

    def _end_step(self, orders: Any, work: list[Work]) -> None:
        if self.outages.delays(lambda: self._end_step(orders, work)):
            return
        self.holdings.compute(work)
        self.engine.fleet.chunks_computed(work)
        if self.plan.applies_late:
            self.engine.on_workers("apply", orders)
        if self.engine.device is None:
            self.engine.on_workers("save", orders)
        else:
            self.engine.device.computed()
        reports = [worker.take_report() for worker in self.engine.workers]
        resets = self.outages.resets

        def results() -> None:
            self._update(reports, work, resets)

        if self.plan.has_lag:
            self._late = results
        else:
            results()
        self._step()

    def _schedule(self) -> list[Work]:
        work: list[Work] = []
        self._is_asking = False
        for request in [one for one in self.requests.values() if one.request_id in self.shortages]:
            if request.status == "running":
                self._preempt(request, work)
                self.shortages.discard(request.request_id)
        for request in [one for one in self.requests.values() if one.status == "running"]:
            if request.status == "running":
                self._grow(request, work)
        if self.outages.is_paused:
            return work
        waiting = [one for one in self.requests.values() if one.status == "waiting"]
        # Those that hold blocks come first: behind a request that waits for blocks they would wait for ever.
        for request in sorted(waiting, key=lambda one: not any(one.blocks)):
            if not self._admit(request):
                break
            if request.status == "running":
                self._grow(request, work)
        return work

    def _grow(self, request: Request, work: list[Work]) -> None:
        """Schedule a running request's next tokens; preempt the youngest if blocks are missing."""
        start = request.scheduled
        if start < len(request.ids):
            stop = min(len(request.ids), start + self.plan.chunk_tokens)
        elif self.plan.has_lag and len(request.ids) < request.most_tokens and start == len(request.ids):
            return  # its next token is not known yet
        else:
            return
        had = [len(group) for group in request.blocks]
        while not self.holdings.take(request, stop):
            victim = self._victim(request, work)
            self._preempt(victim, work)
            if victim is request:
                return
        new = [group[count:] for group, count in zip(request.blocks, had, strict=True)]
        blocks = [list(group) for group in request.blocks] if request.is_fresh else new
        chunk = ScheduledTokens(request.request_id, blocks, request.is_fresh, start, stop - start)
        request.is_fresh = False
        request.scheduled = stop
        work.append(self.holdings.schedule(request, chunk))

    def _victim(self, request: Request, work: list[Work]) -> Request:
        """Return whom to preempt. Whoever is scheduled already keeps its blocks: others may have been given them as a hit."""
        running = [one for one in self.requests.values() if one.status == "running"]
        if not self.holdings.prefix.is_on:
            return running[-1]
        scheduled = {item.request.serial for item in work}
        return ([one for one in running if one.serial not in scheduled] or [request])[-1]

    def _preempt(self, request: Request, work: list[Any]) -> None:
        self.engine.fleet.fault("preemption")
        self.engine.note(f"{request.request_id} is preempted")
        work[:] = [item for item in work if item.request is not request]
        self.restart(request)
        self._preempted.append(request.request_id)

    def restart(self, request: Request) -> None:
        """Take a running request's blocks away; it starts again."""
        self.holdings.free_all(request)
        request.status, request.computed, request.scheduled, request.valid, request.hit = "waiting", 0, 0, 0, 0
        self.engine.fleet.whole.discard(request.hand_over_id)
        request.preemptions += 1
        request.is_fresh, request.void_since = True, 0

    def _admit(self, request: Request) -> bool:
        """Let a waiting request start, or park it for its read; False if blocks are missing."""
        side, request_id = self.engine.side, request.request_id
        if request_id in self._preempted:
            return True
        external, local, is_back = 0, 0, bool(request.computed)
        hits: list[list[int]] = []
        if not is_back:
            hits, local = self.holdings.prefix.longest_hit(request)
            offered, _ = side.external_tokens(request_id, local)
            if offered is None:
                self._is_asking = True
                return True
            external = offered
            if not external and self.holdings.prefix.needs_read:
                hits, local = [], 0
        first = min(len(request.ids), local + self.plan.chunk_tokens)
        reserved = self.holdings.promised(self.requests.values()) if external else 0
        if not self.holdings.take(request, max(local + external, request.computed, first), hits, reserved):
            # No word to the connector, as with vLLM.
            if external:  # without, it waits for blocks like any prompt that is computed here
                self.engine.checks.round_ended(request)
            return False
        self._adopt(request, local, external)
        if external:
            self.holdings.skip_window(request, local + external)
            self.holdings.leave_to_read(request, local, local + external)
        if external or request_id in side.followed:  # as the connector's hook does
            new = [[] for _ in self.groups] if is_back else self.holdings.new_blocks(request, hits)
            side.allocated(request_id, request.blocks, new, external_tokens=external, preemptions=request.preemptions)
        request.status = "parked" if external else "running"
        self.engine.checks.begins(request, local)
        if external:
            request.valid = local + external
            self.engine.note(f"{request_id} reads {external} tokens" + f" after a hit of {local}" * bool(local))
        return True

    def _adopt(self, request: Request, local: int, external: int) -> None:
        if local:
            self.world.counts["hits before a read" if external else "hits alone"] += 1
            request.hit = local
            if not external:
                request.computed = request.scheduled = request.valid = local

    # ------------------------------------------------------------------------------------------------------ results

    def _update(self, reports: list[Any], work: list[Work], resets: int) -> None:
        step = self.engine.ranks.add(reports)
        self.engine.side.update_output(step)
        for request_id in step.received:
            is_good = request_id not in step.failed
            self.engine.checks.fairness.reported(request_id, step.received, is_good=is_good)
            self._received(request_id, resets, is_good=is_good)
        for request_id in step.sent:
            self._sent(request_id)
        for item in work:
            if item.life == item.request.preemptions:
                self._advance(item.request, item.chunk.computed_tokens + len(item.ids))

    def _received(self, request_id: str, resets: int, *, is_good: bool) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status not in {"parked", "aborting"}:
            status = "unknown" if request is None else request.status
            self.engine.violated("ended-twice", f"{request_id} is received while {status}")
            return
        self.engine.note(f"{request_id} is {'received' if is_good else 'failed'}")
        if request.status == "aborting":
            self.holdings.free_all(request)
            self._forget(request)
            return
        if is_good:
            self.world.counts["accepted"] += 1
            request.computed = request.valid
            if 0 < request.void_since <= resets:
                self.engine.violated("accepted-after-reset", f"{request_id} is from before a reset")
            self.engine.checks.accepted(request)
            self.holdings.prefix.keep(request, request.valid, is_pending=False)
            request.computed = min(request.valid, len(request.ids) - 1)
            request.scheduled, request.is_loaded, request.status = request.computed, True, "waiting"
            return
        self.world.counts["failed-reads"] += 1
        self.engine.checks.failed(request)
        request.valid = request.hit = request.void_since = 0
        if self.engine.fleet.plan.fleet.policy == "fail":
            self._finish(request, "error", "load-failed")
        else:
            self.holdings.free_all(request)
            request.status, request.computed, request.scheduled = "waiting", 0, 0

    def _sent(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status != "held":
            status = "unknown" if request is None else request.status
            self.engine.violated("ended-twice", f"{request_id} is sent while {status}")
            return
        self.engine.note(f"{request_id} is sent, its blocks are free")
        self.engine.checks.lease_ended(request)
        self.holdings.free_all(request)
        self._forget(request)

    def _advance(self, request: Request, computed: int) -> None:
        if request.status != "running" or self.requests.get(request.request_id) is not request:
            return
        if computed > request.scheduled:
            return  # of a life before its preemption
        request.computed = max(request.computed, computed)
        if request.computed < len(request.ids):
            self.holdings.skip_window(request, request.computed)
            return
        if len(request.ids) < request.most_tokens:
            request.ids.append(request.next_id())
            self.holdings.skip_window(request, request.computed)
            if not self.ends_at_sample or len(request.ids) < request.most_tokens:
                return
        self._finish(request, "length", "done")

    def _finish(self, request: Request, reason: Any, outcome: str) -> None:
        """End a request towards the scheduler side and the client."""
        was_parked = request.status == "parked" and outcome == "aborted"
        if outcome == "done":
            self.engine.checks.finished(request)
        blocks = [list(group) for group in request.blocks] or [[] for _ in self.groups]
        ending = Ending(request.request_id, reason, request.computed, identity=Prompt(request.ids))
        keeps, params = self.engine.side.finished(ending, blocks)
        self._reply(request, outcome, params)
        if keeps:
            if params is not None or not request.hand_over_id:
                self.engine.checks.handed_over(params)
            if request.void_since and params is not None:
                self.engine.violated("handed-over-after-reset", f"{request.request_id}")
            request.status = "held"
            self.engine.note(f"{request.request_id} is handed over")
        elif was_parked:
            request.status = "aborting"
        else:
            self.holdings.free_all(request)
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
