"""Stream handling for producer records: offers, tables, and words that change in time.

Places of a prompt's block ids in the table of a stream.

Both sides compute them from the number of tokens and the tokens per block alone. The groups follow one another, each with a
place for every block that its tokens need; a group of states has one place.

Worked example. 100 tokens, two groups with blocks of 16 and of 32 tokens, and a group of states: 7 + 4 + 1 = 12 places; the
groups begin with the places 0, 7 and 11. A first chunk of 64 tokens brings the blocks (5, 6, 7, 8) and (20, 21): the runs
(0, (5, 6, 7, 8)) and (7, (20, 21)). The second brings (9, 10, 11, 12), of which 12 was allocated ahead, and (22, 23), and
its state lies in block 30: the runs (4, (9, 10, 11)), (9, (22, 23)) and (11, (30,)).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, Literal, final

from kv_scheduler_state.errors import InvalidEvent, UnknownRequest, quote
from kv_scheduler_state.fences import FencePool, ended_generation, stream_tag
from kv_scheduler_state.plan import StreamAnswer, StreamChunk, StreamOpen, StreamRun, StreamStanding, StreamVoid
from kv_scheduler_state.tables import GONE
from kv_scheduler_state.values import running_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.config import GroupConfig, SchedulerConfig
    from kv_scheduler_state.plan import NoReason, Outbox
    from kv_scheduler_state.records import ProducerRecord
    from kv_scheduler_state.tables import Transition

__all__ = ["ProducedStream", "StreamPlaces", "StreamProducers"]

_RUNNING: Final = frozenset({"offered", "complete"})
_PARKED_PER_REQUEST: Final = 8
_REMEMBERED_IDS: Final = 1024
_TABLE_ENTRIES: Final = 8192
"""Block ids that a stream's table holds; a longer prompt is handed over plain."""

_LONGEST_SILENCE_S: Final = 2.0

Question = tuple[int, bool, float]
"""Number of a parked question, whether only the final ticket is of use, and when it was asked."""


@final
@dataclass(slots=True, eq=False)
class ProducedStream:
    """A request that a peer may read while it is computed.

    Attributes:
        digest: Digest of its prompt.
        places: Places of its block ids in the stream's table.
        media: Number of its images, videos and sounds, and the digest without them; None for none.
        is_whole: Whether it may be read only once it is finished.
        nonce: Nonce of all its starts: a reader of an earlier start has nothing to report under it.
        ticket: Ticket of the offer, or the final one.
        parked: Questions without an answer yet, by the asker's name.
    """

    hand_over_id: str
    digest: str
    record: ProducerRecord
    places: StreamPlaces
    media: tuple[int, str] | None = None
    is_whole: bool = False
    nonce: str = ""
    ticket: dict[str, object] | None = None
    parked: dict[str, Question] = field(default_factory=dict[str, Question])


