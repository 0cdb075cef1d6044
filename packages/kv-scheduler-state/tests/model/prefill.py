"""A minimal prefill engine: scheduler, workers, block owner, and an observer of all of them.

The engine here follows the rules that a real one enforces by dying: it accepts an id as sent only for a request whose
blocks it keeps, and it frees nothing else. The observer knows the truth (who really read what, when a lease really ends)
without asking the code under test.
"""

from __future__ import annotations

import math
from typing import cast

from kv_scheduler_state import UNBOUND
from kv_scheduler_state.config import GroupConfig, SchedulerConfig
from kv_scheduler_state.plan import StepPlan
from kv_scheduler_state.scheduler.state import SchedulerState
from kv_scheduler_state.ticket.early import prefill_request_params
from kv_scheduler_state.worker.leases import Lease, LeaseTable

from .invariants import problems
from .promises import Step, demand

LEASE_S = 3.0
HEARTBEAT_S = 1.0
RENEWAL_S = LEASE_S * 2 / 3


class Prompt:
    """The engine's and the observer's knowledge of one request."""

    def __init__(self, workers: int) -> None:
        self.status = "absent"
        self.is_stepped = False
        self.chunks = 0
        self.preemptions = 0
        self.is_revoked = False
        self.is_revocation_sent = False
        self.is_allocated_twice = False
        self.is_release_sent = False
        self.decoded = 0
        # Orders that the next plan must have, and the fence words of all starts so far.
        self.is_start_due = False
        self.completes_due = False
        self.words: tuple[int, ...] = ()
        self.released: frozenset[int] = frozenset()
        self.saved: frozenset[int] = frozenset()
        self.ticket: dict[str, object] | None = None
        # Per worker: who really reported, and when the lease really ends (None: not granted or ended).
        self.delivered: list[frozenset[str]] = [frozenset()] * workers
        self.deadlines: list[float | None] = [None] * workers
        self.reported: frozenset[int] = frozenset()


