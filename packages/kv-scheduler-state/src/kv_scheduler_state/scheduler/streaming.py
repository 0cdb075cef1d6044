"""Streamed hand-overs of the scheduler process: the side channel's questions and answers, and the ends of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state.errors import InvalidEvent, TicketError, quote
from kv_scheduler_state.records import forget_if_ended
from kv_scheduler_state.ticket.prompt import missing_media

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.plan import StreamQuestion
    from kv_scheduler_state.records import ConsumedStream, Request
    from kv_scheduler_state.scheduler.admission import Admissions
    from kv_scheduler_state.scheduler.consumer import Consumers
    from kv_scheduler_state.scheduler.producer import Producers

__all__ = ["Streams"]


@final
class Streams:
    """Streams of both directions.

    Attributes:
        produced: Prompts that this engine computes: accepts peers' questions, and returns their answers.
        consumed: Prompts that this engine reads: free blocks, outcomes, and questions that need no answer any more.
    """

    def __init__(
        self,
        requests: dict[str, Request],
        consumers: Consumers,
        producers: Producers,
        admissions: Admissions,
        clock: ObservedClock,
    ) -> None:
        self._config = producers.config
        self._clock = clock
        self._requests = requests
        self._consumers = consumers
        self._admissions = admissions
        self.produced = producers.streams
        self.consumed = consumers.streams

    def take_questions(self) -> Sequence[StreamQuestion]:
        """Return new questions, each once, after giving up the streams that got no answer or no room in time.

        Deadlines are compared with the time of the latest event, so call this once per step, after `take_step_plan`.
        """
        now_s = self._clock.observed_s
        self.consumed.step_ended(now_s)
        for stream, event in self.consumed.due(now_s):
            self._step(stream, event)
        return self.consumed.take_questions()

    def answered(self, request_id: str, number: int, answer: Mapping[str, object], *, now_s: float) -> bool:
        """Process the answer to a question; return False, and ignore it, unless it answers the latest question.

        An answer that cannot be trusted counts as a refusal. A "no" with the reason "unanswered" means that no answer came: the
        peer is asked again, as after its own "busy". A "busy" also says that the peer knows the prompt and continues with it. A
        "no" may carry a `code` that names the cause more precisely; `take_outcomes` returns it if it was the last word.

        Raises:
            InvalidEvent: `invalid-event`, for an unknown kind of answer.
        """
        self._clock.observe(now_s)
        stream = self.consumed.get(request_id)
        if stream is None or not number or stream.number != number:
            return False
        kind = answer.get("kind")
        if kind == "no":
            code = str(answer.get("code") or "")
            missing = missing_media(answer.get("media"), stream.media)
            if missing is not None:
                self._requests[request_id].rejected_code = code = missing.code
            self._refused(stream, str(answer.get("reason")), code=code)
            return True
        if kind not in {"offer", "final"}:
            raise InvalidEvent(f"the answer is a {quote(kind)}, must be an offer, a final or a no")
        if kind == "offer" and self.consumed.wants_final(stream):
            # A producer that offers again and again would keep the request, and its blocks, without end.
            self._refused(stream, "withdrawn")
            return True
        try:
            ticket = self._admissions.opened(stream, answer)
        except TicketError as error:
            self._requests[request_id].rejected_code = error.code
            self._refused(stream, "digest-mismatch", code=error.code)
            return True
        if self._consumers.hand_overs.was_read(ticket):
            # A request that has ended since has read it; the peer may not know yet that its blocks are no longer needed.
            self._refused(stream, "withdrawn")
            return True
        if kind == "offer" and not self.consumed.fits(ticket):
            # No blocks are reserved yet; the final ticket makes this a plain hand-over, which needs no share of the reserve.
            self._consumers.step_early(stream, "misfit", ticket)
            return True
        stream.number = 0
        self._consumers.step_early(stream, str(kind), ticket)
        return True

    def ended(self, request_id: str, rank: object, *, is_done: bool) -> None:
        """Record that a worker's part of a stream has ended, with nothing of it on the wire any more.

        Once the parts of all workers have ended and at least one of them is not done, the peer is asked again.

        Args:
            request_id: The request.
            rank: The worker's rank; any value that distinguishes it from the others.
            is_done: Whether its fence held.

        Raises:
            IllegalTransition: The request does not read a stream now.
        """
        if self.consumed.note_end(request_id, rank, is_done=is_done):
            self._step(self.consumed.find(request_id, "torn"), "torn")

    def _refused(self, stream: ConsumedStream, reason: str, *, code: str = "") -> None:
        stream.last_word, now_s = code or reason, self._clock.observed_s
        if reason == "busy":
            stream.since_s = now_s
        # Ask again for an id that is not known *yet*; an id that is no longer known has ended.
        if reason in {"busy", "unanswered"} or (reason == "unknown-id" and stream.record.state == "asking"):
            stream.retry_s = now_s + self._config.stream_retry_s
            return
        stream.number = 0
        self._step(stream, "refuse")

    def _step(self, stream: ConsumedStream, event: str) -> None:
        request_id = stream.record.request_id
        self._consumers.step_early(stream, event, None)
        forget_if_ended(self._requests, request_id, self._requests[request_id])
