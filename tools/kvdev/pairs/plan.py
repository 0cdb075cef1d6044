"""Plan of a run: kinds of pairs, settings that engines are started with, prompts that each is asked, and the order of turns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvdev.demo import connector_config
from kvdev.steps import fail

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "ALONE",
    "ANSWER_TOKENS",
    "BLOCK_TOKENS",
    "KINDS",
    "POOL_TOKENS",
    "PREFIX",
    "PROMPTS_OF_A_RATE",
    "TOKEN_BYTES",
    "Case",
    "PairKind",
    "Plan",
    "Setting",
    "Size",
    "comparisons",
    "last_step_tokens",
    "left_tokens",
    "plan_of",
]

Size = Literal["quick", "gates"]
Prefix = Literal["new", "held"]
Transport = Literal["default", "tcp"]

ALONE: Final = "alone"
"""Name of the engine without a connector that computes the same prompts by itself."""
BLOCK_TOKENS: Final = 128
"""Tokens of a block, vLLM's default on CPU."""
TOKEN_BYTES: Final = 131_072
"""Of the model `fat`."""
ANSWER_TOKENS: Final = 8
LONGEST_PROMPT: Final = 2048 - ANSWER_TOKENS
PROMPTS_OF_A_RATE: Final = 4
POOL_TOKENS: Final = 8704
"""Tokens that each engine's cache holds: 68 blocks, of which four of the longest prompts and their answers take 64."""


@dataclass(frozen=True, slots=True)
class PairKind:
    """A pair of engines as it is started.

    Attributes:
        name: Its name in figures.
        prefill: The prefill engine's `--kv-transfer-config`.
        decode: The decode engine's.
        is_concurrent: Whether the router asks both engines at once, so that the prompt is handed over while it is computed.
    """

    name: str
    prefill: Mapping[str, object]
    decode: Mapping[str, object]
    is_concurrent: bool = False


# Addresses of early tickets must be covered: here by the list of hosts, since these engines share no secret.
_STREAMING: Final = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
_VLLMS: Final = {"kv_connector": "NixlConnector"}

KINDS: Final[Mapping[str, PairKind]] = {
    kind.name: kind
    for kind in (
        PairKind("ours", connector_config("kv_producer"), connector_config("kv_consumer")),
        PairKind(
            "streamed",
            connector_config("kv_producer", **_STREAMING),
            connector_config("kv_consumer", **_STREAMING),
            is_concurrent=True,
        ),
        PairKind("vllm", {**_VLLMS, "kv_role": "kv_producer"}, {**_VLLMS, "kv_role": "kv_consumer"}),
    )
}
"""Kinds by name; ours first, vLLM's own last. A kind between them is compared with both."""


def comparisons(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (kind, kind that it is compared with), for kinds in the order of `KINDS`.

    `ours, streamed, vllm` gives (streamed, ours), (ours, vllm) and (streamed, vllm).
    """
    return [(one, other) if other == "vllm" else (other, one) for one, other in combinations(names, 2)]


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
    """A prompt that is handed over.

    Attributes:
        tokens: Its length.
        prefix: `new`: nobody has seen the prompt; `held`: the prefill engine's cache holds all but its last `left_tokens`.
    """

    tokens: int
    prefix: Prefix = "new"


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a run.

    Attributes:
        settings: Settings, one after the other; each has engines of its own.
        cases: Cases in order.
        kinds: Names of the pairs.
        rounds: Samples of each case and pair.
        pair_rounds: Further samples of the longest new prompt, plain and streamed in turns: what streaming saves is small
            beside what a prefill takes longer or shorter from one time to the next.
        engine_rounds: Samples of each pair beside other requests, under prefills and at rest.
    """

    settings: Sequence[Setting]
    cases: Sequence[Case]
    kinds: Sequence[str]
    rounds: int
    pair_rounds: int
    engine_rounds: int

    def steps(self) -> Iterator[tuple[int, Case, str]]:
        """Yield (round, case, kind) in the order of measuring; the order of kinds turns, so being first costs each the same."""
        for number in range(self.rounds):
            for case in self.cases:
                kinds = self.kinds if number % 2 == 0 else reversed(self.kinds)
                yield from ((number, case, kind) for kind in kinds)

    @property
    def longest(self) -> int:
        """Length of the longest prompt: engines are measured beside other requests with prompts of this one."""
        return max(case.tokens for case in self.cases)


_QUICK: Final = {
    "tokens": "256,1900",
    "transports": "default",
    "prefixes": "new",
    "chunks": "256",
    "rounds": "3",
    "pair_rounds": "1",
    "engine_rounds": "3",
    "kinds": ",".join(KINDS),
}
_GATES: Final = {
    **_QUICK,
    "tokens": "1900",
    "prefixes": "new,held",
    "transports": "default,tcp",
    "chunks": "256,112",
    "rounds": "7",
    "pair_rounds": "60",
}
PREFIX: Final = "KV_BENCH_"
"""Each value of a plan can be set in the environment: `KV_BENCH_TOKENS=256,1024 KV_BENCH_ROUNDS=9`."""


def plan_of(size: Size, environ: Mapping[str, str]) -> Plan:
    """Return the plan of a size, with what the environment sets; a wrong value ends the verb with a message."""
    defaults = {"quick": _QUICK, "gates": _GATES}[size]
    chosen = {key: environ.get(PREFIX + key.upper(), value) for key, value in defaults.items()}
    lengths = _numbers(chosen, "tokens", most=LONGEST_PROMPT)
    rounds, pair_rounds, engine_rounds = (
        _numbers(chosen, key)[0] for key in ("rounds", "pair_rounds", "engine_rounds")
    )
    return Plan(
        settings=[
            Setting(transport, chunk)
            for transport in _words(chosen, "transports", get_args(Transport))
            for chunk in _numbers(chosen, "chunks")
        ],
        cases=[
            Case(tokens, prefix)
            for prefix in _words(chosen, "prefixes", get_args(Prefix))
            for tokens in lengths
            if prefix == "new" or tokens == max(lengths)
        ],
        kinds=_words(chosen, "kinds", list(KINDS)),
        rounds=rounds,
        pair_rounds=pair_rounds,
        engine_rounds=engine_rounds,
    )


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