@final
class StreamProducers:
    """Provides slots, orders and answers for the records that `Producers` moves from state to state.

    Stream slots are a range of their own, in front of those of plain leases, for two reasons. Each slot comes with a table for
    the ids of a whole prompt (8192 entries, 64 KiB). And all progress words of a peer are read at once: 64 words are short
    enough for that, the 4096 of plain leases are not.

    Attributes:
        gives_offers: Whether prompts are offered from now on; False while this engine could write no ticket for them, which
            hands them over whole.
    """

    def __init__(self, config: SchedulerConfig, outbox: Outbox, clock: ObservedClock) -> None:
        self._config = config
        self._clock = clock
        self.gives_offers = True
        self.outbox = outbox
        self.fences = FencePool(config.stream_slots, config.fence_seed)
        self._streams: dict[str, ProducedStream] = {}
        self._by_id: dict[str, ProducedStream] = {}
        # Newest last. A question may arrive after the hand-over that it asks for has ended.
        self._ended_ids: dict[str, NoReason] = {}
        self._answers: list[tuple[str, int, dict[str, object]]] = []
        # Changed standing answers, by id; a caller need not take them.
        self._standings: dict[str, StreamStanding] = {}

    # ---- the engine's events

    def may_begin(self, hand_over_id: str) -> bool:
        """Whether a request may be streamed under this id: not if another live one is, as with n > 1."""
        return self._config.stream_slots > 0 and hand_over_id not in self._by_id

    def begin(self, record: ProducerRecord, hand_over_id: str, digest: str, media: tuple[int, str] | None) -> None:
        """Begin a stream of a prompt with this digest and these media."""
        places = StreamPlaces(self._config.groups, record.prompt_tokens)
        stream = ProducedStream(hand_over_id, digest, record, places, media if media and media[0] else None)
        self._streams[record.request_id] = self._by_id[hand_over_id] = stream
        if hand_over_id in self._ended_ids:
            self._standings[hand_over_id] = StreamStanding(hand_over_id, "", None)

    def decline(self, hand_over_id: str, reason: NoReason = "not-streamed") -> None:
        """Refuse all further questions for an id, unless a request has it."""
        if hand_over_id not in self._by_id:
            self._remember(hand_over_id, reason)

    def hand_over_whole(self, request_id: str) -> None:
        """Hand a request over whole, although a peer wants to read it early: questions wait for its final ticket.

        Call this between the request's arrival and its first allocation.

        Raises:
            UnknownRequest: `unknown-request`, also for a request that is not streamed.
        """
        self.find(request_id, "whole").is_whole = True

    @property
    def slots_used(self) -> int:
        """Stream slots in use; with all of `config.stream_slots` in use prompts are handed over plain."""
        return self.fences.used

    def find(self, request_id: str, event: str) -> ProducedStream:
        """Return a live stream.

        Raises:
            UnknownRequest: `unknown-request`.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            raise UnknownRequest(request_id, event)
        return stream

    def give_slot(self, record: ProducerRecord) -> bool:
        """Give a starting or restarting request a slot with a fresh generation; return False if there is none for it."""
        stream = self.find(record.request_id, "allocate")
        if record.fence is not None:
            record.fence = self.fences.renew(record.fence[0])
            stream.places.restart()
            self.outbox.announce("restarts", record.request_id, None)
            return True
        if not stream.is_whole and stream.places.total <= _TABLE_ENTRIES:
            record.fence = self.fences.take()
        if record.fence is not None:
            self.outbox.announce("expects", record.request_id, None)
        return record.fence is not None

    def scheduled(
        self, request_id: str, row: Transition, block_ids: Sequence[Sequence[int]], tokens: int, held_tokens: int
    ) -> None:
        """Order the words of a scheduled chunk."""
        stream = self.find(request_id, "chunk")
        slot, generation = _fence(stream)
        tag, orders = stream_tag(generation), self.outbox.streams
        if "open" in row.effects:
            orders["voids"].pop(request_id, None)
            orders["opens"][request_id] = StreamOpen(request_id, slot, generation, tag)
        else:
            held_tokens = 0
        runs = stream.places.fill(block_ids, is_last=row.target == "complete")
        known: StreamChunk | None = orders["chunks"].get(request_id)
        if known is not None:
            runs, held_tokens = (*known.runs, *runs), known.held_tokens
        orders["chunks"][request_id] = StreamChunk(request_id, slot, tag, runs, tokens, held_tokens)

    def publish(self, kind: Literal["offer", "final"], request_id: str, ticket: dict[str, object]) -> None:
        """Answer with this ticket, from now on, the questions that an offer, or the ticket of a granted lease, satisfies."""
        stream = self.find(request_id, kind)
        stream.ticket = ticket
        answer = _granting(kind, stream, ticket)
        self._standings[stream.hand_over_id] = StreamStanding(stream.hand_over_id, stream.digest, answer)
        self._answer_parked(stream)

    def revoked(self, request_id: str) -> None:
        """Withdraw the final ticket of a stream from the standing answers."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._stand(stream.hand_over_id, "withdrawn")

    def take_standings(self) -> list[StreamStanding]:
        """Return new standing answers, which hold for every further question about an id, and withdrawals of earlier ones.

        A side channel uses them to answer by itself while a step runs, or while this engine runs no steps. An outdated offer or
        final ticket does no harm: its fence decides.
        """
        standings, self._standings = self._standings, {}
        return list(standings.values())

    def end(self, request_id: str, row: Transition, *, ends: bool) -> None:
        """Perform the effects of the row of a preemption, a reset or an end."""
        stream = self.find(request_id, row.event)
        if "void" in row.effects:
            slot, generation = _fence(stream)
            word, tag = ended_generation(generation), stream_tag(generation)
            orders = self.outbox.streams
            # In place of this step's opening and chunk: they never run, and no peer knows of their words.
            orders["opens"].pop(request_id, None)
            orders["chunks"].pop(request_id, None)
            orders["voids"][request_id] = StreamVoid(request_id, slot, word, tag, ends)
            self._standings[stream.hand_over_id] = StreamStanding(stream.hand_over_id, "", None)
            if ends:
                self.outbox.withdraw(request_id)
        if "refuse" in row.effects:
            self._answer_all(stream, {"kind": "no", "reason": "withdrawn"})
        if row.target == GONE:
            self.forget(stream)

    # ---- the consumers' questions

    def ask(self, asker: str, question: Mapping[str, object]) -> None:
        """Accept a peer's question; `take_answers` returns its answer, at once or as soon as there is one.

        Args:
            asker: Name of this question, never used for another one.
            question: `hand_over_id`, `number`, `digest`, `tokens` and `wants_final`, with their format already checked.

        Raises:
            InvalidEvent: `invalid-event`, for a number that is not an integer.
        """
        hand_over_id, digest = str(question["hand_over_id"]), str(question["digest"])
        number, wants_final = question["number"], bool(question["wants_final"])
        stream = self._by_id.get(hand_over_id)
        if type(number) is not int:
            raise InvalidEvent(f"the question's number is {quote(number)}, must be an integer")
        if stream is None:
            self._refuse(asker, number, self._ended_ids.get(hand_over_id, "unknown-id"))
        elif not compare_digest(stream.digest.encode(), digest.encode()):
            mismatch: dict[str, object] = {"kind": "no", "reason": "digest-mismatch"}
            if stream.media is not None:
                mismatch["media"] = stream.media
            self._answers.append((asker, number, mismatch))
        elif len(stream.parked) >= _PARKED_PER_REQUEST and asker not in stream.parked:
            self._refuse(asker, number, "busy")
        else:
            stream.parked[asker] = number, wants_final, self._clock.observed_s
            self._answer_parked(stream)

    def cancel(self, asker: str, hand_over_id: str) -> None:
        """Forget a question whose asker no longer waits for an answer."""
        stream = self._by_id.get(hand_over_id)
        if stream is not None:
            stream.parked.pop(asker, None)

    def take_answers(self) -> list[StreamAnswer]:
        """Return new answers, each once; among them "busy" to askers that have waited for a prompt that has begun.

        Only that tells them that the prompt is on its way, so that they keep waiting. Of a prompt in the queue there is nothing
        to tell.
        """
        for stream in self._streams.values():
            if stream.parked and stream.record.state != "early":
                self._put_off(stream)
        answers, self._answers = self._answers, []
        return [StreamAnswer(*each) for each in answers]

    # ---- helpers

    def forget(self, stream: ProducedStream) -> None:
        """Forget a stream that has ended on every worker; questions for it are refused from now on."""
        del self._streams[stream.record.request_id], self._by_id[stream.hand_over_id]
        # A revocation that crossed with the lease's own end must not affect the slot's next owner.
        self.outbox.streams["voids"].pop(stream.record.request_id, None)
        self._remember(stream.hand_over_id, "withdrawn")

    def _remember(self, hand_over_id: str, reason: NoReason) -> None:
        self._ended_ids[hand_over_id] = reason
        self._stand(hand_over_id, reason)
        if len(self._ended_ids) > _REMEMBERED_IDS:
            oldest = next(iter(self._ended_ids))
            del self._ended_ids[oldest]
            if self._standings.pop(oldest, None) is None and oldest not in self._by_id:
                self._standings[oldest] = StreamStanding(oldest, "", None)

    def _stand(self, hand_over_id: str, reason: NoReason) -> None:
        self._standings[hand_over_id] = StreamStanding(hand_over_id, "", {"kind": "no", "reason": reason})

    def _answer_parked(self, stream: ProducedStream) -> None:
        """Answer the parked questions that the present state has an answer to."""
        state = stream.record.state
        if state == "streamed" and stream.ticket is not None:
            self._answer_all(stream, _granting("final", stream, stream.ticket))
        elif state in _RUNNING and stream.ticket is not None:
            offer = _granting("offer", stream, stream.ticket)
            for asker, (number, wants_final, _) in list(stream.parked.items()):
                if not wants_final:
                    del stream.parked[asker]
                    self._answers.append((asker, number, offer))
        elif state in {"voiding", "taken-back"}:
            self._answer_all(stream, {"kind": "no", "reason": "withdrawn"})

    def _put_off(self, stream: ProducedStream) -> None:
        """Answer "busy" to askers that have waited for a third of the time that a question may take, so that they ask again."""
        silence_s, now_s = min(_LONGEST_SILENCE_S, self._config.stream_ask_s / 3), self._clock.observed_s
        for asker, (number, _, asked_s) in list(stream.parked.items()):
            if now_s - asked_s >= silence_s:
                del stream.parked[asker]
                self._refuse(asker, number, "busy")

    def _answer_all(self, stream: ProducedStream, answer: dict[str, object]) -> None:
        self._answers += [(asker, number, answer) for asker, (number, _, _) in stream.parked.items()]
        stream.parked.clear()

    def _refuse(self, asker: str, number: int, reason: NoReason) -> None:
        self._answers.append((asker, number, {"kind": "no", "reason": reason}))


