"""Everything that this package changes in its process, or does behind NIXL's interface, beyond its own objects.

One row of `EFFECTS` for each: the environment variable that turns it off with `n`, and the reason. The first time that one
takes hold, a line is logged (logger `kv_nixl_agent`, level INFO). Where the environment already does the same, nothing is
changed.

**zeroed-requests.** A read over TCP (or any transport without one-sided reads) is answered by UCX in the producer's process:
UCX sends the page in pieces through an internal request. If the reader dies while such requests wait for the socket, UCX
releases their memory registrations, and takes the kind of their buffers from a field that these requests never set
(`send.datatype`). The pool gets its memory from `malloc`: if that memory was in use before, the field holds arbitrary data, and
the process ends with SIGSEGV. In a pool whose memory comes from `mmap` the field is zero, which is the right kind. UCX has both
allocators; its pool names its choice in a table of function pointers, which is changed in the loaded library before the first
pool is made. Nothing is changed unless all of this holds: the library is of a version on which the change was measured, the
table holds the two expected functions, its memory is writable, UCX was not in use in this process before (a pool must be
released by the allocator that made it), and the process was not started with `MALLOC_MMAP_THRESHOLD_` of at most 32768, which
has the same effect. A reused request keeps its zero: of NIXL 1.5's calls none writes to the field, and the wire-up of a
connection writes the right kind. Upstream report: docs/upstream/consumer-death.md.

**sleeping-progress.** NIXL's progress thread waits in `poll` for events of its transports, and also checks after `pthrDelay`,
for transports that miss some. NIXL's Python package sets that delay to zero and offers no key for it: `poll` then returns at
once, and the thread takes a whole core for as long as the agent lives, idle or not. The configuration is changed on its way
from NIXL's Python class into its extension module, whose name in that module is replaced while an agent is made; agents that
other threads of the process create at the same moment get the same delay. An event wakes the thread at once, and the thread
that posted a read polls UCX by itself, so no read waits for the delay (`integration_tests/real_io/test_progress_thread.py`). An
event that UCX does not report, which NIXL's source warns about, is found after 50 ms. Upstream: not yet reported; figures in
docs/performance.md.

**worker-turns.** A worker thread of NIXL's UCX backend makes progress only while it carries a part of a transfer, and only
transfers of many descriptors are shared among the threads. If an agent makes only small reads, two things remain undone (NIXL
1.5, four threads). *Half-made connections*: each thread connects to each new peer; the peer's answers stay in sockets that no
thread reads, and NIXL's progress thread at the peer waits for them without sleeping. It took a whole core at 4 of 20 producers
whose reader had read four pages, and at 7 of 24 of which 32 MB had been read three times. Six turns, 10 ms apart, ended it at
24 of 24; two or four did not. So twelve turns follow a new peer, 50 ms apart, and then some at growing intervals, for peers
slow to answer. The first turn of all starts the threads, which takes 31 ms; it is taken before any peer is known.
*Sockets of lost peers*: 4 for each, 8 over TCP, would stay in CLOSE_WAIT; after a turn none do. A turn is a read of this agent
from itself, of so many descriptors that each thread usually gets a part. Example: 4 threads and parts of 128 descriptors: 512
descriptors of 8 bytes, in 16 KB of memory of its own. Upstream: not yet reported.

**switch-interval.** The interpreter lets a thread that computes in Python go on for 5 ms while others wait, and a notification
to a producer would wait as long. `ThreadOptions.gil_switch_interval_s` is the bound; None turns it off for one thread.

**precise-sleeps.** The kernel ends a thread's sleep up to 50 us late (timer slack), and a short read is polled between sleeps of
20 us. The transfer thread asks for 1 us; threads that NIXL starts from it inherit that.

**rcache-bound.** vLLM sets `UCX_RCACHE_MAX_UNRELEASED` before its first import of NIXL: without a bound, UCX's registration
cache keeps unmapped memory. A value that is set already is kept.

**quiet-nixl.** NIXL prints a line per agent on standard output and its refusals on standard error. All of them are coded errors
here, so `NIXL_LOG_LEVEL` is FATAL unless it is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import re
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

__all__ = [
    "EFFECTS",
    "POOL",
    "SWITCH",
    "RequestPool",
    "State",
    "SwitchInterval",
    "WorkerTurns",
    "set_library_defaults",
    "sleep_precisely",
    "sleeping_progress_thread",
]

EFFECTS: Final = MappingProxyType(
    {
        "zeroed-requests": ("KV_NIXL_ZEROED_REQUESTS", "UCX's request pool takes zeroed memory"),
        "sleeping-progress": ("KV_NIXL_SLEEPING_PROGRESS", "NIXL's progress threads sleep between events"),
        "worker-turns": ("KV_NIXL_WORKER_TURNS", "UCX's worker threads take turns after a new peer"),
        "switch-interval": (
            "KV_NIXL_SWITCH_INTERVAL",
            "the interpreter's switch interval is lowered while there is work",
        ),
        "precise-sleeps": ("KV_NIXL_PRECISE_SLEEPS", "sleeps of the transfer thread end 1 us late instead of 50"),
        "quiet-nixl": ("NIXL_LOG_LEVEL", "NIXL prints nothing of its own"),
        "rcache-bound": ("UCX_RCACHE_MAX_UNRELEASED", "UCX's registration cache keeps at most 1024 unmapped regions"),
    }
)
"""(environment variable, change in words) by effect."""

SWITCH: Final = EFFECTS["zeroed-requests"][0]
"""Environment variable; `n` leaves UCX's request pool as it is."""

