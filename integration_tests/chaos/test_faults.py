"""Faults other than a kill, on live engines: stops, a bad side channel, no descriptors, no room for logs, partitions."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from link import ADDRESSES, INTERFACE
from live import FAILS, LEASE_S, NAMES, Live, Setting, Warm, started_live
from load import Asked, Load, running_load
from namespaces import Link, started_link, why_no_namespaces
from proxy import Behaviour, Proxy, running_proxy
from recorder import family_of
from verdicts import judge_all

from kvdev.engines import Engine, EngineProcess

IS_LONG = os.environ.get("KVDEV_LONG") == "1"
WHY_NOT = why_no_namespaces() if IS_LONG else ""
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_LONG, reason="live engines: dev.py test --long chaos"),
]
_RESTORED_WITHIN_S = 40.0


@pytest.fixture(scope="module")
def live(warm: Warm) -> Iterator[Live]:
    """One fleet for all faults of this file that need no other one."""
    with started_live(warm, Setting("faults", keys={"read_timeout_s": 12})) as started:
        yield started


@contextlib.contextmanager
def judged(live: Live, load: Load, *, may_fail: bool = True) -> Iterator[None]:
    """Send requests while the fault is on and after it: all end well, service is restored, nothing is held or dead."""
    began_s = time.monotonic()
    with running_load(load):
        time.sleep(2)
        yield
        restored_s = _wait_restored(live, load)
    counts, bad = judge_all(load.asked, live.outages, FAILS)
    print(
        f"{dict(counts)} of {len(load.asked)} in {time.monotonic() - began_s:.0f} s, restored after {restored_s:.1f} s"
    )
    assert not bad, bad[:3]
    assert counts["right"] > len(load.asked) / 3
    assert may_fail or counts["right"] == len(load.asked)
    assert not live.dead()
    assert not live.stranded()


def _wait_restored(live: Live, load: Load) -> float:
    """Wait until each pair has handed over something that began after the fault; return the seconds."""
    began_s = time.monotonic()
    while True:
        served = {each.pair for each in _after(load, began_s) if each.had_ticket and each.end == "text"}
        if len(served) == len(load.pairs):
            return time.monotonic() - began_s
        missing = [pair for pair in load.pairs if pair not in served]
        assert time.monotonic() - began_s < _RESTORED_WITHIN_S, f"not served again: {missing}, {live.held()}"
        time.sleep(0.2)


def _after(load: Load, began_s: float) -> list[Asked]:
    return [each for each in load.asked if each.started_s >= began_s]


@pytest.mark.parametrize(("name", "seconds"), [("prefill-0", 5.0), ("decode-0", 5.0), ("decode-1", 2.0 * LEASE_S)])
def test_an_engine_that_stands_still_delays_its_own_requests_alone(live: Live, name: str, seconds: float) -> None:
    with judged(live, live.load(seed=1)):
        live.stop(name)
        time.sleep(seconds)
        live.resume(name)


def test_a_scheduler_process_that_is_killed_alone_ends_its_engine_cleanly(live: Live) -> None:
    with judged(live, live.load(seed=2)):
        live.outages.begin("decode-1", time.monotonic())
        engine = live.engines["decode-1"]
        os.kill(_core_of(engine), signal.SIGKILL)
        assert engine.has_ended(within_s=60), "its API server stays"
        live.begin_again("decode-1")
        live.wait_serving("decode-1")


def _core_of(engine: Engine) -> int:
    """Return the scheduler process: of the server's descendants the one with the most memory."""
    return max(family_of(engine.pid)[1:], key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


# ------------------------------------------------------------------------------------------------- the side channel


@pytest.mark.parametrize("behaviour", ["delay", "drop", "drop-answers", "half-open", "cut-midway", "refuse"])
def test_a_side_channel_that_misbehaves_costs_one_engine_and_no_other(live: Live, behaviour: Behaviour) -> None:
    """The prefill engine starts anew, so that both decode engines must meet it again, through the proxy."""
    port = live.engines["prefill-1"].side_channel_port
    with running_proxy(Proxy(("127.0.0.1", port), delay_s=0.3)) as proxy:

        def through_the_proxy(ticket: dict[str, Any]) -> dict[str, Any]:
            return {**ticket, "remote_port": proxy.port} if ticket.get("remote_port") == port else ticket

        load = live.load(seed=3, rewrite=through_the_proxy)
        with judged(live, load):
            proxy.become(behaviour, resets=True)
            live.kill("prefill-1")
            live.begin_again("prefill-1")
            live.wait_serving("prefill-1")
            # It serves, but cannot be met: an outage to decode engines that fail such requests.
            live.outages.begin("prefill-1", time.monotonic())
            time.sleep(12)
            assert proxy.accepted > 0, "nobody came through the proxy"
            proxy.become("pass", resets=True)
            live.outages.end("prefill-1", time.monotonic() + 8)


# ------------------------------------------------------------------------------------------------------ no resources


def limited(pids: Sequence[int], kind: int, soft: Callable[[int], int]) -> list[tuple[int, tuple[int, int]]]:
    """Lower a limit of live processes; return what to set it to again."""
    before = [(pid, resource.prlimit(pid, kind)) for pid in pids]
    for pid, (_, hard) in before:
        resource.prlimit(pid, kind, (soft(pid), hard))
    return before


def test_an_engine_without_descriptors_goes_on_with_the_peers_it_has(live: Live) -> None:
    """Scheduler processes of a decode and of a prefill engine may open nothing more, while another prefill engine is new."""
    with judged(live, live.load(seed=4)):
        cores = [_core_of(live.engines[name]) for name in ("decode-0", "prefill-0")]
        before = limited(cores, resource.RLIMIT_NOFILE, lambda pid: len(list(Path(f"/proc/{pid}/fd").iterdir())))
        live.kill("prefill-1")
        live.begin_again("prefill-1")
        live.wait_serving("prefill-1")
        time.sleep(8)
        assert not live.dead()
        for pid, limit in before:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


def test_logs_that_cannot_be_written_cost_no_request(live: Live) -> None:
    """A full disk, as a limit on the size of files: every write to the log fails, while a peer dies and leases end."""
    names = ("decode-0", "prefill-0")
    pids = [pid for name in names for pid in family_of(live.engines[name].pid)]
    with judged(live, live.load(seed=5)):
        before = limited(pids, resource.RLIMIT_FSIZE, lambda _: 1)
        sizes = [live.engines[name].log.stat().st_size for name in names]
        live.kill("prefill-1")
        live.begin_again("prefill-1")
        live.wait_serving("prefill-1")
        assert sizes == [live.engines[name].log.stat().st_size for name in names], "the log was written"
        for pid, limit in before:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        time.sleep(2)
    live.kill("prefill-1")
    live.begin_again("prefill-1")
    live.wait_serving("prefill-1")
    with judged(live, live.load(seed=6)):
        pass
    assert live.engines["decode-0"].log.stat().st_size > sizes[0], "the log goes on when there is room again"


# -------------------------------------------------------------------------------------------------------- partitions


def _in_namespaces(warm: Warm) -> Setting:
    """Return a fleet whose prefill engines live at `a` and whose decode engines at `b`; their APIs are Unix sockets."""
    sockets = {name: str(warm.starter.folder / f"{name}.uds") for name in NAMES}
    hosts = {name: ADDRESSES["a" if name.startswith("prefill") else "b"] for name in NAMES}
    return Setting(
        "namespaces",
        {"UCX_TLS": "tcp", "UCX_NET_DEVICES": INTERFACE, "VLLM_HOST_IP": "127.0.0.1"},
        {name: {"VLLM_NIXL_SIDE_CHANNEL_HOST": host} for name, host in hosts.items()},
        {name: ["--uds", file] for name, file in sockets.items()},
        {"read_timeout_s": 12},
    )


@contextlib.contextmanager
def _started_apart(warm: Warm, link: Link) -> Iterator[Live]:
    setting = _in_namespaces(warm)
    where = {name: link.a if name.startswith("prefill") else link.b for name in NAMES}
    warm.starter.namespaces = {f"engine-chaos-namespaces-{name}": files for name, files in where.items()}
    with contextlib.ExitStack() as stack:

        def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> EngineProcess:
            words = list(command)
            port, target = int(words[words.index("--port") + 1]), Path(words[words.index("--uds") + 1])
            stack.enter_context(running_proxy(Proxy(target, port=port)))
            return warm.starter.launch(command, environment, log)

        yield stack.enter_context(started_live(warm, setting, launch))


@pytest.fixture(scope="module")
def apart(warm: Warm) -> Iterator[tuple[Live, Link]]:
    """A fleet whose two sides are joined by the wire alone."""
    with started_link() as link, _started_apart(warm, link) as live:
        yield live, link


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("faults", "may_fail"),
    [
        ({"delay_s": 0.05}, False),
        ({"loss": 0.01}, False),
        ({"blocked": ["ab", "ba"]}, True),
        ({"blocked": ["ab"]}, True),
        ({"blocked": ["ba"]}, True),
    ],
    ids=["delay", "loss", "partition", "prefill-unheard", "decode-unheard"],
)
def test_a_bad_network_between_the_sides_delays_and_never_corrupts(
    apart: tuple[Live, Link], faults: dict[str, Any], may_fail: bool
) -> None:
    live, link = apart
    with judged(live, live.load(seed=7), may_fail=may_fail):
        if may_fail:
            for name in NAMES[:2]:
                live.outages.begin(name, time.monotonic())
        link.become(**faults)
        time.sleep(15)
        counts = link.become()
        assert counts["passed"] > 0
        if may_fail:
            for name in NAMES[:2]:
                live.outages.end(name, time.monotonic() + 12)
