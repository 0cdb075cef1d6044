"""The tools that do harm and judge it, without engines: each does what it says, and each judge says no when it must."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from load import Asked, Load, Pair, Prompt, make_prompts, running_load
from namespaces import started_link, why_no_namespaces
from proxy import Behaviour, Proxy, running_proxy
from recorder import Held, family_of, held_of, is_alive, sample_of
from verdicts import Outages, growth, judge, judge_all, too_large

from kvdev.forked import ForkedProcess
from kvdev.paths import ROOT

PROMPT = Prompt(7, "a prompt", 3, " and its answer")
PAIR = Pair("p", "d", "http://127.0.0.1:1", "http://127.0.0.1:1")
RIGHT = Asked(PROMPT, PAIR, 10.0, 11.0, "decode", "text", " and its answer", "", False, True)

# ---------------------------------------------------------------------------------------------------------- the proxy


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Serve a port that sends back what it gets, upper case."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data.upper())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def said(port: int, data: bytes, within_s: float) -> bytes | str:
    """Return the answer to `data`, or how the connection ended."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=within_s) as client:
            client.sendall(data)
            answer = b""
            while len(answer) < len(data):
                part = client.recv(1 << 16)
                if not part:
                    return "closed"
                answer += part
            return answer
    except TimeoutError:
        return "silence"
    except ConnectionResetError:
        return "reset"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("pass", b"HELLO"),
        ("drop", "silence"),
        ("drop-answers", "silence"),
        ("half-open", "silence"),
        ("refuse", "reset"),
        ("cut-midway", "reset"),
    ],
)
def test_the_proxy_behaves_as_it_is_told(behaviour: Behaviour, expected: bytes | str) -> None:
    with echo_server() as port, running_proxy(Proxy(("127.0.0.1", port), cut_after_bytes=2)) as proxy:
        proxy.become(behaviour)
        assert said(proxy.port, b"hello", 0.3 if expected == "silence" else 5.0) == expected
        assert proxy.dropped_bytes == (5 if behaviour.startswith("drop") else 0)
        proxy.become("pass")
        assert said(proxy.port, b"hello", 5.0) == b"HELLO"
        assert proxy.accepted == 2


def test_the_proxy_delays_and_resets_what_is_open() -> None:
    with echo_server() as port, running_proxy(Proxy(("127.0.0.1", port), delay_s=0.15)) as proxy:
        proxy.become("delay")
        began_s = time.monotonic()
        assert said(proxy.port, b"hello", within_s=5) == b"HELLO"
        assert time.monotonic() - began_s > 0.3, "each way is delayed"
        proxy.become("pass")
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
            client.sendall(b"a")
            assert client.recv(1) == b"A"
            proxy.become("pass", resets=True)
            with pytest.raises(ConnectionResetError):
                client.recv(1)


# ----------------------------------------------------------------------------------------------------------- the load


class FakeEngines:
    """Answers as engines do; `mode` is how the decode side answers."""

    def __init__(self) -> None:
        self.mode = "right"
        self.tickets: list[object] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        ticket = body.get("kv_transfer_params")
        if ticket == {"do_remote_decode": True, "do_remote_prefill": False}:
            return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": {"remote_port": 5}})
        self.tickets.append(ticket)
        if self.mode == "error":
            return web.json_response({"error": {"message": "engine died"}}, status=500)
        if self.mode == "garbage":
            return web.Response(status=502, text="bad gateway")
        if self.mode == "slow":
            await asyncio.sleep(0.5)
        text = "wrong" if self.mode == "wrong" else PROMPT.answer
        if not body["stream"]:
            return web.json_response({"choices": [{"text": text, "finish_reason": "length"}]})
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for part in (text[:4], text[4:]):
            await response.write(b"data: " + json.dumps({"choices": [{"text": part}]}).encode() + b"\n\n")
            if self.mode == "breaks off":
                assert request.transport is not None
                request.transport.close()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response


