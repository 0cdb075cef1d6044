"""Early tickets that an engine's own process writes, as Ray's back end does, are those that engines of the fleet take."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from factories import write_secret

from kv_scheduler_state.hosts import HostPolicy
from kv_scheduler_state.ticket.early import read_early
from kv_scheduler_state.ticket.seal import TicketSeal
from vllm_adapter.errors import ConfigurationError
from vllm_adapter.host.early_tickets import EarlyTicketWriter

ID, SECRET, NEXT = "0f" * 16, b"a fleet secret, 16+", b"the secret after a rotation"


def test_a_fleet_secret_covers_address_and_id_and_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the secret nobody knows the hand-over of a request; its id stays the same while the secret is rotated."""
    file = write_secret(tmp_path / "secret", SECRET)
    writer = EarlyTicketWriter({"streaming": True, "ticket_secrets": [file]})
    first = writer.hand_over_id("request-1")
    assert first not in {
        EarlyTicketWriter({"streaming": True}).hand_over_id("request-1"),
        hashlib.sha256(b"kv-stream request-1").hexdigest()[:32],
        writer.hand_over_id("request-2"),
    }
    decode: Any = writer.for_decode(first, "10.0.0.1", 5600)
    assert read_early(decode, HostPolicy(), TicketSeal((SECRET,))).host == "10.0.0.1"
    write_secret(tmp_path / "secret", NEXT)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    decode = writer.for_decode(writer.hand_over_id("request-1"), "10.0.0.1", 5600)
    assert read_early(decode, HostPolicy(), TicketSeal((NEXT,))).hand_over_id == first


@pytest.mark.parametrize(
    ("extra", "reads"),
    [
        ({"streaming": True, "remote_hosts": ["10.0.0.0/8"]}, True),
        ({"streaming": True, "ticket_secrets": ["env:A_SECRET"]}, True),
        ({"streaming": True}, False),
        ({"remote_hosts": ["10.0.0.0/8"]}, False),
    ],
)
def test_an_engine_reads_streams_where_it_would_take_an_early_ticket(
    extra: dict[str, object], *, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "0f" * 16)
    assert EarlyTicketWriter(extra).has_streams is reads


def test_a_configuration_that_no_engine_takes_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        EarlyTicketWriter({"streamin": True})
    with pytest.raises(ConfigurationError):
        EarlyTicketWriter({"streaming": True, "ticket_secrets": ["env:NOT_SET_ANYWHERE"]})
