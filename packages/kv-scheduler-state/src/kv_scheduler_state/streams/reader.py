"""Reader of a streamed hand-over in a consumer's worker: it decides what to read next, and whether the data counts.

The caller polls a peer's progress word and passes it in. The reader says which table entries are whole, counts the parts on
the wire, and asks for the fence word once the last part of all chunks has landed. It reports once, when nothing is on the wire
any more.

Worked example. Blocks of 16 tokens, a prompt of 100, chunks of 40. Progress 40: entries 0 and 1 (32 tokens) are whole and
ordered. Progress 80: entries 2 to 4. Progress 100: entries 5 and 6, the last of which holds 4 tokens, with the states and
the last window. A prefix that the consumer holds itself (`first_entry`) is never ordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, final

from kv_scheduler_state.errors import DuplicateRequest, UnknownRequest
from kv_scheduler_state.fences import is_later_tag
from kv_scheduler_state.plan import StreamPart
from kv_scheduler_state.tables import GONE, NEW, STREAM_READER_TABLE

__all__ = ["StreamReaders", "StreamReport"]

_SLOWEST_TOKENS_PER_S: Final = 100
"""Pace below which a prompt is given up, even if it progresses steadily: a stream holds part of the reserve."""


class StreamReport(NamedTuple):
    """End of a stream on this worker; its memory is quiet."""

    stream_id: str
    is_done: bool
    cause: str = ""
    """Event that broke it: `changed` (later tag or void words), `stall` (no further entry), `slow`, `part-lost`, `lost` (the
    fence differs) or `cancel`; empty if it is done."""


@final
@dataclass(slots=True, eq=False)
class _Reading:
    state: str
    generation: int
    tag: int
    prompt_tokens: int
    entry_tokens: int
    next_entry: int
    began_s: float
    progress_s: float
    tokens: int = 0
    in_flight: int = 0
    cause: str = ""

    def delay(self, now_s: float, stall_s: float) -> str:
        """Return `stall` if no further entry has become whole for `stall_s`, `slow` if the whole prompt takes too long, or "".

        Example: at `stall_s` 60, a prompt of 6000 tokens is given up 60 s after its latest entry, and after 180 s in any case
        unless the peer has computed all of it by then.
        """
        if self.state == "breaking":
            return ""
        if now_s - self.progress_s >= stall_s:
            return "stall"
        whole_s = 2 * stall_s + self.prompt_tokens / _SLOWEST_TOKENS_PER_S
        return "slow" if self.state == "watching" and now_s - self.began_s >= whole_s else ""


@final
class StreamReaders:
    """Readers of one worker.

    Args:
        stall_s: Seconds without a further whole entry after which a stream is given up.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._table = STREAM_READER_TABLE
        self._readings: dict[str, _Reading] = {}
        self._wanted: list[str] = []
        self._reports: list[StreamReport] = []

    def state_of(self, stream_id: str) -> str:
        """Return the state of a request, `gone` if it is not being read."""
        reading = self._readings.get(stream_id)
        return GONE if reading is None else reading.state

    def cause_of(self, stream_id: str) -> str:
        """Return the event that broke a stream which is not quiet yet, as `StreamReport.cause`; empty for any other."""
        reading = self._readings.get(stream_id)
        return "" if reading is None else reading.cause

    def watch(
        self,
        stream_id: str,
        *,
        generation: int,
        tag: int,
        prompt_tokens: int,
        entry_tokens: int,
        first_entry: int = 0,
        now_s: float,
    ) -> None:
        """Begin to read behind a progress word.

        Args:
            stream_id: Name of the stream.
            generation: Generation of the offer, which the fence word must still show at the end.
            tag: Tag of progress words and table entries.
            prompt_tokens: Tokens that are handed over.
            entry_tokens: Tokens of a table entry: the common block size of both engines.
            first_entry: First entry to read; the consumer already has the entries before it.
            now_s: The caller's monotonic clock.

        Raises:
            DuplicateRequest: `duplicate-request`.
        """
        known = self._readings.get(stream_id)
        if known is not None:
            raise DuplicateRequest(stream_id, known.state)
        state = self._table.find(stream_id, NEW, "watch").target
        self._readings[stream_id] = _Reading(
            state, generation, tag, prompt_tokens, entry_tokens, first_entry, began_s=now_s, progress_s=now_s
        )

    def observed(self, stream_id: str, tag: int, tokens: int, now_s: float) -> StreamPart | None:
        """Process a progress word; return the part to read now, if any. Only `watching` readers use it."""
        reading = self._readings.get(stream_id)
        if reading is None or reading.state != "watching":
            return None
        if tag != reading.tag:
            # The offer may arrive before the producer has stored its words: zeros and older tags mean that it has not begun.
            if is_later_tag(tag, reading.tag) and (tag or tokens):
                self._step(stream_id, reading, "changed")
            return None
        if tokens > reading.prompt_tokens or tokens < reading.tokens:
            self._step(stream_id, reading, "changed")
            return None
        if tokens == reading.tokens:
            return None
        if tokens == reading.prompt_tokens or tokens // reading.entry_tokens > reading.tokens // reading.entry_tokens:
            reading.progress_s = now_s
        reading.tokens, is_last = tokens, tokens == reading.prompt_tokens
        self._step(stream_id, reading, "whole" if is_last else "progress")
        stop = -(-tokens // reading.entry_tokens) if is_last else tokens // reading.entry_tokens
        if stop <= reading.next_entry and not is_last:
            return None
        part = StreamPart(reading.next_entry, stop, is_last)
        reading.next_entry = stop
        reading.in_flight += 1
        return part

    def landed(self, stream_id: str, *, is_good: bool, now_s: float) -> None:
        """Count a part as quiet: its bytes have arrived, or it failed and writes nothing more.

        Raises:
            UnknownRequest: `unknown-request`.
        """
        reading = self._readings.get(stream_id)
        if reading is None or not reading.in_flight:
            raise UnknownRequest(stream_id, "landed")
        reading.in_flight -= 1
        reading.progress_s = now_s
        if not is_good and reading.state != "breaking":
            self._step(stream_id, reading, "part-lost")
        else:
            self._settle(stream_id, reading)

    def fence_found(self, stream_id: str, word: int | None) -> None:
        """Process the fence word, None if it could not be read; ignore a late word of a stream that has ended."""
        reading = self._readings.get(stream_id)
        if reading is not None and reading.state == "fencing":
            self._step(stream_id, reading, "held" if word == reading.generation else "lost")

    def cancel(self, stream_id: str) -> None:
        """Stop reading; the report follows once the memory is quiet."""
        reading = self._readings.get(stream_id)
        if reading is not None and reading.state != "breaking":
            self._step(stream_id, reading, "cancel")

    def tick(self, now_s: float) -> None:
        """Give up the streams that made no progress in time, or progressed too slowly."""
        for stream_id, reading in list(self._readings.items()):
            reading.cause = reading.cause or reading.delay(now_s, self._stall_s)
            if reading.cause and reading.state != "breaking":
                self._step(stream_id, reading, "stall")

    def take_fences(self) -> list[str]:
        """Return the requests whose fence word is to be read now, each once."""
        wanted, self._wanted = self._wanted, []
        return [each for each in wanted if self.state_of(each) == "fencing"]

    def take_reports(self) -> list[StreamReport]:
        """Return the ends of streams, each once."""
        reports, self._reports = self._reports, []
        return reports

    def _step(self, stream_id: str, reading: _Reading, event: str) -> None:
        row = self._table.find(stream_id, reading.state, event)
        reading.state = row.target
        if row.target == "breaking":
            reading.cause = reading.cause or event
        if "read-fence" in row.effects:
            self._wanted.append(stream_id)
        if row.target == GONE:
            is_done = "report-done" in row.effects
            self._reports.append(StreamReport(stream_id, is_done, "" if is_done else reading.cause or event))
            del self._readings[stream_id]
        elif row.target == "breaking":
            self._settle(stream_id, reading)

    def _settle(self, stream_id: str, reading: _Reading) -> None:
        if not reading.in_flight and reading.state in {"finishing", "breaking"}:
            self._step(stream_id, reading, "quiet")