def ends(engines: FakeEngines, mode: str, *, is_stream: bool, leaves_after_s: float | None = None) -> Asked:
    """Send one request to fake engines and return its end."""
    engines.mode = mode

    async def run() -> Asked:
        app = web.Application()
        app.router.add_post("/v1/completions", engines.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address,) = runner.addresses
        url = f"http://127.0.0.1:{address[1]}"
        load = Load([], [], 0, workers=1, is_paused=True, rewrite=lambda ticket: {**ticket, "remote_port": 6})
        task = asyncio.ensure_future(load.run())
        try:
            await asyncio.sleep(0)
            pair = Pair("p", "d", url, url)
            while load._session is None:
                await asyncio.sleep(0.01)
            return await load.one(pair, PROMPT, is_stream, leaves_after_s)
        finally:
            load.is_needed = False
            await asyncio.wait_for(asyncio.shield(asyncio.gather(task, return_exceptions=True)), 5)
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("mode", "end", "text"),
    [
        ("right", "text", PROMPT.answer),
        ("wrong", "text", "wrong"),
        ("error", "error", ""),
        ("garbage", "broken", ""),
    ],
)
def test_the_load_tells_how_a_request_ended(mode: str, end: str, text: str, is_stream: bool) -> None:
    engines = FakeEngines()
    asked = ends(engines, mode, is_stream=is_stream)
    assert (asked.step, asked.end, asked.text) == ("decode", end, text), asked
    assert engines.tickets == [{"remote_port": 6}], "the ticket was changed on its way"


def test_a_stream_that_breaks_off_keeps_what_has_come() -> None:
    asked = ends(FakeEngines(), "breaks off", is_stream=True)
    assert (asked.end, asked.text) == ("broken", PROMPT.answer[:4])


def test_a_client_that_leaves_is_no_failure() -> None:
    assert ends(FakeEngines(), "slow", is_stream=False, leaves_after_s=0.05).end == "left"


def test_an_engine_that_is_not_there_breaks_the_first_step() -> None:
    with running_load(Load([PAIR], [PROMPT], 0, workers=1, pause_s=0.01)) as load:
        while not load.asked:
            time.sleep(0.01)
    assert {(each.step, each.end) for each in load.asked} == {("prefill", "broken")}


def test_prompts_differ_and_the_longest_fits() -> None:
    prompts = make_prompts(64)
    assert len({prompt.text[:4] for prompt in prompts}) == 64
    assert 1500 < max(len(prompt.text) for prompt in prompts) < 2000


# ------------------------------------------------------------------------------------------------------- the verdicts


def out(engine: str, began_s: float, ended_s: float) -> Outages:
    outages = Outages()
    outages.begin(engine, began_s)
    outages.end(engine, ended_s)
    return outages


def test_a_right_text_is_right_and_another_one_is_never_excused() -> None:
    everything = out("d", 0, math.inf)
    assert judge(RIGHT, Outages()) == "right"
    assert judge(replace(RIGHT, text=" and its"), everything) == "wrong text"
    assert judge(replace(RIGHT, end="broken", text=" and his"), everything) == "wrong text"
    assert judge(replace(RIGHT, end="broken", text=" and its"), everything) == "clean error"
    assert judge(replace(RIGHT, end="hung", text=""), everything) == "hung"


def test_an_error_needs_an_engine_that_was_out() -> None:
    failed = replace(RIGHT, end="error", text="")
    assert judge(failed, Outages()) == "without excuse"
    assert judge(failed, out("d", 10.5, 12)) == "clean error"
    assert judge(failed, out("d", 11.5, 12)) == "without excuse", "out when it had ended"
    assert judge(failed, out("other", 0, 99)) == "without excuse"
    # A decode engine that computes lost prompts has no excuse in its prefill engine.
    assert judge(failed, out("p", 10.5, 12)) == "without excuse"
    assert judge(failed, out("p", 10.5, 12), {"d": True}) == "clean error"
    assert judge(replace(failed, end="broken"), out("p", 10.5, 12), {"d": True}) == "without excuse"
    assert judge(replace(failed, step="prefill"), out("p", 10.5, 12)) == "clean error"
    assert judge(replace(failed, step="prefill"), out("d", 10.5, 12)) == "without excuse"


def test_verdicts_are_counted_and_bad_requests_are_named() -> None:
    hung = replace(RIGHT, end="hung", text="")
    counts, bad = judge_all([RIGHT, RIGHT, hung, replace(RIGHT, end="left", text="")], Outages())
    assert counts == {"right": 2, "hung": 1, "left": 1}
    assert bad == [hung]


def test_a_leak_is_seen_and_a_spike_is_not() -> None:
    steady = [100.0 + n % 3 for n in range(100)]
    spiky = [*steady[:50], 900.0, *steady[51:]]
    leaking = [100.0 + 0.4 * n for n in range(100)]
    assert growth([9, 9, 1, 1, 1, 1, 3, 3, 3, 3]) == 2
    for name in ("resident_mb", "descriptors", "sockets", "threads"):
        assert too_large(name, steady) == too_large(name, spiky) == ""
    assert too_large("sockets", leaking) == "sockets grew by 16.0, bound 6.0"
    with pytest.raises(ValueError, match="3 samples"):
        growth([1, 2, 3])


# ------------------------------------------------------------------------------------------------------- the recorder

