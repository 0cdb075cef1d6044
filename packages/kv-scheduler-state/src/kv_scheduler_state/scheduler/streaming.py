"""The parts of the scheduler process's state, and its calls for streamed hand-overs: questions, answers, ends of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_scheduler_state.clock import ObservedClock
from kv_scheduler_state.errors import InvalidEvent, TicketError, UnknownRequest, quote
from kv_scheduler_state.outbox import Outbox
from kv_scheduler_state.records import forget_if_ended
from kv_scheduler_state.scheduler.admission import Admissions
from kv_scheduler_state.scheduler.consumer import Consumers
from kv_scheduler_state.scheduler.producer import Producers
from kv_scheduler_state.scheduler.reports import Reports
from kv_scheduler_state.tables import CONSUMER_TABLE, PRODUCER_TABLE, STREAM_CONSUMER_TABLE, STREAM_PRODUCER_TABLE
from kv_scheduler_state.ticket.prompt import missing_media
from kv_scheduler_state.values import BlockRules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_scheduler_state.config import SchedulerConfig
    from kv_scheduler_state.records import ConsumedStream, Request
    from kv_scheduler_state.streams.values import StreamAnswer, StreamOutcome, StreamQuestion, StreamStanding

__all__ = ["SchedulerStreams"]


class SchedulerStreams:
    """Streams of both directions; `SchedulerState` adds everything else."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._clock = ObservedClock()
        self._rules = BlockRules(config.groups, config.null_block)
        self._outbox = Outbox(config.read_hold_steps)
        producing = PRODUCER_TABLE.joined(STREAM_PRODUCER_TABLE)
        self._producers = Producers(config, producing, self._rules, self._outbox)
        self._consumers = Consumers(config, CONSUMER_TABLE.joined(STREAM_CONSUMER_TABLE), self._rules, self._outbox)
        self._requests: dict[str, Request] = {}
        self._reports = Reports(self._requests, self._clock, self._consumers, self._producers)
        self._admissions = Admissions(self._consumers, self._producers)

    # ---- this engine computes

    def stream_question(self, asker: str, question: Mapping[str, object]) -> None:
        """Accept a peer's question; `take_stream_answers` returns its answer, at once or as soon as there is one.

        Args:
            asker: Name of this question, never used for another one.
            question: `hand_over_id`, `number`, `digest`, `tokens` and `wants_final`, with their format already checked.

        Raises:
            InvalidEvent: `invalid-event`, for a number that is not an integer.
        """
        self._producers.streams.ask(asker, question, self._clock.observed_s)

    def stream_cancelled(self, asker: str, hand_over_id: str) -> None:
        """Forget a question whose asker no longer waits for an answer."""
        self._producers.streams.cancel(asker, hand_over_id)

    def stream_whole(self, request_id: str) -> None:
        """Hand a request over whole, although a peer wants to read it early: questions wait for its final ticket.

        Call this between the request's arrival and its first allocation.

        Raises:
            UnknownRequest: `unknown-request`, also for a request that is not streamed.
        """
        self._producers.streams.find(request_id, "whole").is_whole = True

    def give_offers(self, is_on: bool) -> None:
        """Offer prompts from now on or, while this engine could write no ticket for them, hand them over whole."""
        self._producers.gives_offers = is_on

    def take_stream_answers(self) -> Sequence[StreamAnswer]:
        """Return new answers, each once."""
        return self._producers.streams.take_answers(self._clock.observed_s)

    def take_stream_standings(self) -> Sequence[StreamStanding]:
        """Return new standing answers, which hold without endy further question about an id, and withdrawals of earlier ones.

        A side channel uses them to answer by itself while a step runs, or while this engine runs no steps. An outdated offer or
        final ticket does no harm: its fence decides.
        """
        return self._producers.streams.take_standings()

    @property
    def stream_slots_used(self) -> int:
        """Stream slots in use; with all of `config.stream_slots` in use prompts are handed over plain."""
        return self._producers.streams.fences.used

    # ---- this engine reads

    def bind_free_blocks(self, free_blocks: Callable[[], int] | None) -> None:
        """Set the function that returns the free blocks of the engine's pool; it is called before a stream takes any."""
        self._consumers.streams.free_blocks = free_blocks

    @property
    def stream_blocks_held(self) -> int:
        """Blocks that streams hold before their data is whole."""
        return self._consumers.streams.reserve.held

    def take_stream_questions(self) -> Sequence[StreamQuestion]:
        """Return new questions, each once, after giving up the streams that got no answer or no room in time.

        Deadlines are compared with the time of the latest event, so call this once per step, after `take_step_plan`.
        """
        now_s = self._clock.observed_s
        self._consumers.streams.step_ended(now_s)
        for stream, event in self._consumers.streams.due(now_s):
            self._step(stream, event, now_s)
        return self._consumers.streams.take_questions()

    @property
    def streams_lack_blocks(self) -> bool:
        """Whether an offer waited for blocks in the latest step; call `give_way` if no step can give it any."""
        return self._consumers.streams.lacks_blocks

    def take_stream_outcomes(self) -> Sequence[StreamOutcome]:
        """Return the decisions against streaming prompts for which peers were asked, each once.

        Deadlines count from `take_stream_questions`, so call that first.
        """
        return self._consumers.streams.take_outcomes()

    def take_stream_cancels(self) -> Sequence[tuple[str, int]]:
        """Return (request, number) of questions that need no answer any more, each once."""
        return self._consumers.streams.take_cancels()

    def stream_answered(self, request_id: str, number: int, answer: Mapping[str, object], *, now_s: float) -> bool:
        """Process the answer to a question; return False, and ignore it, unless it answers the latest question.

        An answer that cannot be trusted counts as a refusal. A "no" with the reason "unanswered" means that no answer came: the
        peer is asked again, as after its own "busy". A "busy" also says that the peer knows the prompt and continues with it. A
        "no" may carry a `code` that names the cause more precisely; `take_stream_outcomes` returns it if it was the last word.

        Raises:
            InvalidEvent: `invalid-event`, for an unknown kind of answer.
        """
        at_s = self._clock.observe(now_s)
        stream = self._consumers.streams.get(request_id)
        if stream is None or not number or stream.number != number:
            return False
        kind = answer.get("kind")
        if kind == "no":
            code = str(answer.get("code") or "")
            missing = missing_media(answer.get("media"), stream.media)
            if missing is not None:
                self._find(request_id, "answer").rejected_code = code = missing.code
            self._refused(stream, str(answer.get("reason")), at_s, code=code)
            return True
        if kind not in {"offer", "final"}:
            raise InvalidEvent(f"the answer is a {quote(kind)}, must be an offer, a final or a no")
        if kind == "offer" and self._consumers.streams.wants_final(stream):
            # A producer that offers again and again would keep the request, and its blocks, without end.
            self._refused(stream, "withdrawn", at_s)
            return True
        try:
            ticket = self._admissions.opened(stream, answer)
        except TicketError as error:
            self._find(request_id, "answer").rejected_code = error.code
            self._refused(stream, "digest-mismatch", at_s, code=error.code)
            return True
        if self._consumers.hand_overs.was_read(ticket):
            # A request that has ended since has read it; the peer may not know yet that its blocks are no longer needed.
            self._refused(stream, "withdrawn", at_s)
            return True
        if kind == "offer" and not self._consumers.streams.fits(ticket):
            # No blocks are reserved yet; the final ticket makes this a plain hand-over, which needs no share of the reserve.
            self._consumers.step_early(stream, "misfit", ticket, at_s)
            return True
        stream.number = 0
        self._consumers.step_early(stream, str(kind), ticket, at_s)
        return True

    def stream_ended(self, request_id: str, rank: object, *, is_done: bool) -> None:
        """Record that a worker's part of a stream has ended, with nothing of it on the wire any more.

        Once the parts of all workers have ended and at least one of them is not done, the peer is asked again.

        Args:
            request_id: The request.
            rank: The worker's rank; any value that distinguishes it from the others.
            is_done: Whether its fence held.

        Raises:
            IllegalTransition: The request does not read a stream now.
        """
        streams = self._consumers.streams
        if streams.note_end(request_id, rank, is_done=is_done):
            self._step(streams.find(request_id, "torn"), "torn", self._clock.observed_s)

    # ---- helpers

    def _refused(self, stream: ConsumedStream, reason: str, now_s: float, *, code: str = "") -> None:
        stream.last_word = code or reason
        if reason == "busy":
            stream.since_s = now_s
        # Ask again for an id that is not known *yet*; an id that is no longer known has ended.
        if reason in {"busy", "unanswered"} or (reason == "unknown-id" and stream.record.state == "asking"):
            stream.retry_s = now_s + self._config.stream_retry_s
            return
        stream.number = 0
        self._step(stream, "refuse", now_s)

    def _step(self, stream: ConsumedStream, event: str, now_s: float) -> None:
        request_id = stream.request_id
        self._consumers.step_early(stream, event, None, now_s)
        forget_if_ended(self._requests, request_id, self._requests[request_id])

    def _find(self, request_id: str, event: str) -> Request:
        try:
            return self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, event) from None
