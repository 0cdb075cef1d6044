"""Prefill and decode engines in network namespaces of their own, joined by a wire that delays, loses and blocks packets."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults import judged, revived
from link import ADDRESSES, INTERFACE
from live import NAMES, Live, Setting, Warm, started_live
from namespaces import Link, started_link, why_no_namespaces
from proxy import Proxy, running_proxy

from kvdev.engines import EngineProcess

IS_LONG = os.environ.get("KVDEV_LONG") == "1"
WHY_NOT = why_no_namespaces() if IS_LONG else "live engines: dev.py test --long chaos"
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
PREFILL = NAMES[:2]


def _in_namespaces(warm: Warm) -> Setting:
    """Return a fleet whose prefill engines live at `a` and whose decode engines at `b`; their APIs are Unix sockets."""
    sockets = {name: str(warm.starter.folder / f"{name}.uds") for name in NAMES}
    hosts = {name: ADDRESSES["a" if name in PREFILL else "b"] for name in NAMES}
    return Setting(
        "namespaces",
        {"UCX_TLS": "tcp", "UCX_NET_DEVICES": INTERFACE, "VLLM_HOST_IP": "127.0.0.1"},
        {name: {"VLLM_NIXL_SIDE_CHANNEL_HOST": host} for name, host in hosts.items()},
        {name: ["--uds", file] for name, file in sockets.items()},
        {"read_timeout_s": 12},
    )


@contextlib.contextmanager
def _started_apart(warm: Warm, link: Link) -> Iterator[Live]:
    where = {name: link.a if name in PREFILL else link.b for name in NAMES}
    warm.starter.namespaces = {f"engine-chaos-namespaces-{name}": files for name, files in where.items()}
    with contextlib.ExitStack() as stack:
        reached: set[int] = set()

        def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> EngineProcess:
            words = list(command)
            port, target = int(words[words.index("--port") + 1]), Path(words[words.index("--uds") + 1])
            if port not in reached:
                stack.enter_context(running_proxy(Proxy(target, port=port)))
                reached.add(port)
            return warm.starter.launch(command, environment, log)

        yield stack.enter_context(started_live(warm, _in_namespaces(warm), launch))


@pytest.fixture(scope="module")
def apart(warm: Warm) -> Iterator[tuple[Live, Link]]:
    """A fleet whose two sides are joined by the wire alone."""
    with started_link() as link, _started_apart(warm, link) as live:
        yield live, link


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("net-delay", {"delay_s": 0.05}),
        ("net-loss", {"loss": 0.01}),
        ("partition", {"blocked": ["ab", "ba"]}),
        ("prefill-unheard", {"blocked": ["ab"]}),
        ("decode-unheard", {"blocked": ["ba"]}),
    ],
)
def test_a_bad_network_between_the_sides_delays_and_never_corrupts(
    apart: tuple[Live, Link], kind: str, faults: dict[str, Any]
) -> None:
    live, link = revived(apart[0]), apart[1]
    is_cut = "blocked" in faults
    with judged(live, kind, PREFILL, must_be_right=not is_cut) as fault:
        for name in PREFILL if is_cut else ():
            live.outages.begin(name, time.monotonic())
        before = link.become(**faults)
        fault.begins()
        time.sleep(15)
        fault.ends()
        after = link.become()
        assert after["lost"] > before["lost"] or "delay_s" in faults
        assert after["passed"] > before["passed"] or kind == "partition"