FAMILY = """
import os, socket, subprocess, sys, time
kept = [socket.socket() for _ in range(5)] + [open(os.devnull) for _ in range(3)]
memory = bytearray(os.urandom(1)) * (32 << 20)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
time.sleep(60)
"""


def test_a_sample_covers_a_process_and_its_children() -> None:
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        family = family_of(process.pid)
        assert [is_alive(pid) for pid in family] == [True, True]
        sample = sample_of(process.pid, 1.0)
        assert (sample.processes, sample.sockets, sample.threads) == (2, 5, 2)
        assert sample.descriptors >= 5 + 3 + 6
        assert 32 < sample.resident_mb < 80
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()
    assert sample_of(process.pid, 2.0).processes == 0
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in family) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in family), "one that nobody has waited for has ended, too"


def test_holdings_are_those_of_one_engine_and_a_silent_part_is_told() -> None:
    scheduler = {"part": "scheduler", "pid": 4, "leases": 2, "leased_blocks": 9, "requests_by_state": {"a": 1, "b": 2}}
    worker = {"part": "0.0", "pid": 5, "reads": 1, "quarantined_transfers": 3, "peers": 2, "leases": 2}
    other = {"part": "scheduler", "pid": 9, "leases": 70}
    assert held_of([scheduler, worker, other], [4, 5]) == Held(2, 9, 0, 3, 1, 3, 2)
    assert held_of([scheduler, other], [4, 5]).is_silent
    assert held_of([scheduler, {**worker, "is_silent": True}], [4, 5]).is_silent


def test_the_starter_says_that_its_vllm_is_not_there(tmp_path: Path) -> None:
    """The workspace has no vLLM: nothing is preloaded, and the process still obeys and ends with its input."""
    program = ROOT / "tools" / "kvdev" / "starter.py"
    done = subprocess.run(
        [sys.executable, program, str(tmp_path)], input=b"", capture_output=True, timeout=30, check=True
    )
    answer = json.loads(done.stdout.splitlines()[0])
    assert answer["ready"]
    assert "vllm.v1.engine.core" in answer["missing"]


def test_many_threads_learn_the_end_of_a_forked_process(tmp_path: Path) -> None:
    """Its exit code comes a moment after its end: nobody may take it for known before."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        forked = ForkedProcess(process.pid, tmp_path)
        assert forked.poll() is None
        codes: list[int] = []
        threads = [threading.Thread(target=lambda: codes.append(forked.wait(10))) for _ in range(8)]
        for thread in threads:
            thread.start()
        process.communicate()
        time.sleep(0.2)
        (tmp_path / f"{process.pid}.exit").write_text("-9")
        for thread in threads:
            thread.join(10)
    assert codes == [-9] * 8
    assert forked.poll() == -9
    forked.terminate()


# ------------------------------------------------------------------------------------------------------ the namespaces

WHY_NOT = why_no_namespaces()
CLIENT = """
import ctypes, os, socket, sys, time
for path in sys.argv[2:]:
    assert ctypes.CDLL(None).setns(os.open(path, os.O_RDONLY), 0) == 0
if sys.argv[1] == "serve":
    with socket.create_server(("10.77.0.2", 7)) as server:
        print("up", flush=True)
        while True:
            connection, _ = server.accept()
            connection.sendall(connection.recv(100).upper())
            connection.close()
began_s = time.monotonic()
try:
    with socket.create_connection(("10.77.0.2", 7), timeout=float(sys.argv[1])) as client:
        client.sendall(b"hello")
        print(client.recv(100).decode(), time.monotonic() - began_s)
except TimeoutError:
    print("silence 0")
"""


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_wire_between_namespaces_delays_and_blocks_each_way() -> None:
    def asked(within_s: float) -> tuple[str, float]:
        words = [sys.executable, "-c", CLIENT, str(within_s), *link.a]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
        text, took_s = done.stdout.split()
        return text, float(took_s)

    with started_link() as link:
        words = [sys.executable, "-c", CLIENT, "serve", *link.b]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            assert asked(5)[0] == "HELLO"
            # A connection and an answer are two rounds, each of which waits on both ways.
            link.become(delay_s=0.1)
            text, took_s = asked(5)
            assert text == "HELLO"
            assert took_s >= 0.4
            for faults in ({"blocked": ["ab"]}, {"blocked": ["ba"]}, {"loss": 1.0}):
                link.become(**faults)
                assert asked(0.5)[0] == "silence"
            before = link.become()
            assert asked(5)[0] == "HELLO"
            assert link.become()["passed"] > before["passed"] > 0
            assert before["lost"] > 0
        finally:
            server.kill()
            server.communicate()
