"""Speed of hand-overs between real vLLM engines on CPU: pairs with our connector, plain and streamed, and with vLLM's own.

All engines are up at once, and one group runs at a time while the others are stopped (SIGSTOP): a connector that polls while it
is idle takes a core from what is measured. Kinds are measured by turns, whose order changes with each round. The model has
131 072 bytes of cache a token and little to compute. Every answer is compared with that of an engine without a connector.

A hand-over lasts from the prefill engine's answer to the decode engine's first token. Rows with a target are gates: figure
(`ratio`), bound and verdict (`met`). With `--gates` a bound for which nothing was measured is not met.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
from _connector_rows import ALONE, BLOCK_TOKENS, LEFT, TOKENS, Place, rows_of

from kv_scheduler_state import prefill_request_params
from kvdev.demo import connector_config
from kvdev.engines import Engine, EngineSpec, local_model, metric_sum, start_all
from kvdev.envs import DEFAULT_VLLM
from kvdev.forked import Starter, started_starter
from kvdev.steps import DevError, note

TOKEN_BYTES: Final = 131_072
POOL_TOKENS: Final = 8704
"""Tokens that each engine's cache holds: 68 blocks, of which four prompts of 1900 tokens take 60."""
ANSWER_TOKENS: Final = 8
BESIDE_TOKENS: Final = 1500
"""Length of a request that generates beside what is measured: longer than any measurement."""
PRINTABLE: Final = range(4, 98)
"""Token ids of `!` to `~` in the byte-level tokenizer: each is one character of text, so no token waits for the next one."""
# Addresses of early tickets must be covered: here by the list of hosts, since these engines share no secret.
_STREAMING: Final = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
_ROLES: Final = ("kv_producer", "kv_consumer")
CONFIGS: Final[Mapping[str, Sequence[Mapping[str, object]]]] = {
    "ours": [connector_config(role) for role in _ROLES],
    "streamed": [connector_config(role, **_STREAMING) for role in _ROLES],
    "vllm": [{"kv_connector": "NixlConnector", "kv_role": role} for role in _ROLES],
}
"""Kind of pair -> `--kv-transfer-config` of its prefill and of its decode engine."""
KINDS: Final = tuple(CONFIGS)


class Plan(NamedTuple):
    """Cases of a run and how often each is measured.

    `pair_rounds` are further samples of plain and streamed: what streaming saves is small beside the spread of prefills.
    """

    transports: Sequence[str]
    chunks: Sequence[int]
    prefixes: Sequence[str]
    rounds: int
    pair_rounds: int
    engine_rounds: int


QUICK: Final = Plan(["default"], [256], ["new"], rounds=3, pair_rounds=1, engine_rounds=3)
GATES: Final = Plan(["default", "tcp"], [256, 112], ["new", "held"], rounds=7, pair_rounds=20, engine_rounds=3)


def run(*, gates: bool = False) -> list[dict[str, Any]]:
    """Measure; return a row per target and place, and the sums of wrong answers and recomputed tokens."""
    plan, samples = GATES if gates else QUICK, defaultdict[tuple[str, str, Place], list[float]](list)
    python, model = local_model(Path(os.environ["KVDEV_UV"]), "fat", DEFAULT_VLLM)
    with started_starter(python) as starter:
        for transport in plan.transports:
            for chunk in plan.chunks:
                environment = {"UCX_TLS": "tcp"} if transport == "tcp" else {}
                with _started_fleet(starter, python, model, chunk, environment) as fleet:
                    note(f"{transport}, steps of {chunk}: engines are up")
                    asyncio.run(_Setting(plan, Place(transport, chunk), fleet, samples).measure())
    return rows_of(samples, needs_all=gates)


# ------------------------------------------------------------------------------------------------------------- engines


Params = Mapping[str, object] | None
"""`kv_transfer_params` of a request."""
Fleet = dict[str, list[Engine]]
"""All engines of a setting by group: a kind of pair, or `ALONE`."""


def only(fleet: Fleet, *names: str) -> None:
    """Let these groups go on and stop all others."""
    for name, engines in fleet.items():
        for engine in engines:
            engine.signal_all(signal.SIGCONT if name in names else signal.SIGSTOP)


