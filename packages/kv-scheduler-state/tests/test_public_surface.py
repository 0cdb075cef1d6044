"""The public names, pinned: a change of the surface is a change of this file."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import kv_scheduler_state

SURFACE = {
    "kv_scheduler_state": [
        "Admission",
        "AnnouncedFences",
        "BlockList",
        "FenceOrder",
        "FinishDecision",
        "GrantOrder",
        "GroupConfig",
        "HandoffTicket",
        "HeartbeatOrder",
        "LeaseEnd",
        "LeaseTable",
        "PeerAddress",
        "ReadOrder",
        "Refusal",
        "SchedulerConfig",
        "SchedulerState",
        "SchedulerStateError",
        "StepPlan",
        "TicketError",
        "TicketLimits",
        "TicketReader",
        "prefill_request_params",
        "prompt_digest",
    ],
    "kv_scheduler_state.streams": [
        "EndReport",
        "StreamAnswer",
        "StreamChunk",
        "StreamEnds",
        "StreamOpen",
        "StreamOrder",
        "StreamOutcome",
        "StreamPart",
        "StreamPlan",
        "StreamQuestion",
        "StreamReaders",
        "StreamReport",
        "StreamRun",
        "StreamStanding",
        "StreamVoid",
        "StreamWords",
        "StreamWorker",
    ],
    "kv_scheduler_state.testing": [
        "ModelViolation",
        "check_lease_table",
        "check_scheduler_state",
        "forged_tickets",
        "tampered_tickets",
    ],
}


@pytest.mark.parametrize("module", SURFACE)
def test_a_module_offers_exactly_the_pinned_names(module: str) -> None:
    offered = importlib.import_module(module)
    assert sorted(offered.__all__) == SURFACE[module]
    assert all(hasattr(offered, name) for name in offered.__all__)


def test_no_other_module_is_public() -> None:
    found = {each.name for each in pkgutil.iter_modules(kv_scheduler_state.__path__)}
    assert {name for name in found if not name.startswith("_")} == {"streams", "testing"}


def test_the_top_level_is_small() -> None:
    assert len(SURFACE["kv_scheduler_state"]) <= 25
