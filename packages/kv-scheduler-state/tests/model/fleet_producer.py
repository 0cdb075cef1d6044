"""The producer of a random fleet, with its workers: it computes prompts, hands them over and keeps its leases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from kv_scheduler_state.config import SchedulerConfig
from kv_scheduler_state.errors import SchedulerStateError
from kv_scheduler_state.scheduler.state import SchedulerState
from kv_scheduler_state.ticket.early import prefill_request_params
from kv_scheduler_state.worker.leases import LeaseTable
from kv_scheduler_state.worker.state import WorkerState

from .fleet_shared import FleetIdentity, FleetPrompt, Results, Shared
from .promises import demand

if TYPE_CHECKING:
    from kv_scheduler_state.config import GroupConfig
    from kv_scheduler_state.worker.lease import LeaseEnd

__all__ = ["FleetProducer"]

_TOLERANCE_S: Final = 1e-6
_MOST_SKIPPED: Final = 2
"""Turns that a worker may skip in a row; a round takes a twelfth of a lease at most."""
_SAFE_PART: Final = 0.35
"""Part of a lease that is left, at a worker's last look, of every lease that is renewed in time."""
_REVOCATION_ROUNDS: Final = _MOST_SKIPPED + 3
"""Rounds after which a revoked lease must have ended on every worker; one more with a lag."""


