"""A prefill and a decode engine of one model family behind a router, and what the tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvdev.demo import connector_config, running_router
from kvdev.engines import Engine, EngineSpec, local_model, metric_sum, start_all

VLLM = os.environ.get("KVDEV_VLLM", "0.32.0")
STATE_MODEL = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}


def prompt(number: int, words: int = 40) -> str:
    """A prompt that shares no block with that of another number."""
    return f"{number:04d} " + " ".join(f"w{number * 7 + k * k % 97}" for k in range(words))


@dataclass
class Pair:
    """Two engines and their router."""

    prefill: Engine
    decode: Engine
    router: str
    family: str
    marks: dict[str, float] = field(default_factory=dict)

    async def ask(self, session: aiohttp.ClientSession, text: str, *, url: str = "", **more: Any) -> str:
        """Return the greedy answer to a prompt through the router (or from one engine directly)."""
        body = {"model": "tiny", "prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
        async with session.post((url or self.router) + "/v1/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return str(answer["choices"][0]["text"])

    def ask_all(self, texts: Sequence[str], *, url: str = "", **more: Any) -> list[str]:
        """Return the answers to prompts sent at the same time."""

        async def run() -> list[str]:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
                return list(await asyncio.gather(*(self.ask(session, text, url=url, **more) for text in texts)))

        return asyncio.run(run())

    def assert_same_as_alone(self, texts: Sequence[str], **more: Any) -> None:
        """The router's answers equal those of the prefill engine when it does the whole job by itself."""
        through = self.ask_all(texts, **more)
        alone = self.ask_all(texts, url=self.prefill.url, **more)
        different = [(text[:20], a, b) for text, a, b in zip(texts, through, alone, strict=True) if a != b]
        assert not different, (
            f"{len(different)} of {len(texts)} answers differ (prompt, handed over, alone): {different}"
        )

    def decode_count(self, name: str, **labels: str) -> float:
        """A counter of the decode engine."""
        return metric_sum(self.decode.metrics(), name, **labels)

    def flush(self) -> None:
        """Let both engines take a few steps, so that they collect what their workers have to report."""
        for number in range(3):
            for engine in (self.prefill, self.decode):
                engine.complete({"model": "tiny", "prompt": f"flush {number}", "max_tokens": 2, "temperature": 0})
            time.sleep(0.1)

    def assert_all_blocks_free(self, within_s: float = 20) -> None:
        """Both engines hold no block for any request any more."""
        until = time.monotonic() + within_s
        while True:
            self.flush()
            used = {
                engine.spec.name: metric_sum(engine.metrics(), "vllm:kv_cache_usage_perc")
                for engine in (self.prefill, self.decode)
            }
            if not any(used.values()):
                return
            assert time.monotonic() < until, f"KV cache usage stays at {used}"
            time.sleep(0.5)


@contextlib.contextmanager
def started_pair(
    family: str,
    *,
    prefill_arguments: Sequence[str] = (),
    decode_arguments: Sequence[str] = (),
    prefill_config: Mapping[str, object] | None = None,
    decode_config: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    decode_environment: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Start a pair; by default both with our connector at its defaults."""
    python, model = local_model(Path(os.environ["KVDEV_UV"]), family, VLLM)
    extra = {**(STATE_MODEL if family == "mamba" else {}), **(environment or {})}
    more = ["--no-enable-prefix-caching"] if family == "mamba" else []
    specs = [
        EngineSpec(
            f"{family}-prefill",
            model,
            "0",
            prefill_config or connector_config("kv_producer"),
            [*more, *prefill_arguments],
            extra,
        ),
        EngineSpec(
            f"{family}-decode",
            model,
            "1",
            decode_config or connector_config("kv_consumer"),
            [*more, *decode_arguments],
            {**extra, **(decode_environment or {})},
        ),
    ]
    with start_all(specs, python, quiet=True) as (prefill, decode), running_router([prefill.url], [decode.url]) as url:
        yield Pair(prefill, decode, url, family)