@contextlib.contextmanager
def _started_fleet(
    starter: Starter, python: Path, model: Path, chunk: int, environment: Mapping[str, str]
) -> Iterator[Fleet]:
    """Start one group after the other, each stopped as soon as it is healthy; `chunk`: most tokens of a step."""
    fleet, cores = Fleet(), sorted(os.sched_getaffinity(0))
    arguments = [
        "--disable-uvicorn-access-log",
        "--kv-cache-memory-bytes", str(POOL_TOKENS * TOKEN_BYTES),
        "--block-size", str(BLOCK_TOKENS),
        "--max-num-batched-tokens", str(chunk),
        "--max-num-seqs", "64",
    ]  # fmt: skip

    def spec(name: str, number: int, config: Mapping[str, object] | None) -> EngineSpec:
        more = ["--no-enable-prefix-caching"] if number else []  # a decode engine holds no prefix
        core = str(cores[number % len(cores)])
        return EngineSpec(f"bench-{name}-{number}", model, core, config, [*arguments, *more], dict(environment))

    with contextlib.ExitStack() as stack:
        for name, configs in [*CONFIGS.items(), (ALONE, [None])]:
            specs = [spec(name, number, config) for number, config in enumerate(configs)]
            fleet[name] = stack.enter_context(start_all(specs, python, quiet=True, launch=starter.launch))
            stack.callback(lambda: only(fleet, *fleet))  # a stopped process obeys no SIGTERM
            only(fleet)
        yield fleet


async def rest_shares(engines: Sequence[Engine]) -> list[float]:
    """Return the share of a core, in per cent, that each engine's worker takes at rest; it lives in the scheduler's process."""
    await asyncio.sleep(2)
    workers = [max(_processes_beside(engine.pid), key=cpu_seconds) for engine in engines]
    before, began_s = [cpu_seconds(pid) for pid in workers], time.monotonic()
    await asyncio.sleep(5)
    lasted_s = time.monotonic() - began_s
    return [100 * (cpu_seconds(pid) - was) / lasted_s for pid, was in zip(workers, before, strict=True)]


