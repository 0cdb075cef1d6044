"""Engines of one setting: every kind of pair with a router in front, and an engine that does the whole job alone."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdev.demo import running_router
from kvdev.early import EarlyTickets
from kvdev.engines import Engine, EngineSpec, start_all
from kvdev.pairs.plan import ALONE, BLOCK_TOKENS, KINDS, POOL_TOKENS, TOKEN_BYTES, PairKind, Plan, Setting
from kvdev.pairs.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvdev.forked import Starter

__all__ = ["Fleet", "Pair", "alone_spec", "specs_of", "started_fleet"]

_MOST_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine, and the address of the router in front of them.

    Attributes:
        prefill: The prefill engine.
        decode: The decode engine.
        router: The router's address.
        early: Writes early tickets, as the router does, where both engines are asked at once; None for a plain pair.
    """

    prefill: Engine
    decode: Engine
    router: str
    early: EarlyTickets | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines of a setting, of which one pair or the lonely engine runs at a time."""

    pairs: Mapping[str, Pair]
    alone: Engine
    turns: Turns


def specs_of(kind: PairKind, setting: Setting, model: Path) -> list[EngineSpec]:
    """Return how the two engines of a kind are started: prefill on the first core, decode on the second."""
    decode_only = ["--no-enable-prefix-caching"]
    return [
        _spec(f"{kind.name}-prefill", 0, setting, model, config=kind.prefill),
        _spec(f"{kind.name}-decode", 1, setting, model, *decode_only, config=kind.decode),
    ]


def alone_spec(setting: Setting, model: Path) -> EngineSpec:
    """Return how the engine without a connector is started: as a prefill engine is."""
    return _spec(ALONE, 0, setting, model, config=None)


def _spec(
    name: str, core: int, setting: Setting, model: Path, *more: str, config: Mapping[str, object] | None
) -> EngineSpec:
    cores = sorted(os.sched_getaffinity(0))
    arguments = [
        "--disable-uvicorn-access-log",
        "--kv-cache-memory-bytes", str(POOL_TOKENS * TOKEN_BYTES),
        "--block-size", str(BLOCK_TOKENS),
        "--max-num-batched-tokens", str(setting.chunk),
        "--max-num-seqs", str(_MOST_REQUESTS),
        *more,
    ]  # fmt: skip
    return EngineSpec(
        f"bench-{name}", model, str(cores[core % len(cores)]), config, arguments, dict(setting.environment)
    )


@contextlib.contextmanager
def started_fleet(starter: Starter, python: Path, model: Path, setting: Setting, plan: Plan) -> Iterator[Fleet]:
    """Start all engines, one group after the other, each stopped as soon as it is healthy."""
    pairs: dict[str, Pair] = {}
    turns = Turns()
    with contextlib.ExitStack() as stack:
        for name in plan.kinds:
            kind = KINDS[name]
            engines = stack.enter_context(
                start_all(specs_of(kind, setting, model), python, quiet=True, launch=starter.launch)
            )
            pairs[name] = _paired(stack, kind, engines)
            _join(stack, turns, name, engines)
        (alone,) = stack.enter_context(
            start_all([alone_spec(setting, model)], python, quiet=True, launch=starter.launch)
        )
        _join(stack, turns, ALONE, [alone])
        yield Fleet(pairs, alone, turns)


def _paired(stack: contextlib.ExitStack, kind: PairKind, engines: Sequence[Engine]) -> Pair:
    prefill, decode = engines
    place = ("127.0.0.1", prefill.side_channel_port)
    words = ["--concurrent", f"{place[0]}:{place[1]}"] if kind.is_concurrent else []
    router = stack.enter_context(running_router([prefill.url], [decode.url], *words))
    return Pair(prefill, decode, router, EarlyTickets([prefill.url], [place]) if kind.is_concurrent else None)


def _join(stack: contextlib.ExitStack, turns: Turns, name: str, engines: list[Engine]) -> None:
    """Add a group, which stands still from then on; before engines are ended all go on, as SIGTERM needs it."""
    turns.add(name, engines)
    stack.callback(turns.all)
    turns.none()
