"""Options, validated on construction."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.errors import AgentError, demand
from kv_nixl_agent.values import MAX_CAPACITY, MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_nixl_agent.values import MemoryRegion

__all__ = ["AgentOptions", "BackendOptions", "ThreadOptions"]

_HOST_SPLIT_BATCH_SIZE: Final = 128
_TCP_SIZES: Final = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
_TCP_SENT_AT_ONCE: Final = "64k"
"""Largest piece that UCX sends over TCP: the size of its receive buffer.

With UCX's own 8 KiB, pages of 64 KiB take 1.5 times as long to read, pages of 1 MiB 2.7 times (docs/performance.md). UCX does not
start if it would send more than it receives, so sizes that are given are left alone.
"""
_LEAST_S: Final = 1e-9
_NUMBERS: Final = {int: (int,), float: (int, float, NoneType), NoneType: (int, NoneType)}
"""Types that an option may have by that of its default."""


def _demand_within(options: object, **limits: tuple[float, float]) -> None:
    """Refuse an option outside (lowest, highest); None, for no limit, is always fine."""
    for name, (lowest, highest) in limits.items():
        value = getattr(options, name)
        demand(name, value, *_NUMBERS[type(getattr(type(options), name))])
        if value is not None and not lowest <= value <= highest:
            most = "any number" if highest == math.inf else f"{highest:g}"
            raise AgentError("bad-options", f"{name} is {value}, allowed are {lowest:g} to {most}")


@final
@dataclass(frozen=True)
class BackendOptions:
    """NIXL backend and its parameters.

    The defaults of UCX follow measurements (docs/performance.md): four worker threads read many pages, and long runs
    of host memory, faster, and let posting return sooner. Error handling stays at UCX's `peer`,
    without which a dead peer is never noticed.

    Attributes:
        name: Plugin name.
        num_threads: UCX worker threads beside the progress thread; 0 for none.
        split_batch_size: Descriptors, after merging, from which a transfer is shared among the worker threads. None for 128 with
            an agent that registers host memory alone, and for the plugin's default (1024) with device memory, which was not
            measured.
        engine_config: UCX settings by name without `UCX_`, for example `{"TLS": "tcp"}`; over TCP pieces of 64 KiB are sent
            unless these, or the environment, give a size (`TCP_TX_SEG_SIZE`, `TCP_RX_SEG_SIZE`).
        parameters: Further plugin parameters, passed unchanged; they override the fields above.
    """

    name: str = "UCX"
    num_threads: int = 4
    split_batch_size: int | None = None
    engine_config: Mapping[str, str] = field(default_factory=dict[str, str])
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        demand("name", self.name, str)
        demand("engine_config", self.engine_config, Mapping)
        demand("parameters", self.parameters, Mapping)
        if not self.name:
            raise AgentError("bad-options", "a backend needs a plugin name such as 'UCX'")
        _demand_within(self, num_threads=(0, 64), split_batch_size=(1, math.inf))

    def for_host_memory(self) -> BackendOptions:
        """Return these options with the default of an agent that registers host memory alone."""
        if self.name != "UCX" or not self.num_threads or self.split_batch_size is not None:
            return self
        return replace(self, split_batch_size=_HOST_SPLIT_BATCH_SIZE)

    def as_parameters(self) -> Mapping[str, str]:
        """Return the parameters in NIXL's spelling."""
        result: dict[str, str] = {}
        if self.num_threads:
            result["num_threads"] = str(self.num_threads)
        if self.split_batch_size is not None:
            result["split_batch_size"] = str(self.split_batch_size)
        settings = dict(self.engine_config)
        if self.name == "UCX" and not any(name in settings or f"UCX_{name}" in os.environ for name in _TCP_SIZES):
            settings["TCP_TX_SEG_SIZE"] = _TCP_SENT_AT_ONCE
        if settings:
            result["engine_config"] = ",".join(f"{name}={value}" for name, value in settings.items())
        result.update(self.parameters)
        return MappingProxyType(result)