@final
class FleetProducer:
    """An engine that hands prompts over, and the workers that keep its leases."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        config = shared.config
        self.state = SchedulerState(
            SchedulerConfig(
                "producer",
                "10.0.0.1",
                5600,
                groups=config.groups,
                lease_s=config.lease_s,
                fence_slots=config.fence_slots,
                null_block=0,
            )
        )
        self.leases = [LeaseTable() for _ in range(config.workers)]
        self.workers = [WorkerState() for _ in range(config.workers)]
        # Turns in a row that each worker has skipped.
        self.skipped = [0] * config.workers
        self.free: list[int] = list(range(1, 400))
        self.prompts: dict[str, FleetPrompt] = {}
        self.texts = 0
        self.results = Results(has_lag=config.has_lag)

    def round(self) -> None:
        """Let prompts arrive, start, go on and end, and order the step."""
        for request_id in [f"p{number}" for number in range(self.shared.config.ids)]:
            prompt = self.prompts.get(request_id)
            if prompt is None:
                if not self.shared.is_healing and not self.shared.below(3):
                    self._arrive(request_id)
            elif prompt.status == "waiting":
                self._start(request_id, prompt)
            elif prompt.status == "running":
                self._go_on(request_id, prompt)
        if not self.shared.is_healing and not self.shared.below(12):
            self._revoke()
        self._step()
        self.results.step_ordered()
        self.check()

    def _arrive(self, request_id: str) -> None:
        try:
            self.texts += 1
            tokens = 2 + self.shared.below(38)
            admission = self.state.arrive(
                request_id, prefill_request_params(), prompt_tokens=tokens, now_s=self.shared.now_s
            )
        except SchedulerStateError:
            return  # its last orders wait for the next plan
        self.prompts[request_id] = FleetPrompt(self.texts, tokens - admission.truncate_tokens)

    def _start(self, request_id: str, prompt: FleetPrompt) -> None:
        prompt.blocks = [self._take(group, prompt) for group in self.shared.config.groups]
        self.state.allocate(
            request_id,
            block_ids=prompt.blocks,
            new_block_ids=prompt.blocks,
            external_tokens=0,
            preemptions=prompt.preemptions,
            now_s=self.shared.now_s,
        )
        prompt.status, prompt.start, prompt.is_stepped = "running", prompt.start + 1, False

    def _take(self, group: GroupConfig, prompt: FleetPrompt) -> list[int]:
        """Allocate and compute a group's blocks, up to two of them ahead."""
        if group.kind == "state":
            ids = [self.free.pop(0) for _ in range(1 + group.scratch_blocks)]
            self.shared.memory.update(dict.fromkeys(ids, ("scratch",)))
            self.shared.memory[ids[0]] = ("state", prompt.text, prompt.tokens)
            return ids
        count = -(-prompt.tokens // group.span_tokens)
        ids = [self.free.pop(0) for _ in range(count + self.shared.below(3))]
        for place, block in enumerate(ids):
            self.shared.memory[block] = (prompt.text, place * group.span_tokens) if place < count else ("ahead",)
        return ids

    def _give_back(self, prompt: FleetPrompt) -> None:
        self.free += [block for group in prompt.blocks for block in group if block]
        prompt.blocks = []

    def _go_on(self, request_id: str, prompt: FleetPrompt) -> None:
        choice = self.shared.below(8)
        if choice == 0 and not self.shared.is_healing and prompt.preemptions < 3:
            self._give_back(prompt)
            prompt.preemptions += 1
            if self.shared.below(2):
                self.state.preempt(request_id, now_s=self.shared.now_s)
                prompt.status = "waiting"
            else:  # reported late: the request has been allocated again by then
                self._start(request_id, prompt)
                self.state.preempt(request_id, now_s=self.shared.now_s)
        elif choice < 3 and prompt.is_stepped:
            prompt.status = "ending"
            if self.shared.config.has_lag and not self.shared.below(6):
                # Preempted by the step that is ordered before the last token is known.
                self._give_back(prompt)
                prompt.preemptions += 1
                self.state.preempt(request_id, now_s=self.shared.now_s)
            self.results.tell(partial(self._finish, request_id, prompt))
        elif choice == 3:
            self.state.finish(
                request_id, reason="abort", block_ids=prompt.blocks, computed_tokens=0, now_s=self.shared.now_s
            )
            self._give_back(prompt)
            del self.prompts[request_id]

    def _finish(self, request_id: str, prompt: FleetPrompt) -> None:
        if self.prompts.get(request_id) is not prompt:
            return  # a reset has ended it meanwhile
        is_preempted = not prompt.blocks
        prompt.blocks = prompt.blocks or [[] for _ in self.shared.config.groups]
        groups = zip(self.shared.config.groups, prompt.blocks, strict=True)
        blocks = [_at_the_end(group, ids, prompt.tokens) for group, ids in groups]
        is_state = any(group.kind == "state" for group in self.shared.config.groups)
        ran_on = 0 if is_state else self.shared.below(2)
        decision = self.state.finish(
            request_id,
            reason="length",
            block_ids=blocks,
            computed_tokens=prompt.tokens + ran_on,
            identity=FleetIdentity(prompt.text, prompt.tokens),
            now_s=self.shared.now_s,
        )
        if not decision.keep_blocks:
            expected = "no-blocks" if is_preempted else "no-fence-slot"
            demand(decision.withheld_code == expected, f"{request_id}: not handed over ({decision.withheld_code})")
            self._give_back(prompt)
            del self.prompts[request_id]
            return
        ticket: dict[str, Any] = dict(decision.params or {})
        prompt.ticket = ticket
        self._check_ticket(request_id, prompt, ticket)
        prompt.status = "leased"
        prompt.told = [{} for _ in self.leases]
        prompt.left_s = [self.shared.config.lease_s] * len(self.leases)
        prompt.deadlines_s = [self.shared.now_s + self.shared.config.lease_s] * len(self.leases)
        self.shared.by_nonce[ticket["kv_nonce"]] = prompt

    def _check_ticket(self, request_id: str, prompt: FleetPrompt, ticket: dict[str, Any]) -> None:
        demand("kv_fence" in ticket, f"{request_id}: its ticket has no fence although the engine has fences")
        generation = ticket["kv_fence"][1]
        demand(
            prompt.words.get(generation) == prompt.start, f"{request_id}: its ticket has the word of an earlier start"
        )
        demand(ticket["kv_nonce"] not in self.shared.by_nonce, f"{request_id}: its nonce was given before")
        for ids in ticket["remote_block_ids"]:
            contents = [self.shared.memory[block] for block in ids if block]
            demand(("ahead",) not in contents, f"{request_id}: its ticket lists a block that holds no computed token")

    def _revoke(self) -> None:
        if self.shared.below(2):
            self.state.revoke_all(now_s=self.shared.now_s)
        elif self.shared.below(4) == 0:
            self.state.reset(now_s=self.shared.now_s)
            for prompt in self.prompts.values():
                if prompt.status in {"running", "ending"}:
                    prompt.status = "void"
            for request_id, prompt in list(self.prompts.items()):
                if prompt.status == "void":
                    self._end_void(request_id, prompt)

    def _end_void(self, request_id: str, prompt: FleetPrompt) -> None:
        decision = self.state.finish(
            request_id, reason="length", block_ids=prompt.blocks, computed_tokens=prompt.tokens, now_s=self.shared.now_s
        )
        demand(decision.params is None, f"{request_id}: handed over although the cache was reset")
        self._give_back(prompt)
        del self.prompts[request_id]

    def _step(self) -> None:
        plan = self.state.take_step_plan(now_s=self.shared.now_s)
        for order in plan.fences:
            prompt = self.prompts.get(order.request_id)
            if prompt is not None:
                prompt.words[order.generation] = prompt.start
        for worker, table in enumerate(self.leases):
            mine = self.workers[worker].apply(plan)
            self.shared.words[worker].update({order.slot: order.generation for order in mine.fences})
            refusals = table.apply(mine, now_s=self.shared.now_s)
            demand(not refusals, f"the workers refuse {refusals}")
        for request_id, prompt in self.prompts.items():
            prompt.is_stepped = True
            producer = self.state._requests[request_id].producer
            if producer is not None and producer.state == "revoked":
                prompt.revoked_rounds += 1

    # ---- a worker

    def turns(self) -> None:
        """Give each worker its turn, which it may skip a few times."""
        for worker in range(self.shared.config.workers):
            if self.shared.is_healing or self.shared.below(4) or self.skipped[worker] == _MOST_SKIPPED:
                self._turn(worker)
            else:
                self.skipped[worker] += 1

    def _turn(self, worker: int) -> None:
        """Let a worker run its timers and only then read its notifications."""
        table = self.leases[worker]
        self.skipped[worker] = 0
        for end in table.take_ended(now_s=self.shared.now_s):
            self._ended(worker, end)
        queue, self.shared.queues[worker] = self.shared.queues[worker], []
        past = self.shared.past
        if past and not self.shared.is_healing and not self.shared.below(4):
            late = past[self.shared.below(len(past))]
            self.shared.note(worker, late)  # it may have been lost at first
            queue.append(late)
        for kind, request_id, nonce, consumer, rank in queue:
            if kind == "beat":
                table.renew(request_id, nonce=nonce, now_s=self.shared.now_s)
            else:
                table.read_complete(
                    request_id,
                    reader=f"{consumer}/{rank}",
                    consumer=consumer,
                    reader_count=self.shared.config.readers,
                    nonce=nonce,
                    now_s=self.shared.now_s,
                )
        for end in table.take_ended(now_s=self.shared.now_s):
            self._ended(worker, end)
        for prompt in self.prompts.values():
            if prompt.deadlines_s:
                prompt.left_s[worker] = prompt.deadlines_s[worker] - self.shared.now_s

    def _ended(self, worker: int, end: LeaseEnd) -> None:
        if end.fence is not None:
            self.shared.words[worker][end.fence[0]] = end.fence[1]
        if not end.is_reported:
            return
        prompt = self.prompts[end.request_id]
        demand(prompt.status == "leased", f"{end.request_id}: its lease ended while {prompt.status}")
        if end.reason == "read":
            is_read = any(len(ranks) == self.shared.config.readers for ranks in prompt.told[worker].values())
            demand(is_read, f"{end.request_id}: ended as read, only {prompt.told[worker]} have reported")
        elif not end.is_revoked:
            early_s, left_s = prompt.deadlines_s[worker] - self.shared.now_s, prompt.left_s[worker]
            is_lawful = early_s < _TOLERANCE_S or left_s < _SAFE_PART * self.shared.config.lease_s
            demand(
                is_lawful,
                f"{end.request_id}: expired {early_s} s before its deadline; {left_s} s were left at the last look",
            )
        prompt.ended.add(worker)
        if len(prompt.ended) == len(self.leases):
            self.results.tell(partial(self._report, end.request_id, prompt))

    def _report(self, request_id: str, prompt: FleetPrompt) -> None:
        self.state.report(sent=[request_id], received=[], failed=[])
        self._give_back(prompt)
        del self.prompts[request_id]

    def check(self) -> None:
        """Demand that every internal promise is kept, and that revoked leases end."""
        problems = [
            *self.state.check_invariants(),
            *(text for table in self.leases for text in table.check_invariants()),
        ]
        demand(not problems, "; ".join(problems))
        for request_id, prompt in self.prompts.items():
            demand(
                prompt.revoked_rounds < _REVOCATION_ROUNDS + self.shared.config.has_lag,
                f"{request_id}: its lease was revoked, and lives on",
            )

    def is_settled(self) -> bool:
        """Whether nothing is left of any prompt: no record, no order, no lease, no fence slot."""
        is_idle = not (self.state.live_count or self.state.has_work() or self.state.fence_slots_used)
        return is_idle and not any(table.live_count() for table in self.leases)


def _at_the_end(group: GroupConfig, ids: list[int], tokens: int) -> list[int]:
    """Return a group's blocks as the engine gives them at the end: null where the window has gone on.

    Example: blocks of 4 tokens, a window of 6, 18 tokens. The next token looks back to token 13, so 3 blocks are gone.
    """
    gone = (tokens - group.window_tokens + 1) // group.span_tokens if group.kind == "window" else 0
    return [0 if place < gone else block for place, block in enumerate(ids)]