_logger = logging.getLogger("kv_nixl_agent")
_logged: set[str] = set()


def _is_off(effect: str) -> bool:
    return os.environ.get(EFFECTS[effect][0], "y").lower() in {"n", "no", "0", "off", "false"}


def _log_once(effect: str) -> None:
    if effect not in _logged:
        _logged.add(effect)
        variable, change = EFFECTS[effect]
        _logger.info("%s (%s; set %s to change it)", change, effect, variable, stacklevel=2)


def set_library_defaults() -> None:
    """Bound UCX's registration cache and quieten NIXL, unless the environment says otherwise; call before NIXL is imported."""
    for effect, value in {"rcache-bound": "1024", "quiet-nixl": "FATAL"}.items():
        if EFFECTS[effect][0] not in os.environ:
            os.environ[EFFECTS[effect][0]] = value
            _log_once(effect)


# ----------------------------------------------------------------------------------------------------- zeroed requests

State = Literal["zeroed", "off", "already-in-use", "unknown-build", "not-loaded"]
"""Outcome: with `zeroed` the pool's memory is zero. `already-in-use`: another part of this process loaded UCX first."""

_MEASURED: Final = frozenset({(1, 23, 0)})
"""Versions of UCX with which `integration_tests/chaos/agents` was run; NIXL 1.5.1 comes with 1.23.0."""
_LIBRARY: Final = re.compile(r"(/\S*/(libuc[ps])[-.]\S*)$")
_TABLE: Final = "ucp_request_mpool_ops"
_MALLOC: Final = ("ucs_mpool_hugetlb_malloc", "ucs_mpool_hugetlb_free")
_MMAP: Final = ("ucs_mpool_chunk_mmap", "ucs_mpool_chunk_munmap")
_THRESHOLD: Final = re.compile(rb"(?:^|\0)MALLOC_MMAP_THRESHOLD_=(\d{1,18})(?:\0|$)")
_CHUNK_THRESHOLD_BYTES: Final = 32768


@final
class RequestPool:
    """Change of the pool, in two steps: `watch` before NIXL loads UCX, `zero` before UCX makes its first worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_first = False
        self.state: State = "not-loaded"
        """Outcome so far."""

    def watch(self) -> None:
        """Record whether UCX is already loaded in this process, unless the outcome is decided."""
        with self._lock:
            if self.state == "not-loaded":
                self._is_first = _maps() != "" and not _loaded()

    def zero(self) -> None:
        """Make UCX's future pools take zeroed memory; a second call changes nothing."""
        with self._lock:
            if self.state == "not-loaded":
                self.state = _change(is_first=self._is_first)


POOL: Final = RequestPool()
"""The pool of this process: UCX is loaded once."""


