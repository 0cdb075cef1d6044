"""vllm-router in front of two prefill engines and one decode engine with our connector."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from judging import (
    REQUESTS,
    Alone,
    ask_all,
    assert_no_lease_left,
    assert_nothing_failed,
    failures,
    fleet_python,
    handed_over,
)
from two_by_two import TwoByTwo

from kvdev.engines import free_port, metric_sum
from kvdev.steps import end_process

PROMPTS_EACH = 8
_ROUTES_WITHIN_S = 60


@contextlib.contextmanager
def vllm_router(fleet: TwoByTwo, policy: str, log: Path, *words: str) -> Iterator[str]:
    """Run vllm-router as `docs/operate/two-hosts.md` says; yield its base URL."""
    port = free_port()
    command = [
        str(fleet_python().parent / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
        "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", policy,
        *(word for engine in fleet.prefill for word in ("--prefill", engine.url)),
        "--decode", fleet.decode[0].url,
        "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1",
        *words,
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_routes(process, url, log)
        yield url
    finally:
        end_process(process, 20)


def _wait_until_it_routes(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _ROUTES_WITHIN_S
    while True:
        assert process.poll() is None, f"vllm-router ended: {log.read_text()[-3000:]}"
        gone = contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError)
        with gone, urllib.request.urlopen(f"{url}/readiness", timeout=5) as answer:
            if answer.status == 200:
                return
        assert time.monotonic() < until, f"vllm-router does not route: {log.read_text()[-3000:]}"
        time.sleep(0.3)


def asked(fleet: TwoByTwo) -> list[float]:
    """Return how many requests each prefill engine has answered."""
    return [metric_sum(engine.metrics(), "vllm:request_success_total") for engine in fleet.prefill]


@pytest.mark.parametrize(("number", "policy"), [(0, "round_robin"), (1, "cache_aware")])
def test_prompts_are_handed_over_behind_vllm_router(
    alone: Alone, two_by_two: TwoByTwo, tmp_path: Path, number: int, policy: str
) -> None:
    fleet = two_by_two
    first = REQUESTS + number * PROMPTS_EACH
    reader = fleet.decode[0]
    before, asked_before = handed_over([reader.metrics()]), asked(fleet)
    failed_before = failures(fleet.pages())  # engines were replaced before
    started_s = time.monotonic()
    with vllm_router(fleet, policy, tmp_path / "router.log") as url:
        replies = ask_all(url, range(first, first + PROMPTS_EACH))
    alone.assert_same(replies)
    assert handed_over([reader.metrics()]) - before == PROMPTS_EACH
    shares = [now - was for now, was in zip(asked(fleet), asked_before, strict=True)]
    assert sum(shares) == PROMPTS_EACH
    if policy == "round_robin":
        assert shares == [PROMPTS_EACH / 2] * 2
    assert_nothing_failed(fleet.pages(), failed_before)
    assert_no_lease_left(fleet.pages, fleet.take_steps, within_s=60)
    print(f"{policy}: {PROMPTS_EACH} hand-overs, prefill shares {shares}, {time.monotonic() - started_s:.0f} s")
