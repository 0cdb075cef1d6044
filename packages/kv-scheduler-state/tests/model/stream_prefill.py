"""A minimal streaming prefill engine: scheduler, workers, devices that lag behind, and pages with contents.

A prompt has a few chunks of one block each, and a recurrent state that every chunk overwrites. The scheduler runs ahead of
the devices: it may schedule, preempt and abort while steps are queued. Its plans are those of `SchedulerState`, and the workers
carry them out by `StreamWorker` and `LeaseTable`.
"""

from __future__ import annotations

import math
from typing import cast

from stream_helpers import Prompt as Identity

from kv_scheduler_state.config import GroupConfig, SchedulerConfig
from kv_scheduler_state.plan import EMPTY_PLAN, EMPTY_STREAM_PLAN, StepPlan, StreamChunk, StreamQuestion
from kv_scheduler_state.scheduler.state import SchedulerState
from kv_scheduler_state.tables import GONE
from kv_scheduler_state.worker.leases import LeaseEnd, LeaseTable
from kv_scheduler_state.worker.state import StreamWorker

from .freeze import freeze
from .invariants import problems
from .promises import Step, demand
from .stream_words import Device, Job, StreamRules, StreamSetting, Words, early_ticket, page_text

GROUPS = (GroupConfig("full", block_tokens=1), GroupConfig("state", block_tokens=1))


class Prompt:
    """The observer's knowledge of a request."""

    def __init__(self) -> None:
        self.status = "absent"
        self.pages: tuple[int, ...] = ()
        self.chunks = 0
        self.fence: tuple[int, int] = (0, 0)
        self.reported: set[int] = set()
        # Whether the cache was reset since it began: it is not handed over before it has started again.
        self.is_void = False


class Worker:
    """A worker: words, leases, a device, and what it has yet to do."""

    def __init__(self, slots: int, plain: int, pages: int) -> None:
        self.words = Words(slots + plain)
        self.streams = StreamWorker(self.words, slots)
        self.leases = LeaseTable(max_pause_s=math.inf)
        self.device = Device(pages)
        self.inbox: list[tuple[StepPlan, Job]] = []
        self.stage = 0
        self.notes: list[StreamChunk] = []

    def work(self, rules: StreamRules, now_s: float) -> None:
        """Do the first or second half of a step: the words of streams, then the forward pass and all other orders."""
        plan, job = self.inbox[0]
        streams = plan.streams
        voids = EMPTY_STREAM_PLAN._replace(voids=streams.voids)
        if not self.stage:
            if rules.voids_last:
                self.streams.before_forward(streams._replace(voids=()))
            self.streams.before_forward(voids if rules.voids_last else streams)
            self.stage = 1
            return
        self.device.submit(job)
        for order in plan.fences:
            self.words.fences[order.slot] = order.generation
        refusals = self.leases.apply(plan, now_s=now_s)
        demand(not refusals, f"the workers refuse {refusals}")
        self.stage = 0
        self.inbox.pop(0)

    def event(self) -> None:
        """Let the device finish a step."""
        chunk = self.device.finish()
        if chunk is not None:
            self.notes.append(chunk)

    def take_sent(self, now_s: float) -> list[str]:
        """Return the requests that this worker reports as sent."""
        ends: tuple[LeaseEnd, ...] = self.leases.take_ended(now_s=now_s)
        for end in ends:
            if end.fence is not None:
                self.words.fences[end.fence[0]] = end.fence[1]
        self.streams.leases_ended(ends)
        return [*self.streams.take_sent(), *[end.request_id for end in ends if end.is_reported]]


