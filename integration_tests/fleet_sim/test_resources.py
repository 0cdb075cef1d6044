"""Nothing grows with the requests or the engines that were: neither in an episode nor over many rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from draw import draw_plan
from endurance import endure, growing, roomy, small_memories
from episode import Outcome, play
from resources import walk

from kv_nixl_agent._peers import PeerTable
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.transfer.peers import Probes

ROUNDS = 36


def _endured(
    seed: int, restarted: str, bug: Callable[[ExitStack], None] | None = None, *, is_small: bool = True
) -> tuple[Outcome, list[Counter[str]]]:
    found: list[Counter[str]] = []
    with small_memories() if is_small else nullcontext():
        outcome = play(roomy(draw_plan(seed)), bug, lambda fleet: found.extend(endure(fleet, ROUNDS, restarted)))
    return outcome, found


@pytest.mark.parametrize("restarted", ["prefill", "decode"])
@pytest.mark.parametrize("seed", [7, 12])
def test_no_container_grows_with_requests_or_with_engines_that_were(seed: int, restarted: str) -> None:
    outcome, found = _endured(seed, restarted)
    assert not outcome.violations
    assert len(found) == ROUNDS
    assert outcome.counts["accepted"] > ROUNDS
    assert not growing(found)


def test_memories_that_have_a_bound_would_be_noticed_without_it() -> None:
    """With the bounds as they are in production this run is too short to reach them."""
    _, found = _endured(7, "prefill", is_small=False)
    grown = " ".join(growing(found))
    assert "HandOverLog._events grows" in grown
    assert "Statistics._recent grows" in grown


def _hoard(stack: ExitStack) -> None:
    """A list that nobody empties, in a class that has none today."""
    apply = WorkerSide.apply

    def keep(self: Any, orders: Any) -> None:
        self.hoard = [*getattr(self, "hoard", []), *[order.request_id for order in orders.plan.grants]]
        apply(self, orders)

    stack.enter_context(patch.object(WorkerSide, "apply", keep))


def _never_retired(stack: ExitStack) -> None:
    """Lists of removed peers are never released."""
    stack.enter_context(patch.object(PeerTable, "retire", lambda *_: None))


def _never_probed(stack: ExitStack) -> None:
    """Engines that nobody reads from are never asked whether they live."""
    stack.enter_context(patch.object(Probes, "look_after", lambda *_: None))


@pytest.mark.parametrize(
    ("bug", "restarted", "name"),
    [
        (_hoard, "decode", "WorkerSide.hoard grows"),
        (_never_retired, "prefill", "NIXL: prepared lists grows"),
        (_never_retired, "prefill", "PeerTable._retiring grows"),
        (_never_probed, "prefill", "PeerDirectory._engines grows"),
    ],
)
def test_a_new_container_without_a_bound_is_noticed(
    bug: Callable[[ExitStack], None], restarted: str, name: str
) -> None:
    _, found = _endured(7, restarted, bug)
    assert name in " ".join(growing(found))


class _Known:
    """Stands for a production object: the walk follows classes by the name of their module."""

    def __init__(self) -> None:
        self.lines = {"a": [1, 2], "b": [3]}
        self.call = lambda: self.lines


def test_a_walk_names_containers_by_class_and_attribute() -> None:
    with patch.object(_Known, "__module__", "kv_nixl_agent.some"):
        found = walk([_Known()])
    assert dict(found.sizes) == {"_Known.lines": 2, "_Known.lines[]": 3}
