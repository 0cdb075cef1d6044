"""`dev.py dashboard --record`: what a real Prometheus saw of two real engines under load and in trouble, for the pictures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvdev.dashboard_picture import RECORDED
from kvdev.demo import connector_config, running_router
from kvdev.engines import EngineSpec, local_model, start_all
from kvdev.prometheus import find_prometheus, running_prometheus
from kvdev.recording import Phase, record, write_recording
from kvdev.steps import fail, note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvdev.engines import Engine

__all__ = ["record_story"]

_LEASE_S: Final = 15
_ASK_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_ABOUT: Final = (
    "Two vLLM engines (a small model of random weights) on the CPU of a machine with two cores, scraped every second; "
    "leases of 15 s."
)


def record_story(uv: Path, vllm: str) -> int:
    """Run the phases, write `docs/operate/recorded/dashboard.json`; return the exit code 0."""
    tools = find_prometheus()
    if isinstance(tools, str):
        return fail(tools)
    python, model = local_model(uv, "dense", vllm)
    extra = {"kv_lease_duration": _LEASE_S}
    specs = [
        EngineSpec(
            name, model, core, connector_config(role, **extra), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        )
        for name, core, role in (("prefill", "0", "kv_producer"), ("decode", "1", "kv_consumer"))
    ]
    with (
        tempfile.TemporaryDirectory(prefix="kvdev-") as folder,
        start_all(specs, python) as (prefill, decode),
        running_router([prefill.url], [decode.url]) as router,
    ):
        load = _Load(prefill, decode, router)
        asyncio.run(load.one_after_the_other(5))
        settings = Path(folder) / "prometheus.yml"
        settings.write_text(json.dumps(_settings(prefill, decode)))
        with running_prometheus(tools, settings, Path(folder)) as url:
            time.sleep(3)
            begun_s = time.time()
            phases = [_played(begun_s, text, job) for text, job in load.phases()]
            recording = record(url, begun_s, time.time() - begun_s, about=_ABOUT, phases=phases)
    write_recording(recording, RECORDED)
    note(f"{recording.span_s:.0f} s in {RECORDED.name}; draw them with `dev.py dashboard --picture`")
    return 0


def _settings(prefill: Engine, decode: Engine) -> dict[str, object]:
    """Return Prometheus's configuration; engines have names here, as their ports are chance."""
    targets = [
        {"targets": [engine.url.removeprefix("http://")], "labels": {"instance": f"{engine.spec.name}-0"}}
        for engine in (prefill, decode)
    ]
    jobs = [{"job_name": "vllm", "static_configs": targets}]
    return {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}


def _played(begun_s: float, text: str, job: Callable[[], Awaitable[None]]) -> Phase:
    from_s = time.time() - begun_s
    note(f"{from_s:5.0f} s  {text}")

    async def play() -> None:
        await job()

    asyncio.run(play())
    return Phase(round(from_s, 1), round(time.time() - begun_s, 1), text)


class _Load:
    """Requests of different kinds, none of which shares a block with another."""

    def __init__(self, prefill: Engine, decode: Engine, router: str) -> None:
        self._prefill, self._decode, self._router = prefill, decode, router
        self._number = 0

    def phases(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Return what is played, in order, each with a few words."""
        return [
            ("one prompt at a time", lambda: self.one_after_the_other(45)),
            ("six at a time", lambda: self.several(6, 60)),
            ("a router that changes every second ticket, and clients that never use theirs", lambda: self.broken(45)),
            ("the prefill engine stands still for 12 s", lambda: self.stopped(12, 30)),
            ("six at a time", lambda: self.several(6, 40)),
        ]

    async def one_after_the_other(self, span_s: float) -> None:
        """Send prompts one by one."""
        await self.several(1, span_s)

    async def several(self, count: int, span_s: float) -> None:
        """Keep some requests on their way."""
        async with _session() as session:
            until_s = time.monotonic() + span_s
            await asyncio.gather(*(self._lane(session, until_s) for _ in range(count)))

    async def _lane(self, session: aiohttp.ClientSession, until_s: float) -> None:
        while time.monotonic() < until_s:
            await _post(session, self._router, {"prompt": self._prompt(), "max_tokens": 16})

    async def broken(self, span_s: float) -> None:
        """Take tickets; break one, use one, leave one, and again."""
        async with _session() as session:
            until_s = time.monotonic() + span_s
            while time.monotonic() < until_s:
                for kind in ("broken", "good", "left"):
                    prompt = self._prompt()
                    asked = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": _ASK_TICKET}
                    ticket = (await _post(session, self._prefill.url, asked)).get("kv_transfer_params") or {}
                    if kind == "broken":
                        ticket["remote_block_ids"] = "0"
                    if kind != "left":
                        body = {"prompt": prompt, "max_tokens": 8, "kv_transfer_params": ticket}
                        await _post(session, self._decode.url, body)

    async def stopped(self, still_s: float, span_s: float) -> None:
        """Stop the prefill engine under load, and let it go on."""

        async def stop() -> None:
            await asyncio.sleep(3)
            self._prefill.signal_all(signal.SIGSTOP)
            try:
                await asyncio.sleep(still_s)
            finally:
                self._prefill.signal_all(signal.SIGCONT)

        await asyncio.gather(stop(), self.several(3, span_s))

    def _prompt(self) -> str:
        self._number += 1
        words = 40 + 70 * (self._number % 5)
        return f"{self._number:04d} " + " ".join(f"w{self._number * 7 + k * k % 97}" for k in range(words))


def _session() -> aiohttp.ClientSession:
    """Return a session that uses no connection twice: a server may close an idle one just then."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(force_close=True)
    )


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's answer; an error is an answer too."""
    whole = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(url + "/v1/completions", json=whole) as reply:
            return dict(await reply.json())
    return {}