@final
@dataclass(frozen=True)
class AgentOptions:
    """How one agent registers, transfers and protects memory.

    Attributes:
        backends: Backends to create, in order.
        fence_words: 64-bit words of this rank's fence array.
        stream_slots: Most prompts that peers may read at once while they are computed: a progress word and a table of block ids
            are registered for each. Their fence words come first. 0 for none; such an agent cannot watch peers either.
        stream_capacity: Block ids that a slot's table holds, 8 bytes each.
        stream_poll_s: Interval of polls of a peer whose progress has just changed.
        stream_slow_poll_s: Longest interval of polls of a watched peer.
        chunk_rows: Descriptors posted at once; a larger transfer is posted in pieces, so that polling, notifications
            and other peers get their turn in between. 0 posts everything at once.
        max_inflight_bytes: Bytes posted and not yet completed, over all peers; further ones wait in the queue, but a peer with
            nothing on the wire may post one part. None for no cap.
        max_queued: Transfers that may wait before further ones are refused with `queue-full`.
        max_quarantined_per_peer: Unfinished transfers of a peer in quarantine before further orders to it are
            refused.
        wire_up: Whether to connect with a tiny read when a peer is added.
        progress_thread: Whether NIXL runs its own progress thread, which sleeps between events of its transports. Needed
            by a rank whose memory is read over transports that the owner of the memory must help along (TCP, or large
            reads over shared memory) while its own thread sleeps.
        stall_after_s: Seconds on the wire without a part ending after which a transfer is reported as stalled (`stalls`, a
            counter, the trace); it goes on until its deadline. None for no such watch.
        close_wait_s: How long `close` polls transfers that are still on the wire, in seconds.
    """

    backends: tuple[BackendOptions, ...] = (BackendOptions(),)
    fence_words: int = 4096
    stream_slots: int = 0
    stream_capacity: int = 8192
    stream_poll_s: float = 5e-4
    stream_slow_poll_s: float = 0.02
    chunk_rows: int = 16384
    max_inflight_bytes: int | None = None
    max_queued: int = 65536
    max_quarantined_per_peer: int = 256
    wire_up: bool = True
    progress_thread: bool = True
    stall_after_s: float | None = 5.0
    close_wait_s: float = 2.0

    def __post_init__(self) -> None:
        demand("wire_up", self.wire_up, bool)
        demand("progress_thread", self.progress_thread, bool)
        demand("backends", self.backends, tuple)
        for backend in self.backends:
            demand("each of backends", backend, BackendOptions)
        names = [backend.name for backend in self.backends]
        if not names or len(set(names)) < len(names):
            raise AgentError("bad-options", f"backends are {names}: at least one is needed, each plugin once")
        _demand_within(self, fence_words=(1, 1 << 24), stream_slow_poll_s=(_LEAST_S, math.inf))
        _demand_within(
            self,
            stream_slots=(0, min(MAX_SLOTS, self.fence_words)),
            stream_capacity=(1, MAX_CAPACITY),
            stream_poll_s=(_LEAST_S, self.stream_slow_poll_s),
            chunk_rows=(0, math.inf),
            max_inflight_bytes=(1, math.inf),
            max_queued=(1, math.inf),
            max_quarantined_per_peer=(1, math.inf),
            stall_after_s=(_LEAST_S, math.inf),
            close_wait_s=(0, math.inf),
        )

    def for_regions(self, regions: Sequence[MemoryRegion]) -> AgentOptions:
        """Return these options with the defaults filled in that depend on the memory to register."""
        if any(region[3] != "DRAM" for region in regions):
            return self
        return replace(self, backends=tuple(backend.for_host_memory() for backend in self.backends))

    @property
    def shared_from(self) -> int:
        """Number of descriptors from which a backend is known to share a transfer among its threads; 0 if none does."""
        sizes = [backend.split_batch_size for backend in self.backends if backend.num_threads]
        return min((size for size in sizes if size is not None), default=0)


@final
@dataclass(frozen=True)
class ThreadOptions:
    """Waiting behaviour of the owner thread.

    Attributes:
        spin_s: Time without progress, while transfers are in flight, before the thread starts to sleep between polls.
        min_sleep_s: First sleep after spinning; doubles at every empty poll.
        max_sleep_s: Longest sleep while transfers are in flight.
        idle_poll_s: Polling period for notifications when nothing is in flight. New work wakes the thread at once.
        slow_poll_s: Polling period while `allow_slow_polling` is on and nothing is in flight; timers may be late by as much, at
            most by 0.25 s.
        stuck_after_s: Time in one turn of the loop after which `health` says `stuck`.
        close_grace_s: Time that `close` gives transfers in flight to end before it abandons them.
        gil_switch_interval_s: Upper bound for `sys.getswitchinterval()` while the thread has work or looks out for some; not
            while it may poll slowly and has nothing to do. A notification waits that long when the engine thread
            computes in Python, 5 ms by default; None leaves it alone.
        on_thread_start: Called first on the owner thread, for example to select a CUDA device.
    """

    spin_s: float = 200e-6
    min_sleep_s: float = 20e-6
    max_sleep_s: float = 500e-6
    idle_poll_s: float = 5e-4
    slow_poll_s: float = 0.25
    stuck_after_s: float = 30.0
    close_grace_s: float = 2.0
    gil_switch_interval_s: float | None = 5e-4
    on_thread_start: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        _demand_within(
            self,
            **dict.fromkeys(("spin_s", "min_sleep_s", "max_sleep_s", "close_grace_s"), (0, math.inf)),
            **dict.fromkeys(
                ("idle_poll_s", "slow_poll_s", "stuck_after_s", "gil_switch_interval_s"), (_LEAST_S, math.inf)
            ),
        )
