"""Asks that nobody answers cost a listener their budget and nothing more, and end with their time."""

from __future__ import annotations

import contextlib
import time

import zmq

from kv_handshake import Client, Listener, LocalOffer, QueryLimits, Timing
from kv_handshake._ask_frames import encode_ask
from kv_handshake._limits import MAX_ASK_BYTES
from kv_handshake._pacing import AskLimits
from kv_handshake.testing import sample_envelopes


def test_a_flood_of_asks_costs_its_budget() -> None:
    limits = AskLimits()
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes(), limits=QueryLimits(queries_per_s=0))
    open_ids: set[int] = set()
    listener.take_asks(lambda ask_id, _: open_ids.add(ask_id), open_ids.discard, wait_s=5.0)
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
            most = min(limits.in_all // 2, limits.bytes_in_all // 2 // size_bytes, connections * limits.per_connection)
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
    until_s = time.monotonic() + 20
    while _asked(listener) != asked:
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.005)


def _asked(listener: Listener) -> int:
    counts = listener.statistics()
    return counts["asks"] + counts.get("refused.ask-busy", 0)
