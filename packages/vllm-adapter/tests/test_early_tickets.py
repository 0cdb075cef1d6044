"""Early tickets that an engine's own process writes, as Ray's back end does, are those that engines of the fleet take."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from kv_scheduler_state.hosts import HostPolicy
from kv_scheduler_state.ticket.early import read_early
from kv_scheduler_state.ticket.seal import TicketSeal
from vllm_adapter.errors import ConfigurationError
from vllm_adapter.host.early_tickets import EarlyTicketWriter

ID, SECRET, NEXT = "0f" * 16, b"a fleet secret, 16+", b"the secret after a rotation"


def test_both_requests_name_the_same_hand_over_and_side_channel() -> None:
    writer = EarlyTicketWriter({"streaming": True})
    prefill, decode = writer.for_prefill(ID, "10.0.0.1", 5600), writer.for_decode(ID, "10.0.0.1", 5600)
    assert prefill["kv_stream"] == decode["kv_stream"] == {"id": ID, "host": "10.0.0.1", "port": 5600}
    assert (prefill["do_remote_decode"], decode["do_remote_prefill"]) == (True, True)
    assert writer.is_streaming
    assert not EarlyTicketWriter({}).is_streaming


def test_a_fleet_secret_covers_the_address_and_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o400)
    writer = EarlyTicketWriter({"streaming": True, "ticket_secret_files": [str(file)]})
    decode: Any = writer.for_decode(ID, "10.0.0.1", 5600)
    assert read_early(decode, HostPolicy(), TicketSeal((SECRET,))).host == "10.0.0.1"
    file.unlink()
    file.write_bytes(NEXT)
    file.chmod(0o400)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    decode = writer.for_decode(ID, "10.0.0.1", 5600)
    assert read_early(decode, HostPolicy(), TicketSeal((NEXT,))).port == 5600


def test_who_knows_a_request_but_not_the_secret_does_not_know_its_hand_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id is that of one request in all calls, also while the secret is rotated, and one that both engines take."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o400)
    keyed = EarlyTicketWriter({"streaming": True, "ticket_secret_files": [str(file)]})
    first = keyed.hand_over_id("request-1")
    assert first != EarlyTicketWriter({"streaming": True}).hand_over_id("request-1")
    assert first != hashlib.sha256(b"kv-stream request-1").hexdigest()[:32]
    assert first != keyed.hand_over_id("request-2")
    file.unlink()
    file.write_bytes(NEXT)
    file.chmod(0o400)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    decode: Any = keyed.for_decode(keyed.hand_over_id("request-1"), "10.0.0.1", 5600)
    assert read_early(decode, HostPolicy(), TicketSeal((NEXT,))).hand_over_id == first


@pytest.mark.parametrize(
    ("extra", "reads"),
    [
        ({"streaming": True, "remote_hosts": ["10.0.0.0/8"]}, True),
        ({"streaming": True, "ticket_secret_variable": "A_SECRET"}, True),
        ({"streaming": True}, False),
        ({"remote_hosts": ["10.0.0.0/8"]}, False),
        ({"streaming": True, "remote_hosts": ["10.0.0.0/8"], "stream_reserve_fraction": 0.0}, False),
    ],
)
def test_an_engine_reads_streams_where_it_would_take_an_early_ticket(
    extra: dict[str, object], *, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "0f" * 16)
    assert EarlyTicketWriter(extra).reads_streams is reads


def test_a_configuration_that_no_engine_takes_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        EarlyTicketWriter({"streamin": True})
    with pytest.raises(ConfigurationError):
        EarlyTicketWriter({"streaming": True, "ticket_secret_variable": "NOT_SET_ANYWHERE"})
