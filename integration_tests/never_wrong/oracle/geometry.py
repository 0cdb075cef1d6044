"""Random pairs of engines and the requests that cross between them, as frozen values whose `repr` evaluates to them again.

A `Case` says all that happens: the model, both engines' sizes and layouts of memory, and per request its lengths and the shapes
of its block lists. `draw(seed)` makes one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

STATE_KINDS = ("MAMBA2", "GDN_ATTN", "MAMBA1", "LINEAR")
_Conversion = Literal["auto", "never", "always"]
_CONVERSIONS: tuple[_Conversion, ...] = ("auto", "never", "always")


@dataclass(frozen=True)
class Group:
    """A KV-cache group: `kind` is "full", "window", "chunked", "latent" or "state".

    `reach` is the window or the chunk in tokens; `state` names the host's kind of state layer.
    """

    kind: str
    layers: int = 1
    reach: int = 0
    state: str = ""


@dataclass(frozen=True)
class Model:
    """The model that both engines serve. `state_groups` counts the B/C groups of Mamba-2 or the key heads of gated delta nets."""

    groups: tuple[Group, ...]
    heads: int = 1
    head_size: int = 1
    element_bytes: int = 4
    state_heads: int = 1
    state_groups: int = 1
    state_size: int = 2
    rows: int = 3


@dataclass(frozen=True)
class Side:
    """Sizes and layouts of an engine.

    Attributes:
        tp: Tensor-parallel size.
        block_tokens: Tokens per block and context rank, for each group.
        scratch: Speculative blocks behind a running state, for each group.
        dcp: Decode-context-parallel size.
        turn: Tokens that go to one context rank in turn; 0 for the shortest block of any group, as vLLM pins them for NIXL.
        split: Kernel blocks per scheduler block.
        layout: Order of blocks (B), layers (L), heads (H) and tokens (N) in memory, in vLLM's names.
        is_shared: Whether layers of several groups lie in one pool.
        conv_order: Whether a state's convolution keeps the rows of a channel together ("DS") or the channels of a row ("SD").
        conversion: The setting `receive_conversion`.
        pp: Pipeline stages.
    """

    tp: int
    block_tokens: tuple[int, ...]
    scratch: tuple[int, ...]
    dcp: int = 1
    turn: int = 0
    split: int = 1
    layout: str = "LBHNC"
    is_shared: bool = True
    conv_order: str = "DS"
    conversion: _Conversion = "auto"
    pp: int = 1

    @property
    def turn_tokens(self) -> int:
        return self.turn or min(self.block_tokens)


@dataclass(frozen=True)
class Request:
    """A hand-over.

    Attributes:
        prompt: Tokens of the prompt.
        hit_blocks: Prefix hit of the consumer, in units that are whole blocks of all its groups.
        spare_local: Blocks that the consumer has beyond those it needs.
        spare_peer: Blocks that the producer has beyond those it needs.
        further: Tokens that the producer decoded beyond the prompt.
        in_flight: Tokens of a step that still runs at the producer's end.
        producer_nulls: Part of the blocks out of reach that are null in the producer's lists.
        consumer_nulls: The same in the consumer's.
        fate: "expired": the lease ends and other content lands in the blocks while the reads are on the wire.
            "foreign": the ticket comes with another prompt. "blip": a read fails once as if the producer had gone.
    """

    prompt: int
    hit_blocks: int = 0
    spare_local: int = 0
    spare_peer: int = 0
    further: int = 0
    in_flight: int = 0
    producer_nulls: float = 0.0
    consumer_nulls: float = 0.0
    fate: str = ""


@dataclass(frozen=True)
class Case:
    """A pair of engines and its requests; `seed` draws block ids, content and the order of events."""

    seed: int
    model: Model
    producer: Side
    consumer: Side
    requests: tuple[Request, ...]

    @property
    def blocks(self) -> int:
        """Blocks of each engine: enough for all requests at once, and a few that stay unused."""
        least = min(*self.producer.block_tokens, *self.consumer.block_tokens)
        lists = [
            -(-(r.prompt + r.further + r.in_flight) // least) + r.spare_local + r.spare_peer + 3 for r in self.requests
        ]
        return sum(lists) * len(self.model.groups) + 5

    @property
    def most_tokens(self) -> int:
        """Tokens that the longest block list of any request has room for."""
        span = max(n * side.dcp for side in (self.producer, self.consumer) for n in side.block_tokens)
        return max(
            r.prompt + r.further + r.in_flight + (r.spare_local + r.spare_peer + 1) * span for r in self.requests
        )

    @property
    def has_state(self) -> bool:
        return any(group.kind == "state" for group in self.model.groups)


def is_fair(heads: int, tp: int) -> bool:
    """Return whether an engine of `tp` ranks can serve `heads` KV heads: evenly dealt, or each held by several ranks."""
    return heads % tp == 0 or tp % heads == 0


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    # Every 16th case walks through all pairs up to 8 x 8; the others are small, so that there can be many.
    tps = divmod(seed // 16 % 64, 8) if seed % 16 == 0 else (_tp(rng), _tp(rng))
    tps = (tps[0] + 1, tps[1] + 1)
    family = rng.choices(
        ["dense", "gqa", "mla", "hybrid", "window", "chunked", "mla-hybrid", "mixed"], [4, 4, 3, 4, 4, 2, 1, 2]
    )[0]
    dcps = (1, 1)
    heads = rng.choice([n for n in range(1, 57) if all(is_fair(n, tp) for tp in tps)][: 3 if rng.random() < 0.9 else 9])
    if family == "gqa":
        heads = rng.choice([n for n in range(1, 5) if all(is_fair(n, tp) for tp in tps)])
    groups = tuple(_groups(rng, family))
    if family in {"mla", "gqa"} and rng.random() < 0.2:
        dcps = (_dcp(rng, tps[0], family, heads), _dcp(rng, tps[1], family, heads))
    state_heads = math.lcm(*tps) * rng.choice([1, 1, 2]) if math.lcm(*tps) <= 14 else math.lcm(*tps)
    fair_groups = [n for n in range(1, state_heads + 1) if state_heads % n == 0 and all(n % tp == 0 for tp in tps)]
    kinds = {group.state for group in groups}
    state_groups = rng.choice(fair_groups)
    if "MAMBA2" in kinds and "GDN_ATTN" not in kinds and rng.random() < 0.6:
        state_groups = 1  # fewer groups than ranks: every rank holds a replica
    model = Model(
        groups=groups,
        heads=heads,
        head_size=rng.choice([1, 2, 3]),
        element_bytes=rng.choices([1, 2, 4], [1, 3, 4])[0],
        state_heads=state_heads,
        state_groups=state_groups,
        state_size=rng.choice([1, 2, 3]),
        rows=rng.choice([1, 2, 3]),
    )
    producer, consumer = (_side(rng, model, tp, dcp) for tp, dcp in zip(tps, dcps, strict=True))
    if rng.random() < 0.3:  # a homogeneous fleet
        consumer = replace(producer, tp=tps[1], dcp=dcps[1], conversion=consumer.conversion)
    # Drawn apart, so that all else in the cases of earlier seeds stays as it was.
    stages, layers = random.Random(~seed), sum(group.layers for group in groups)
    if stages.random() < 0.2:
        producer, consumer = (replace(side, pp=stages.randint(1, min(3, layers))) for side in (producer, consumer))
    case = Case(seed, model, producer, consumer, ())
    count = rng.choices([1, 2, 3], [6, 3, 1])[0]
    return replace(case, requests=tuple(_request(rng, case) for _ in range(count)))


def _tp(rng: random.Random) -> int:
    return rng.choices(range(4), [20, 10, 2, 3])[0]


def _dcp(rng: random.Random, tp: int, family: str, heads: int) -> int:
    return rng.choice([dcp for dcp in (1, 2, 4) if _can_dcp(dcp, tp, family, heads)])


def _can_dcp(dcp: int, tp: int, family: str, heads: int) -> bool:
    """Return whether vLLM allows a context-parallel size: the ranks of one context group hold the same heads."""
    if tp % dcp:
        return False
    return dcp == 1 or family == "mla" or (tp % heads == 0 and (tp // heads) % dcp == 0)


def _groups(rng: random.Random, family: str) -> Iterator[Group]:
    layers = rng.choice([1, 1, 1, 2, 3])
    if family in {"dense", "gqa"}:
        yield Group("full", layers)
    elif family == "mla":
        yield Group("latent", layers)
    elif family == "hybrid":
        state = Group("state", layers, 0, rng.choice(STATE_KINDS))
        yield from rng.choice([(state, Group("full", layers)), (Group("full", layers), state)])
    elif family == "mla-hybrid":
        yield from (Group("state", layers, 0, rng.choice(STATE_KINDS)), Group("latent", layers))
    elif family == "window":
        reach = rng.choice([2, 2, 3, 4, 5, 8, 12])
        yield from rng.choice([
            (Group("window", layers, reach), Group("full", layers)),
            (Group("full", layers), Group("window", layers, reach)),
            (Group("window", layers, reach),),
            (Group("window", layers, reach), Group("window", layers, reach), Group("full", layers)),
        ])  # fmt: skip
    elif family == "chunked":
        yield from (Group("chunked", layers, rng.choice([4, 8, 12])), Group("full", layers))
    else:
        yield from (
            Group("window", layers, rng.choice([3, 6])),
            Group("full", layers),
            Group("state", layers, 0, rng.choice(STATE_KINDS)),
        )


def _side(rng: random.Random, model: Model, tp: int, dcp: int) -> Side:
    size = rng.choice([1, 2, 2, 3, 4, 4, 4, 6, 8])
    is_alike = rng.random() < 0.7
    tokens = tuple(
        rng.choice([16, 64]) if group.kind == "state" else size if is_alike else size * rng.choice([1, 1, 2])
        for group in model.groups
    )
    is_single = len(model.groups) == 1 and model.groups[0].kind in {"full", "window"}
    layouts = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"] + (["BHLNC", "LHBNC"] if is_single and dcp == 1 else [])
    layout = rng.choice(layouts)
    has_state = any(group.kind == "state" for group in model.groups)
    split = (
        rng.choice([1, 1, 1, 2]) if layout.startswith("LB") and not has_state and all(n % 2 == 0 for n in tokens) else 1
    )
    return Side(
        tp=tp,
        block_tokens=tokens,
        scratch=tuple(rng.choice([0, 0, 1, 2]) if group.kind == "state" else 0 for group in model.groups),
        dcp=dcp,
        turn=rng.choice([0, 0, rng.choice([n for n in range(1, size + 1) if size % n == 0])]) if dcp > 1 else 0,
        split=split,
        layout=layout,
        is_shared=split == 1 and rng.random() < 0.7,
        conv_order=rng.choice(["DS", "SD"]),
        conversion=rng.choices(_CONVERSIONS, [6, 2, 1])[0],
    )


def _request(rng: random.Random, case: Case) -> Request:
    spans = [
        n * case.consumer.dcp
        for n, g in zip(case.consumer.block_tokens, case.model.groups, strict=True)
        if g.kind != "state"
    ]
    hit = math.lcm(*spans) if spans else 1
    prompt = rng.choice([rng.randint(1, 8), rng.randint(2, 24), rng.randint(2, 40)])
    hits = (prompt - 1) // hit if not case.has_state else 0
    return Request(
        prompt=prompt + 1 if case.has_state else prompt,
        hit_blocks=rng.randint(0, hits) if rng.random() < 0.5 else 0,
        spare_local=rng.choices([0, 1, 2], [7, 2, 1])[0],
        spare_peer=rng.choices([0, 1, 2], [7, 2, 1])[0],
        further=rng.choices([0, rng.randint(1, 9)], [9, 2])[0],
        in_flight=rng.choices([0, rng.randint(1, 4)], [12, 1])[0],
        producer_nulls=rng.choice([0.0, 0.5, 1.0, 1.0]),
        consumer_nulls=rng.choice([0.0, 0.5, 1.0, 1.0]),
        fate=rng.choices(["", "expired", "foreign", "blip"], [28, 2, 1, 1])[0],
    )
