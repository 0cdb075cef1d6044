"""The seams at which production meets the simulation: clock, threads, ZeroMQ, NIXL, random numbers.

Production modules import `time`, `threading` and the two modules that know ZeroMQ and NIXL by name. During an episode these names
stand for the simulated ones; nothing else of production is replaced. A thread that production starts is not run: it is handed to
`drivers.py`, which calls the turns of its loop from the world's events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final
from unittest.mock import patch

from world import World

import kv_handshake.core.pacing
import kv_handshake.net.client
import kv_handshake.net.listener
import kv_handshake.net.loop
import kv_nixl_agent.mailbox
import kv_nixl_agent.thread
import kv_nixl_agent.transfers.handles
import vllm_adapter.scheduler.streams
import vllm_adapter.wiring
import vllm_adapter.worker.ends
import vllm_adapter.worker.engine_thread
import vllm_adapter.worker.pages
import vllm_adapter.worker.registration
import vllm_adapter.worker.streams
from kv_handshake import Client, Listener
from kv_nixl_agent import AgentOptions, ThreadOptions, TransferThread

if TYPE_CHECKING:
    from fleet import Fleet

_TIMED = (
    kv_handshake.net.client,
    kv_handshake.net.listener,
    kv_handshake.core.pacing,
    kv_handshake.net.loop,
    kv_nixl_agent.transfers.handles,
    kv_nixl_agent.thread,
    vllm_adapter.worker.pages,
    vllm_adapter.worker.engine_thread,
    vllm_adapter.worker.ends,
    vllm_adapter.wiring,
)
_POLL_S = 0.004
"""Shortest time between two looks at progress words; coarser than in production, since every look costs an event."""
_THREADED = (kv_handshake.net.listener, kv_handshake.net.loop, kv_nixl_agent.thread, vllm_adapter.worker.streams)


@final
class SimTime:
    """Stands for the module `time`: the running process's clock, and sleeps that take the event's time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.monotonic = self.perf_counter = world.clock

    def sleep(self, duration_s: float) -> None:
        process = self._world.current
        self._world.elapsed_s += duration_s / (process.rate if process is not None else 1.0)


@final
class BlockingEvent:
    """Stands for an event that the engine's thread waits for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float) -> bool:
        self._world.wait(timeout, self.is_set)
        return self._is_set


@final
class PacerTime:
    """Stands for the module `time` of the transfer thread's pacer: a sleep between two polls of the wire ends the turn."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads

    def sleep(self, duration_s: float) -> None:
        if self._threads.running is not None:
            self._threads.running.driver.slept_s = duration_s


@final
class SimThread:
    """Stands for a thread: its target's loop is driven by events.

    Attributes:
        driver: Runs its turns, once it is started.
        ident: None before its start.
    """

    def __init__(self, threads: SimThreads, target: Callable[..., None], name: str) -> None:
        self._threads = threads
        self.name = name
        self.loop: Any = getattr(target, "__self__", None)
        self.ident: int | None = None
        self.driver: Any = None

    def start(self) -> None:
        self.ident = 1
        self.driver = self._threads.adopt(self)

    def is_alive(self) -> bool:
        return self.driver is not None and self.driver.is_running

    def join(self, timeout: float | None = None) -> None:
        self.driver.end()


@final
class SimThreads:
    """Stands for the module `threading`."""

    Lock = staticmethod(threading.Lock)
    Event = staticmethod(threading.Event)
    local = staticmethod(threading.local)

    def __init__(self, adopt: Callable[[SimThread], object]) -> None:
        self.adopt = adopt
        self.running: SimThread | None = None

    def Thread(  # noqa: N802  (stands for the class of that name)
        self, target: Callable[..., None], name: str = "", daemon: bool = False, args: tuple[Any, ...] = ()
    ) -> SimThread:
        return SimThread(self, target, name)

    def current_thread(self) -> object:
        return self.running


@final
class SimExecutor:
    """Stands for a `ThreadPoolExecutor` of one thread: runs each action at once."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, action: Callable[..., None], *arguments: object) -> Future[None]:
        future: Future[None] = Future()
        try:
            future.set_result(action(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        pass


@contextmanager
def simulated(
    fleet: Fleet, *, hub: Callable[..., object], port: Callable[..., object], router: Callable[..., object]
) -> Iterator[SimThreads]:
    """Put the simulated names in place for one episode.

    Args:
        fleet: The episode's fleet, which adopts threads that production starts.
        hub: Stands for the ZeroMQ client's `Hub`.
        port: Stands for `ListeningPort`.
        router: Stands for `RouterSocket`.
    """
    world, plan = fleet.world, fleet.plan.fleet
    clock, threads, draw = SimTime(world), SimThreads(fleet.adopt), world.random("secrets")
    secrets = SimpleNamespace(randbits=draw.getrandbits, token_hex=lambda count: draw.randbytes(count).hex())
    # Transfer threads wait more coarsely than in production, since every look costs an event.
    options = ThreadOptions(
        spin_s=0.0,
        min_sleep_s=0.001,
        max_sleep_s=plan.poll_s,
        idle_poll_s=plan.poll_s,
        slow_poll_s=0.25,
        gil_switch_interval_s=None,
    )

    def transfer_thread(*arguments: Any, **named: Any) -> TransferThread:
        thread = TransferThread(*arguments, clock=world.clock, **{**named, "thread_options": options})
        run_here = thread.run_here
        # The clock stands still while a caller polls, so it makes one turn; the thread's own turns are events.
        vars(thread)["run_here"] = lambda call, _, within_s: run_here(call, lambda: True, within_s)
        return thread

    replaced: list[tuple[object, str, object]] = [
        *[(module, "time", clock) for module in _TIMED],
        *[(module, "threading", threads) for module in _THREADED],
        (kv_nixl_agent.mailbox, "time", PacerTime(threads)),
        (vllm_adapter.worker.pages, "ThreadPoolExecutor", SimExecutor),
        (vllm_adapter.worker.registration, "time", SimpleNamespace(monotonic=world.clock, sleep=world.wait)),
        (vllm_adapter.worker.registration, "threading", SimpleNamespace(Event=lambda: BlockingEvent(world))),
        (kv_handshake.net.loop, "Hub", hub),
        (kv_handshake.net.listener, "ListeningPort", port),
        (kv_handshake.net.listener, "RouterSocket", router),
        (vllm_adapter.wiring, "secrets", secrets),
        (vllm_adapter.scheduler.streams, "random", secrets),
        (vllm_adapter.wiring, "TransferThread", transfer_thread),
        (vllm_adapter.wiring, "Client", lambda *a, **n: Client(*a, **n, seed=world.random("jitter").getrandbits(30))),
        (vllm_adapter.wiring, "Listener", lambda *a, **n: Listener(*a, **n, clock=world.clock)),
        (vllm_adapter.wiring, "_TICK_S", min(0.25, plan.lease_s / plan.tick_parts)),
        (vllm_adapter.wiring, "AgentOptions", partial(AgentOptions, stream_poll_s=_POLL_S)),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield threads
