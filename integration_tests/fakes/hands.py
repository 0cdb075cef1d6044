"""Stand-ins for a thread, a socket and a clock: the transfer thread turned by hand, handshakes without a wire, time that waits.

The objects behind are production's: the agent and loop of `TransferThread`, the sessions and the server core of the side channel.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_handshake import LocalOffer, Outcome
from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession

SideChannel = dict[tuple[str, int], ServerCore]
"""The servers of all engines, by the address of their listener."""


class Clock(types.SimpleNamespace):
    """Stands in for the module `time` in the adapter's modules; only `advance` moves it."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def install(self) -> None:
        """Give this clock to every module of the adapter that asks the time."""
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm_adapter.") and isinstance(
                getattr(module, "time", None), (types.ModuleType, Clock)
            ):
                setattr(module, "time", self)  # noqa: B010  (no type knows that attribute)


class _Sleepless:
    """A pacer that never waits: the next turn comes when it is asked for."""

    may_poll_slowly = True

    def progressed(self) -> None: ...
    def wake(self) -> None: ...
    def wait_busy(self) -> None: ...
    def wait_idle(self, *_: object, **__: object) -> None: ...


class HandThread:
    """A `TransferThread` that runs when it is asked to, on the calling thread."""

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self._timers: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thread, name)

    def start(self) -> None:
        self._thread._thread = self._thread._driver = threading.current_thread()
        self._thread._is_running = True
        self._thread._pacer = _Sleepless()
        if self._thread._set_up() is None:
            raise self._thread.failure

    def call_every(self, period_s: float, function: Callable[[], None]) -> None:
        self._timers.append(function)

    def run_here(self, function: Callable[[], object], is_done: Callable[[], object], within_s: float) -> bool:
        """Run a function and one turn for its transfers: this clock does not move meanwhile."""
        return bool(self._thread.run_here(function, lambda: True, within_s))

    def turn(self) -> None:
        """Run one turn of the loop."""
        self._thread._turn(self._thread._agent)
        health = self._thread.health()
        assert health.callback_errors + health.loop_errors == 0, f"the transfer thread raised: {health.last_error}"

    def tick(self) -> None:
        """Run all timers."""
        for function in self._timers:
            function()

    def close(self) -> None:
        self._thread._agent.close()


class StillListener:
    """A listener without a socket: the server core of the side channel, found by its address."""

    def __init__(self, channel: SideChannel, host: str, port: int) -> None:
        self._channel, self._host, self.port = channel, host, port
        self._core = ServerCore()

    def start(self) -> None:
        self._channel[self._host, self.port] = self._core

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._core.replace(payloads)

    def close(self) -> None: ...


class StillClient:
    """A handshake client that asks and answers at once: real queries, replies and judgements, no socket."""

    def __init__(self, channel: SideChannel, offer: LocalOffer) -> None:
        self._channel = channel
        self._offer = offer

    def request(
        self, *, host: str, port: int, ranks: Sequence[tuple[int, int]], engine_id: str, dialect: int,
        on_done: Callable[[Any], None], generation: int | None = None, check_first: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        session = ClientSession(
            self._offer, ranks, dialect=dialect, engine_id=engine_id, generation=generation, check_first=check_first
        )
        core = self._channel[host, port]
        while session.queries_left and not session.is_over:
            frames = core.respond(session.next_query(now_s=0.0), clock_s=0.0)
            session.receive_message(frames, now_s=0.0)
        code = session.error.code if session.error else ""
        on_done(Outcome(dict(session.peers) if not code else {}, code, str(session.error or "")))

    def close(self) -> None: ...
