"""ZMTP 3 by hand over a plain socket, to send what no library would."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
EMPTY_AND_MORE = b"\x01\x00"


def frame(body: bytes, *, more: bool = False, is_command: bool = False) -> bytes:
    """Return a frame. Example: frame(b"a", more=True) is 01 01 61."""
    flags = (1 if more else 0) | (4 if is_command else 0)
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def _ready(kind: bytes) -> bytes:
    properties = b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", b""))
    )
    return frame(b"\x05READY" + properties, is_command=True)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def read_frame(sock: socket.socket) -> tuple[int, bytes]:
    """Return the flags and the body of the next frame."""
    flags = _read(sock, 1)[0]
    size = int.from_bytes(_read(sock, 8 if flags & 2 else 1), "big")
    return flags, _read(sock, size)


def _open(sock: socket.socket, kind: bytes) -> None:
    sock.sendall(GREETING)
    _read(sock, 64)
    sock.sendall(_ready(kind))
    read_frame(sock)


def connected(port: int) -> socket.socket:
    """Return a connection to a listener after the opening, as a DEALER."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    try:
        _open(sock, b"DEALER")
    except OSError:
        sock.close()
        raise
    return sock


class HostileServer:
    """A server that opens each connection properly and then does `act` with it, on a thread of its own."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._act = act
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(30)
            _open(sock, b"ROUTER")
            self._act(sock)

    def close(self) -> None:
        """Stop accepting."""
        self._listening.close()


def answering(*frames: bytes) -> Callable[[socket.socket], None]:
    """Return an act that answers every query with these frames."""
    reply = frame(b"", more=True) + b"".join(
        frame(body, more=number + 1 < len(frames)) for number, body in enumerate(frames)
    )

    def act(sock: socket.socket) -> None:
        while True:
            flags, _ = read_frame(sock)
            if not flags & 1:
                sock.sendall(reply)

    return act
