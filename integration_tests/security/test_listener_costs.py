"""A listener under attack: what strangers send costs little, and honest clients do not notice."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from figures import Figure
from victims import Honest, PeakMeter, Victim
from zmtp import EMPTY_AND_MORE, connected, frame, read_frame

QUERY = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
ASKED = frame(b"", more=True) + frame(QUERY)
Start = Callable[..., Victim]


def send(sock: socket.socket, data: bytes, times: int) -> int:
    """Send data so many times; return how often it was taken before the connection was closed."""
    for number in range(times):
        try:
            sock.sendall(data)
        except OSError:
            return number
    return times


@pytest.mark.full
def test_h5_messages_of_many_frames_cost_their_senders_alone(victim: Start, figure: Figure) -> None:
    """H5, repeated: 236 bytes, twenty times a second, closed every connection of the listener each time."""
    server = victim("listener")
    stop = threading.Event()
    attacks = 0

    def attack() -> None:
        nonlocal attacks
        while not stop.wait(0.02):
            with connected(server.port) as sock:
                attacks += send(sock, EMPTY_AND_MORE * 70 + frame(b""), 1)

    thread = threading.Thread(target=attack)
    thread.start()
    seconds: list[float] = []
    with Honest(server.port) as honest:
        while attacks <= 40:
            seconds += honest.fetch(5)
        assert honest.attempts == len(seconds), "an honest connection was closed"
    stop.set()
    thread.join()
    figure(f"{attacks} attacks, {len(seconds)} fetches, worst {max(seconds):.2f} s")


def test_h6_unread_replies_share_their_bytes(victim: Start, figure: Figure) -> None:
    """H6: 0.18 MB of queries on 12 connections that read nothing made 4.6 GB of replies of 1.5 MB."""
    server = victim("listener", blob_bytes=1_500_000)
    with PeakMeter(server) as memory, contextlib.ExitStack() as stack:
        for _ in range(12):
            sock = stack.enter_context(connected(server.port))
            sock.sendall(ASKED * 250)
        with Honest(server.port) as honest:
            honest.fetch(3)
        time.sleep(1)
    figure(f"{memory.growth_mb:.0f} MB")
    assert memory.growth_mb < 128


def test_h12_an_endless_message_is_cut_off(victim: Start, figure: Figure) -> None:
    """H12: frames of one message on one connection, 1.6 GB in 4 s."""
    server = victim("listener")
    with PeakMeter(server) as memory, connected(server.port) as sock:
        began_s = time.monotonic()
        taken = send(sock, frame(bytes(100_000), more=True), 6000)
        seconds = time.monotonic() - began_s
    with Honest(server.port) as honest:
        honest.fetch()
    figure(f"closed after {taken * 0.1:.1f} MB and {seconds:.2f} s; {memory.growth_mb:.0f} MB")
    assert taken < 6000, "the connection was never closed"
    assert memory.growth_mb < 128


def test_h12_many_slow_messages_are_bounded_in_all(victim: Start, figure: Figure) -> None:
    """200 connections that each stay below the limit of one: 20 MB of empty frames would take 640 MB."""
    server = victim("listener")
    with PeakMeter(server) as memory, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server.port)) for _ in range(200)]
        for _ in range(10):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.sendall(EMPTY_AND_MORE * 5_000)
            time.sleep(0.05)
        with Honest(server.port) as honest:
            honest.fetch(3)
    figure(f"{memory.growth_mb:.0f} MB")
    assert memory.growth_mb < 160


@pytest.mark.full
def test_h16_connections_have_a_limit(victim: Start, figure: Figure) -> None:
    """H16: with 128 descriptors, 270 connections kept new peers out and a core at 39 %."""
    server = victim("listener", files=128)
    with contextlib.ExitStack() as stack:
        for _ in range(270):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
        with Honest(server.port) as honest:
            seconds = honest.fetch(5)
        began_s, cpu_s = time.monotonic(), server.cpu_s()
        time.sleep(2)
        share = (server.cpu_s() - cpu_s) / (time.monotonic() - began_s)
    figure(f"worst fetch {max(seconds):.2f} s, {share:.0%} of a core afterwards")
    assert share < 0.2


def test_h16_idle_connections_are_closed(victim: Start, figure: Figure) -> None:
    """H16: 200 of 200 idle connections were never closed. The limit of 60 s is 1 s here."""
    server = victim("listener", idle_s=1.0)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server.port)) for _ in range(50)]
        end_s = time.monotonic() + 60
        open_ones = set(socks)
        while open_ones and time.monotonic() < end_s:
            time.sleep(0.1)
            open_ones = {sock for sock in open_ones if not _is_closed(sock)}
    figure(f"{50 - len(open_ones)} of 50 closed")
    assert not open_ones


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0.001)
    try:
        return sock.recv(65_536) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.full
def test_h17_a_flood_starves_no_neighbour(victim: Start, figure: Figure) -> None:
    """H17: while one connection floods, 13 of 60 queries of others at the same address were served."""
    server = victim("listener")
    is_over = threading.Event()

    def flood(sock: socket.socket) -> None:
        threading.Thread(target=_drain, args=(sock,), daemon=True).start()
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                sock.sendall(ASKED * 200)
            time.sleep(0.002)

    with connected(server.port) as sock:
        attack = threading.Thread(target=flood, args=(sock,))
        attack.start()
        end_s = time.monotonic() + 60
        while server.call("statistics").get("refused.rate-limited", 0) < 1000:
            assert time.monotonic() < end_s, "the flood is not even noticed"
            time.sleep(0.1)
        served = 0
        for _ in range(60):
            with connected(server.port) as neighbour:
                neighbour.sendall(ASKED)
                read_frame(neighbour)
                served += b"rate-limited" not in read_frame(neighbour)[1]
        is_over.set()
        attack.join()
    figure(f"{served} of 60 served")
    assert served == 60


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass
