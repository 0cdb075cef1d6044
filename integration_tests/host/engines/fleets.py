"""Real engines of one model family that hand prompts over to one another, directly or through a router."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from kvdev.demo import connector_config, running_router
from kvdev.engines import Engine, EngineSpec, Launch, local_model, metric_sum, start_all
from kvdev.envs import DEFAULT_VLLM
from kvdev.forked import started_starter
from kvdev.paths import ROOT

T = TypeVar("T")
VLLM = os.environ.get("KVDEV_VLLM", DEFAULT_VLLM)
ASK_TICKET: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
STATE_MODEL = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
OWN_WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""A process for each worker, as vLLM has it on CPU by default, and everywhere with several ranks.

Other engines here have their worker in the scheduler's process, as vLLM has it on one GPU.
"""
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
LEASE_S = 15
"""Of pairs: half of the default, because a test waits until an unrenewed lease has ended."""
NO_PREFIX_CACHE = ("mamba", "mamba-one-group", "mamba-beside", "mla", "mla-calm")
"""On CPU vLLM keeps prefixes of states in short steps alone; latent caches go without, so that every block crosses."""

DEVICE = os.environ.get("KVDEV_DEVICE", "cpu")
# Where the processor has AMX, vLLM would choose kernels for latent attention that only take bfloat16.
_CPU_MLA = ["--attention-backend", "CPU_MLA"]
_ON_CUDA = ["--block-size", "128"]
DEVICE_ARGUMENTS: dict[str, dict[str, list[str]]] = {
    "cpu": {"mla": _CPU_MLA, "mla-calm": _CPU_MLA},
    # Blocks as on CPU. Latent attention has kernels for 16-bit elements alone there.
    "cuda": {"dense": _ON_CUDA, "mla": ["--dtype", "bfloat16"], "mla-calm": ["--dtype", "bfloat16"]},
}
"""Arguments of a family's engines, by the device that `KVDEV_DEVICE` names (`dev.py test gpu`)."""
_SHARE_OF_MEMORY = {"cpu": [], "cuda": ["--gpu-memory-utilization", "0.1"]}
"""Engines share one GPU, and by default each wants nearly all of its memory to be free when it starts."""

_PASSED_ON = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY",)
"""UCX's settings that engines take over from `dev.py test gpu`; of all others in the environment they take none."""

DEVICE_ENVIRONMENT: dict[str, dict[str, str]] = {"cpu": {}, "cuda": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}}
"""Greedy tests have nothing to sample: on CUDA they need neither FlashInfer nor the compiler that it calls at the start."""

TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
FAILED = "vllm:nixl_num_failed_transfers_total"
REFUSED = "vllm:kv_transfer_num_refused_tickets_total"
RETRIED = "vllm:kv_transfer_num_retried_reads_total"
FAILED_READS = "vllm:kv_transfer_num_failed_reads_total"
CANCELLED = "vllm:kv_transfer_num_cancelled_reads_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
REVOKED = "vllm:kv_transfer_num_revoked_leases_total"
BYTES = "vllm:nixl_bytes_transferred_sum"
COMPUTED = "vllm:prompt_tokens_by_source_total"
"""To be asked for with `source="local_compute"`: 1 for a prompt with a state, or one that was read before it got its blocks."""


def prompt(number: int, words: int = 40) -> str:
    """Return a prompt that shares no block with that of another number."""
    return f"{number:04d} " + " ".join(f"w{number * 7 + k * k % 97}" for k in range(words))


def ours(role: str = "kv_both", **keys: object) -> dict[str, object]:
    """Return our connector's configuration; `keys` are extra-config keys, or a failure policy."""
    return _config(connector_config(role), keys)


def probed(role: str = "kv_both", **keys: object) -> dict[str, object]:
    """Return the same with the probes of `probe_connector.py`; the engine needs `probe_environment`."""
    return {**ours(role, **keys), "kv_connector_module_path": "probe_connector"}


