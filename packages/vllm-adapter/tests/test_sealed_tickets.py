"""Sealed tickets at the scheduler side: changed ones are computed here, secrets rotate, unsealed peers are known."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from factories import facts, write_secret
from prompts import Prompt
from scheduler_engine import PREFILL, scheduler_side

from kv_scheduler_state import UNBOUND
from vllm_adapter.config import Settings
from vllm_adapter.config.secrets import FleetSecrets
from vllm_adapter.errors import ConfigurationError
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.wiring import make_scheduler

_NUMBERS = itertools.count()


def fleet(file: Path, *secrets: str) -> FleetSecrets:
    return FleetSecrets([write_secret(file, "\n".join(secrets).encode())])


def sealing_side(secrets: FleetSecrets | None, now: Any = time.monotonic, **changes: Any) -> SchedulerSide:
    engine = facts(engine_id=f"engine-{next(_NUMBERS)}")
    return scheduler_side(engine, now, secrets=secrets, **changes)


def finished_ticket(
    side: SchedulerSide, request_id: str, params: Any = PREFILL, identity: Any = UNBOUND
) -> dict[str, Any]:
    side.arrived(Arrival(request_id, params, 32, identity))
    side.allocated(request_id, [[1, 2]], [[1, 2]], external_tokens=0, preemptions=0)
    _, ticket = side.finished(Ending(request_id, "length", 32, identity=identity), [[1, 2]])
    assert ticket is not None
    return ticket


@pytest.mark.never_wrong("A7")
def test_a_changed_ticket_is_computed_here_counted_and_logged_by_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = sealing_side(fleet(tmp_path / "p", "a" * 16))
    reader = sealing_side(fleet(tmp_path / "d", "a" * 16))
    ticket = finished_ticket(writer, "p1")
    reader.arrived(Arrival("good", ticket, 32, identity=UNBOUND))
    reader.arrived(Arrival("bad", {**ticket, "remote_block_ids": [[3, 4]]}, 32, identity=UNBOUND))
    assert reader.external_tokens("good", 0) == (32, True)
    assert reader.external_tokens("bad", 0) == (0, False)
    assert "ticket-seal" in caplog.text
    assert "a" * 16 not in caplog.text
    stats = reader.take_stats()
    assert stats is not None
    assert "ticket-seal" in str(stats["num_refused_tickets"])
    assert len(stats["num_requests"]) == 2


def test_a_secret_that_cannot_be_read_leaves_no_thread_behind(tmp_path: Path) -> None:
    threads = threading.enumerate()
    settings = Settings(streaming=True, ticket_secrets=(str(tmp_path / "missing"),))
    with pytest.raises(ConfigurationError):
        make_scheduler(facts(), settings)
    assert threading.enumerate() == threads


def test_an_unsealed_peer_is_accepted_from_where_it_may_be_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = sealing_side(fleet(tmp_path / "d", "a" * 16), unsealed_networks=("10.0.0.0/24",))
    plain = finished_ticket(sealing_side(None), "p1")
    for number in range(3):
        side.arrived(Arrival(f"d{number}", plain, 32, identity=UNBOUND))
        assert side.external_tokens(f"d{number}", 0)[0] == 32 or number
    assert caplog.text.count("hands over without seals") == 1
    side.arrived(Arrival("far", {**plain, "remote_host": "10.0.1.1"}, 32, identity=UNBOUND))
    assert side.external_tokens("far", 0) == (0, False)


@pytest.mark.never_wrong("B14")
@pytest.mark.parametrize("kind", ["hand-over", "readback"])
@pytest.mark.parametrize("proof", ["sealed", "changed", "unsealed", "no secrets"])
def test_a_refused_ticket_is_released_at_its_writer_if_the_seal_proves_who_that_is(
    tmp_path: Path, kind: str, proof: str
) -> None:
    """Without a proof a client may have made the ticket up, so this engine connects to nobody for it."""
    secrets = None if proof == "no secrets" else fleet(tmp_path / "p", "a" * 16)
    options: dict[str, Any] = {"unsealed_networks": ("10.0.0.0/24",)} if secrets else {}
    source, writer, reader = (sealing_side(secrets, bidirectional=kind == "readback", **options) for _ in range(3))
    ticket: Any = PREFILL
    for side in (source, writer) if kind == "readback" else (writer,):
        ticket = finished_ticket(side, "w", ticket, Prompt("x" * 32))
    if proof == "changed":
        ticket["kv_lease_s"] += 1.0
    if proof == "unsealed":
        del ticket["kv_seal"]
    reader.arrived(Arrival("r", ticket, 32, Prompt("y" * 32)))
    assert reader.external_tokens("r", 0) == (0, False)
    plan = reader.build_step((), ()).plan
    assert [(order.ticket.peer_request_id, order.is_reported) for order in plan.reads] == [("w", False)] * (
        proof == "sealed"
    )
    assert plan.heartbeats == ()
    reader.allocated("r", [[1, 2]], [[1, 2]], external_tokens=0, preemptions=0)
    reader.finished(Ending("r", "abort", 32, identity=UNBOUND), [[1, 2]])
    assert reader.build_step((), ()).plan.reads == ()


def test_a_refused_ticket_that_another_request_reads_is_not_released(tmp_path: Path) -> None:
    secrets = fleet(tmp_path / "p", "a" * 16)
    writer, reader = sealing_side(secrets), sealing_side(secrets)
    ticket = finished_ticket(writer, "w", identity=Prompt("x" * 32))
    reader.arrived(Arrival("right", ticket, 32, Prompt("x" * 32)))
    reader.arrived(Arrival("wrong", ticket, 32, Prompt("y" * 32)))
    assert reader.build_step((), ()).plan.reads == ()
    assert reader.external_tokens("right", 0) == (32, True)
