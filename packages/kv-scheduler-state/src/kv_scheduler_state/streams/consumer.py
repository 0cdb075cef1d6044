"""Stream handling for consumer records: questions, reservations and retries.

The blocks that streams may hold before their data is whole.

A parked stream holds blocks and computes nothing. Where two engines prefill for each other, streams that held all blocks
would keep the prompts that they wait for from running; a limited share leaves room for those prompts.

Worked example. Of 1000 blocks with a fraction of 0.5 streams hold at most 500. With 400 held and 300 free, 100 more may be
taken and 101 may not; with 80 free, 80 may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.errors import UnknownRequest
from kv_scheduler_state.fences import stream_tag
from kv_scheduler_state.plan import StreamOrder, StreamOutcome, StreamQuestion, StreamResult
from kv_scheduler_state.records import UNRESERVED
from kv_scheduler_state.ticket.prompt import MEDIA_MISSING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kv_scheduler_state.config import GroupConfig, SchedulerConfig
    from kv_scheduler_state.plan import Outbox, ReadOrder
    from kv_scheduler_state.records import ConsumedStream, ConsumerRecord
    from kv_scheduler_state.tables import Transition
    from kv_scheduler_state.ticket.early import EarlyTicket
    from kv_scheduler_state.ticket.ticket import HandoffTicket

__all__ = ["StreamConsumers"]

_WAITS: Final = UNRESERVED | {"awaiting"}
_MOST_WAITS: Final = 10
"""A request waits this many times the longest wait for an answer if the peer keeps saying that the prompt is on its way."""
_RESULTS: Final[Mapping[str, StreamResult]] = {"ask": "read-whole", "leave": "computed-here", "stop-stream": "given-up"}
"""Effect of a row that ends the wait for a stream -> what becomes of the request."""
_MOST_STREAMS: Final = 1024
"""Requests with an early ticket at once. The engine asks for each that waits in every step; that took 14 us on the build
machine, most of it the engine's own look-up of the prefix."""
_HOLD_S: Final = 0.25
"""Time for which an offer is withheld after the engine did not allocate its blocks; each try may delay the queue by a step."""