class PrefillSide:
    """A prefill engine with its workers, for `requests` requests that `readers` ranks will read."""

    def __init__(
        self, *, requests: int, readers: int, workers: int = 1, adversity: int = 1, is_plain: bool = False
    ) -> None:
        self.state = SchedulerState(
            SchedulerConfig(
                "prefill-0",
                "10.0.0.1",
                5600,
                groups=(GroupConfig(),),
                lease_s=LEASE_S,
                heartbeat_s=HEARTBEAT_S,
                fence_seed=1,
                nonce_seed="n",
                fence_slots=requests,
                uses_host_buffer=not is_plain,
            )
        )
        self.tables = [LeaseTable(max_pause_s=math.inf) for _ in range(workers)]
        self.words = [[0] * requests for _ in range(workers)]
        self.readers = tuple(f"reader-{rank}" for rank in range(readers))
        self.prompts = {f"p{index}": Prompt(workers) for index in range(requests)}
        self.adversity = adversity
        # A plain engine reads device memory, so it saves nothing, and its workers do not use the announcements.
        self.is_plain = is_plain

    # ---- what can happen

    def steps(self) -> list[Step]:
        """Return everything that the engine may do now."""
        steps: list[Step] = []
        for request_id, prompt in self.prompts.items():
            steps += [(name, request_id) for name in self._names(prompt)]
        if self.state.has_work():
            steps.append(("p-step",))
        if self._can_poll():
            steps.append(("p-poll",))
        return steps

    def _names(self, prompt: Prompt) -> list[str]:
        status = prompt.status
        if status == "absent":
            return ["p-arrive"]
        if status in {"waiting", "preempted"}:
            return ["p-allocate", "p-abort"]
        if status == "running":
            return ["p-abort", *self._running_names(prompt)]
        if not self.adversity or prompt.ticket is None:
            return []
        return ["p-revoke"] if status == "kept" and not prompt.is_revoked else []

    def _running_names(self, prompt: Prompt) -> list[str]:
        names: list[str] = []
        is_computed = self.is_plain or prompt.chunks == 2
        if is_computed:
            names += ["p-finish"] if prompt.is_stepped else []
        else:
            names += ["p-last"] if prompt.chunks else ["p-chunk", "p-last"]
        if is_computed and not self.is_plain and prompt.decoded < self.adversity:
            names.append("p-decode")
        if self.adversity and not prompt.is_allocated_twice:
            names.append("p-again")
        if prompt.preemptions < self.adversity:
            names.append("p-preempt")
        return names

    def _can_poll(self) -> bool:
        return any(table.live_count() or table._ended for table in self.tables)

    def apply(self, step: Step, now_s: float) -> None:
        """Do one of `steps` and check what can be checked at once."""
        name, request_id = step[0], step[1] if len(step) > 1 else ""
        if name == "p-step":
            self._step(now_s)
        elif name == "p-poll":
            self._poll(now_s)
        else:
            self._request_step(name, request_id, self.prompts[request_id], now_s)
        found = (*problems(self.state), *[text for table in self.tables for text in problems(table)])
        demand(not found, "; ".join(found))

    def _request_step(self, name: str, request_id: str, prompt: Prompt, now_s: float) -> None:
        blocks = [self._blocks(request_id)]
        if name == "p-arrive":
            self.state.arrive(request_id, prefill_request_params(), prompt_tokens=32, identity=UNBOUND, now_s=now_s)
            prompt.status = "waiting"
        elif name == "p-allocate":
            self.state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=now_s)
            prompt.status, prompt.chunks, prompt.saved = "running", 0, frozenset()
            prompt.is_stepped, prompt.is_start_due = False, True
        elif name in {"p-chunk", "p-last", "p-decode"}:
            self._chunk_step(name, request_id, prompt)
        elif name == "p-again":
            self.state.allocate(request_id, block_ids=blocks, new_block_ids=[[]], external_tokens=0, now_s=now_s)
            prompt.is_allocated_twice = True
        elif name == "p-preempt":
            self.state.preempt(request_id, now_s=now_s)
            prompt.status = "preempted"
            prompt.preemptions += 1
            prompt.completes_due = False
        elif name == "p-revoke":
            self.state.revoke_all(now_s=now_s)
            for other in self.prompts.values():
                other.is_revoked = other.is_revoked or other.status == "kept"
        else:
            self._end(name, request_id, prompt, now_s)

    def _chunk_step(self, name: str, request_id: str, prompt: Prompt) -> None:
        if name == "p-decode":
            for _ in range(2):
                self.state.scheduled(request_id, new_block_ids=[[99]], is_prompt_complete=True)
            prompt.decoded += 1
            return
        blocks = self._blocks(request_id)
        new = blocks[prompt.chunks :] if name == "p-last" else blocks[:1]
        self.state.scheduled(request_id, new_block_ids=[new], is_prompt_complete=name == "p-last")
        prompt.chunks = 2 if name == "p-last" else 1
        prompt.completes_due = name == "p-last"
        prompt.is_stepped = False

    def _end(self, name: str, request_id: str, prompt: Prompt, now_s: float) -> None:
        decision = self.state.finish(
            request_id,
            reason="length" if name == "p-finish" else "abort",
            block_ids=[self._blocks(request_id)],
            computed_tokens=32,
            identity=UNBOUND,
            now_s=now_s,
        )
        demand(decision.keep_blocks == (name == "p-finish"), f"{request_id}: {name} led to {decision}")
        if not decision.keep_blocks:
            prompt.status = "dropped"
            return
        is_saved = self.is_plain or prompt.saved == frozenset(self._blocks(request_id))
        demand(is_saved, f"{request_id}: handed over with {prompt.saved} saved")
        prompt.status = "kept"
        prompt.ticket = dict(decision.params or {})
        demand(self.is_fence_intact(request_id), f"{request_id}: its ticket left before its fence was written")

    def _step(self, now_s: float) -> None:
        plan = self.state.take_step_plan(now_s=now_s)
        self._check_starts(plan)
        for request_id, blocks in plan.saves:
            prompt = self.prompts[request_id]
            demand(prompt.status == "running", f"{request_id}: saved while {prompt.status}")
            demand(not self.is_plain and 99 not in blocks[0], f"{request_id}: saved {blocks}, which nobody will read")
            prompt.saved |= frozenset(blocks[0])
        for words, table in zip(self.words, self.tables, strict=True):
            for order in plan.fences:
                words[order.slot] = order.generation
            refusals = table.apply(plan._replace(expects=()) if self.is_plain else plan, now_s=now_s)
            demand(not refusals, f"the workers refuse {refusals}")
        for grant in plan.grants:
            prompt = self.prompts[grant.request_id]
            demand(prompt.status == "kept", f"{grant.request_id}: granted while {prompt.status}")
            prompt.deadlines = [now_s + grant.lease_s] * len(self.tables)
        for request_id in plan.releases:
            demand(self.prompts[request_id].status == "dropped", f"{request_id}: released without an abort")
            self.prompts[request_id].is_release_sent = not self.is_plain
        for prompt in self.prompts.values():
            prompt.is_stepped = True
            prompt.is_revocation_sent = prompt.is_revoked

    def _check_starts(self, plan: StepPlan) -> None:
        """Demand a new fence word for every start of a prompt, and a `completes` entry for every complete prompt."""
        written = {order.request_id: order.generation for order in plan.fences}
        for request_id, prompt in self.prompts.items():
            if prompt.status == "running" and prompt.is_start_due:
                word = written.get(request_id)
                demand(word is not None and word not in prompt.words, f"{request_id}: starts under the word {word}")
                prompt.words = (*prompt.words, word or 0)
            is_notified = request_id in plan.completes
            demand(
                is_notified == (prompt.completes_due and prompt.status == "running"),
                f"{request_id}: complete: {is_notified}",
            )
            prompt.is_start_due = prompt.completes_due = False

    def _poll(self, now_s: float) -> None:
        for worker, table in enumerate(self.tables):
            for end in table.take_ended(now_s=now_s):
                prompt = self.prompts[end.request_id]
                if end.fence is not None:
                    slot, generation = end.fence
                    demand(self.words[worker][slot] != generation, f"{end.request_id}: its fence does not change")
                    self.words[worker][slot] = generation
                if end.reason == "released":
                    demand(prompt.status == "dropped", f"{end.request_id}: released while {prompt.status}")
                    demand(not end.is_reported, f"{end.request_id}: the engine has forgotten it, and is notified")
                    prompt.released |= {worker}
                    continue
                demand(end.is_reported, f"{end.request_id}: {end.reason}, but no peer is notified")
                is_counted = end.readers_done == len(self.readers) or end.reason == "expired"
                demand(is_counted, f"{end.request_id}: read by all, {end.readers_done} were counted")
                self._check_end(end.request_id, prompt, worker, end.reason, now_s)
                prompt.deadlines[worker] = None
                prompt.reported |= {worker}
            for request_id, prompt in self.prompts.items():
                deadline_s = prompt.deadlines[worker]
                is_over = prompt.is_revocation_sent or (deadline_s is not None and deadline_s <= now_s)
                demand(not is_over or worker in prompt.reported, f"{request_id}: its lease is over, unnoticed")
                is_known = not prompt.is_release_sent or worker in prompt.released
                demand(is_known, f"{request_id}: no worker is notified of its release")
        for request_id, prompt in self.prompts.items():
            if len(prompt.reported) == len(self.tables) and prompt.status != "freed":
                demand(prompt.status == "kept", f"{request_id}: reported as sent while {prompt.status}")
                self.state.report(sent=[request_id], received=[], failed=[])
                demand(not self.is_fence_intact(request_id), f"{request_id}: freed, and its fence still says it is not")
                prompt.status = "freed"

    def _check_end(self, request_id: str, prompt: Prompt, worker: int, reason: str, now_s: float) -> None:
        demand(prompt.status == "kept", f"{request_id}: its lease ended while {prompt.status}")
        demand(worker not in prompt.reported, f"{request_id}: ended twice on worker {worker}")
        deadline_s = prompt.deadlines[worker]
        if reason == "read":
            demand(prompt.delivered[worker] == frozenset(self.readers), f"{request_id}: freed under a reader")
        else:
            is_due = prompt.is_revoked or (deadline_s is not None and deadline_s <= now_s)
            demand(is_due, f"{request_id}: expired at {now_s}, its lease runs to {deadline_s}")

    # ---- what the other side does to it

    def ticket(self, request_id: str) -> dict[str, object] | None:
        """Return the ticket of a request, once there is one."""
        return self.prompts[request_id].ticket

    def notify(self, request_id: str, reader: str, now_s: float, only: int | None = None) -> None:
        """Deliver a reader's completion to one worker, or to every one."""
        prompt = self.prompts[request_id]
        for worker, table in self._workers(only):
            verdict = table.read_complete(request_id, reader=reader, reader_count=len(self.readers), now_s=now_s)
            demand(
                verdict != "counted" or reader not in prompt.delivered[worker],
                f"{request_id}: {reader} was counted twice",
            )
            if verdict != "unknown":  # a worker that uses no announcements ignores a reader before the grant
                prompt.delivered[worker] |= {reader}

    def renew(self, request_id: str, now_s: float, only: int | None = None) -> None:
        """Deliver a heartbeat to one worker, or to every one."""
        prompt = self.prompts[request_id]
        for worker, table in self._workers(only):
            is_renewed = table.renew(request_id, now_s=now_s)
            deadline_s = prompt.deadlines[worker]
            demand(
                not is_renewed or deadline_s is not None, f"{request_id}: a heartbeat renews a lease that does not run"
            )
            if deadline_s is not None:
                # A lease that is due but not yet looked at is still a lease: its renewal was waiting in the queue.
                prompt.deadlines[worker] = max(deadline_s, now_s + RENEWAL_S)

    def _workers(self, worker: int | None) -> list[tuple[int, LeaseTable]]:
        numbered = list(enumerate(self.tables))
        return numbered if worker is None else [numbered[worker]]

    def is_fence_intact(self, request_id: str) -> bool:
        """Whether the fence words match the ticket."""
        ticket = self.prompts[request_id].ticket
        fence = None if ticket is None else ticket.get("kv_fence")
        demand(isinstance(fence, list), f"{request_id}: no fence in the ticket although a slot was free")
        slot, generation = cast("list[int]", fence)
        return all(words[slot] == generation for words in self.words)

    def is_freed(self, request_id: str) -> bool:
        """Whether the engine has given the blocks to another request."""
        return self.prompts[request_id].status == "freed"

    # ---- for the explorer

    def heal_step(self) -> Step | None:
        """Return the next step of a well-behaved engine, or None if it only waits."""
        for request_id, prompt in self.prompts.items():
            if prompt.status not in {"waiting", "preempted", "running"}:
                continue
            if prompt.status == "running" and prompt.chunks < 2 and not self.is_plain:
                return ("p-last", request_id)
            if self.state.has_work():
                return ("p-step",)
            is_done = prompt.status == "running" and prompt.is_stepped
            return ("p-finish" if is_done else "p-abort", request_id)
        if self.state.has_work():
            return ("p-step",)
        is_awaited = any(
            prompt.status == "kept" or (prompt.is_release_sent and not prompt.released)
            for prompt in self.prompts.values()
        )
        return ("p-poll",) if is_awaited else None

    def is_settled(self) -> bool:
        """Whether nothing is left of any request: no record, no lease, no slot in use."""
        return not (self.state.live_count or self.state.has_work() or any(table.live_count() for table in self.tables))

    def request_key(self, request_id: str, now_s: float, *, is_named: bool) -> tuple[object, ...]:
        """Return everything that determines this request's future, with times relative to now and, perhaps, readers unnamed."""
        prompt = self.prompts[request_id]
        live = self.state._requests.get(request_id)  # the key must see what decides the future
        outbox = self.state._outbox.orders
        leases = [table._leases.get(request_id) for table in self.tables]
        readers = [
            [
                (reader in delivered, lease is not None and reader in lease.readers_done)
                for delivered, lease in zip(prompt.delivered, leases, strict=True)
            ]
            for reader in self.readers
        ]
        return (
            prompt.status,
            prompt.is_stepped,
            prompt.chunks,
            prompt.preemptions,
            (prompt.is_revoked, prompt.is_revocation_sent),
            tuple(sorted(prompt.saved)) and tuple(block % 10 for block in sorted(prompt.saved)),
            readers if is_named else sorted(readers),
            tuple(None if at is None else max(0.0, at - now_s) for at in prompt.deadlines),
            tuple(sorted(prompt.reported)),
            (
                prompt.is_start_due,
                prompt.completes_due,
                request_id in outbox["restarts"],
                request_id in outbox["completes"],
            ),
            (prompt.is_release_sent, tuple(sorted(prompt.released)), prompt.is_allocated_twice, prompt.decoded),
            live and live.producer and live.producer.state,
            [_lease_key(lease, now_s) for lease in leases],
            prompt.ticket is not None and self.is_fence_intact(request_id),
            request_id in outbox["expects"],
            request_id in outbox["grants"],
            request_id in outbox["releases"],
            request_id in outbox["revokes"],
            len(outbox["saves"].get(request_id, ())),
        )

    def _blocks(self, request_id: str) -> list[int]:
        first = 10 * (int(request_id[1:]) + 1)
        return [first, first + 1]


def _lease_key(lease: Lease | None, now_s: float) -> tuple[object, ...] | None:
    if lease is None:
        return None
    left_s = max(0.0, lease.deadline_s - now_s) if lease.state == "granted" else None
    return lease.state, left_s, len(lease.readers_done), any(each.is_complete for each in lease.readers.values())
