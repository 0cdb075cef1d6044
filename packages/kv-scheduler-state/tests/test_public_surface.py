"""The public names, pinned: a change of the surface is a change of this file."""

from __future__ import annotations

import importlib

import pytest

SURFACE = {
    "kv_scheduler_state": (
        "Admission BlockList EndReport FenceOrder FinishDecision GrantOrder GroupConfig HandoffTicket HeartbeatOrder "
        "LeaseEnd LeaseTable PeerAddress PromptIdentity ReadOrder Refusal SchedulerConfig SchedulerState "
        "SchedulerStateError StepPlan Streams TextPrompt TicketError TicketReader UNBOUND "
        "WorkerState prefill_request_params prompt_digest"
    ),
    "kv_scheduler_state.streams": (
        "StreamAnswer StreamChunk StreamOpen StreamOrder StreamOutcome StreamPart StreamPlan StreamQuestion "
        "StreamReaders StreamReport StreamRun StreamStanding StreamVoid StreamWords StreamWorker"
    ),
}


@pytest.mark.parametrize("module", SURFACE)
def test_a_module_offers_exactly_the_pinned_names(module: str) -> None:
    offered = importlib.import_module(module)
    assert " ".join(sorted(offered.__all__)) == SURFACE[module]
    assert all(hasattr(offered, name) for name in offered.__all__)


def test_the_top_level_is_small() -> None:
    assert len(SURFACE["kv_scheduler_state"].split()) <= 27
