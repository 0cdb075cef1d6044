"""Two prefill and two decode engines that are killed, stopped and started anew while requests go on."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from levels import held_by
from load import Load, Pair, Prompt, make_prompts
from processes import family_of, is_alive
from verdicts import Outages

from kvdev.demo import connector_config
from kvdev.engines import Engine, EngineSpec, local_model, metric_sum, start_all, wait_healthy
from kvdev.forked import Starter, started_starter

LEASE_S = 8
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
FAILS = {"decode-1": True}
"""Decode engines that fail a request whose KV is lost; the others compute its prompt."""
STABLE_IDS = ("prefill-0", "decode-0")
"""Engines that come back under the id that they had; the others choose a new one, as vLLM's default is."""
PROMPTS = 64
_USAGE = "vllm:kv_cache_usage_perc"
_FLUSH = {"model": "tiny", "prompt": "flush", "max_tokens": 2, "temperature": 0}


def _config(name: str, keys: Mapping[str, object]) -> dict[str, object]:
    role = "kv_producer" if name.startswith("prefill") else "kv_consumer"
    config = connector_config(role, **{"kv_lease_duration": LEASE_S, **keys})
    config["kv_load_failure_policy"] = "fail" if FAILS.get(name) else "recompute"
    if name in STABLE_IDS:
        config["engine_id"] = f"chaos-{name}-{os.getpid()}"
    return config


def spec_of(name: str, label: str, keys: Mapping[str, object], model: Path, runtime: Path) -> EngineSpec:
    """Return how an engine of a fleet is started; `keys` are extra-config keys of its connector."""
    cores = sorted(os.sched_getaffinity(0))
    # Decode engines keep no prefixes: each request is read from its peer.
    more = ["--no-enable-prefix-caching"] if name.startswith("decode") else []
    more += ["--disable-uvicorn-access-log", "--kv-cache-memory-bytes", "67108864"]
    return EngineSpec(
        f"chaos-{label}-{name}",
        model,
        str(cores[NAMES.index(name) % len(cores)]),
        _config(name, keys),
        more,
        {"XDG_RUNTIME_DIR": str(runtime)},
    )


@final
@dataclass
class Live:
    """The fleet and its book of outages."""

    engines: dict[str, Engine]
    prompts: Sequence[Prompt]
    status_folder: Path
    """Folder of the sockets on which these engines answer `vllm-adapter status`."""
    outages: Outages = field(default_factory=Outages)

    def pairs(self, prefill: Sequence[str] = NAMES[:2], decode: Sequence[str] = NAMES[2:]) -> list[Pair]:
        """Return all pairs of these engines."""
        return [Pair(p, d, self.engines[p].url, self.engines[d].url) for p in prefill for d in decode]

    def load(self, seed: int, **more: Any) -> Load:
        """Return a load over all pairs."""
        return Load(self.pairs(), self.prompts, seed, **more)

    # ------------------------------------------------------------------------------------------------------- faults

    def kill(self, name: str) -> None:
        """Kill an engine with all its processes at once."""
        self.outages.begin(name, time.monotonic())
        family = family_of(self.engines[name].pid)
        self.engines[name].signal_all(signal.SIGKILL)
        assert self.engines[name].has_ended(within_s=60)
        # The scheduler process has the server's listening socket as well, and may end after it.
        until = time.monotonic() + 60
        while any(is_alive(pid) for pid in family):
            assert time.monotonic() < until, f"processes of {name} do not end"
            time.sleep(0.02)

    def start_again(self, name: str) -> None:
        """Start an engine that has ended on its ports, wait until it is healthy, and note the end of its outage."""
        self.engines[name] = self.engines[name].again()
        wait_healthy([self.engines[name]])
        self.outages.end(name, time.monotonic())

    def stop(self, name: str) -> None:
        """Stop all processes of an engine."""
        self.outages.begin(name, time.monotonic())
        self.engines[name].signal_all(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a stopped engine go on."""
        self.engines[name].signal_all(signal.SIGCONT)
        self.outages.end(name, time.monotonic())

    def dead(self) -> list[str]:
        """Return engines that ended by themselves."""
        now_s = time.monotonic()
        return [
            name
            for name, engine in self.engines.items()
            if not engine.is_running and not self.outages.is_out(name, now_s, now_s)
        ]

    # ------------------------------------------------------------------------------------------------------ at rest

    def take_steps(self) -> None:
        """Let each engine take a few steps: it reports with its steps."""
        for engine in self.engines.values():
            if engine.is_running:
                engine.complete(_FLUSH)

    def held(self) -> dict[str, str]:
        """Return what each engine holds, in words; engines that hold nothing are left out."""
        held = held_by({name: engine.pid for name, engine in self.engines.items()}, self.status_folder)
        for name, engine in self.engines.items():
            held[name]["percent of its blocks"] = math.ceil(100 * metric_sum(engine.metrics(), _USAGE))
        words = {name: [f"{count} {what}" for what, count in each.items() if count] for name, each in held.items()}
        return {name: ", ".join(each) for name, each in words.items() if each}

    def stranded(self, within_s: float = 2.0 * LEASE_S + 2) -> dict[str, str]:
        """Wait until nothing is held; return what still is after this time, by engine."""
        until = time.monotonic() + within_s
        while True:
            self.take_steps()
            left = self.held()
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Warm:
    """The process that has imported vLLM, and the right answers."""

    starter: Starter
    python: Path
    model: Path
    prompts: Sequence[Prompt]


@contextlib.contextmanager
def warm_starter() -> Iterator[Warm]:
    """Import vLLM once, and let one engine alone answer all prompts."""
    python, model = local_model(Path(os.environ["KVDEV_UV"]), "dense", os.environ["KVDEV_VLLM"])
    with started_starter(python) as starter:
        yield Warm(starter, python, model, _answered(starter, python, model))


def _answered(starter: Starter, python: Path, model: Path) -> list[Prompt]:
    """Let one plain engine, without a connector, answer all prompts, and end it."""
    spec = EngineSpec("chaos-alone", model, str(min(os.sched_getaffinity(0))))
    answered: list[Prompt] = []
    with start_all([spec], python, quiet=True, launch=starter.launch) as (engine,):
        for prompt in make_prompts(PROMPTS):
            body = {"prompt": prompt.text, "max_tokens": prompt.tokens, "temperature": 0, "ignore_eos": True}
            answer: Any = engine.complete({"model": "tiny", **body})
            answered.append(replace(prompt, answer=str(answer["choices"][0]["text"])))
    texts = [prompt.answer for prompt in answered if prompt.tokens > 1]
    assert len(set(texts)) > 0.9 * len(texts), "prompts share answers: a mix-up would not show"
    return answered


@contextlib.contextmanager
def started_live(warm: Warm, label: str, **keys: object) -> Iterator[Live]:
    """Start the four engines, by forks; `keys` are extra-config keys of all connectors."""
    with (
        tempfile.TemporaryDirectory(prefix=f"kv-{label}-") as runtime,
        start_all(
            [spec_of(name, label, keys, warm.model, Path(runtime)) for name in NAMES],
            warm.python,
            quiet=True,
            launch=warm.starter.launch,
        ) as started,
    ):
        live = Live(dict(zip(NAMES, started, strict=True)), warm.prompts, Path(runtime) / "vllm-adapter")
        try:
            yield live
        finally:
            # Engines that were started anew end too.
            started[:] = live.engines.values()
            for engine in started:
                engine.signal_all(signal.SIGCONT)
