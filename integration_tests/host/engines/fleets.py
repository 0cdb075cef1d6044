"""Engines of one model family that hand prompts over to one another in any direction, without a router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from pairs import STATE_MODEL, VLLM

from kvdev.demo import connector_config
from kvdev.engines import Engine, EngineSpec, local_model, metric_sum, start_all

ASK_TICKET: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
NO_PREFIX_CACHE = ("mamba", "mla")
"""vLLM keeps no prefixes of states; latent caches go without, so that every block crosses."""


def ours(**keys: object) -> dict[str, object]:
    """Return the configuration of our connector in both roles; `keys` are extra-config keys, or a failure policy."""
    return _config(connector_config("kv_both"), keys)


def own_name(**keys: object) -> dict[str, object]:
    """Return the same under the name that vLLM's plugin entry point makes known, without a module path."""
    config = {**ours(**keys), "kv_connector": "KVTransferConnector"}
    del config["kv_connector_module_path"]
    return config


def hosts_own(**keys: object) -> dict[str, object]:
    """Return the configuration of vLLM's own connector in both roles, hash checks on (its default)."""
    return _config({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, keys)


def _config(config: dict[str, object], keys: dict[str, object]) -> dict[str, object]:
    policy = {name: keys.pop(name) for name in ("kv_load_failure_policy",) if name in keys}
    extra: Any = config.get("kv_connector_extra_config", {})
    return {**config, **policy, "kv_connector_extra_config": {**extra, **keys}}


@dataclass
class Fleet:
    """Healthy engines by name."""

    engines: dict[str, Engine]
    family: str

    async def post(self, session: aiohttp.ClientSession, engine: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a greedy completion request and return the answer."""
        whole = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
        async with session.post(self.engines[engine].url + "/v1/completions", json=whole) as reply:
            answer: dict[str, Any] = await reply.json()
            assert reply.status == 200, answer
            return answer

    async def ticket(
        self, session: aiohttp.ClientSession, text: str | list[int], prefill: str, more: dict[str, Any]
    ) -> dict[str, Any]:
        """Let an engine compute a prompt and return the ticket to it."""
        short = {**more, "prompt": text, "max_tokens": 1, "kv_transfer_params": ASK_TICKET}
        ticket = (await self.post(session, prefill, short)).get("kv_transfer_params")
        assert isinstance(ticket, dict), f"{prefill} gave no ticket"
        return ticket

    async def _one(
        self, session: aiohttp.ClientSession, text: str | list[int], prefill: str, decode: str, more: dict[str, Any]
    ) -> str:
        ticket = await self.ticket(session, text, prefill, more) if prefill else None
        body = {"prompt": text, "max_tokens": 24, **more, **({"kv_transfer_params": ticket} if ticket else {})}
        return str((await self.post(session, decode, body))["choices"][0]["text"])

    def answers(self, texts: Sequence[str | list[int]], *, prefill: str = "", decode: str, **more: Any) -> list[str]:
        """Return greedy answers to prompts sent at the same time; without `prefill` by one engine alone."""

        async def run() -> list[str]:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
                jobs = (self._one(session, text, prefill, decode, more) for text in texts)
                return list(await asyncio.gather(*jobs))

        return asyncio.run(run())

    def let_meet(self, prefill: str, decode: str) -> None:
        """Hand over something, so that the two know each other; vLLM's own reader has five seconds for that, so perhaps again."""
        for attempt in range(4):
            try:
                self.answers([f"met {attempt}"], prefill=prefill, decode=decode, max_tokens=1)
            except AssertionError:
                time.sleep(2)
            else:
                return
        raise AssertionError(f"{decode} cannot read from {prefill}: {self.log(decode)[-2000:]}")

    def count(self, engine: str, name: str, **labels: str) -> float:
        """Return a counter of an engine."""
        return metric_sum(self.engines[engine].metrics(), name, **labels)

    def log(self, engine: str) -> str:
        """Return an engine's log."""
        return self.engines[engine].log.read_text(errors="replace")

    def assert_all_blocks_free(self, within_s: float = 30) -> None:
        """No engine holds a block for any request any more."""
        until = time.monotonic() + within_s
        while True:
            for engine in self.engines.values():
                engine.complete({"model": "tiny", "prompt": "flush", "max_tokens": 2, "temperature": 0})
            used = {name: self.count(name, "vllm:kv_cache_usage_perc") for name in self.engines}
            if not any(used.values()):
                return
            assert time.monotonic() < until, f"KV cache usage stays at {used}"
            time.sleep(0.5)


@contextlib.contextmanager
def started_fleet(
    family: str,
    configs: Mapping[str, Mapping[str, object]],
    *,
    arguments: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    cores: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """Start one engine per (name, --kv-transfer-config), by default each on a core of its own as far as there are any."""
    python, model = local_model(Path(os.environ["KVDEV_UV"]), family, VLLM)
    extra = {**(STATE_MODEL if family == "mamba" else {}), **(environment or {})}
    more = ["--no-enable-prefix-caching"] if family in NO_PREFIX_CACHE else []
    count = os.cpu_count() or 1
    specs = [
        EngineSpec(
            f"{family}-{name}",
            model,
            (cores or {}).get(name, str(number % count)),
            config,
            [*more, *(arguments or {}).get(name, ())],
            extra,
        )
        for number, (name, config) in enumerate(configs.items())
    ]
    with start_all(specs, python, quiet=True) as engines:
        yield Fleet(dict(zip(configs, engines, strict=True)), family)
