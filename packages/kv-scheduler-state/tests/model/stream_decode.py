"""A minimal streaming decode engine: scheduler, workers, a wire, and an observer of the data that was read."""

from __future__ import annotations

from stream_helpers import Prompt

from kv_scheduler_state import UNBOUND
from kv_scheduler_state.config import SchedulerConfig
from kv_scheduler_state.plan import EMPTY_PLAN, StreamAnswer, StreamQuestion
from kv_scheduler_state.scheduler.state import SchedulerState
from kv_scheduler_state.tables import GONE

from .freeze import freeze
from .invariants import problems
from .promises import Step, demand
from .stream_prefill import GROUPS, StreamPrefill
from .stream_reading import Reader
from .stream_words import StreamSetting, early_ticket


class StreamDecode:
    """The decode engine: it parks a request that reads, and frees or runs it once every worker has reported it."""

    def __init__(self, peer: StreamPrefill, setting: StreamSetting) -> None:
        self.opposite = peer
        self.chunks = peer.rules.chunks
        self.blocks = 2 + self.chunks
        self.room = setting.room * self.blocks
        config = SchedulerConfig(
            *("decode-0", "10.0.0.2", 5600),
            tp=len(peer.workers),
            groups=GROUPS,
            lease_s=1000.0,
            fence_seed=1,
            nonce_seed="n",
            peer_networks=("10.0.0.0/8",),
            load_failure_policy="fail" if setting.fails_requests else "recompute",
            stream_reserve_fraction=1.0,
            cache_blocks=max(1, self.room),
            stream_ask_s=3.0,
            stream_retry_s=1.0,
            stream_max_breaks=setting.max_breaks,
        )
        self.state = SchedulerState(config)
        self.state.streams.consumed.free_blocks = self.free_blocks
        self.status = dict.fromkeys(peer.prompts, "absent")
        self.readers = [Reader(number, peer) for number in range(len(peer.workers))]
        self.reports: dict[str, dict[int, bool]] = {}
        self.questions: list[StreamQuestion] = []
        self.announced: list[StreamAnswer] = []
        """Answers of the listener that are on their way."""
        self.losses = self.aborts = setting.faults
        self.resets = setting.resets

    def free_blocks(self) -> int:
        """Return the number of blocks that no request has."""
        return self.room - self.blocks * sum(status in {"parked", "draining"} for status in self.status.values())

    # ---- what can happen

    def steps(self) -> list[Step]:
        """Return everything that may happen here next."""
        names: list[Step] = [step for reader in self.readers for step in reader.steps()]
        if self.losses:
            names += [("c-lose", *step[1:]) for step in names if step[0] == "c-land"]
        if self.state.has_work():
            names.append(("c-step",))
        if self.questions and not self.opposite.is_dead:
            names.append(("c-send",))
        if not self.opposite.is_dead and self._has_answers():
            names.append(("c-answer",))
        if self.resets:
            names.append(("c-reset",))
        for request_id, status in self.status.items():
            names += [(name, request_id) for name in self._request_names(request_id, status)]
        return names

    def _has_answers(self) -> bool:
        return bool(self.opposite.state._producers.streams._answers or self.announced)

    def state_of(self, request_id: str) -> str:
        """Return the state of the request's consumer record."""
        request = self.state._requests.get(request_id)
        return GONE if request is None or request.consumer is None else request.consumer.state

    def _request_names(self, request_id: str, status: str) -> list[str]:
        if status == "absent":
            return ["c-arrive"]
        names: list[str] = []
        if status == "waiting" and self.state_of(request_id) not in {"asking", "asking-final"}:
            names.append("c-admit")
        if status in {"waiting", "parked"} and self.aborts:
            names.append("c-abort")
        if status in {"computed", "read"}:
            names.append("c-finish")
        return names

    # ---- events

    def apply(self, step: Step, now_s: float) -> None:
        """Do one of `steps`, and everything that follows from it at once."""
        name, argument = step[0], step[1] if len(step) > 1 else ""
        if name == "c-send":
            for question in self.questions:
                answer = self.opposite.answer_by_listener(question)
                if answer is None:
                    self.opposite.state.streams.produced.ask(question.request_id, question._asdict())
                else:
                    self.announced.append(StreamAnswer(question.request_id, question.number, answer))
            self.questions.clear()
        elif name == "c-answer":
            announced, self.announced = self.announced, []
            for asker, number, answer in (*announced, *self.opposite.state.streams.produced.take_answers()):
                self.state.streams.answered(asker, number, answer, now_s=now_s)
        elif name == "c-step":
            self._send(now_s)
        elif name == "c-reset":
            self.resets -= 1
            self.state.reset(now_s=now_s)
        elif argument.isdigit():
            self._worker_step(name, self.readers[int(argument)], step[2] if len(step) > 2 else "", now_s)
        else:
            self._request_step(name, argument, now_s)
        self.pump()
        found = problems(self.state)
        demand(not found, "; ".join(found))

    def _worker_step(self, name: str, reader: Reader, argument: str, now_s: float) -> None:
        if name == "c-work":
            reader.work(now_s)
        elif name == "c-report":
            self._report(reader)
        elif name == "c-poll":
            reader.poll(argument, now_s)
        elif name == "c-fence":
            reader.fence(argument, now_s)
        else:
            self.losses -= name == "c-lose"
            request_id = reader.wire[int(argument)].request_id
            demand(self.status[request_id] in {"parked", "draining"}, "no freed block is written by the wire")
            reader.land(int(argument), now_s, is_good=name == "c-land")

    def _request_step(self, name: str, request_id: str, now_s: float) -> None:
        if name == "c-arrive":
            params, tokens = early_ticket(request_id, serves=False), self.chunks + 1
            admission = self.state.arrive(request_id, params, prompt_tokens=tokens, identity=Prompt(), now_s=now_s)
            demand(admission.role == "consumer", f"an early ticket is taken: {admission}")
            self.status[request_id] = "waiting"
        elif name == "c-admit":
            self._admit(request_id, now_s)
        else:
            self.aborts -= name == "c-abort"
            is_parked = self.status[request_id] == "parked"
            self.state.finish(
                request_id,
                reason="abort" if name == "c-abort" else "stop",
                block_ids=[[], []],
                computed_tokens=0,
                identity=UNBOUND,
                now_s=now_s,
            )
            self.status[request_id] = "draining" if is_parked else "over"

    def _admit(self, request_id: str, now_s: float) -> None:
        tokens = self.state.external_tokens(request_id, computed_tokens=0)
        if tokens is None:
            return
        first = 10 * int(request_id[1:])
        blocks = [list(range(first, first + self.chunks + 1)), [first + 9]]
        if tokens and self.free_blocks() < self.blocks:
            return
        self.state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=tokens, now_s=now_s)
        self.status[request_id] = "parked" if tokens else "computed"

    def _send(self, now_s: float) -> None:
        plan = self.state.take_step_plan(now_s=now_s)
        for reader in self.readers:
            if plan is not EMPTY_PLAN:
                reader.inbox.append(plan)

    def _report(self, reader: Reader) -> None:
        received, ends = reader.report()
        for request_id, is_failed in received:
            announced = self.reports.setdefault(request_id, {})
            demand(reader.number not in announced, "a worker reports a request as received once")
            announced[reader.number] = is_failed
        for request_id, is_done in ends:
            self.state.streams.ended(request_id, reader.number, is_done=is_done)
        for request_id, announced in list(self.reports.items()):
            if len(announced) == len(self.readers):
                del self.reports[request_id]
                self._received(request_id, is_failed=any(announced.values()))

    def _received(self, request_id: str, *, is_failed: bool) -> None:
        demand(self.status[request_id] in {"parked", "draining"}, "only parked requests are reported")
        is_quiet = not any(part.request_id == request_id for reader in self.readers for part in reader.wire)
        demand(is_quiet, "blocks are given back once the memory is quiet")
        self.state.report(sent=[], received=[request_id], failed=[request_id] if is_failed else [])
        if self.status[request_id] == "draining":
            self.status[request_id] = "over"
            return
        self.status[request_id] = "computed" if is_failed else "read"

    def tick(self, now_s: float, *, is_punctual: bool = False) -> None:
        """Let deadlines pass; none may be missed while every part does its work at once."""
        self.state.take_step_plan(now_s=now_s) if not self.state.has_work() else self._send(now_s)
        self.pump()
        cancels = self.state._consumers.streams._cancels
        is_punctual = is_punctual and not self.opposite.is_dead
        demand(not is_punctual or not cancels, "a peer that lives answers in time")
        for reader in self.readers:
            for request_id in reader.tick(now_s):
                is_due = reader._generation(request_id) in self.opposite.ended
                demand(not is_punctual or is_due, "a stream in good order makes progress")

    def pump(self) -> None:
        """Take questions, and cancel at the peer those that need no answer any more."""
        self.questions += self.state.streams.take_questions()
        self.state.streams.consumed.take_outcomes()
        for request_id, number in self.state.streams.consumed.take_cancels():
            self.questions = [each for each in self.questions if each.number != number]
            hand_over_id = f"{int(request_id[1:]):032x}"
            if not self.opposite.is_dead:
                self.opposite.state.streams.produced.cancel(request_id, hand_over_id)

    # ---- the end

    def heal_step(self) -> Step | None:
        """Return the next step that this side has left to do."""
        bad = {"c-lose", "c-abort", "c-reset"}
        good = [step for step in self.steps() if step[0] not in bad]
        return next((step for step in good if step[0] != "c-admit" or self._can_admit(step[1])), None)

    def _can_admit(self, request_id: str) -> bool:
        is_offered = self.state_of(request_id) in {"offered", "queued"}
        return self.free_blocks() >= self.blocks or not is_offered

    def leftovers(self) -> list[str]:
        """Return everything that should not be left at the end."""
        left = [f"{request_id} is {status} here" for request_id, status in self.status.items() if status != "over"]
        held, live = self.state.streams.consumed.blocks_held, self.state.live_count
        if held or live or self.state._consumers.streams._streams:
            left.append(f"{held} blocks are reserved, {live} requests are live")
        states = [reader.ends._states for reader in self.readers]
        return [*left, f"workers remember {states}"] if any(states) else left

    def key(self) -> object:
        """Return all that the future depends on."""
        return freeze(self)
