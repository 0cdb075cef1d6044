"""`vllm-adapter check`: real reads from the probe pages of real agents, and each way in which they can fail."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines_to_check import NO_AGENT, Checked, config, envelopes, silenced

from kv_nixl_agent import BackendOptions
from kv_nixl_agent.testing import PeerProcess
from kv_nixl_agent.tools.remote import Measurement, RankRead, measure_ranks
from vllm_adapter.cli.check import pair

Start = Callable[..., PeerProcess]
Serve = Callable[..., str]
pytestmark = pytest.mark.usefixtures("no_engines")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a rank's agent in a process of its own."""
    started: list[PeerProcess] = []

    def run(**options: Any) -> PeerProcess:
        started.append(PeerProcess(f"prefill-{len(started)}", page_count=1, **options))
        return started[-1]

    yield run
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def alive() -> Iterator[PeerProcess]:
    """An agent that no test changes: starting one takes seconds."""
    process = PeerProcess("prefill", page_count=1)
    yield process
    process.close()


@pytest.fixture
def serve(listen: Serve) -> Serve:
    """Serve the envelopes of an engine that has this agent; return its address."""

    def run(name: str, *agents: Any, is_silent: bool = False) -> str:
        frames = envelopes(name, tp=max(1, len(agents)), agents=agents or (NO_AGENT,))
        return listen(silenced(frames) if is_silent else frames)

    return run


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checked]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    return lambda *words: Checked(capsys, "--read", *words, configs=(config(), config()))


Check = Callable[..., Checked]


def agent_of(process: PeerProcess, **changes: Any) -> SimpleNamespace:
    values = {"agent_metadata": lambda: process.agent_metadata, "fence": process.fence, "streams": None, **changes}
    return SimpleNamespace(**values)


def test_bytes_transport_and_speed_are_those_of_real_reads_of_probe_pages_alone(
    alive: PeerProcess, serve: Serve, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = measure_ranks

    def noting(ranks: Any, **options: Any) -> Any:
        asked.extend(ranks)
        return real(ranks, **options)

    monkeypatch.setattr(pair, "measure_ranks", noting)
    found = check(serve("P", agent_of(alive)), serve("D"))
    assert [each.fence for each in asked] == [alive.fence], "no address of the cache"
    assert (found.code, found.reasons()) == (0, [])
    messages = {each["topic"]: each["message"] for each in found.findings if each["topic"] in {"reads", "transport"}}
    assert "1 of 1 prefill ranks: the probe pages came whole (checksum eacc91bb)" in messages["reads"]
    assert "GB/s from the slowest rank" in messages["transport"]
    assert "tcp" not in messages["transport"]
    measured = messages["transport"].partition(" GB/s")[0].rpartition(" ")[2]
    assert float(measured) > 0
    (cost,) = [each["message"] for each in found.findings if "1024 tokens moves" in each["message"]]
    used = cost.partition(" GB/s")[0].rpartition(" ")[2]
    assert float(used) == pytest.approx(float(measured), rel=0.1), "the cost is that of the measured speed"


def test_a_fall_back_to_tcp_is_a_reason_against_unless_it_is_allowed(
    start: Start, serve: Serve, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, real = list[Any](), measure_ranks

    def once(*ranks: Any, **options: Any) -> Any:  # one measurement is judged twice
        measured[:] = measured or [real(*ranks, **options)]
        return measured[0]

    monkeypatch.setattr(pair, "measure_ranks", once)
    addresses = serve("P", agent_of(start(backend=BackendOptions(engine_config={"TLS": "tcp"})))), serve("D")
    found = check(*addresses)
    assert (found.code, found.reasons()) == (1, [("transport", "tcp-fallback")])
    assert "tcp/" in found.message("tcp-fallback")
    assert "kv-nixl doctor" in found.message("tcp-fallback")
    allowed = check(*addresses, "--allow-tcp")
    assert (allowed.code, allowed.codes("note")) == (0, {"tcp-fallback"})


def test_reads_of_too_few_bytes_give_no_speed_and_the_cost_is_that_of_shared_memory(
    serve: Serve, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "measure_ranks", lambda *_, **__: Measurement([RankRead("0.0")]))
    found = check(serve("P"), serve("D"))
    assert (found.code, found.reasons()) == (0, [])
    assert any("at the speed of shared memory" in each["message"] for each in found.findings)


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_rank_that_answers_and_cannot_be_read_is_named_and_the_other_is_read(
    start: Start, serve: Serve, check: Check, *, is_silent: bool
) -> None:
    """Its process is gone; or the kernel accepts what is sent to it, and nobody answers, as behind a firewall."""
    alive, unread = (start(backend=BackendOptions(engine_config={"TLS": "tcp"})) for _ in range(2))
    addresses = serve("P", agent_of(alive), agent_of(unread)), serve("D")
    (unread.stop if is_silent else unread.kill)()
    found = check(*addresses, "--allow-tcp", "--timeout", "8" if is_silent else "60")
    assert (found.code, found.reasons()) == (1, [("reads", "read-failed")])
    assert "rank 0.1 answers, and its memory cannot be read from here" in found.message("read-failed")
    assert "rank 0.0" not in found.message("read-failed")


def test_a_rank_whose_metadata_is_damaged_is_a_reason_against(serve: Serve, check: Check) -> None:
    damaged = check(serve("P"), serve("D"))
    assert damaged.reasons() == [("reads", "read-failed")]
    assert "metadata" in damaged.message("read-failed")


def test_bytes_that_differ_are_a_reason_against(alive: PeerProcess, serve: Serve, check: Check) -> None:
    address, device, words = alive.fence
    # Of an array with 24 words less the pages would begin 192 bytes earlier, where words of its own are.
    found = check(serve("P", agent_of(alive, fence=(address, device, words - 24))), serve("D"))
    assert found.reasons() == [("reads", "bytes-differ")]
    assert "their content has eacc91bb" in found.message("bytes-differ")


def test_an_engine_without_probe_pages_is_not_measured_and_not_refused(
    alive: PeerProcess, serve: Serve, check: Check
) -> None:
    address, device, words = alive.fence
    older = check(serve("P", agent_of(alive, fence=(address, device, words + 40_000))), serve("D"))
    assert (older.code, older.codes("note")) == (0, {"no-probe-pages"})
    strange = check(serve("P", agent_of(alive), is_silent=True), serve("D"))
    assert strange.code == 0
    assert "no-probe-pages" in strange.codes("note")


def test_without_nixl_here_the_rest_is_checked_all_the_same(
    alive: PeerProcess, serve: Serve, check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o700)
    prefill = serve("P", agent_of(alive))
    monkeypatch.setattr(sys, "executable", str(program))
    found = check(prefill, serve("D"))
    assert (found.code, found.codes("note")) == (0, {"not-measured"})
    assert "kv-nixl doctor" in found.message("not-measured")


def test_only_a_measurement_beside_the_decode_engine_is_its_own() -> None:
    assert pair._is_here("127.0.0.1")
    assert pair._is_here("localhost")
    assert not pair._is_here("192.0.2.1"), "an address for documentation, which no machine has"
    assert not pair._is_here("nowhere.invalid")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert pair._is_here("127.0.0.1")
