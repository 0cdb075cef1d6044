"""Hand-overs under scheduling pressure: chunked prefill, unequal block sizes, caches too small for all requests.

The engines trace, so that all of it also runs with tracing on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest
from fleets import CANCELLED, COMPUTED, EXPIRED, FAILED, REVOKED, TRANSFERS, Fleet, ours, prompt, started_fleet

CONVERSIONS = "vllm:kv_transfer_conversion_seconds_count"
ARGUMENTS = {
    # Prompts below are longer than 96 tokens: each takes several steps.
    "chunked": ["--block-size", "64", "--max-num-batched-tokens", "96", "--max-num-seqs", "4"],
    # 11 usable blocks of 128 tokens: three requests of these tests fit, until they grow.
    "tight": ["--block-size", "128", "--num-gpu-blocks-override", "12", "--max-model-len", "640"],
    # 15 usable blocks: five prompts of the test fit, each of three blocks.
    "full": ["--block-size", "128", "--num-gpu-blocks-override", "16", "--max-model-len", "640"],
    "busy": ["--block-size", "128", "--max-num-seqs", "1"],
}
CONFIGS = {
    "full": ours("kv_producer"),
    "busy": ours("kv_consumer", kv_load_failure_policy="fail"),
}


@pytest.fixture(scope="module")
def exported() -> Iterator[tuple[str, list[bytes]]]:
    """A collector of OpenTelemetry exports: its address and the bodies that it was sent."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # (the base class's name)
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", bodies
        server.shutdown()


@pytest.fixture(scope="module")
def fleet(exported: tuple[str, list[bytes]]) -> Iterator[Fleet]:
    arguments = {name: [*more, "--otlp-traces-endpoint", exported[0]] for name, more in ARGUMENTS.items()}
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    configs = {name: CONFIGS.get(name) or ours() for name in ARGUMENTS}
    with started_fleet("dense", configs, arguments=arguments, environment=environment) as running:
        yield running


def test_spans_of_a_hand_over_join_the_requests_trace(fleet: Fleet, exported: tuple[str, list[bytes]]) -> None:
    trace, text = "0af7651916cd43dd8448eb211c80319c", prompt(400, 60)
    parent = f"00-{trace}-b7ad6b7169203331-01"
    ticket = fleet.take_ticket("chunked", text, traceparent=parent)
    fleet.ask("tight", {"prompt": text, "max_tokens": 4, "kv_transfer_params": ticket}, traceparent=parent)
    names = ["read", "queue", "handshake", "wire", "fence", "lease"]
    until = time.monotonic() + 30
    while True:
        found = b"".join(body for body in exported[1] if bytes.fromhex(trace) in body)
        missing = [name for name in names if f"kv_transfer.{name}".encode() not in found]
        if not missing:
            return
        assert time.monotonic() < until, f"no span kv_transfer.{missing} of trace {trace}"
        fleet.assert_all_blocks_free()


@pytest.mark.proves("dense: unequal blocks, prefix hits")
@pytest.mark.parametrize(("prefill", "decode"), [("chunked", "tight"), ("tight", "chunked")])
def test_chunked_prompts_cross_between_unequal_block_sizes(fleet: Fleet, prefill: str, decode: str) -> None:
    """vLLM's CPU kernel keeps keys by channel: two blocks of 64 tokens are not one of 128, and torch puts them in order."""
    texts = [prompt(10 * len(prefill) + n, 25 + 20 * n) for n in range(3)]
    transfers, conversions = fleet.count(decode, TRANSFERS), fleet.count(decode, CONVERSIONS)
    computed = fleet.count(decode, COMPUTED, source="local_compute")
    texts.append(texts[-1] + prompt(10 * len(prefill) + 3, 25))  # begins with a prefix hit on both sides
    for text in texts:
        assert len(text) > 96
        assert fleet.answers([text], prefill=prefill, decode=decode) == fleet.answers([text], decode=prefill)
    assert fleet.count(decode, TRANSFERS) - transfers == len(texts)
    # Smaller blocks are read whole and put in order; parts of larger ones are read piece by piece.
    assert fleet.count(decode, CONVERSIONS) - conversions == (len(texts) if prefill == "chunked" else 0)
    assert fleet.count(decode, FAILED) == 0
    assert fleet.count(decode, COMPUTED, source="local_compute") <= computed + len(texts)
    fleet.assert_all_blocks_free()


@pytest.mark.never_wrong("B10")
def test_a_full_prefill_cache_and_a_busy_decode_engine_cost_no_request(fleet: Fleet) -> None:
    """Decode takes seconds for each answer, one after another; no lease is taken from its reader meanwhile.

    It begins with a request of its own: while one runs, vLLM allocates no blocks for another, so nothing is read.
    """
    texts = [prompt(400 + n, 60) for n in range(8)]
    expected = fleet.answers(texts, decode="chunked")
    before = fleet.count("busy", COMPUTED, source="local_compute")
    ticket_s = list[float]()

    async def load(session: aiohttp.ClientSession) -> tuple[list[str], float, float]:
        async def hold() -> float:
            await fleet.post(session, "busy", {"prompt": prompt(399, 20), "max_tokens": 400})
            return time.monotonic()

        async def one(text: str) -> str:
            ticket = await fleet.ticket(session, text, "full", {})
            ticket_s.append(time.monotonic())
            body = {"prompt": text, "max_tokens": 400, "kv_transfer_params": ticket}
            answer = await fleet.post(session, "busy", body)
            return str(answer["choices"][0]["text"])

        holder = asyncio.create_task(hold())
        while (computed := await asyncio.to_thread(fleet.count, "busy", COMPUTED, source="local_compute")) == before:
            await asyncio.sleep(0.05)
        got = await asyncio.gather(*map(one, texts))
        return got, await holder, computed

    got, held_s, computed = fleet.run(load)
    assert [text.startswith(first) for text, first in zip(got, expected, strict=True)] == [True] * 8
    # The client may see the last ticket a little before the end of the request that it waited for.
    waited_s = max(ticket_s) - min(ticket_s)
    assert held_s - max(ticket_s) < waited_s, "prefill waits for decode, which answers one request at a time"
    assert fleet.count("busy", TRANSFERS) == len(texts)
    assert fleet.count("busy", COMPUTED, source="local_compute") <= computed + len(texts)
    for engine, name in (("busy", FAILED), ("full", EXPIRED), ("full", REVOKED), ("busy", CANCELLED)):
        assert fleet.count(engine, name) == 0, name
    fleet.assert_all_blocks_free()
