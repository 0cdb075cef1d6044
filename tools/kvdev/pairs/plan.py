"""Plan of a run: settings that engines are started with, cases that each of them is asked, and who is measured when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvdev.pairs.kinds import KINDS
from kvdev.steps import fail

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "ANSWER_TOKENS",
    "BLOCK_TOKENS",
    "PREFIX",
    "TOKEN_BYTES",
    "Case",
    "Plan",
    "Pool",
    "Setting",
    "Size",
    "blocks_of",
    "last_step_tokens",
    "left_tokens",
    "plan_of",
]

Size = Literal["quick", "gates", "full"]
Pool = Literal["fresh", "fragmented"]
Prefix = Literal["new", "held"]
Transport = Literal["default", "tcp"]

BLOCK_TOKENS: Final = 128
"""Tokens of a block, vLLM's default on CPU."""
TOKEN_BYTES: Final = 131_072
"""Of the model `fat`."""
ANSWER_TOKENS: Final = 8
_PROMPTS_OF_A_RATE: Final = 4
LONGEST_PROMPT: Final = 2048 - ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class Setting:
    """Choices that need engines of their own.

    Attributes:
        transport: `default`, or `tcp` for `UCX_TLS=tcp`.
        chunk: Most tokens of a step (`--max-num-batched-tokens`).
    """

    transport: Transport
    chunk: int

    @property
    def environment(self) -> dict[str, str]:
        """Environment of all engines."""
        return {"UCX_TLS": "tcp"} if self.transport == "tcp" else {}


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts that are sent together.

    Attributes:
        tokens: Length of each prompt.
        at_once: Number of prompts.
        pool: `fresh`: blocks lie as they did since the start; `fragmented`: their order was shuffled.
        prefix: `new`: nobody has seen the prompt; `held`: the prefill engine's cache holds all but its last `left_tokens`.
    """

    tokens: int
    at_once: int
    pool: Pool
    prefix: Prefix = "new"


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a run.

    Attributes:
        settings: Settings, one after the other; each has fresh engines `starts` times.
        cases: Cases in order, fresh pools first.
        kinds: Names of the pairs.
        rounds: Samples of each case and pair, per start.
        pair_rounds: Further samples of the longest new prompt, plain and streamed in turns, per start: what streaming saves is
            small beside what a prefill takes longer or shorter from one time to the next.
        engine_rounds: Samples of each pair beside other requests, under prefills and at rest, per start.
        starts: Fresh engines per setting; the first contact is timed once in each.
        pool_tokens: Tokens that each engine's cache holds.
        idle_s: Time at rest in which the workers' CPU time is counted.
        left_out: Cases that were asked for and that a cache of `pool_tokens` cannot hold.
    """

    settings: Sequence[Setting]
    cases: Sequence[Case]
    kinds: Sequence[str]
    rounds: int
    starts: int
    pool_tokens: int
    idle_s: int
    engine_rounds: int = 3
    pair_rounds: int = 1
    left_out: Sequence[Case] = ()

    def turns(self, round_number: int) -> list[str]:
        """Return the kinds in the order of one round: being first costs each the same."""
        return list(self.kinds) if round_number % 2 == 0 else list(reversed(self.kinds))

    def steps(self, pool: Pool) -> Iterator[tuple[int, Case, str]]:
        """Yield (round, case, kind) in the order of measuring, for the cases of one kind of pool."""
        for round_number in range(self.rounds):
            for case in self.cases:
                if case.pool == pool:
                    yield from ((round_number, case, kind) for kind in self.turns(round_number))

    @property
    def longest(self) -> int:
        """Length of the longest prompt: engines are measured beside other requests with prompts of this one."""
        return max(case.tokens for case in self.cases)

    @property
    def prompts_of_a_rate(self) -> int:
        """Number of longest prompts that a prefill rate is measured with: at most 4, and no more than a cache holds.

        Their blocks are all held until the last one is computed. Of 1900 tokens, 15 blocks each, 32 blocks hold 2.
        """
        return max(
            1, min(_PROMPTS_OF_A_RATE, self.pool_tokens // BLOCK_TOKENS // blocks_of(Case(self.longest, 1, "fresh")))
        )


_QUICK: Final = {
    "tokens": "256,1900",
    "at_once": "1,4",
    "pools": "fresh",
    "transports": "default",
    "prefixes": "new",
    "chunks": "256",
    "rounds": "3",
    "pair_rounds": "1",
    "engine_rounds": "3",
    "starts": "1",
    "idle_s": "5",
    "pool_tokens": "8704",
}
_GATES: Final = {
    **_QUICK,
    "tokens": "1900",
    "at_once": "1",
    "prefixes": "new,held",
    "transports": "default,tcp",
    "chunks": "256,112",
    "rounds": "7",
    "pair_rounds": "60",
}
_FULL: Final = {
    **_QUICK,
    "tokens": "256,512,1024,1900",
    "at_once": "1,4,16",
    "pools": "fresh,fragmented",
    "prefixes": "new,held",
    "transports": "default,tcp",
    "chunks": "256,112",
    "rounds": "5",
    "pair_rounds": "7",
    "engine_rounds": "5",
    "starts": "2",
    "idle_s": "10",
    "pool_tokens": "12288",
}
PREFIX: Final = "KV_BENCH_"
"""Each value of a plan can be set in the environment: `KV_BENCH_TOKENS=256,1024 KV_BENCH_ROUNDS=9`."""


def plan_of(size: Size, environ: Mapping[str, str]) -> Plan:
    """Return the plan of a size, with what the environment sets; a wrong value ends the verb with a message."""
    defaults = {**{"quick": _QUICK, "gates": _GATES, "full": _FULL}[size], "kinds": ",".join(KINDS)}
    chosen = {key: environ.get(PREFIX + key.upper(), value) for key, value in defaults.items()}
    pools: list[Pool] = _words(chosen, "pools", get_args(Pool))
    transports: list[Transport] = _words(chosen, "transports", get_args(Transport))
    at_once, lengths = _numbers(chosen, "at_once", most=16), _numbers(chosen, "tokens", most=LONGEST_PROMPT)
    wanted = [
        Case(tokens, count, pool, prefix)
        for prefix in _words(chosen, "prefixes", get_args(Prefix))
        for pool in pools
        for count in at_once
        for tokens in lengths
        if prefix == "new" or (count, pool, tokens) == (1, "fresh", max(lengths))
    ]
    rounds, pair_rounds, engine_rounds, starts, pool_tokens, idle_s = (
        _numbers(chosen, key)[0]
        for key in ("rounds", "pair_rounds", "engine_rounds", "starts", "pool_tokens", "idle_s")
    )
    cases = [case for case in wanted if blocks_of(case) * BLOCK_TOKENS <= pool_tokens]
    if not cases:
        fail(f"no case fits the engines' caches: set {PREFIX}POOL_TOKENS higher")
    return Plan(
        settings=[Setting(transport, chunk) for transport in transports for chunk in _numbers(chosen, "chunks")],
        cases=cases,
        kinds=_words(chosen, "kinds", list(KINDS)),
        rounds=rounds,
        starts=starts,
        pool_tokens=pool_tokens,
        idle_s=idle_s,
        engine_rounds=engine_rounds,
        pair_rounds=pair_rounds,
        left_out=[case for case in wanted if case not in cases],
    )


def blocks_of(case: Case) -> int:
    """Return the blocks that the prompts and answers of a case take: 4 x 256 tokens and their answers take 4 x 3 of 128."""
    return case.at_once * -(-(case.tokens + ANSWER_TOKENS) // BLOCK_TOKENS)


def left_tokens(tokens: int) -> int:
    """Return the tokens of a prompt that a prefill engine computes which holds all whole blocks but the last 128 tokens.

    Of 1900 tokens 14 blocks of 128 are held, 108 tokens are left; of 1920 tokens 14 as well, and 128 are left.
    """
    return tokens - (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def last_step_tokens(tokens: int, chunk: int) -> int:
    """Return the tokens whose blocks are whole, or there at all, only when a prompt's last step has ended.

    1900 tokens in steps of 256 or of 112: the last step begins at token 1792, where a block begins: 108. In steps of 100 it
    begins at 1800, within the block of 1792: also 108.
    """
    return tokens - (tokens - 1) // chunk * chunk // BLOCK_TOKENS * BLOCK_TOKENS


def _numbers(chosen: Mapping[str, str], key: str, *, most: int = 1 << 20) -> list[int]:
    words = chosen[key].split(",")
    if not all(word.isdecimal() and 0 < int(word) <= most for word in words):
        fail(f"{PREFIX}{key.upper()}: numbers from 1 to {most}, with commas between them, not {chosen[key]!r}")
    return [int(word) for word in words]


def _words(chosen: Mapping[str, str], key: str, known: Sequence[Any]) -> list[Any]:
    """Return the words of a list in the order in which they are known."""
    words = chosen[key].split(",")
    if not set(words) <= set(known):
        fail(f"{PREFIX}{key.upper()}: of {', '.join(known)}, with commas between them, not {chosen[key]!r}")
    return [word for word in known if word in words]
