"""Requests from prefill to decode engines under faults, each with all that its verdict needs.

The load is its own router: it asks a prefill engine for a ticket and hands the ticket to a decode engine, once, without a second
try. So a request fails exactly when an engine that it needs fails it, and a failure that has no excuse is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import aiohttp

ASK_TICKET: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
HANGS_AFTER_S = 90.0
Step = Literal["prefill", "decode"]
End = Literal["text", "error", "broken", "hung", "left"]
"""`text`: HTTP 200 and a whole answer; `error`: an error in the API's form; `broken`: a connection that ended before its answer;
`hung`: no end within 90 s; `left`: the client left on purpose."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, how much of an answer is asked for, and the right answer of one engine alone."""

    number: int
    text: str
    tokens: int
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine: names and addresses."""

    prefill: str
    decode: str
    prefill_url: str
    decode_url: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has ended."""

    prompt: Prompt
    pair: Pair
    started_s: float
    ended_s: float
    step: Step
    end: End
    text: str
    detail: str = ""
    is_stream: bool = False
    had_ticket: bool = False

    @property
    def is_right(self) -> bool:
        """Whether it got the right text."""
        return self.end == "text" and self.text == self.prompt.answer


_WORDS = (12, 40, 60, 40, 150, 60, 280, 370)
_TOKENS = (1, 8, 16, 4, 2, 12, 3, 1)


def make_prompts(count: int) -> list[Prompt]:
    """Return prompts of mixed lengths, some 50 to 1850 tokens, that share no block.

    Example: prompt 6 has 280 words, which are about 1400 tokens, and asks for 3 tokens.
    """
    return [
        Prompt(
            number,
            f"{number:04d} " + " ".join(f"w{number * 7 + k * k % 97}" for k in range(_WORDS[number % len(_WORDS)])),
            _TOKENS[number % len(_TOKENS)],
        )
        for number in range(count)
    ]