def _change(*, is_first: bool) -> State:
    if _is_off("zeroed-requests"):
        return "off"
    loaded = _loaded()
    if not loaded:
        return "not-loaded"
    if _maps_chunks_anyway():
        return "zeroed"
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
        _log_once("zeroed-requests")
    return "zeroed" if list(table) == new else "unknown-build"


def _maps_chunks_anyway() -> bool:
    """Return whether `malloc` maps chunks of the pool (40 KiB) since the process started, as the environment asked it to."""
    try:
        found = _THRESHOLD.search(Path("/proc/self/environ").read_bytes())
    except OSError:
        return False
    return found is not None and int(found[1]) <= _CHUNK_THRESHOLD_BYTES


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


# --------------------------------------------------------------------------------------------------- sleeping progress

_PERIOD_US: Final = 50_000
"""Idle CPU of an agent with four worker threads: 100 % of a core at 0, 0.3 % at 5000, 0.12 % at 20000, 0.06 % at 50000."""

_lock = threading.Lock()


@final
class _Extension:
    """NIXL's extension module, except that agents are made with a period for the progress thread."""

    def __init__(self, real: Any) -> None:  # noqa: ANN401
        self._real = real

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._real, name)

    def nixlAgent(self, name: str, configuration: Any) -> Any:  # noqa: ANN401, N802  (NIXL's spelling)
        """Make an agent whose progress thread sleeps."""
        if getattr(configuration, "pthrDelay", None) == 0:
            with suppress(AttributeError, TypeError):  # another NIXL: its thread polls without a pause
                configuration.pthrDelay = _PERIOD_US
        return self._real.nixlAgent(name, configuration)


@contextmanager
def sleeping_progress_thread(agent_class: type[Any]) -> Generator[None]:
    """Give agents of this class that are created within the block a progress thread that sleeps between events.

    A NIXL that is built differently is left as it is: its thread then polls without a pause.
    """
    module = sys.modules.get(agent_class.__module__)
    with _lock:
        real: Any = getattr(module, "nixlBind", None)
        if real is None or not hasattr(real, "nixlAgent") or _is_off("sleeping-progress"):
            yield
            return
        _log_once("sleeping-progress")
        setattr(module, "nixlBind", _Extension(real))  # noqa: B010  (of a module that type checkers do not know)
        try:
            yield
        finally:
            setattr(module, "nixlBind", real)  # noqa: B010


# -------------------------------------------------------------------------------------------------------- worker turns

_PLUGIN: Final = "UCX"
_PIECE_BYTES: Final = 8
_GAP_PIECES: Final = 2
"""Adjacent pieces would be merged into one descriptor."""
_PLUGINS_SPLIT: Final = 1024
_END_WAIT_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.001
_GAP_S: Final = 0.05
_EVEN_TURNS: Final = 12
_TURNS: Final = 20
"""Turns after a new peer: twelve at even gaps, eight at gaps that double up to 12.8 s; 26 s in all."""