def probe_environment(folder: Path, *probes: str, **settings: object) -> dict[str, str]:
    """Return what an engine with probes needs: where it finds them, its folder, which are on, and settings that are no keys."""
    folder.mkdir(parents=True, exist_ok=True)
    here = str(Path(__file__).parent)
    given = {"PYTHONPATH": here, "KVDEV_PROBE_FOLDER": str(folder), "KVDEV_PROBE_SETTINGS": json.dumps(settings)}
    return {**given, **{f"KVDEV_PROBE_{name}": "1" for name in probes}}


def own_name(role: str = "kv_both", **keys: object) -> dict[str, object]:
    """Return the same under the name that vLLM's plugin entry point makes known, without a module path."""
    config = {**ours(role, **keys), "kv_connector": "KVTransferConnector"}
    del config["kv_connector_module_path"]
    return config


def hosts_own(**keys: object) -> dict[str, object]:
    """Return the configuration of vLLM's own connector in both roles, hash checks on (its default)."""
    return _config({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, keys)


def _config(config: dict[str, object], keys: dict[str, object]) -> dict[str, object]:
    policy = {name: keys.pop(name) for name in ("kv_load_failure_policy",) if name in keys}
    extra: Any = config.get("kv_connector_extra_config", {})
    return {**config, **policy, "kv_connector_extra_config": {**extra, **keys}}


def client(*, timeout_s: float = 240, **headers: str) -> aiohttp.ClientSession:
    """Return a session that uses no connection twice: a server that closes an idle one just then would fail a request."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), connector=connector, headers=headers)


def stages(pp: int, tp: int = 1) -> list[str]:
    """Return the arguments of an engine with so many pipeline stages of so many ranks.

    CPU engines with stages compile even with --enforce-eager, unless their compilation is a mere trace.
    """
    eager = ["--no-enforce-eager", "--compilation-config", '{"mode": 2, "backend": "eager"}'] if pp > 1 else []
    return ["--pipeline-parallel-size", str(pp), "--tensor-parallel-size", str(tp), *eager]


@dataclass
class Fleet:
    """Healthy engines by name."""

    engines: dict[str, Engine]
    family: str
    router: str = ""
    """Address of a router from `prefill` to `decode`, if there is one."""
    asleep: set[str] = field(default_factory=set)

    # ------------------------------------------------------------------------------------------------------- asking

    def run(self, requests: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, T]], **headers: Any) -> T:
        """Return the outcome of requests that share a session."""

        async def run() -> T:
            async with client(**headers) as session:
                return await requests(session)

        return asyncio.run(run())

    async def send(self, session: aiohttp.ClientSession, engine: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Post a greedy completion request to an engine ('' for the router); return status and JSON answer, None if empty."""
        whole = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
        url = self.engines[engine].url if engine else self.router
        async with session.post(url + "/v1/completions", json=whole) as reply:
            raw = await reply.read()
            return reply.status, json.loads(raw) if raw else None

    async def post(self, session: aiohttp.ClientSession, engine: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a request that must be answered and return the answer."""
        status, answer = await self.send(session, engine, body)
        assert status == 200, answer
        return dict(answer)

    async def ticket(
        self, session: aiohttp.ClientSession, text: str | list[int], prefill: str, more: dict[str, Any]
    ) -> dict[str, Any]:
        """Let an engine compute a prompt and return the ticket to it."""
        short = {**more, "prompt": text, "max_tokens": 1, "kv_transfer_params": ASK_TICKET}
        ticket = (await self.post(session, prefill, short)).get("kv_transfer_params")
        assert isinstance(ticket, dict), f"{prefill} gave no ticket"
        return ticket

    def ask(self, engine: str, body: dict[str, Any], **headers: Any) -> dict[str, Any]:
        """Post one greedy completion request and return the answer."""
        return self.run(lambda session: self.post(session, engine, body), **headers)

    def take_ticket(self, prefill: str, text: str, **headers: Any) -> dict[str, Any]:
        """Let an engine compute a prompt, by itself, and return the ticket to it."""
        return self.run(lambda session: self.ticket(session, text, prefill, {}), **headers)

    async def _one(
        self, session: aiohttp.ClientSession, text: str | list[int], prefill: str, decode: str, more: dict[str, Any]
    ) -> str:
        ticket = await self.ticket(session, text, prefill, more) if prefill else None
        body = {"prompt": text, "max_tokens": 24, **more, **({"kv_transfer_params": ticket} if ticket else {})}
        return str((await self.post(session, decode, body))["choices"][0]["text"])

    def answers(self, texts: Sequence[str | list[int]], *, prefill: str = "", decode: str, **more: Any) -> list[str]:
        """Return greedy answers to prompts sent at the same time; without `prefill` by one engine alone."""

        async def all_of(session: aiohttp.ClientSession) -> list[str]:
            return await asyncio.gather(*(self._one(session, text, prefill, decode, more) for text in texts))

        return self.run(all_of)

    def routed(self, texts: Sequence[str], **more: Any) -> list[str]:
        """Return the answers to prompts sent through the router at the same time."""
        return self.answers(texts, decode="", **more)

    def assert_same_as_alone(self, texts: Sequence[str], **more: Any) -> None:
        """The router's answers equal those of the prefill engine when it does the whole job by itself."""
        pairs = zip(texts, self.routed(texts, **more), self.answers(texts, decode="prefill", **more), strict=True)
        different = [(text[:20], routed, alone) for text, routed, alone in pairs if routed != alone]
        assert not different, f"{len(different)} of {len(texts)} differ (prompt, handed over, alone): {different}"

    def let_connect(self, prefill: str, decode: str) -> None:
        """Hand over something, so that the two know each other; vLLM's own reader has five seconds for that, so perhaps again."""
        for attempt in range(4):
            try:
                self.answers([f"met {attempt}"], prefill=prefill, decode=decode, max_tokens=1)
            except AssertionError:
                time.sleep(2)
            else:
                return
        raise AssertionError(f"{decode} cannot read from {prefill}: {self.log(decode)[-2000:]}")

    def assert_handed_over(
        self, prefill: str, decode: str, texts: Sequence[str], expected: Sequence[str], **more: Any
    ) -> None:
        """Prompts handed over give the expected texts; each is counted, none failed, and nothing was recomputed."""
        transfers, failed = self.count(decode, TRANSFERS), self.count(decode, FAILED)
        computed = self.count(decode, COMPUTED, source="local_compute")
        assert self.answers(texts, prefill=prefill, decode=decode, **more) == expected
        assert self.count(decode, TRANSFERS) - transfers >= len(texts)
        assert self.count(decode, FAILED) == failed
        assert self.count(decode, COMPUTED, source="local_compute") - computed <= len(texts)
        self.assert_all_blocks_free()

    # ----------------------------------------------------------------------------------------------------- looking

    def count(self, engine: str, name: str, **labels: str) -> float:
        """Return a counter of an engine."""
        return metric_sum(self.engines[engine].metrics(), name, **labels)

    def log(self, engine: str) -> str:
        """Return an engine's log."""
        return self.engines[engine].log.read_text(errors="replace")

    def assert_all_blocks_free(self, within_s: float = 30) -> None:
        """No engine holds a block for any request any more; each takes steps meanwhile, to collect its workers' reports."""
        until = time.monotonic() + within_s
        awake = {name: engine for name, engine in self.engines.items() if name not in self.asleep}
        while True:
            for engine in awake.values():
                engine.complete({"model": "tiny", "prompt": "flush", "max_tokens": 2, "temperature": 0})
            used = {name: self.count(name, "vllm:kv_cache_usage_perc") for name in awake}
            if not any(used.values()):
                return
            assert time.monotonic() < until, f"KV cache usage stays at {used}"
            time.sleep(0.5)

    # ---------------------------------------------------------------------------------------------------- sleeping

    def only(self, *names: str) -> None:
        """Let these engines run and stop the others' processes: more than two starve one another on two cores."""
        for name, engine in self.engines.items():
            if (name in names) is (name in self.asleep):
                engine.signal_all(signal.SIGCONT if name in names else signal.SIGSTOP)
                self.asleep ^= {name}

    def end(self, name: str) -> None:
        """Kill an engine and forget it."""
        self.engines.pop(name).signal_all(signal.SIGKILL)


def log_lines(text: str) -> list[str]:
    """Return this connector's lines of a log, or of a page that quotes one, with a mark for each part that varies."""
    found = re.findall(r"(?:^|[) ])(INFO|WARNING|ERROR) .*?\[(\w+\.py):\d+\] (kv-transfer: .*)", text, re.MULTILINE)
    return [
        # An engine without a configured name has its role and side channel for one; of a peer, the side channel alone.
        re.sub(
            r"(?<=peer ')[^']+|(?:(?<=engine )|(?<=request ))[\w.@:-]*\w|(?<==)\S+|\d[\d.]*",
            "*",
            re.sub(r"engine (\S+ )?at ", "engine * at ", " ".join(line)),
        )
        for line in found
    ]


def quoted_lines(event: str) -> list[str]:
    """Return the lines that the page on the log quotes for an event."""
    page = (ROOT / "docs" / "operate" / "install.md").read_text()
    (block,) = re.findall(rf"^<!-- log: {event} -->\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return log_lines(block)


@functools.cache
def forks(python: Path) -> Launch:
    """Import vLLM once; the engines of all fleets of this run are forks of that process, which ends with the run."""
    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(started_starter(python)).launch


@contextlib.contextmanager
def started_fleet(
    family: str,
    configs: Mapping[str, Mapping[str, object] | None],
    *,
    arguments: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    cores: Mapping[str, str] | None = None,
    releases: Mapping[str, str] | None = None,
    is_forked: bool = DEVICE == "cpu",
) -> Iterator[Fleet]:
    """Start one engine per (name, --kv-transfer-config or None), by default each on a core of its own as far as there are any.

    `releases` names the vLLM of engines that run another one than the rest.

    Engines are forks of one process that has imported vLLM, or, if not `is_forked`, new Pythons as users start them.
    """
    hosts = {name: (releases or {}).get(name, VLLM) for name in configs}
    made = {host: local_model(Path(os.environ["KVDEV_UV"]), family, host) for host in hosts.values()}
    extra = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **DEVICE_ENVIRONMENT[DEVICE],
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        **(STATE_MODEL if family.startswith("mamba") else {}),
        **(environment or {}),
    }
    more = ["--no-enable-prefix-caching"] if family in NO_PREFIX_CACHE else []
    more += [*_SHARE_OF_MEMORY[DEVICE], *DEVICE_ARGUMENTS[DEVICE].get(family, [])]
    allowed = sorted(os.sched_getaffinity(0))
    specs = {
        name: EngineSpec(
            f"{family}-{name}",
            made[hosts[name]][1],
            (cores or {}).get(name, str(allowed[number % len(allowed)])),
            config,
            [*more, *(arguments or {}).get(name, ())],
            {**extra, **(environments or {}).get(name, {})},
        )
        for number, (name, config) in enumerate(configs.items())
    }
    with contextlib.ExitStack() as started:
        engines: dict[str, Engine] = {}
        for host, (python, _) in made.items():
            part = {name: spec for name, spec in specs.items() if hosts[name] == host}
            launch = forks(python) if is_forked else None
            found = started.enter_context(start_all([*part.values()], python, quiet=True, launch=launch))
            engines |= zip(part, found, strict=True)
        fleet = Fleet({name: engines[name] for name in configs}, family)
        try:
            yield fleet
        finally:
            fleet.only(*fleet.engines)


@contextlib.contextmanager
def started_pair(
    family: str,
    *,
    configure: Callable[..., dict[str, object]] = ours,
    arguments: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    is_concurrent: bool = False,
    is_forked: bool = DEVICE == "cpu",
) -> Iterator[Fleet]:
    """Start `prefill`, `decode` and a router between them, which sends requests to both at once if `is_concurrent`."""
    configs = {name: configure(role, kv_lease_duration=LEASE_S) for name, role in ROLES.items()}
    with started_fleet(family, configs, arguments=arguments, environment=environment, is_forked=is_forked) as fleet:
        prefill, decode = fleet.engines["prefill"], fleet.engines["decode"]
        more = ["--concurrent", f"127.0.0.1:{prefill.side_channel_port}"] if is_concurrent else []
        with running_router([prefill.url], [decode.url], *more) as fleet.router:
            yield fleet
