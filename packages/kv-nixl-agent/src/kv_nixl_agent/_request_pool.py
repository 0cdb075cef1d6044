"""UCX's pool of requests, changed to hand out zeroed memory.

A read over TCP (or any transport without one-sided reads) is answered by UCX in the producer's process: UCX sends the page in
pieces through an internal request. If the reader dies while such requests wait for the socket, UCX releases their memory
registrations, and takes the kind of their buffers from a field that these requests never set (`send.datatype`). The pool gets
its memory from `malloc`: if that memory was in use before, the field holds arbitrary data, and the process ends with SIGSEGV.
In a pool whose memory comes from `mmap` the field is zero, which is the right kind. docs/upstream/consumer-death.md has the
report and the figures.

UCX has both allocators; its pool names its choice in a table of function pointers. This module changes that table in the loaded
library before the first pool is made. It changes nothing unless all of this holds: the library is of a version on which the
change was measured, the table holds the two expected functions, its memory is writable, and UCX was not in use in this process
before, since a pool must be released by the allocator that made it.

A reused request keeps its zero: of NIXL 1.5's calls (reads, writes, messages below UCX's rendezvous, flushing and closing of
endpoints) none writes to the field, and the wire-up of a connection writes the right kind.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path
from typing import Final, Literal, final

__all__ = ["POOL", "SWITCH", "RequestPool", "State"]

SWITCH: Final = "KV_NIXL_ZEROED_REQUESTS"
"""Environment variable; `n` leaves UCX as it is."""

State = Literal["zeroed", "off", "already-in-use", "unknown-build", "not-loaded"]
"""Outcome: only `zeroed` changed something. `already-in-use`: another part of this process loaded UCX first."""

_MEASURED: Final = frozenset({(1, 23, 0)})
"""Versions of UCX with which `integration_tests/chaos/agents` was run; NIXL 1.5.1 comes with 1.23.0."""
_LIBRARY: Final = re.compile(r"(/\S*/(libuc[ps])[-.]\S*)$")
_TABLE: Final = "ucp_request_mpool_ops"
_MALLOC: Final = ("ucs_mpool_hugetlb_malloc", "ucs_mpool_hugetlb_free")
_MMAP: Final = ("ucs_mpool_chunk_mmap", "ucs_mpool_chunk_munmap")


@final
class RequestPool:
    """Change of the pool, in two steps: `watch` before NIXL loads UCX, `zero` before UCX makes its first worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_first = False
        self._state: State = "not-loaded"

    @property
    def state(self) -> State:
        """Outcome so far."""
        return self._state

    def watch(self) -> None:
        """Record whether UCX is already loaded in this process, unless the outcome is decided."""
        with self._lock:
            if self._state == "not-loaded":
                self._is_first = _maps() != "" and not _loaded()

    def zero(self) -> None:
        """Make UCX's future pools take zeroed memory; a second call changes nothing."""
        with self._lock:
            if self._state == "not-loaded":
                self._state = _change(is_first=self._is_first)


POOL: Final = RequestPool()
"""The pool of this process: UCX is loaded once."""


def _change(*, is_first: bool) -> State:
    if os.environ.get(SWITCH, "y").lower() in {"n", "no", "0", "off", "false"}:
        return "off"
    loaded = _loaded()
    if not loaded:
        return "not-loaded"
    if not is_first:
        return "already-in-use"
    try:
        ucp, ucs = (_open(loaded[name]) for name in ("libucp", "libucs"))
        if _version(ucp) not in _MEASURED:
            return "unknown-build"
        table = (ctypes.c_void_p * 2).in_dll(ucp, _TABLE)
        old, new = ([_address(ucs, name) for name in names] for names in (_MALLOC, _MMAP))
    except (KeyError, OSError, ValueError, AttributeError):
        return "unknown-build"
    if list(table) == old and _may_write(ctypes.addressof(table), ctypes.sizeof(table)):
        table[0], table[1] = new
    return "zeroed" if list(table) == new else "unknown-build"


def _open(paths: set[str]) -> ctypes.CDLL:
    (path,) = paths  # ValueError for copies of two builds
    return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


def _version(ucp: ctypes.CDLL) -> tuple[int, ...]:
    parts = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, parts))
    return tuple(part.value for part in parts)


def _may_write(start: int, size_bytes: int) -> bool:
    """Return whether memory is writable. Example of a row: `7f00-7f20 rw-p ...` holds 0x7f00 up to 0x7f20."""
    for row in _maps().splitlines():
        interval, permissions = row.split(maxsplit=2)[:2]
        first, end = (int(part, 16) for part in interval.split("-"))
        if first <= start and start + size_bytes <= end:
            return permissions[1] == "w"
    return False


def _address(library: ctypes.CDLL, function: str) -> int | None:
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value


def _maps() -> str:
    """Return the rows of `/proc/self/maps`; empty where it cannot be read. File names may not be valid UTF-8."""
    try:
        return Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return ""


def _loaded() -> dict[str, set[str]]:
    """Return the paths of UCX's libraries in this process by name, `libucp` and `libucs`."""
    found: dict[str, set[str]] = {}
    for line in _maps().splitlines():
        match = _LIBRARY.search(line)
        if match:
            found.setdefault(match[2], set()).add(match[1])
    return found