@final
class StreamConsumers:
    """Collects questions and orders for the records that `Consumers` moves from state to state.

    Args:
        config: The engine.
        outbox: Orders for the workers.

    Attributes:
        free_blocks: Returns the free blocks of the engine's pool; if None, all blocks that the share allows count as free.
        lacks_blocks: Whether an offer waited for blocks in the latest step; call `give_way` if no step can give it any.
    """

    def __init__(self, config: SchedulerConfig, outbox: Outbox) -> None:
        self._config = config
        self.outbox = outbox
        # Blocks that each stream holds, and the most that all of them may hold together.
        self._held: dict[str, int] = {}
        self._most_held = int(config.cache_blocks * config.stream_reserve_fraction)
        self.free_blocks: Callable[[], int] | None = None
        self._streams: dict[str, ConsumedStream] = {}
        self._number = 0
        self._questions: list[StreamQuestion] = []
        self._cancels: list[tuple[str, int]] = []
        self._outcomes: list[StreamOutcome] = []
        # Offers that found too few free blocks in this step, and those that the engine was asked to begin.
        self._short: list[ConsumedStream] = []
        self._begun: list[ConsumedStream] = []
        self.lacks_blocks = False

    @property
    def blocks_held(self) -> int:
        """Blocks that streams hold before their data is whole."""
        return sum(self._held.values())

    @property
    def is_full(self) -> bool:
        """Whether as many requests with an early ticket wait or read as may at once."""
        return len(self._streams) >= _MOST_STREAMS

    def begin(self, stream: ConsumedStream) -> None:
        """Register a stream and ask its first question."""
        self._streams[stream.record.request_id] = stream
        self._ask(stream)

    def find(self, request_id: str, event: str) -> ConsumedStream:
        """Return a live stream.

        Raises:
            UnknownRequest: `unknown-request`.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            raise UnknownRequest(request_id, event)
        return stream

    def reads(self, hand_over_id: str) -> bool:
        """Whether a live stream already has this id, as with the children of a request with n > 1."""
        return any(stream.early.hand_over_id == hand_over_id for stream in self._streams.values())

    def get(self, request_id: str) -> ConsumedStream | None:
        """Return a live stream, or None."""
        return self._streams.get(request_id)

    def external_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Return the tokens to read, None while there is no offer, or no room for its blocks."""
        stream = self.find(request_id, "external-tokens")
        record = stream.record
        tokens = record.loadable_tokens - computed_tokens
        record.computed_tokens = computed_tokens
        if tokens <= 0:
            return 0
        if record.state != "offered":
            return None
        self._held.pop(request_id, None)
        blocks = self._blocks(stream, computed_tokens)
        free = blocks if self.free_blocks is None else self.free_blocks()
        stream.is_too_large = blocks > self._most_held
        if blocks > free or stream.hold_s is not None:
            self._short.append(stream)
            return None
        if self.blocks_held + blocks > self._most_held:
            return None
        self._held[request_id] = blocks
        self._begun.append(stream)
        return tokens

    def follow(self, request_id: str, row: Transition, effect: str) -> None:
        """Perform an effect of a stream's row."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._note_outcome(stream, row, effect)
        if effect == "ask":
            if row.event in {"expire", "misfit"}:  # only the final ticket is of use from now on
                stream.breaks = max(stream.breaks, self._config.stream_max_breaks)
                self._held.pop(request_id, None)
            stream.breaks += row.event == "torn"
            stream.torn.clear()
            self._ask(stream)
        elif effect == "cancel-question":
            if stream.number:
                self._cancels.append((request_id, stream.number))
                stream.number = 0
        elif effect == "stop-stream":
            self.outbox.streams["stops"][request_id] = request_id
        elif effect in {"end-stream", "leave"}:
            if effect == "end-stream":
                self.outbox.streams["ends"][request_id] = request_id
            self._held.pop(request_id, None)
            del self._streams[request_id]

    def order(self, record: ConsumerRecord, read: ReadOrder, start: int) -> None:
        """Order the first stream of a request, into blocks that it keeps for all later streams."""
        stream = self.find(record.request_id, "load")
        stream.read, stream.start = read, start
        self.order_again(record)

    def order_again(self, record: ConsumerRecord) -> None:
        """Order a stream into the blocks of the request."""
        stream, fence = self.find(record.request_id, "offer"), record.ticket.fence
        if stream.read is None or fence is None:
            raise UnknownRequest(record.request_id, "stream")
        read = stream.read._replace(ticket=record.ticket)
        self.outbox.streams["watches"][record.request_id] = StreamOrder(read, stream_tag(fence[1]), stream.start)

    def order_final(self, record: ConsumerRecord) -> None:
        """Order the plain read of the final ticket into the blocks of the request."""
        stream = self.find(record.request_id, "final")
        if stream.read is None:
            raise UnknownRequest(record.request_id, "final")
        self.outbox.read(stream.read._replace(ticket=record.ticket))

    def fits(self, ticket: HandoffTicket) -> bool:
        """Whether both engines' blocks cover the same number of tokens, so that a prompt can be read in parts.

        Example: with blocks of 16 tokens here and of 8 at the peer, a prompt is read only as a whole, from its final ticket.
        """
        return not ticket.span_tokens or all(
            group.kind == "state" or group.span_tokens == span
            for group, span in zip(self._config.groups, ticket.span_tokens, strict=True)
        )

    def step_ended(self, now_s: float) -> None:
        """Withhold for a while the offers that the engine was asked to begin in this step but did not allocate.

        An engine does not look at free blocks alone: it keeps some for running prompts, for drafts and for a watermark. No
        request behind one that lacks blocks gets its turn, so an offer repeated in every step would block the queue.
        """
        refused = [stream for stream in self._begun if stream.record.state == "offered"]
        for stream in refused:
            stream.hold_s = now_s + _HOLD_S
            self._held.pop(stream.record.request_id, None)
        self.lacks_blocks = bool(refused) or any(stream.record.state == "offered" for stream in self._short)
        self._short.clear()
        self._begun.clear()

    def due(self, now_s: float) -> list[tuple[ConsumedStream, str]]:
        """Return the streams whose wait is over, with the event that is due: `retry` or `expire`."""
        due: list[tuple[ConsumedStream, str]] = []
        for stream in self._streams.values():
            if stream.record.state not in _WAITS:
                continue
            if stream.hold_s is not None and now_s >= stream.hold_s:
                stream.hold_s = None
            longest_s = self._config.stream_ask_s
            is_over = now_s - stream.since_s >= longest_s or now_s - stream.entered_s >= _MOST_WAITS * longest_s
            if is_over or stream.is_too_large:
                due.append((stream, "expire"))
            elif stream.retry_s is not None and now_s >= stream.retry_s:
                stream.retry_s = None
                due.append((stream, "retry"))
        return due

    def note_end(self, request_id: str, rank: object, *, is_done: bool) -> bool:
        """Note that a worker is quiet; return True once all workers are quiet and at least one is not done."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        (stream.done if is_done else stream.torn).add(rank)
        workers = self._config.tp * self._config.pp
        return bool(stream.torn) and len(stream.done | stream.torn) >= workers

    def wants_final(self, stream: ConsumedStream) -> bool:
        """Whether a stream has broken so often that only its final ticket is of use."""
        return stream.breaks >= self._config.stream_max_breaks

    def take_questions(self) -> list[StreamQuestion]:
        """Return new questions, each once, except those that need no answer any more."""
        questions, self._questions = self._questions, []
        return [each for each in questions if self._is_open(each.request_id, each.number)]

    def take_cancels(self) -> list[tuple[str, int]]:
        """Return (request, number) of questions that need no answer any more, each once."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def take_outcomes(self) -> list[StreamOutcome]:
        """Return the decisions against streaming prompts for which peers were asked, each once.

        Deadlines count from `Streams.take_questions`, so call that first.
        """
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def note_local(self, request_id: str, early: EarlyTicket, code: str) -> None:
        """Record that a prompt is computed here without asking its peer."""
        self._outcomes.append(
            StreamOutcome(request_id, code, "computed-here", early.host, early.port, early.hand_over_id)
        )

    def _note_outcome(self, stream: ConsumedStream, row: Transition, effect: str) -> None:
        result = _RESULTS.get(effect)
        if result is None or row.event not in {"refuse", "expire", "misfit"}:
            return
        if row.state == "offered":
            code = "over-share" if stream.is_too_large else "no-room"
        elif row.event == "misfit":
            code = "other-blocks"
        else:
            code = stream.last_word or "no-answer"
            if code == MEDIA_MISSING:
                result = "fails"
        hand_over_id, host, port = stream.early
        self._outcomes.append(StreamOutcome(stream.record.request_id, code, result, host, port, hand_over_id))

    def _is_open(self, request_id: str, number: int) -> bool:
        stream = self._streams.get(request_id)
        return stream is not None and stream.number == number

    def _ask(self, stream: ConsumedStream) -> None:
        self._number += 1
        stream.number = self._number
        stream.retry_s = None
        stream.is_too_large = False
        hand_over_id, host, port = stream.early
        self._questions.append(
            StreamQuestion(
                stream.record.request_id,
                self._number,
                host,
                port,
                hand_over_id,
                stream.digest,
                stream.offered_tokens,
                self.wants_final(stream),
            )
        )

    def _blocks(self, stream: ConsumedStream, computed_tokens: int) -> int:
        """Return an upper bound on the blocks that the engine is about to allocate for a request.

        Example: a prompt of 100 tokens, read except for a prefix hit of 32, in groups with blocks of 16. A group that keeps
        every block takes 7 - 2 = 5; a group with a window of 32 takes those from token 68 on, so 7 - 4 = 3.
        """
        return sum(
            1 + group.scratch_blocks
            if group.kind == "state"
            else -(-stream.prompt_tokens // group.span_tokens)
            - _first_taken(group, stream.offered_tokens, computed_tokens)
            for group in self._config.groups
        )


def _first_taken(group: GroupConfig, tokens: int, computed_tokens: int) -> int:
    """Return the number of the first block that is neither a prefix hit nor wholly before the window at the end of `tokens`."""
    first_token = max(0, tokens - group.window_tokens) if group.kind == "window" else 0
    return max(first_token, computed_tokens) // group.span_tokens
