"""A worker of the model's streaming decode engine: its reads of the peer's memory, and its reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_scheduler_state.fences import is_later_tag
from kv_scheduler_state.plan import ReadOrder, StepPlan, StreamPart
from kv_scheduler_state.streams.reader import StreamReaders
from kv_scheduler_state.worker.state import WorkerState

from .promises import Step, demand
from .stream_prefill import StreamPrefill, Worker
from .stream_words import page_text

_STALL_S: Final = 2.0


class Part(NamedTuple):
    """Pages on the wire: (own entry, the peer's page) each; entry -1 is the state."""

    request_id: str
    pages: tuple[tuple[int, int], ...]


class Reader:
    """A worker; it reads its peer's memory only through `opposite`."""

    def __init__(self, number: int, peer: StreamPrefill) -> None:
        self.number = number
        self.opposite = peer
        self.streams = StreamReaders(_STALL_S)
        self.ends = WorkerState()
        self.entries: dict[str, dict[int, str]] = {}
        self.orders: dict[str, ReadOrder] = {}
        self.plain: set[str] = set()
        self.wire: list[Part] = []
        self.wanted: set[str] = set()
        self.void: set[str] = set()
        """Plain reads under way that must end badly."""
        self.inbox: list[StepPlan] = []
        # (request, whether it failed) for the engine.
        self.received: list[tuple[str, bool]] = []

    @property
    def _words(self) -> Worker:
        return self.opposite.workers[self.number]

    # ---- what can happen

    def steps(self) -> list[Step]:
        """Return everything that may happen here next, except lost parts."""
        number = str(self.number)
        names: list[Step] = [("c-work", number)] if self.inbox else []
        if self.has_news():
            names.append(("c-report", number))
        names += [("c-land", number, str(index)) for index in range(len(self.wire))]
        for request_id, reading in self.streams._readings.items():
            if reading.state == "watching" and self._has_progress(request_id):
                names.append(("c-poll", number, request_id))
        names += [("c-fence", number, request_id) for request_id in sorted(self.wanted)]
        return names

    def has_news(self) -> bool:
        """Whether something is to be reported."""
        ends = self.ends
        return bool(self.received or ends._received or ends._failed or ends._ends)

    def _has_progress(self, request_id: str) -> bool:
        if self.opposite.is_dead:
            return False
        reading = self.streams._readings[request_id]
        tag, tokens = self._words.words.progress[self._slot(request_id)]
        if tag == reading.tag:
            return tokens != reading.tokens
        return is_later_tag(tag, reading.tag)

    def _slot(self, request_id: str) -> int:
        fence = self.orders[request_id].ticket.fence
        return fence[0] if fence is not None else 0

    def _generation(self, request_id: str) -> int:
        fence = self.orders[request_id].ticket.fence
        return fence[1] if fence is not None else 0

    # ---- events

    def work(self, now_s: float) -> None:
        """Apply the oldest plan."""
        plan = self.ends.apply(self.inbox.pop(0))
        for order in plan.streams.watches:
            request_id = order.read.request_id
            self._begin(request_id, order.read)
            self.streams.watch(
                request_id,
                generation=self._generation(request_id),
                tag=order.tag,
                prompt_tokens=order.read.tokens,
                entry_tokens=1,
                first_entry=order.start,
                now_s=now_s,
            )
        for request_id in plan.streams.stops:
            self.streams.cancel(request_id)
        for read in plan.reads:
            self._read(read, now_s)
        self.void.update(self.plain.intersection(plan.voids))
        self.received += [(each, True) for each in plan.failures]
        self._settle(now_s)

    def _begin(self, request_id: str, read: ReadOrder) -> None:
        is_quiet = not any(part.request_id == request_id for part in self.wire)
        demand(is_quiet, "the same blocks are read once at a time")
        self.orders[request_id] = read
        self.entries[request_id] = {}

    def _read(self, read: ReadOrder, now_s: float) -> None:
        request_id = read.request_id
        if read.is_notify_only:
            self._notify(read, now_s)
            if read.is_reported:
                self.received.append((request_id, True))
            return
        self._begin(request_id, read)
        self.plain.add(request_id)
        entries, state = read.ticket.peer_blocks
        self.wire.append(Part(request_id, (*enumerate(entries.ids), (-1, state.ids[0]))))

    def poll(self, request_id: str, now_s: float) -> None:
        """Look at the progress word, and at the table behind it."""
        tag, tokens = self._words.words.progress[self._slot(request_id)]
        part = self.streams.observed(request_id, tag, tokens, now_s)
        if part is not None:
            self._order(request_id, part)
        is_broken = self.streams.state_of(request_id) not in {"watching", "finishing"}
        is_due = self._generation(request_id) in self.opposite.ended
        demand(not is_broken or is_due, "a stream in good order is not broken off")
        self._settle(now_s)

    def _order(self, request_id: str, part: StreamPart) -> None:
        read = self.orders[request_id]
        table = self._words.words.tables[self._slot(request_id)]
        tag = self._generation(request_id) % (1 << 32)
        state = read.tokens
        wanted = list(range(part.first, part.stop))
        places = [*wanted, *([state] if part.is_last else [])]
        found = {place: table[place][1] for place in places if table.get(place, (-1, 0))[0] == tag}
        demand(len(found) == len(places), "the table lists what is finished")
        self.wire.append(Part(request_id, tuple([(-1 if at == state else at, found[at]) for at in places])))

    def land(self, index: int, now_s: float, *, is_good: bool) -> None:
        """Let a part land, or fail."""
        part = self.wire.pop(index)
        request_id = part.request_id
        is_good = is_good and not self.opposite.is_dead
        if is_good:
            pages = self._words.device.pages
            self.entries[request_id].update((entry, pages[page]) for entry, page in part.pages)
        if request_id not in self.plain:
            self.streams.landed(request_id, is_good=is_good, now_s=now_s)
        elif is_good:
            self.wanted.add(request_id)
        else:
            self._plain_ended(request_id, is_done=False, now_s=now_s)
        self._settle(now_s)

    def fence(self, request_id: str, now_s: float) -> None:
        """Read the fence word."""
        self.wanted.discard(request_id)
        generation = self._generation(request_id)
        word = None if self.opposite.is_dead else self._words.words.fences[self._slot(request_id)]
        is_due = generation in self.opposite.ended or self.opposite.is_dead
        demand(word == generation or is_due, "good data is not refused by its fence")
        if request_id in self.plain:
            self._plain_ended(request_id, is_done=word == generation, now_s=now_s)
        else:
            self.streams.fence_found(request_id, word)
        self._settle(now_s)

    def tick(self, now_s: float) -> list[str]:
        """Let deadlines pass; return the streams that were given up."""
        reading = list(self.streams._readings)
        self.streams.tick(now_s)
        given_up = [each for each in reading if self.streams.state_of(each) in {"gone", "breaking"}]
        self._settle(now_s)
        return given_up

    def _plain_ended(self, request_id: str, *, is_done: bool, now_s: float) -> None:
        self.plain.discard(request_id)
        is_void = request_id in self.void
        self.void.discard(request_id)
        if is_done:
            self._check(request_id)
            self._notify(self.orders[request_id], now_s)
        self.received.append((request_id, is_void or not is_done))

    def _settle(self, now_s: float) -> None:
        self.wanted |= set(self.streams.take_fences())
        self.wanted = {each for each in self.wanted if each in self.plain or self.streams.state_of(each) == "fencing"}
        for report in self.streams.take_reports():
            is_quiet = not any(part.request_id == report.stream_id for part in self.wire)
            demand(is_quiet, "a report comes once the memory is quiet")
            if report.is_done:
                self._check(report.stream_id)
                self._notify(self.orders[report.stream_id], now_s)
            self.ends.ended(report.stream_id, is_done=report.is_done)

    def _check(self, request_id: str) -> None:
        found, chunks = self.entries[request_id], self.opposite.rules.chunks
        for epoch in range(self.opposite.epoch + 1):
            good = {entry: page_text("kv", request_id, entry, epoch) for entry in range(chunks)}
            good[-1] = page_text("state", request_id, chunks, epoch)
            if found == good:
                return
        demand(False, f"no stale page is accepted: {sorted(found.items())}")

    def _notify(self, read: ReadOrder, now_s: float) -> None:
        if not self.opposite.is_dead:
            verdict = self._words.leases.read_complete(
                read.ticket.peer_request_id,
                reader=f"decode-{self.number}",
                reader_count=1,
                consumer="decode",
                nonce=read.ticket.nonce,
                now_s=now_s,
            )
            demand(verdict != "stale", "a nonce is good for all starts of a request")

    def report(self) -> tuple[Sequence[tuple[str, bool]], Sequence[tuple[str, bool]]]:
        """Return (request, whether it failed) for the engine, and (request, whether its fence held) for the scheduler half."""
        report = self.ends.take_report()
        received = [*self.received, *[(each, each in report.failed) for each in report.received]]
        self.received = []
        return received, report.ends
