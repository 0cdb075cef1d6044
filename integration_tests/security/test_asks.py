"""Asks without an answer cost a listener and an asker their budget and nothing more, and end with their time."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import pytest
import zmq
from figures import Figure

from kv_handshake import Client, Codec, Listener, LocalOffer, QueryLimits, Timing
from kv_handshake.core import desk
from kv_handshake.core.pacing import MOST_FAILURES
from kv_handshake.testing import sample_envelopes, sample_metadata
from kv_handshake.wire.asks import encode_ask
from kv_handshake.wire.limits import MAX_ASK_BYTES


@pytest.mark.full
def test_a_flood_of_asks_costs_its_budget() -> None:
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes(), limits=QueryLimits(queries_per_s=0))
    open_ids: set[int] = set()
    listener.take_asks(lambda ask_id, _: open_ids.add(ask_id), open_ids.discard, wait_s=10.0)
    listener.start()
    client = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=30, attempt_s=20))
    # Long ones: 40 of 4 KiB from each of 8 connections are more bytes than may be open.
    long, short = (8, 40, MAX_ASK_BYTES), (6, 300, 1)
    for connections, each, size_bytes in (long, short):
        before = _asked(listener)
        with zmq.Context() as context, contextlib.ExitStack() as stack:
            for number in range(connections):
                _send(stack.enter_context(context.socket(zmq.DEALER)), listener.port, each, size_bytes)
                _wait_for(listener, before + (number + 1) * each)
            # All come from one address, which leaves half to others.
            most = min(
                desk.MOST_ASKS // 2, desk.MOST_ASKED_BYTES // 2 // size_bytes, connections * desk.ASKS_PER_CONNECTION
            )
            assert len(open_ids) == listener.statistics()["asks_open"] == most
            assert client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14).is_ok
            while open_ids:
                time.sleep(0.01)  # each ends with its time
        assert listener.statistics()["asks_open"] == 0
    client.close()
    listener.close()


def _send(sock: zmq.Socket[bytes], port: int, count: int, size_bytes: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(f"tcp://127.0.0.1:{port}")
    for number in range(1, count + 1):
        sock.send_multipart([b"", encode_ask(number, bytes(size_bytes))])


def _wait_for(listener: Listener, asked: int) -> None:
    until_s = time.monotonic() + 60
    while _asked(listener) != asked:
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.005)


def _asked(listener: Listener) -> int:
    counts = listener.statistics()
    return counts["asks"] + counts.get("refused.ask-busy", 0)


def test_places_that_are_gone_or_have_slow_names_delay_no_other_ask(
    figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early tickets name places: each of 6900 dead ones was looked at in every turn, and honest asks took 0.4 to 2.5 s."""
    is_over = threading.Event()
    envelope = Codec(capabilities={"ask": "supported"}).encode_envelope(
        sample_metadata(), {"vllm_version": "0.32.0"}, dialect=14, rank=(0, 0)
    )
    listener = Listener("127.0.0.1", 0, payloads={(0, 0): envelope}, limits=QueryLimits(queries_per_s=0))
    listener.take_asks(listener.answer, lambda _: None, wait_s=30.0)
    listener.start()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(200) and [])
    client = Client(LocalOffer(policy="off"))
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(host: str, port: int) -> None:
        client.ask(host=host, port=port, payload=b"?", on_reply=lambda code, _: ended.put(code), deadline_s=200)

    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed_port = unused.getsockname()[1]
    places = 3 * MOST_FAILURES
    for number in range(places):
        ask(f"127.1.{number // 250}.{number % 250 + 1}", closed_port)
    codes = {ended.get(timeout=120) for _ in range(places)}
    assert client.statistics()["remembered_failures"] <= MOST_FAILURES
    slow = 3 * Timing().connections
    for number in range(slow):
        ask(f"slow-{number}.test", 5600)
    seconds = []
    for _ in range(20):
        began_s = time.monotonic()
        ask("127.0.0.1", listener.port)
        while ended.get(
            timeout=60
        ):  # silent names, which answer no earlier than `is_over`, give their places up meanwhile
            pass
        seconds.append(time.monotonic() - began_s)
    figure(
        f"{places} places failed as {sorted(codes)}; honest asks {min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"
    )
    is_over.set()
    client.close()
    listener.close()
    assert codes <= {"connection-refused", "timed-out", "too-many-peers"}
    assert seconds[0] < 20, "silent names do not keep it from connecting; they answer after minutes"
    assert min(seconds) < 0.4