@final
class WorkerTurns:
    """Lets an agent's worker threads take a turn; does nothing if it has none, or if NIXL cannot read from itself."""

    def __init__(
        self,
        agent: Any,  # noqa: ANN401 - a `nixl_agent`
        name: str,
        parameters: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the parameters of turns; nothing is registered before the first turn.

        Args:
            agent: The agent, with its backends.
            name: Name of the agent.
            parameters: Parameters of its UCX backend, in NIXL's spelling.
            clock: Monotonic clock, in seconds.
        """
        threads = int(parameters.get("num_threads", "0"))
        self._agent: Any = agent if threads and not _is_off("worker-turns") else None
        self._name = name
        self._pieces = threads * int(parameters.get("split_batch_size", _PLUGINS_SPLIT))
        self._memory: object = None
        self._transfer: object = None
        self._clock = clock
        # The first turn starts the threads: 31 of the 68 ms of a process's first hand-over if its first peer waited for that.
        self._left = 1
        self._next_s = -math.inf

    def added_peer(self) -> None:
        """Take a turn, and schedule the turns that a new peer's connections need."""
        self._take()
        self._left = _TURNS
        self._next_s = self._clock() + _GAP_S

    def take_due(self) -> None:
        """Take the turn that is due, if any; call often."""
        if not self._left or self._clock() < self._next_s:
            return
        self._take()
        self._left -= 1
        doublings = max(0, _TURNS - _EVEN_TURNS + 1 - self._left)
        self._next_s = self._clock() + _GAP_S * 2**doublings

    def _take(self) -> None:
        """Start a turn unless the last one is still running; never raises, and waits only until the threads have started."""
        agent = self._agent
        if agent is None:
            return
        try:
            if self._transfer is None:
                self._transfer = self._made(agent)
                _log_once("worker-turns")
            elif agent.check_xfer_state(self._transfer) == "PROC":
                return
            agent.transfer(self._transfer)
        except Exception:  # noqa: BLE001 - sockets that stay open are no reason to refuse a peer
            self._agent = self._transfer = None

    def _made(self, agent: Any) -> object:  # noqa: ANN401
        step_bytes = _GAP_PIECES * _PIECE_BYTES
        memory = np.zeros(2 * self._pieces * step_bytes, dtype=np.uint8)
        address = int(memory.ctypes.data)
        agent.register_memory(np.array([[address, memory.nbytes, 0]], dtype=np.uint64), "DRAM")
        # The agent keeps no reference to registered memory.
        self._memory = memory
        offsets = np.arange(2 * self._pieces, dtype=np.uint64) * np.uint64(step_bytes)
        rows = np.zeros((2 * self._pieces, 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = np.uint64(address) + offsets, _PIECE_BYTES
        lists = [agent.get_xfer_descs(half, "DRAM") for half in (rows[: self._pieces], rows[self._pieces :])]
        return agent.initialize_xfer("READ", lists[0], lists[1], self._name, b"", [_PLUGIN])

    def end(self) -> None:
        """Stop taking turns and drop all references to the agent; waits at most half a second for the last turn to end."""
        agent, transfer = self._agent, self._transfer
        give_up_s = time.monotonic() + _END_WAIT_S
        with contextlib.suppress(Exception):
            while agent is not None and transfer is not None and agent.check_xfer_state(transfer) == "PROC":
                if time.monotonic() > give_up_s:
                    break
                time.sleep(_LOOK_EVERY_S)
        self._agent = self._transfer = None


# --------------------------------------------------------------------------------------------------- sleeps, switching

_SET_TIMER_SLACK: Final = 29
_SLACK_NS: Final = 1000


def sleep_precisely() -> None:
    """Let sleeps of the calling thread, and of those that it starts, end 1 us late instead of 50, where the system can."""
    if _is_off("precise-sleeps"):
        return
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(_SLACK_NS))
        _log_once("precise-sleeps")


@final
class SwitchInterval:
    """Request of one owner thread to `sys.getswitchinterval()`: at most its bound while the request is active.

    The lowest active bound of the process applies; without active bounds, the interval is restored to its original value.

    Args:
        bound_s: Bound; None to never request one.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _wanted: ClassVar[list[float]] = []
    _before: ClassVar[float] = 0.0

    def __init__(self, bound_s: float | None) -> None:
        self._bound_s = None if _is_off("switch-interval") else bound_s
        self._is_lowered = self._is_closed = self._bound_s is None

    def lower(self) -> None:
        """Request the bound; any thread."""
        if self._is_lowered:
            return
        _log_once("switch-interval")
        with self._lock:
            if self._bound_s is None or self._is_closed or self._is_lowered:  # by another thread meanwhile
                return
            if not self._wanted:
                SwitchInterval._before = sys.getswitchinterval()
            self._wanted.append(self._bound_s)
            self._is_lowered = True
            self._apply()

    def restore(self) -> None:
        """Withdraw the bound; any thread."""
        with self._lock:
            if self._is_lowered and self._bound_s is not None:
                self._wanted.remove(self._bound_s)
                self._is_lowered = False
                self._apply()

    def close(self) -> None:
        """Withdraw the bound permanently."""
        self._is_closed = True
        self.restore()

    @classmethod
    def _apply(cls) -> None:
        sys.setswitchinterval(min([cls._before, *cls._wanted]))