class StreamPrefill:
    """The prefill engine, with requests `s0` and so on."""

    def __init__(self, setting: StreamSetting) -> None:
        requests, slots, rules = setting.requests, setting.slots, setting.rules
        config = SchedulerConfig(
            *("prefill-0", "10.0.0.1", 5600),
            tp=setting.workers,
            groups=GROUPS,
            lease_s=1000.0,
            fence_seed=1,
            nonce_seed="n",
            fence_slots=requests,
            stream_slots=slots,
            stream_reserve_fraction=0.5,
            cache_blocks=64,
            peer_networks=("10.0.0.0/8",),
        )
        self.state = SchedulerState(config)
        self.rules = rules
        self.prompts = {f"s{index}": Prompt() for index in range(requests)}
        pages = (1 + rules.chunks) * requests
        self.workers = [Worker(slots, requests, pages) for _ in range(setting.workers)]
        self.free = set(range(pages))
        self.others = self.preemptions = self.decodes = self.revocations = setting.preemptions
        self.resets = setting.resets
        # Grows with each reset; pages of one prompt that were computed before and after one do not go together.
        self.epoch = 0
        self.is_dead = False
        self.now_s = 0.0
        # Generations that were ended for a reason: a reader may be refused by these, and by no others.
        self.ended: set[int] = set()
        self.board: dict[str, dict[str, object]] = {}
        """Answers that the listener gives by itself, by hand-over id."""

    # ---- what can happen

    def steps(self) -> list[Step]:
        """Return everything that may happen here next."""
        if self.is_dead:
            return []
        names: list[Step] = []
        for number, worker in enumerate(self.workers):
            names += [("p-work", str(number))] if worker.inbox else []
            names += [("p-event", str(number))] if worker.device.queue else []
            names += [("p-note", str(number))] if worker.notes else []
        if not any(worker.inbox for worker in self.workers):
            names += self._scheduling()
        for request_id, prompt in self.prompts.items():
            names += [(name, request_id) for name in self._endings(request_id, prompt)]
            if prompt.status == "leased":
                names += [("p-end", request_id, str(number)) for number in self._holders(request_id)]
        return names

    def _holders(self, request_id: str) -> list[int]:
        tables = [worker.leases for worker in self.workers]
        return [number for number, table in enumerate(tables) if request_id in table._leases]

    def _scheduling(self) -> list[Step]:
        names: list[Step] = [("p-idle",)] if self.state.has_work() else []
        for request_id, prompt in self.prompts.items():
            missing = 1 + (not prompt.pages)
            is_due = prompt.status == "waiting" or (prompt.status == "running" and prompt.chunks < self.rules.chunks)
            if is_due and len(self.free) >= missing:
                names.append(("p-chunk", request_id))
        if self.others and self.free:
            names.append(("p-other",))
        if self.resets:
            names.append(("p-reset",))
        return names

    def _endings(self, request_id: str, prompt: Prompt) -> list[str]:
        if prompt.status == "absent":
            return ["p-arrive"]
        if prompt.status == "waiting":
            return ["p-abort"]
        if prompt.status == "leased":
            return ["p-revoke"] if self.revocations and self.state_of(request_id) == "streamed" else []
        if prompt.status != "running":
            return []
        names = ["p-abort"]
        if self.preemptions:
            names.append("p-preempt")
        if prompt.chunks == self.rules.chunks:
            names += ["p-decode"] if self.decodes else []
            names += [] if self._is_computing(request_id) else ["p-finish"]
        return names

    def state_of(self, request_id: str) -> str:
        """Return the state of the request's producer record."""
        request = self.state._requests.get(request_id)
        return GONE if request is None or request.producer is None else request.producer.state

    def _is_computing(self, request_id: str) -> bool:
        waiting = [job[1] for worker in self.workers for _, job in worker.inbox]
        is_waiting = any(chunk is not None and chunk.request_id == request_id for chunk in waiting)
        return is_waiting or any(worker.device.computes(request_id) for worker in self.workers)

    # ---- events

    def apply(self, step: Step) -> None:
        """Do one of `steps`."""
        name, argument = step[0], step[1] if len(step) > 1 else ""
        if name == "p-work":
            self.workers[int(argument)].work(self.rules, self.now_s)
        elif name == "p-event":
            self.workers[int(argument)].event()
        elif name == "p-note":
            worker = self.workers[int(argument)]
            worker.streams.chunk_ended(worker.notes.pop(0))
        elif name in {"p-idle", "p-other"}:
            self._idle(is_other=name == "p-other")
        elif name == "p-reset":
            self._reset()
        elif name == "p-chunk":
            self._chunk(argument, self.prompts[argument])
        elif name == "p-end" and len(step) > 2:
            self.ended.add(self.prompts[argument].fence[1])
            self.workers[int(step[2])].leases.release(argument, now_s=self.now_s)
        else:
            self._request_step(name, argument, self.prompts[argument])

    def _request_step(self, name: str, request_id: str, prompt: Prompt) -> None:
        state, now_s = self.state, self.now_s
        if name == "p-arrive":
            params, tokens = early_ticket(request_id, serves=True), self.rules.chunks + 1
            admission = state.arrive(request_id, params, prompt_tokens=tokens, identity=Identity(), now_s=now_s)
            demand(admission.truncate_tokens == 1, "the consumer computes the last token")
            prompt.status = "waiting"
        elif name == "p-finish":
            self._end(request_id, prompt, "length")
            if prompt.is_void:
                demand(prompt.status != "leased", "what was computed before a reset is not handed over")
                return
            slot, generation = prompt.fence
            is_shown = all(worker.words.fences[slot] == generation for worker in self.workers)
            demand(prompt.status == "leased" and is_shown, "the word shows the generation of the lease")
        elif name == "p-decode":
            self.decodes -= 1
            state.scheduled(request_id, new_block_ids=[[], []], is_prompt_complete=True, computed_tokens=prompt.chunks)
        elif name == "p-preempt":
            self.preemptions -= 1
            self.ended.add(prompt.fence[1])
            state.preempt(request_id, now_s=now_s)
            self._release(prompt, "waiting")
        elif name == "p-abort":
            self.ended.add(prompt.fence[1])
            self._end(request_id, prompt, "abort")
        else:
            self.revocations -= 1
            self.ended |= {other.fence[1] for other in self.prompts.values() if other.status == "leased"}
            state.revoke_all(now_s=now_s)

    def _end(self, request_id: str, prompt: Prompt, reason: str) -> None:
        decision = self.state.finish(
            request_id,
            reason="length" if reason == "length" else "abort",
            block_ids=self._block_ids(prompt.pages),
            computed_tokens=prompt.chunks,
            identity=Identity(),
            now_s=self.now_s,
        )
        self._publish()
        if not decision.keep_blocks:
            self._release(prompt, "over")
            return
        prompt.status = "kept" if decision.params is None else "leased"
        if decision.params is not None:
            fence = decision.params["kv_fence"]
            demand(isinstance(fence, list), "a ticket has a fence")
            slot, generation = cast("list[int]", fence)
            prompt.fence = slot, generation

    def _block_ids(self, pages: tuple[int, ...]) -> list[list[int]]:
        return [list(pages[1:]), list(pages[:1])]

    def _chunk(self, request_id: str, prompt: Prompt) -> None:
        is_first = not prompt.pages
        taken = tuple([self._take_page() for _ in range(1 + is_first)])
        prompt.pages = (*prompt.pages, *taken)
        prompt.status = "running"
        prompt.chunks += 1
        new = self._block_ids(taken) if is_first else [list(taken), []]
        if is_first:
            self.state.allocate(request_id, block_ids=new, new_block_ids=new, external_tokens=0, now_s=self.now_s)
        self.state.scheduled(
            request_id,
            new_block_ids=new,
            is_prompt_complete=prompt.chunks == self.rules.chunks,
            computed_tokens=prompt.chunks,
        )
        record = self.state._requests[request_id].producer
        if record is not None and record.fence is not None:
            prompt.fence = record.fence
        state = (prompt.pages[0], page_text("state", request_id, prompt.chunks, self.epoch))
        entry = (taken[-1], page_text("kv", request_id, prompt.chunks - 1, self.epoch))
        self._send((state, entry), request_id)

    def _send(self, writes: tuple[tuple[int, str], ...], request_id: str = "") -> None:
        plan = self.state.take_step_plan(now_s=self.now_s)
        self._publish()
        chunk = next((each for each in plan.streams.chunks if each.request_id == request_id), None)
        for worker in self.workers:
            if plan is not EMPTY_PLAN or writes:
                worker.inbox.append((plan, (writes, chunk)))

    def _publish(self) -> None:
        """Let the listener give the answers that stand, as once a step and when a request has ended."""
        for standing in self.state.streams.produced.take_standings():
            if standing.answer is not None:
                self.board[standing.hand_over_id] = standing.answer
            elif not self.rules.keeps_offers:
                self.board.pop(standing.hand_over_id, None)

    def answer_by_listener(self, question: StreamQuestion) -> dict[str, object] | None:
        """Return the listener's own answer, however long ago it was published; None for a question that waits."""
        answer = self.board.get(question.hand_over_id)
        is_of_use = answer is not None and (answer["kind"] != "offer" or not question.wants_final)
        return answer if is_of_use else None

    def _idle(self, *, is_other: bool) -> None:
        self.others -= is_other
        self._send(((min(self.free), "other"),) if is_other else ())

    def settle(self) -> None:
        """Free the requests that every worker has reported as sent."""
        if self.is_dead:
            return
        for number, worker in enumerate(self.workers):
            for request_id in worker.take_sent(self.now_s):
                prompt = self.prompts[request_id]
                is_new = number not in prompt.reported
                demand(
                    prompt.status in {"kept", "leased"} and is_new, "sent is reported once, for blocks that are kept"
                )
                prompt.reported.add(number)
        for request_id, prompt in self.prompts.items():
            if prompt.status in {"kept", "leased"} and len(prompt.reported) == len(self.workers):
                self.state.report(sent=[request_id], received=[], failed=[])
                self._release(prompt, "over")
        found = problems(self.state)
        demand(not found, "; ".join(found))

    def _take_page(self) -> int:
        page = min(self.free)
        self.free.remove(page)
        return page

    def _reset(self) -> None:
        """Void everything that was computed before now."""
        self.resets -= 1
        self.epoch += 1
        self.state.reset(now_s=self.now_s)
        for prompt in self.prompts.values():
            if prompt.status in {"running", "leased"}:
                self.ended.add(prompt.fence[1])
                prompt.is_void = prompt.status == "running"

    def _release(self, prompt: Prompt, status: str) -> None:
        demand(not self.free & set(prompt.pages), "a page is freed once")
        self.free |= set(prompt.pages)
        prompt.pages, prompt.chunks, prompt.status = (), 0, status
        prompt.is_void = prompt.is_void and status != "waiting"

    # ---- the end

    def heal_step(self) -> Step | None:
        """Return the next step that this side has left to do."""
        steps = self.steps()
        for name in ("p-work", "p-event", "p-note", "p-idle", "p-arrive", "p-chunk", "p-finish"):
            step = next((each for each in steps if each[0] == name), None)
            if step is not None:
                return step
        return None

    def expire_one(self) -> Step | None:
        """Return the end of a lease that was neither read nor revoked."""
        return next((each for each in self.steps() if each[0] == "p-end"), None)

    def leftovers(self) -> list[str]:
        """Return everything that should not be left at the end."""
        if self.is_dead:
            return []
        left = [
            f"{request_id} is {prompt.status}" for request_id, prompt in self.prompts.items() if prompt.status != "over"
        ]
        used = self.state.streams.produced.slots_used + self.state.fence_slots_used
        pages = len(self.workers[0].device.pages) - len(self.free)
        if used or pages or self.state.live_count:
            left.append(f"{used} slots, {pages} pages and {self.state.live_count} requests are in use")
        leases = [worker.leases.live_count() for worker in self.workers]
        return [*left, f"{leases} leases are left"] if any(leases) else left

    def key(self) -> object:
        """Return everything that the future depends on."""
        return "dead" if self.is_dead else freeze(self)