def _fence(stream: ProducedStream) -> tuple[int, int]:
    if stream.record.fence is None:
        raise UnknownRequest(stream.record.request_id, "fence")
    return stream.record.fence


def _granting(kind: str, stream: ProducedStream, ticket: dict[str, object]) -> dict[str, object]:
    """Return an offer or a final answer; a prompt without a fence has slot and generation 0."""
    slot, generation = stream.record.fence or (0, 0)
    answer: dict[str, object] = {
        "kind": kind,
        "request_id": ticket["remote_request_id"],
        "slot": slot,
        "generation": generation,
    }
    if kind == "offer":
        answer["tag"] = stream_tag(generation)
    answer["ticket"] = ticket
    return answer


@final
class StreamPlaces:
    """Places of one prompt, and how many of each group are filled.

    Args:
        groups: The model's groups.
        tokens: Tokens of the prompt that are handed over.
    """

    def __init__(self, groups: tuple[GroupConfig, ...], tokens: int) -> None:
        self._groups = groups
        self._counts = [1 if group.kind == "state" else -(-tokens // group.span_tokens) for group in groups]
        self._starts = [sum(self._counts[:number]) for number in range(len(groups))]
        self.total = sum(self._counts)
        self._filled = [0] * len(groups)
        # Ids of state groups so far; only the last chunk tells which of them holds the running state.
        self._states: list[list[int]] = [[] for _ in groups]

    def restart(self) -> None:
        """Fill the places from the first one again."""
        self._filled = [0] * len(self._groups)
        self._states = [[] for _ in self._groups]

    def fill(self, block_ids: Sequence[Sequence[int]], *, is_last: bool) -> tuple[StreamRun, ...]:
        """Return the runs of a chunk's new blocks per group."""
        runs: list[StreamRun] = []
        for number, (group, ids) in enumerate(zip(self._groups, block_ids, strict=True)):
            if group.kind == "state":
                self._states[number] += ids
                found = running_state(group.scratch_blocks, self._states[number]) if is_last else ()
                if found:
                    runs.append(StreamRun(self._starts[number], found))
                continue
            filled = self._filled[number]
            kept = tuple(ids[: self._counts[number] - filled])
            if kept:
                runs.append(StreamRun(self._starts[number] + filled, kept))
                self._filled[number] = filled + len(kept)
        return tuple(runs)