def _body(prompt: Prompt, **more: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt.text,
        "max_tokens": prompt.tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


class _EndedError(Exception):
    """A request has ended without its text."""

    def __init__(self, end: End, detail: str, text: str = "") -> None:
        super().__init__(detail)
        self.end: End = end
        self.detail = detail
        self.text = text


@final
@dataclass
class Load:
    """Workers that ask one after the other, each with a pair and a prompt that a seeded generator draws."""

    pairs: Sequence[Pair]
    prompts: Sequence[Prompt]
    seed: int
    workers: int = 4
    pause_s: float = 0.05
    """Mean pause of a worker between two requests."""
    leave_share: float = 0.0
    """Share of requests whose client leaves in their middle."""
    rewrite: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Changes a ticket on its way, as a proxy between engines needs it."""
    asked: list[Asked] = field(default_factory=list)
    is_needed: bool = True
    _loop: asyncio.AbstractEventLoop | None = None
    _session: aiohttp.ClientSession | None = None
    _bursts: list[asyncio.Future[None]] = field(default_factory=list)

    async def run(self) -> None:
        """Ask until the load is stopped."""
        self._loop = asyncio.get_running_loop()
        # A server that closes an idle connection just when it is used again would fail a request.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=HANGS_AFTER_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            await asyncio.gather(*(self._work(random.Random(f"{self.seed} {n}")) for n in range(self.workers)))
            await asyncio.gather(*self._bursts)

    async def _work(self, draw: random.Random) -> None:
        while self.is_needed:
            await asyncio.sleep(draw.expovariate(1 / self.pause_s))
            if self.is_needed:
                leaves_after_s = draw.uniform(0.0, 0.1) if draw.random() < self.leave_share else None
                await self.one(draw.choice(self.pairs), draw.choice(self.prompts), draw.random() < 0.5, leaves_after_s)

    def aim(
        self, pairs: Sequence[Pair], prompts: Sequence[Prompt], strike: Callable[[], object], after_s: float
    ) -> None:
        """Fetch a ticket for each prompt, hand all tickets over at once, and strike so many seconds later: reads are under way.

        Returns when the strike is done; the requests go on.
        """
        loop = self._loop
        assert loop is not None, "the load does not run yet"
        asyncio.run_coroutine_threadsafe(self._aim(pairs, prompts, strike, after_s), loop).result(HANGS_AFTER_S)

    async def _aim(
        self, pairs: Sequence[Pair], prompts: Sequence[Prompt], strike: Callable[[], object], after_s: float
    ) -> None:
        asking = [(pairs[number % len(pairs)], prompt) for number, prompt in enumerate(prompts)]
        tickets = await asyncio.gather(*(self._ticket(*each) for each in asking))
        self._bursts += [
            asyncio.ensure_future(self.one(*each, False, ticket=ticket))
            for each, ticket in zip(asking, tickets, strict=True)
        ]
        await asyncio.sleep(after_s)
        strike()

    async def one(
        self,
        pair: Pair,
        prompt: Prompt,
        is_stream: bool,
        leaves_after_s: float | None = None,
        *,
        ticket: dict[str, Any] | None = None,
    ) -> None:
        """Send one request, to prefill unless there is a ticket, and note how it ended."""
        started_s = time.monotonic()
        step: Step = "prefill"
        end: End = "text"
        text = detail = ""
        try:
            async with asyncio.timeout(leaves_after_s):
                ticket = ticket or await self._ticket(pair, prompt)
                step = "decode"
                more: dict[str, object] = {"kv_transfer_params": ticket} if ticket else {}
                text = await self._answer(pair, _body(prompt, stream=is_stream, **more), is_stream)
        except _EndedError as ended:
            end, detail, text = ended.end, ended.detail, ended.text
        except TimeoutError:
            end, detail = ("left", "") if leaves_after_s is not None else ("hung", "no end")
        self.asked.append(
            Asked(prompt, pair, started_s, time.monotonic(), step, end, text, detail, is_stream, ticket is not None)
        )

    async def _ticket(self, pair: Pair, prompt: Prompt) -> dict[str, Any] | None:
        body = {**_body(prompt), "max_tokens": 1, "kv_transfer_params": ASK_TICKET}
        answer = await self._whole(pair.prefill_url, body)
        ticket = answer.get("kv_transfer_params")
        return self.rewrite(ticket) if isinstance(ticket, dict) else None

    async def _answer(self, pair: Pair, body: Mapping[str, object], is_stream: bool) -> str:
        if is_stream:
            return await self._stream(pair.decode_url, body)
        return _text_of(await self._whole(pair.decode_url, body))

    async def _whole(self, url: str, body: Mapping[str, object]) -> dict[str, Any]:
        assert self._session is not None
        with _failures():
            async with self._session.post(f"{url}/v1/completions", json=body) as reply:
                raw = await reply.read()
                return _checked(reply.status, raw)

    async def _stream(self, url: str, body: Mapping[str, object]) -> str:
        assert self._session is not None
        parts: list[str] = []
        with _failures(parts):
            async with self._session.post(f"{url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    _checked(reply.status, await reply.read())
                async for line in reply.content:
                    event = line.removeprefix(b"data: ").strip()
                    if event == b"[DONE]":
                        return "".join(parts)
                    if event:
                        parts.append(_text_of(_checked(200, event)))
        raise _EndedError("broken", "a stream without its end", "".join(parts))


@contextlib.contextmanager
def _failures(parts: Sequence[str] = ()) -> Iterator[None]:
    """Turn what a connection raises into the end of its request; `parts` have come before that."""
    try:
        yield
    except _EndedError as ended:
        raise _EndedError(ended.end, ended.detail, "".join(parts)) from ended
    except TimeoutError:
        raise _EndedError("hung", f"no end within {HANGS_AFTER_S:g} s", "".join(parts)) from None
    except aiohttp.ClientError as error:
        raise _EndedError("broken", repr(error), "".join(parts)) from error


def _checked(status: int, raw: bytes) -> dict[str, Any]:
    """Return the answer's object; an error in the API's form ends the request cleanly, anything else does not."""
    try:
        answer = json.loads(raw)
    except ValueError:
        raise _EndedError("broken", f"HTTP {status}: {raw[:200]!r}") from None
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise _EndedError("error", f"HTTP {status}: {answer['error'].get('message', '')}"[:300])
    if status != 200 or not isinstance(answer, dict):
        raise _EndedError("broken", f"HTTP {status}: {raw[:200]!r}")
    return answer


def _text_of(answer: Mapping[str, Any]) -> str:
    choices = answer.get("choices") or [{}]
    if choices[0].get("finish_reason") in {"abort", "error"}:
        raise _EndedError("error", f"finished by {choices[0]['finish_reason']}")
    return str(choices[0].get("text", ""))


@contextlib.contextmanager
def running_load(load: Load) -> Iterator[Load]:
    """Run the load on a thread of its own; at the end the requests under way are waited for."""
    thread = threading.Thread(target=lambda: asyncio.run(load.run()), name="load", daemon=True)
    thread.start()
    try:
        while load._loop is None:
            time.sleep(0.01)
        yield load
    finally:
        load.is_needed = False
        thread.join(HANGS_AFTER_S + 30)
        assert not thread.is_alive(), "requests do not end"
