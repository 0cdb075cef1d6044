"""Two network namespaces with a wire between them that delays, loses and blocks packets: `unshare -rn python link.py`.

The wire is this process: it reads the packets of one namespace's interface and writes them to the other's. So a fault holds for
all traffic, on whatever port. Lines on standard input change it: `{"delay_s": 0.05, "loss": 0.02, "blocked": ["ab"]}`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
INTERFACE = min((entry.name for entry in Path("/sys/class/net").iterdir() if entry.name != "lo"), default="")
"""A name that the machine's own network has as well: UCX takes names from `/sys`, which does not show those of the namespace."""
_MTU_BYTES = 9000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001


def opened_interface(own: str, peer: str) -> int:
    """Make this namespace's end of the wire; return its descriptor, from which the packets that it sends are read."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _TUN_WITHOUT_HEADER))
    for words in (
        "link set lo up",
        f"addr add {own} peer {peer} dev {INTERFACE}",
        f"link set {INTERFACE} up mtu {_MTU_BYTES}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return descriptor


class Wire:
    """Packets on their way."""

    def __init__(self, a: int, b: int) -> None:
        self.ends = {a: ("ab", b), b: ("ba", a)}
        self.delay_s = self.loss = 0.0
        self.blocked: set[str] = set()
        self.passed = self.lost = 0
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._draw = random.Random(0)

    def obey(self, order: dict[str, Any]) -> None:
        """Change the faults; those that are not named are over."""
        self.delay_s, self.loss = float(order.get("delay_s", 0)), float(order.get("loss", 0))
        self.blocked = set(order.get("blocked", ()))

    def take(self, source: int, now_s: float) -> None:
        """Take all packets that an end has sent."""
        way, target = self.ends[source]
        while True:
            try:
                packet = os.read(source, 1 << 16)
            except BlockingIOError:
                return
            if way in self.blocked or self._draw.random() < self.loss:
                self.lost += 1
            else:
                heapq.heappush(self._waiting, (now_s + self.delay_s, next(self._order), target, packet))

    def deliver(self, now_s: float) -> float:
        """Hand over the packets that are due; return the seconds until the next one."""
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self._waiting)
            try:
                os.write(target, packet)
                self.passed += 1
            except OSError:  # the other end's queue is full: a wire loses such packets too
                self.lost += 1
        return min(1.0, self._waiting[0][0] - now_s) if self._waiting else 1.0


def main() -> None:
    """Make both namespaces, say where they are, and carry packets until standard input ends."""
    if not INTERFACE:
        raise OSError(errno.ENODEV, "this machine has no interface whose name the wire could have")
    a = opened_interface(ADDRESSES["a"], ADDRESSES["b"])
    first = os.open("/proc/self/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no second network namespace")
    b = opened_interface(ADDRESSES["b"], ADDRESSES["a"])
    here = f"/proc/{os.getpid()}"
    user = f"{here}/ns/user"
    print(json.dumps({"a": [user, f"{here}/fd/{first}"], "b": [user, f"{here}/ns/net"]}), flush=True)
    wire, held = Wire(a, b), b""
    while True:
        ready = select.select([a, b, 0], [], [], max(0.0, wire.deliver(time.monotonic())))[0]
        for source in ready:
            if source:
                wire.take(source, time.monotonic())
                continue
            data = os.read(0, 1 << 12)
            if not data:
                return
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                wire.obey(json.loads(line))
                print(json.dumps({"passed": wire.passed, "lost": wire.lost}), flush=True)


if __name__ == "__main__":
    main()
