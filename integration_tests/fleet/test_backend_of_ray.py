"""The connector's back end in Ray's own classes: its registration, its flags, both requests of a hand-over. No engine runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from judging import fleet_python

from kv_scheduler_state.hosts import HostPolicy
from kv_scheduler_state.ticket.early import read_early
from kv_scheduler_state.ticket.seal import TicketSeal
from kvdev.engines import Launch

SEAL = TicketSeal((b"a-fleet-secret,16+",))


@pytest.fixture(scope="module")
def said(launch: Launch) -> Any:  # noqa: ARG001  (first of all suites here: vLLM is imported beside it, on the other core)
    done = subprocess.run(
        [fleet_python(), Path(__file__).with_name("ray_backend.py")],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ray_finds_the_back_end_by_the_connectors_name(said: Any) -> None:
    assert (said["registered"], said["kind"]) == (True, "KVTransferBackend")
    # Ray's own part is done as under NixlConnector.
    assert said["engine_id"].endswith("-10.0.0.1-5600")
    assert said["peer"] == {"kv_side_channel": ["10.0.0.1", 5600]}


def test_both_replicas_work_at_once_only_where_the_configuration_says_so(said: Any) -> None:
    assert said["streaming"] == [True, True]
    assert said["plain"] == [False, False]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_both_requests_carry_one_covered_early_ticket(said: Any, kind: str) -> None:
    prefill, decode = said[kind]["prefill"], said[kind]["decode"]
    assert prefill["kv_stream"] == decode["kv_stream"]
    assert (prefill["do_remote_decode"], prefill["do_remote_prefill"]) == (True, False)
    assert (decode["do_remote_decode"], decode["do_remote_prefill"]) == (False, True)
    early = read_early(decode, HostPolicy(), SEAL)
    assert (early.host, early.port) == ("10.0.0.1", 5600)
    assert said[kind]["tokens"] == [1, 9]
    assert said[kind]["stream"][0] is False
    assert said[kind]["untouched"] is True


def test_the_id_is_the_requests_own(said: Any) -> None:
    """Ray asks for the two requests in two calls that share no state."""
    assert said["completion"] == said["again"]
    assert said["completion"]["prefill"]["kv_stream"]["id"] != said["chat"]["prefill"]["kv_stream"]["id"]


def test_a_replica_that_does_not_say_where_it_listens_hands_over_nothing_early(said: Any) -> None:
    assert "kv_stream" not in said["silent_peer"]["prefill"]
    assert said["silent_peer"]["decode"] is None


def test_a_replica_that_does_not_stream_is_asked_first_and_that_is_said_once(said: Any) -> None:
    """Of two replicas that work at once Ray drops the prefill replica's answer, and the ticket with it."""
    assert said["mixed"]["flags"] == [[True, True], [True, False], [True, False], [True, True]]
    assert [line.rpartition(": ")[2] for line in said["mixed"]["said"]] == [
        "the prefill replica does not have `streaming`, or has neither fleet secrets nor remote_hosts"
    ]
    address = {"kv_side_channel": ["10.0.0.1", 5600]}
    assert said["published"] == [address, {}, {}], (
        "an engine that nothing covers refuses early tickets, so it is asked first"
    )


def test_a_decode_replica_whose_engine_would_refuse_early_tickets_gets_none(said: Any) -> None:
    assert said["uncovered"]["flags"] == [[False, False], [False, False]]
    (line,) = said["uncovered"]["said"]
    assert "neither fleet secrets nor remote_hosts" in line
    assert said["of_plain"] == {"flags": [[False, False]], "said": []}


def test_without_streaming_requests_are_those_of_ray(said: Any) -> None:
    assert said["sequential"]["prefill"]["do_remote_decode"] is True
    assert "kv_stream" not in said["sequential"]["prefill"]
    assert said["sequential"]["decode"] == {"a": 1}
