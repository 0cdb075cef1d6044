"""Requests to engines whose answers are streamed, with the time of each token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

__all__ = [
    "ANSWER_TOKENS",
    "Answer",
    "Stream",
    "ask",
    "ask_all",
    "client",
    "made_prompt",
    "running_stream",
    "text_of_event",
]

ANSWER_TOKENS: Final = 8

_PRINTABLE: Final = range(4, 98)
"""Token ids of `!` to `~` in the byte-level tokenizer: each is one character of text, so no token waits for the next one."""
_ENOUGH: Final = 24
"""Tokens that a background stream has given before it counts as usual."""
_WITHIN_S: Final = 600
_PREFILL: Final = b": prefill-ms "
"""Comment of a router that asks both engines at once: the prefill engine's answer may come after the first token."""


def made_prompt(seed: str, tokens: int) -> list[int]:
    """Return token ids of a prompt that shares no block with that of another seed."""
    return random.Random(seed).choices(_PRINTABLE, k=tokens)  # noqa: S311 - reproducible, no secret


@dataclass(slots=True)
class Answer:
    """An answer on its way, and at its end.

    Attributes:
        began_s: When it was asked for, as `time.perf_counter` has it.
        times_s: When each piece of text came.
        text: The text so far.
        prefill_ms: Time until the prefill engine's answer, as the router tells it; 0 if it told none, or was not asked.
    """

    began_s: float
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    prefill_ms: float = 0.0

    @property
    def first_token_ms(self) -> float:
        """Time to the first token."""
        return 1e3 * (self.times_s[0] - self.began_s)

    @property
    def hand_over_ms(self) -> float:
        """Time from the prefill engine's answer to the first token."""
        return self.first_token_ms - self.prefill_ms

    @property
    def step_ms(self) -> float:
        """Median gap between its own tokens; of tokens at 10, 80, 152 and 222 ms it is 70 ms."""
        return 1e3 * statistics.median(late - early for early, late in pairwise(self.times_s))

    @property
    def prefilled_s(self) -> float:
        """Moment of the prefill engine's answer."""
        return self.began_s + self.prefill_ms / 1e3


def client() -> aiohttp.ClientSession:
    """Return a session that uses no connection twice, and takes as many as there are requests."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_WITHIN_S))


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], *, tokens: int = ANSWER_TOKENS
) -> Answer:
    """Ask for a greedy answer of so many tokens, and read it to its end."""
    answer = Answer(time.perf_counter())
    async for _ in _read(session, url, prompt, tokens, answer):
        pass
    if len(answer.text) != tokens:
        raise DevError(f"{url} answered {len(answer.text)} of {tokens} tokens: {answer.text!r}")
    return answer


async def ask_all(url: str, prompts: Iterable[Sequence[int]], *, tokens: int = ANSWER_TOKENS) -> list[Answer]:
    """Ask for all answers at once."""
    async with client() as session:
        return list(await asyncio.gather(*(ask(session, url, prompt, tokens=tokens) for prompt in prompts)))


async def _read(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int, answer: Answer
) -> AsyncIterator[None]:
    """Read a stream into an answer; yields after each piece of text."""
    body = {
        "model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "allowed_token_ids": list(_PRINTABLE),
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise DevError(f"{url}: HTTP {reply.status}: {(await reply.text())[:500]}")
        answer.prefill_ms = float(reply.headers.get("X-Prefill-Ms", "0"))
        async for line in reply.content:
            if line.startswith(_PREFILL):
                answer.prefill_ms = float(line.removeprefix(_PREFILL))
            text = text_of_event(line)
            if text:
                answer.times_s.append(time.perf_counter())
                answer.text += text
                yield


def text_of_event(line: bytes) -> str:
    """Return the text of a line of an event stream: `data: {"choices": [{"text": "a"}]}` gives "a".

    Raises:
        DevError: The event is an error.
    """
    content = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or content == b"[DONE]":
        return ""
    event: dict[str, Any] = json.loads(content)
    if "error" in event:
        raise DevError(f"an answer broke off: {event['error']}")
    return "".join(str(choice.get("text") or "") for choice in event["choices"])


@dataclass(slots=True)
class Stream:
    """A request that goes on beside what is measured."""

    answer: Answer

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Return the gaps between neighbouring tokens that lie in a span of time, with those across its ends.

        Tokens at 1, 2, 5 and 6 s have gaps of 1, 3 and 1 s; the span from 3 to 4 s lies in the second.
        """
        return [1e3 * (late - early) for early, late in self.steps_s(begin_s, end_s)]

    def steps_s(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return the two moments of each of these gaps."""
        return [(early, late) for early, late in pairwise(self.answer.times_s) if late > begin_s and early < end_s]


@contextlib.asynccontextmanager
async def running_stream(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], *, tokens: int
) -> AsyncIterator[Stream]:
    """Let a request generate tokens meanwhile; begins once it has given some, and gives it up at the end.

    Raises:
        DevError: It ended before the end: some of what was measured was not beside it.
    """
    stream, is_steady = Stream(Answer(time.perf_counter())), asyncio.Event()

    async def read() -> None:
        async for _ in _read(session, url, prompt, tokens, stream.answer):
            if len(stream.answer.times_s) >= _ENOUGH:
                is_steady.set()

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(is_steady.wait())
    try:
        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        yield stream
        if reading.done():
            reading.result()
            raise DevError(f"{url}: the stream beside ended after {len(stream.answer.times_s)} tokens")
    finally:
        for task in (reading, waiting):
            task.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