def _processes_beside(group: int) -> list[int]:
    """Return the processes of a process group but its leader, the API server."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(folder.name)) == group != int(folder.name):
                found.append(int(folder.name))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the time that a process has run, all of its threads. Source: proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------------ requests


@dataclass(slots=True)
class Answer:
    """An answer on its way, and at its end: moments of `time.perf_counter`.

    Attributes:
        began_s: When it was asked for.
        prefilled_s: When the prefill engine answered.
        times_s: When each token came.
        text: The text so far, a character a token.
    """

    began_s: float = field(default_factory=time.perf_counter)
    prefilled_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def step_ms(self) -> float:
        """Median gap between its tokens; of tokens at 10, 80, 152 and 222 ms it is 70 ms."""
        return 1e3 * statistics.median(late - early for early, late in pairwise(self.times_s))


def made_prompt(seed: str, tokens: int = TOKENS) -> list[int]:
    """Return token ids of a prompt that shares no block with that of another seed."""
    return random.Random(seed).choices(PRINTABLE, k=tokens)  # noqa: S311 - reproducible, no secret


def _body(prompt: Sequence[int], tokens: int, params: Params) -> dict[str, object]:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "allowed_token_ids": list(PRINTABLE), **({"kv_transfer_params": params} if params else {})}


def gaps_of(stream: Answer, answer: Answer, *, is_streamed: bool = False) -> tuple[float, float]:
    """Return (worst, usual) gap of a stream, in ms: of a plain one from the prefill engine's answer on, else from the request on.

    The last gap is the step that computes the prompt's first token. It has more to do than those before, so what it lasts
    beyond the steps after it, which have the same to do, is put on top of the usual gap. Example: usual gaps of 14 ms, 20 ms
    while the prompt is read, 48 ms with its first token, 45 ms after it: the worst is 20 ms, since 14 + (48 - 45) is less.
    """
    since_s = answer.began_s if is_streamed else answer.prefilled_s
    steps = list(pairwise(stream.times_s))
    first_s, last_s = answer.times_s[0], answer.times_s[-1]

    def within(begin_s: float, end_s: float) -> list[tuple[float, float]]:
        return [step for step in steps if step[1] > begin_s and step[0] < end_s]

    before, during = within(steps[0][0] if is_streamed else answer.began_s, since_s), within(since_s, first_s)
    if not before or not during:
        raise DevError("the stream beside gave no tokens during a hand-over")
    usual = usual_of(before)
    half_step_s = answer.step_ms / 2e3 if len(answer.times_s) > 1 else 0.0
    usual_of_both = usual_of(within(first_s, last_s) or before)
    more = [1e3 * (late - early) - (usual_of_both if late > first_s - half_step_s else usual) for early, late in during]
    return usual + max(more), usual


def usual_of(steps: Sequence[tuple[float, float]]) -> float:
    """Return the median of the means of eight neighbouring steps, in ms: tokens may come to the client in bunches."""
    gaps = [1e3 * (late - early) for early, late in steps]
    several = 8 if len(gaps) >= 8 else 1
    means = [statistics.fmean(gaps[first : first + several]) for first in range(len(gaps) - several + 1)]
    return statistics.median(means)


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass
class _Setting:
    """Measurements of the engines of one setting."""

    plan: Plan
    place: Place
    fleet: Fleet
    samples: defaultdict[tuple[str, str, Place], list[float]]
    given: list[tuple[str, Place, list[int], str]] = field(default_factory=list)
    """Answers to be compared with those of one engine alone: kind, place, prompt, text."""

    async def measure(self) -> None:
        """Take all samples of the plan."""
        # No connection is used twice, and there are as many as there are requests.
        connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as self.session:
            for kind in KINDS:  # first steps and first connections are not measured
                only(self.fleet, kind)
                for engine in self.fleet[kind]:
                    await self.one_token(engine, made_prompt(f"first steps of {engine.spec.name}", 256))
                await self.hand_over(kind, made_prompt(f"contact {kind}", 256))
            for number in range(self.plan.rounds + self.plan.pair_rounds):
                is_shared = number < self.plan.rounds
                for prefix in self.plan.prefixes if is_shared else ["new"]:
                    for kind in _in_turn(KINDS if is_shared else ("ours", "streamed"), number):
                        await self._sample(number, self.place._replace(prefix=prefix), kind)
                await self._judge()
            for number in range(self.plan.engine_rounds):
                for kind in _in_turn((*KINDS, ALONE), number):
                    await self._measure_engines(kind, number)
                await self._judge()

    async def one_token(self, engine: Engine, prompt: Sequence[int], params: Params = None) -> dict[str, Any]:
        """Ask an engine for one token; return its answer."""
        async with self.session.post(f"{engine.url}/v1/completions", json=_body(prompt, 1, params)) as reply:
            answer: dict[str, Any] = await reply.json()
            return answer

    async def read_stream(
        self, engine: Engine, prompt: Sequence[int], answer: Answer, params: Params = None, tokens: int = ANSWER_TOKENS
    ) -> Answer:
        """Read a streamed greedy answer of so many tokens.

        Raises:
            DevError: It broke off, or is short.
        """
        body = {**_body(prompt, tokens, params), "stream": True}
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as reply:
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line.removeprefix(b"data:")).get("choices", [])
                if text := "".join(str(choice.get("text") or "") for choice in choices):
                    answer.times_s.append(time.perf_counter())
                    answer.text += text
        if len(answer.text) != tokens:
            raise DevError(f"{engine.spec.name} answered {len(answer.text)} of {tokens} tokens: {answer.text!r}")
        return answer

    async def hand_over(self, kind: str, prompt: Sequence[int]) -> Answer:
        """Hand a prompt over: the ticket first, or with an early one both engines at once."""
        answer, (prefill, decode) = Answer(), self.fleet[kind]
        is_streamed = kind == "streamed"
        early = (uuid.uuid4().hex, "127.0.0.1", prefill.side_channel_port) if is_streamed else None
        params = prefill_request_params(early)

        async def prefilled() -> Params:
            reply = await self.one_token(prefill, prompt, params)
            answer.prefilled_s = time.perf_counter()
            return dict(reply["kv_transfer_params"] or {})

        if not is_streamed:
            return await self.read_stream(decode, prompt, answer, await prefilled())
        ticket = {"do_remote_prefill": True, "do_remote_decode": False, "kv_stream": params["kv_stream"]}
        await asyncio.gather(prefilled(), self.read_stream(decode, prompt, answer, ticket))
        return answer

    async def prefill_rate(self, kind: str, prompts: Sequence[Sequence[int]]) -> float:
        """Return how many prompt tokens a second an engine computes; a pair's are handed over meanwhile."""
        began_s = time.perf_counter()
        if kind == ALONE:
            await asyncio.gather(*(self.one_token(self.fleet[ALONE][0], prompt) for prompt in prompts))
            ended_s = time.perf_counter()
        else:
            answers = await asyncio.gather(*(self.hand_over(kind, prompt) for prompt in prompts))
            ended_s = max(answer.prefilled_s for answer in answers)
        return sum(map(len, prompts)) / (ended_s - began_s)

    @contextlib.asynccontextmanager
    async def running_stream(self, engine: Engine, prompt: Sequence[int]) -> AsyncIterator[Answer]:
        """Let a request generate tokens meanwhile; begins once it has given some, and gives it up at the end.

        Raises:
            DevError: It ended before the end: some of what was measured was not beside it.
        """
        stream = Answer()
        reading = asyncio.create_task(self.read_stream(engine, prompt, stream, tokens=BESIDE_TOKENS))
        try:
            while len(stream.times_s) < 24 and not reading.done():
                await asyncio.sleep(0.01)
            yield stream
            if reading.done():
                raise DevError(f"{engine.spec.name}: the stream beside ended after {len(stream.times_s)} tokens")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _sample(self, number: int, place: Place, kind: str) -> None:
        only(self.fleet, kind)
        prompt, (prefill, decode) = made_prompt(f"{number} {place}"), self.fleet[kind]
        if place.prefix == "held":
            await self.one_token(prefill, prompt[:-LEFT])
        before = decode.metrics()
        answer = await self.hand_over(kind, prompt)
        after = decode.metrics()

        def grew(name: str, **labels: str) -> float:
            return metric_sum(after, name, **labels) - metric_sum(before, name, **labels)

        self._add("recomputed", kind, grew("vllm:prompt_tokens_by_source_total", source="local_compute"), place)
        self._add("hand-over", kind, 1e3 * (answer.times_s[0] - answer.prefilled_s), place)
        self._add("first token", kind, 1e3 * (answer.times_s[0] - answer.began_s), place)
        if len(answer.times_s) > 1:
            self._add("decode step", kind, answer.step_ms, place)
        if kind == "streamed":  # what was not streamed came late
            due = max(grew("vllm:kv_transfer_stream_bytes_sum"), TOKENS * TOKEN_BYTES)
            self._add("early bytes", kind, 100 * grew("vllm:kv_transfer_stream_early_bytes_sum") / due, place)
        self.given.append((kind, place, prompt, answer.text))

    async def _measure_engines(self, kind: str, number: int) -> None:
        """Measure a group under prefills, at rest, and a pair beside another request of its decode engine."""
        only(self.fleet, kind)
        engines, seed = self.fleet[kind], f"{self.place} engines {number}"
        prompts = [made_prompt(f"{seed} {each}") for each in range(4)]
        self._add("prefill throughput", kind, await self.prefill_rate(kind, prompts))
        for share in await rest_shares(engines):
            self._add("worker at rest", kind, share)
        if kind == ALONE:
            return
        if kind == "ours":
            self._add("last read", kind, await self._last_read_ms(seed))
        prompt, beside = made_prompt(f"{seed} gap"), made_prompt(f"{seed} beside", 64)
        try:
            async with self.running_stream(engines[1], beside) as stream:
                answer = await self.hand_over(kind, prompt)
                worst, usual = gaps_of(stream, answer, is_streamed=kind == "streamed")
        except DevError as error:  # figures of this pair alone are missing
            note(f"not measured, {kind}: {error}")
        else:
            self._add("worst gap", kind, worst)
            self._add("usual gap", kind, usual)
            self.given.append((kind, self.place, prompt, answer.text))
        # A request whose client has left goes on for a while.
        while metric_sum(engines[1].metrics(), "vllm:num_requests_running"):
            await asyncio.sleep(0.03)

    async def _last_read_ms(self, seed: str) -> float:
        """Return the time on the wire of what is whole, or there at all, only when a prompt's last step has ended.

        1900 tokens in steps of 256 or of 112: the last step begins at token 1792, where a block begins: 108 tokens.
        """
        tokens = TOKENS - (TOKENS - 1) // self.place.chunk * self.place.chunk // BLOCK_TOKENS * BLOCK_TOKENS
        decode = self.fleet["ours"][1]
        pages = [decode.metrics()]
        await self.hand_over("ours", made_prompt(f"{seed} last", tokens))
        pages.append(decode.metrics())
        sums = [[metric_sum(page, f"vllm:nixl_xfer_time_seconds_{end}") for end in ("sum", "count")] for page in pages]
        return 1e3 * (sums[1][0] - sums[0][0]) / (sums[1][1] - sums[0][1])

    def _add(self, measure: str, kind: str, value: float, place: Place | None = None) -> None:
        self.samples[measure, kind, place or self.place].append(value)

    async def _judge(self) -> None:
        """Let the engine alone answer all prompts, and count the answers that differ."""
        only(self.fleet, ALONE)
        (alone,), due = self.fleet[ALONE], dict[str, str]()
        for kind, place, prompt, text in self.given:
            if str(prompt) not in due:
                due[str(prompt)] = (await self.read_stream(alone, prompt, Answer())).text
            self._add("wrong answers", kind, float(text != due[str(prompt)]), place)
            if text != due[str(prompt)]:
                note(f"a wrong answer: {kind}, {place}: {text!r}, alone {due[str(prompt)]!r}")
        self.given.clear()


def _in_turn(kinds: Sequence[str], number: int) -> Sequence[str]:
    """Return kinds in the order of a round; it turns, so that being first costs each the same."""
    return kinds if number % 2 == 0 else kinds[::-1]
