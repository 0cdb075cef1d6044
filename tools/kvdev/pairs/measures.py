"""Measure a running pair: hand-overs, other requests beside a read, work at rest, prefill throughput."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvdev.engines import Engine, metric_sum
from kvdev.pairs.asking import Answer, Stream, ask, ask_all, client, running_stream
from kvdev.pairs.engines import TOKEN_BYTES, cpu_seconds, processes_of
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdev.pairs.engines import Pair

__all__ = [
    "Counts",
    "Gaps",
    "counts_of",
    "early_share",
    "gap_beside_a_prefill",
    "gaps_beside_a_read",
    "gaps_of",
    "hand_over",
    "hold_prefix",
    "last_read_ms",
    "prefill_rate",
    "rest_shares",
    "usual_of",
    "wait_idle",
]

_BESIDE_TOKENS: Final = 1500
"""Length of a request that goes on beside: longer than any measurement."""
_POLL_S: Final = 0.03
_NEIGHBOURS: Final = 8
_SETTLES_S: Final = 2.0
_REST_S: Final = 5.0
"""Time at rest in which the workers' CPU time is counted."""
_ASK_TICKET: Final[dict[str, object]] = {"do_remote_decode": True, "do_remote_prefill": False}
_READ: Final[dict[str, object]] = {"do_remote_decode": False, "do_remote_prefill": True}
_IDLE_WITHIN_S: Final = 60.0
_REQUESTS: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")


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


async def prefill_rate(engine: Engine, pair: Pair | None, prompts: Sequence[Sequence[int]]) -> float:
    """Return how many prompt tokens a second an engine computes; a pair's are read meanwhile, those of a plain one afterwards."""
    early = pair.early if pair else None
    streams = [early.new(engine.url) for _ in prompts] if early else []
    asked: Sequence[Mapping[str, object] | None] = [{**_ASK_TICKET, "kv_stream": stream} for stream in streams]
    asked = asked or [_ASK_TICKET if pair else None] * len(prompts)
    async with client() as session:
        began_s = time.perf_counter()
        told: list[Mapping[str, object]] = [{**_READ, "kv_stream": stream} for stream in streams]
        reads = _reads(session, pair, prompts, told) if pair and streams else []
        answers = await asyncio.gather(
            *(_one_token(session, engine, *each) for each in zip(prompts, asked, strict=True))
        )
        lasted_s = time.perf_counter() - began_s
        if pair and not streams:
            reads = _reads(session, pair, prompts, [answer["kv_transfer_params"] for answer in answers])
        await asyncio.gather(*reads)
    return sum(map(len, prompts)) / lasted_s


def _reads(
    session: aiohttp.ClientSession,
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    tickets: Sequence[Mapping[str, object]],
) -> list[asyncio.Task[dict[str, Any]]]:
    both = zip(prompts, tickets, strict=True)
    return [asyncio.create_task(_one_token(session, pair.decode, *each)) for each in both]


async def _one_token(
    session: aiohttp.ClientSession, engine: Engine, prompt: Sequence[int], params: Mapping[str, object] | None
) -> dict[str, Any]:
    extra = {} if params is None else {"kv_transfer_params": params}
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, **extra}
    async with session.post(f"{engine.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise DevError(f"{engine.url}: HTTP {reply.status}: {(await reply.text())[:500]}")
        answer: dict[str, Any] = await reply.json()
        return answer


def rest_shares(engines: Sequence[Engine]) -> list[float]:
    """Return the share of a core that each engine's worker takes at rest; it lives in the scheduler's process."""
    time.sleep(_SETTLES_S)
    workers = [_worker_of(engine) for engine in engines]
    before, began_s = [cpu_seconds(pid) for pid in workers], time.monotonic()
    time.sleep(_REST_S)
    lasted_s = time.monotonic() - began_s
    return [(cpu_seconds(pid) - was) / lasted_s for pid, was in zip(workers, before, strict=True)]


def _worker_of(engine: Engine) -> int:
    """Return the process, besides the server's, that has run longest."""
    others = [pid for pid in processes_of(engine.pid) if pid != engine.pid]
    if not others:
        raise DevError(f"{engine.spec.name} has no process beside the server's")
    return max(others, key=cpu_seconds)


def hand_over(pair: Pair, prompt: Sequence[int]) -> Answer:
    """Hand a prompt over through the router.

    A decode engine that reads meanwhile may have answered before the prefill engine's answer has left it. Such an answer says
    nothing of the prefill engine's; tokens computed again are counted.

    Raises:
        DevError: The prefill engine has not answered: what was measured was no hand-over.
    """
    (answer,) = asyncio.run(ask_all(pair.router, [prompt]))
    if pair.early is None and not answer.prefill_ms:
        raise DevError(f"{pair.prefill.spec.name} did not answer; the decode engine computed the prompt by itself")
    return answer


def hold_prefix(engine: Engine, prompt: Sequence[int]) -> None:
    """Let an engine compute the beginning of a prompt, so that its cache holds it."""
    asyncio.run(ask_all(engine.url, [prompt], tokens=1))


def last_read_ms(pair: Pair, prompt: Sequence[int]) -> float:
    """Return the time on the wire of a prompt's read, as the decode engine's connector counts it."""
    before = counts_of(pair.decode)
    hand_over(pair, prompt)
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
