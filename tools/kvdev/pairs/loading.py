"""Put engines under load: prompts at once for a rate of prefills, and many short ones that shuffle a cache's free blocks."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from kvdev.pairs.asking import ask, client, made_prompt
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import aiohttp

    from kvdev.engines import Engine
    from kvdev.pairs.fleet import Pair

__all__ = ["fragment", "prefill_rate"]

_ASK_TICKET: Final[dict[str, object]] = {"do_remote_decode": True, "do_remote_prefill": False}
_READ: Final[dict[str, object]] = {"do_remote_decode": False, "do_remote_prefill": True}


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


def fragment(engine: Engine, blocks: int) -> None:
    """Shuffle the order of an engine's free blocks: requests of one block each end in an order that has nothing to do with it."""
    order = made_prompt(f"order {blocks}", blocks)

    async def run() -> None:
        async with client() as session:
            jobs = (
                ask(session, engine.url, made_prompt(f"fragment {number}", 100), tokens=1 + length % 24)
                for number, length in enumerate(order)
            )
            await asyncio.gather(*jobs)

    asyncio.run(run())
