"""Measure a running pair: hand-overs, other requests beside a read, blocks held, work at rest, prefill throughput."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from kvdev.engines import Engine, metric_sum
from kvdev.pairs.asking import Answer, Stream, ask, ask_all, client, running_stream
from kvdev.pairs.plan import TOKEN_BYTES
from kvdev.pairs.turns import cpu_seconds, processes_of
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdev.pairs.fleet import Pair

__all__ = [
    "Counts",
    "Gaps",
    "Look",
    "counts_of",
    "early_share",
    "freed_s",
    "gap_beside_a_prefill",
    "gaps_beside_a_read",
    "gaps_of",
    "hand_over",
    "held_ms",
    "hold_prefix",
    "last_read_ms",
    "rest_shares",
    "usual_of",
    "wait_idle",
]

_BESIDE_TOKENS: Final = 1500
"""Length of a request that goes on beside: longer than any measurement."""
_BESIDE_PROMPT: Final = 64
_POLL_S: Final = 0.03
_NEIGHBOURS: Final = 8
_FREE_WITHIN_S: Final = 60.0
_SETTLES_S: Final = 2.0
_IDLE_WITHIN_S: Final = 60.0
_REQUESTS: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_USAGE: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between tokens of another request, in ms.

    Attributes:
        worst: The worst one while a prompt is read, until its first token.
        usual: The usual one before.
    """

    worst: float
    usual: float
    answer: Answer


def gaps_of(stream: Stream, answer: Answer, *, is_streamed: bool = False) -> Gaps:
    """Return the gaps of a stream beside a hand-over: of a plain one from the prefill engine's answer, else from the request on.

    The last of them is the step that computes the prompt's first token. It has more to do than those before, so what it lasts
    beyond the steps after it, which have the same to do, is put on top of the usual gap. Example: usual gaps of 14 ms, 20 ms
    while the prompt is read, 48 ms with its first token, 45 ms after it: the worst is 20 ms, since 14 + (48 - 45) is less.
    """
    since_s, first_s, last_s = answer.prefilled_s, answer.times_s[0], answer.times_s[-1]
    before = stream.gaps_ms(answer.began_s, since_s)
    if is_streamed:
        since_s = answer.began_s
        before = stream.gaps_ms(stream.answer.times_s[0], since_s)
    during = stream.steps_s(since_s, first_s)
    if not before or not during:
        raise DevError("the stream beside gave no tokens during a hand-over")
    usual = usual_of(before)
    half_step_s = answer.step_ms / 2e3 if len(answer.times_s) > 1 else 0.0
    usual_of_both = usual_of(stream.gaps_ms(first_s, last_s) or before)
    more = [1e3 * (late - early) - (usual_of_both if late > first_s - half_step_s else usual) for early, late in during]
    return Gaps(usual + max(more), usual, answer)


def usual_of(gaps: Sequence[float]) -> float:
    """Return the median of the means of eight neighbouring gaps: tokens may come to the client in bunches.

    Gaps of 0, 0, 0, 56, 0, 0, 0 and 56 ms, over and over, are steps of 14 ms. Of fewer than eight it is their own median.
    """
    several = _NEIGHBOURS if len(gaps) >= _NEIGHBOURS else 1
    means = [statistics.fmean(gaps[first : first + several]) for first in range(len(gaps) - several + 1)]
    return statistics.median(means)


async def gaps_beside_a_read(pair: Pair, prompt: Sequence[int], beside: Sequence[int]) -> Gaps:
    """Hand a prompt over while the decode engine generates for another request."""
    async with client() as session, running_stream(session, pair.decode.url, beside, tokens=_BESIDE_TOKENS) as stream:
        answer = await ask(session, pair.router, prompt)
        return gaps_of(stream, answer, is_streamed=pair.early is not None)


async def gap_beside_a_prefill(pair: Pair, prompt: Sequence[int], beside: Sequence[int]) -> float:
    """Return the worst gap of a request of the decode engine, in ms, while the prefill engine computes what nobody reads.

    It is what the computation costs the request on a machine where both engines share the cores.
    """
    async with client() as session, running_stream(session, pair.decode.url, beside, tokens=_BESIDE_TOKENS) as stream:
        answer = await ask(session, pair.prefill.url, prompt, tokens=1)
        gaps = stream.gaps_ms(answer.began_s, answer.times_s[0])
    if not gaps:
        raise DevError("the stream beside gave no tokens during a prefill")
    return max(gaps)


@dataclass(frozen=True, slots=True)
class Look:
    """A look at the share of an engine's cache that is in use: when it was asked for, when it was told."""

    asked_s: float
    told_s: float
    share: float


async def held_ms(pair: Pair, prompt: Sequence[int], beside: Sequence[int]) -> tuple[float, Answer]:
    """Return how long the prefill engine holds a prompt's blocks after its answer, in ms.

    Another request goes on there, since an engine frees blocks, and tells of them, with its steps.
    """
    async with client() as session, running_stream(session, pair.prefill.url, beside, tokens=_BESIDE_TOKENS):
        looks = [await _look(session, pair.prefill)]
        asking = asyncio.create_task(ask(session, pair.router, prompt))
        until = time.monotonic() + _FREE_WITHIN_S
        while time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
            looks.append(await _look(session, pair.prefill))
            if asking.done() and (freed := freed_s(looks, asking.result().prefilled_s)) is not None:
                return 1e3 * (freed - asking.result().prefilled_s), asking.result()
    raise DevError(f"{pair.prefill.spec.name} holds the blocks for more than {_FREE_WITHIN_S:g} s")


