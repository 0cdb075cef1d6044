"""Faults other than a kill, on live engines: stops, a bad side channel, no descriptors, no room for logs."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faults import (
    MISBEHAVIOURS,
    core_of,
    first_limit,
    judged,
    limited,
    revived,
    standing_still,
    start_anew,
    used_descriptors,
)
from live import LEASE_S, Live, Warm, started_live
from processes import family_of
from proxy import Behaviour, Proxy, running_proxy

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("KVDEV_LONG") != "1", reason="live engines: dev.py test --long chaos"),
]
SHORT_S, LONG_S = 5.0, 2.0 * LEASE_S


@pytest.fixture(scope="module")
def started(warm: Warm) -> Iterator[Live]:
    """Start a fleet for all faults of this file."""
    with started_live(warm, "faults", read_timeout_s=12) as fleet:
        yield fleet


@pytest.fixture
def live(started: Live) -> Live:
    """The fleet, without anything of the test before."""
    return revived(started)


@pytest.mark.parametrize(
    ("name", "seconds"), [("prefill-0", SHORT_S), ("decode-0", SHORT_S), ("prefill-1", LONG_S), ("decode-1", LONG_S)]
)
def test_an_engine_that_stands_still_delays_its_own_requests_alone(live: Live, name: str, seconds: float) -> None:
    """A stop that is shorter than a lease costs time alone."""
    with judged(live, "stop", [name], must_be_right=seconds < LEASE_S) as fault:
        fault.begins()
        with standing_still(live, name):
            time.sleep(seconds)
            fault.ends()


def test_a_scheduler_process_that_is_killed_alone_ends_its_engine_cleanly(live: Live) -> None:
    with judged(live, "scheduler-kill", ["decode-1"]) as fault:
        fault.begins()
        live.outages.begin("decode-1", time.monotonic())
        engine = live.engines["decode-1"]
        assert core_of(engine) != engine.pid
        os.kill(core_of(engine), signal.SIGKILL)
        assert engine.has_ended(within_s=60), "its API server stays"
        live.start_again("decode-1")
        fault.ends()


# ------------------------------------------------------------------------------------------------- the side channel


@pytest.mark.parametrize("behaviour", MISBEHAVIOURS)
def test_a_side_channel_that_misbehaves_costs_one_engine_and_no_other(live: Live, behaviour: Behaviour) -> None:
    """The prefill engine starts anew before, so that both decode engines must meet it again, through the proxy."""
    is_slow_alone = behaviour == "delay"
    port = live.engines["prefill-1"].side_channel_port
    start_anew(live, "prefill-1")
    with running_proxy(Proxy(("127.0.0.1", port), behaviour, delay_s=0.3)) as proxy:

        def through_the_proxy(ticket: dict[str, Any], /) -> dict[str, Any]:
            return {**ticket, "remote_port": proxy.port} if ticket.get("remote_port") == port else ticket

        if not is_slow_alone:  # it serves, but cannot be reached: out to a decode engine that fails such requests
            live.outages.begin("prefill-1", time.monotonic())
        with judged(live, behaviour, ["prefill-1"], rewrite=through_the_proxy, must_be_right=is_slow_alone) as fault:
            fault.begins()
            time.sleep(12)
            fault.ends()
            assert proxy.accepted > 0, "no connection came through the proxy"
            assert (proxy.dropped_bytes > 0) == behaviour.startswith("drop")
            proxy.behave()


# ------------------------------------------------------------------------------------------------------ no resources


@pytest.mark.parametrize(("kind", "spare"), [("descriptors-none", 0), ("descriptors-few", 24)])
def test_an_engine_without_descriptors_goes_on_with_the_peers_it_has(live: Live, kind: str, spare: int) -> None:
    """Scheduler processes of a decode and of a prefill engine may open nothing more, while another prefill engine is new."""
    cores = [core_of(live.engines[name]) for name in ("decode-0", "prefill-0")]
    with judged(live, kind, ["prefill-1"]) as fault:
        fault.begins()
        with limited(cores, resource.RLIMIT_NOFILE, lambda pid: first_limit(used_descriptors(pid), spare)):
            start_anew(live, "prefill-1")
            time.sleep(10)
            assert not live.dead(), [live.engines[name].last_words(6) for name in live.dead()]
        fault.ends()


def test_logs_that_cannot_be_written_cost_no_request(live: Live) -> None:
    """A full disk, as a limit on the size of files: every write to the log fails, while a peer dies and leases end."""
    names = ("decode-0", "prefill-0")
    pids = [pid for name in names for pid in family_of(live.engines[name].pid)]
    with judged(live, "full-log", ["prefill-1"]) as fault:
        fault.begins()
        with limited(pids, resource.RLIMIT_FSIZE, lambda _: 1):
            sizes = log_sizes(live, names)
            start_anew(live, "prefill-1")
            time.sleep(10)
            assert sizes == log_sizes(live, names), "the log was written"
        fault.ends()
    until = time.monotonic() + 30
    while any(now <= before for now, before in zip(log_sizes(live, names), sizes, strict=True)):
        assert time.monotonic() < until, "the log does not go on when there is room again"
        live.take_steps()
        time.sleep(0.5)


def log_sizes(live: Live, names: tuple[str, ...]) -> list[int]:
    """Return the sizes of logs, in bytes."""
    return [live.engines[name].log.stat().st_size for name in names]