def freed_s(looks: Sequence[Look], end_s: float) -> float | None:
    """Return when a cache's usage had fallen by half of what it had grown by, after a moment; None if it has not, or never grew.

    A look takes time, and is of some moment within it: so it is the middle between the beginning of the last look before and the
    end of the first one after. Looks from 1.00 to 1.01 s at 0.5, from 2.00 to 2.01 s at 0.5 and from 3.00 to 3.01 s at 0.2, which
    began with 0.1: it falls below 0.3 between 2.00 and 3.01 s, that is at 2.505 s.
    """
    level = (looks[0].share + max(look.share for look in looks)) / 2
    held: Look | None = None
    for look in looks:
        if look.share > level:
            held = look
        elif held is not None and look.told_s >= end_s:
            return max(end_s, (held.asked_s + look.told_s) / 2)
    return None


async def _look(session: aiohttp.ClientSession, engine: Engine) -> Look:
    """Look at the usage alone: reading the whole page as Prometheus does would take longer than what is looked for."""
    asked_s = time.perf_counter()
    async with session.get(f"{engine.url}/metrics") as reply:
        page = await reply.text()
    told_s = time.perf_counter()
    found = _USAGE.search(page)
    if found is None:
        raise DevError(f"{engine.spec.name} does not tell how much of its cache is in use")
    return Look(asked_s, told_s, float(found[1]))


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of a decode engine at one moment.

    Attributes:
        recomputed: Prompt tokens that it has computed itself.
        streamed_bytes: Bytes of streamed hand-overs that counted.
        early_bytes: Of these, what was here when the end of the prompt's last step was seen.
        reads: Reads that were done.
        read_ms: Time on the wire of these reads.
    """

    recomputed: float
    streamed_bytes: float
    early_bytes: float
    reads: float
    read_ms: float


def counts_of(engine: Engine) -> Counts:
    """Return an engine's counters; those that its connector does not have are 0."""
    page = engine.metrics()
    return Counts(
        metric_sum(page, "vllm:prompt_tokens_by_source_total", source="local_compute"),
        metric_sum(page, "vllm:kv_transfer_stream_bytes_sum"),
        metric_sum(page, "vllm:kv_transfer_stream_early_bytes_sum"),
        metric_sum(page, "vllm:nixl_xfer_time_seconds_count"),
        1e3 * metric_sum(page, "vllm:nixl_xfer_time_seconds_sum"),
    )


def early_share(before: Counts, after: Counts, tokens: int) -> float:
    """Return the percentage of so many tokens' bytes that was there before the end of the last step was seen.

    What was not streamed came late: of two prompts of 1 token, 131 072 bytes each, of which one was streamed, with 98 304 bytes
    early, it is 37.5.
    """
    due = max(after.streamed_bytes - before.streamed_bytes, tokens * TOKEN_BYTES)
    return 100 * (after.early_bytes - before.early_bytes) / due


def rest_shares(engines: Sequence[Engine], seconds: float) -> list[float]:
    """Return the share of a core that each engine's worker takes at rest; it lives in the scheduler's process."""
    time.sleep(_SETTLES_S)
    workers = [_worker_of(engine) for engine in engines]
    before, began_s = [cpu_seconds(pid) for pid in workers], time.monotonic()
    time.sleep(seconds)
    lasted_s = time.monotonic() - began_s
    return [(cpu_seconds(pid) - was) / lasted_s for pid, was in zip(workers, before, strict=True)]


def _worker_of(engine: Engine) -> int:
    """Return the process, besides the server's, that has run longest."""
    others = [pid for pid in processes_of(engine.pid) if pid != engine.pid]
    if not others:
        raise DevError(f"{engine.spec.name} has no process beside the server's")
    return max(others, key=cpu_seconds)


def hand_over(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Hand prompts over through the router, all at once.

    A decode engine that reads meanwhile may have answered before the prefill engine's answer has left it: of several prompts it
    goes out with the next prompt's step. Such an answer says nothing of the prefill engine's; tokens computed again are counted.

    Raises:
        DevError: The prefill engine has not answered: what was measured was no hand-over.
    """
    answers = asyncio.run(ask_all(pair.router, prompts))
    if pair.early is None and not all(answer.prefill_ms for answer in answers):
        raise DevError(f"{pair.prefill.spec.name} did not answer; the decode engine computed the prompt by itself")
    return answers


def hold_prefix(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Let an engine compute the beginnings of prompts, so that its cache holds them."""
    asyncio.run(ask_all(engine.url, prompts, tokens=1))


def last_read_ms(pair: Pair, prompt: Sequence[int]) -> float:
    """Return the time on the wire of a prompt's read, as the decode engine's connector counts it."""
    before = counts_of(pair.decode)
    hand_over(pair, [prompt])
    after = counts_of(pair.decode)
    if after.reads == before.reads:
        raise DevError(f"{pair.decode.spec.name} counts no read")
    return (after.read_ms - before.read_ms) / (after.reads - before.reads)


def wait_idle(*engines: Engine) -> None:
    """Wait until engines have no request any more: one whose client has left goes on for a while.

    Raises:
        DevError: An engine is busy for long.
    """
    until = time.monotonic() + _IDLE_WITHIN_S
    for engine in engines:
        while _is_busy(engine.metrics()):
            if time.monotonic() > until:
                raise DevError(f"{engine.spec.name} is busy for more than {_IDLE_WITHIN_S:g} s")
            time.sleep(_POLL_S)


def _is_busy(page: str) -> bool:
    return any(metric_sum(page, name) for name in _REQUESTS)
