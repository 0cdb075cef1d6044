"""Drive production's thread loops from events: transfer thread, handshake client, asker, side channel's listener, chunk marks.

A driver calls one turn of a loop per event and notes how long the loop wants to wait. The loops are production's own, bodies and
all; only the waiting inside of them is taken out. A wake-up that production gives ends the wait; one that it forgets does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from seams import SimThread, SimThreads
from world import Process, World

_TURN_S = 2e-5
"""How long after a turn that moved something the next one begins."""


class _Turns:
    """Turns of a thread's loop: one event each; a later call of `_schedule` replaces an earlier one."""

    kind = ""

    def __init__(self, world: World, threads: SimThreads, process: Process, thread: SimThread) -> None:
        self._world, self._threads, self.process, self._thread = world, threads, process, thread
        self.loop: Any = thread.loop
        self.is_running = True
        self._token = 0

    def ring(self) -> None:
        """Begin the next turn now."""
        if self.is_running:
            self._schedule(_TURN_S)

    def _schedule(self, delay_s: float) -> None:
        self._token += 1
        token = self._token
        self._world.after(delay_s, lambda: self._due(token), self.process)

    def _due(self, token: int) -> None:
        if token == self._token and self.is_running:
            self._turn()

    def _turn(self) -> None:
        raise NotImplementedError

    def _as_thread(self, action: Any, *arguments: Any) -> Any:
        former, self._threads.running = self._threads.running, self._thread
        try:
            return action(*arguments)
        finally:
            self._threads.running = former

    def _guarded(self, action: Any) -> Exception | None:
        """Call an action as the thread; an exception is a broken promise."""
        self._world.counts[f"{self.kind}-turns"] += 1
        try:
            self._as_thread(action)
        except Exception as error:
            self._world.violated(f"{self.kind}-error", f"{self.process.name}: {error!r}")
            return error
        return None

    def _wait_for_event(self, *waiting: Any) -> None:
        """Schedule the next turn of a loop over connections: now, at its next event if it waits for anything, or never."""
        if self.loop._hub.is_ready:
            self._schedule(_TURN_S)
        elif any(waiting):
            self._schedule(max(_TURN_S, (self.loop._next_event_s() - self._world.clock()) / self.process.rate))

    def end(self) -> None:
        """Stop."""
        self.is_running = False


@final
class _Bell:
    """Stands for the lock that a transfer thread sleeps on."""

    def __init__(self, driver: TransferDriver) -> None:
        self._driver = driver

    def acquire(self, timeout: float) -> None:
        self._driver.wait_s = timeout

    def release(self) -> None:
        self._driver.ring()


@final
class TransferDriver(_Turns):
    """Turns of `kv_nixl_agent`'s owner thread."""

    kind = "transfer"

    def __init__(self, world: World, threads: SimThreads, process: Process, thread: SimThread) -> None:
        super().__init__(world, threads, process, thread)
        self.wait_s: float | None = None
        self.slept_s: float | None = None
        self.loop._pacer._bell = _Bell(self)
        self._as_thread(self.loop._pacer.begin)
        agent = self._as_thread(self.loop._set_up)
        self.loop._ready.set()
        if agent is None:
            self.is_running = False
        else:
            self._schedule(_TURN_S)

    def _turn(self) -> None:
        if self._world.now_s < self.process.starved_until_s:
            self._schedule(self.process.starved_until_s - self._world.now_s)
            return
        loop, pacer = self.loop, self.loop._pacer
        pacer._is_idle = False
        self.wait_s = self.slept_s = None
        mailbox = loop._mailbox
        before = loop._loop_errors, mailbox.callback_errors
        try:
            self._as_thread(self._as_thread(loop._turn, loop._agent))
        except Exception as error:
            loop._keep_error(error)
        if (loop._loop_errors, mailbox.callback_errors) != before:
            kind, text = mailbox.last_error
            self._world.violated("thread-error", f"{self.process.name}: {kind}\n{text}")
        self._world.counts["transfer-turns"] += 1
        pacer._is_idle = self.wait_s is not None  # a sleep between two polls of the wire is not ended by a wake-up
        wait_s = self.wait_s if self.wait_s is not None else self.slept_s
        self._schedule(_TURN_S if wait_s is None else max(_TURN_S, wait_s / self.process.rate))

    def end(self) -> None:
        """Tear down, as the thread does when it is asked to close."""
        if self.is_running:
            self.is_running = False
            self._as_thread(self.loop._tear_down, self.loop._agent)
            self.loop._pacer.end()


@final
class ClientDriver(_Turns):
    """Turns of `kv_handshake`'s client loop."""

    kind = "client"

    def __init__(self, world: World, threads: SimThreads, process: Process, thread: SimThread) -> None:
        super().__init__(world, threads, process, thread)
        self.loop._hub.driver = self

    def _turn(self) -> None:
        loop = self.loop
        error = self._guarded(loop._turn)
        if error is not None:
            self._as_thread(loop._recover, error)
        self._wait_for_event(loop._under_way, loop._waiting, loop._inbox)

    def end(self) -> None:
        """End all handshakes and asks, as the thread does when it is closed."""
        if self.is_running:
            self.is_running = False
            self._guarded(self.loop._run)


@final
class ListenerDriver:
    """Serves the side channel: production decides on every reply, also on those that come later."""

    def __init__(self, world: World, process: Process, thread: SimThread) -> None:
        self._world, self.process = world, process
        self.listener: Any = thread.loop
        self.is_running = True
        self._connections: dict[bytes, Any] = {}
        self._is_due = False
        self.listener._socket.port.bind(self)

    def serve(self, connection: Any, incoming: Any) -> list[bytes]:
        """Return the reply to a query, none for an ask that is open."""
        reply = list(self.listener._reply(incoming))
        desk = self.listener._desk
        if desk is not None and not reply:
            self._connections[incoming.envelope[0]] = connection
            self._world.after(desk.wait_s / self.process.rate + _TURN_S, self._send_due, self.process)
        return reply

    def wake(self) -> None:
        """Send replies that are due now; once, however often it is woken."""
        if self.is_running and not self._is_due:
            self._is_due = True
            self._world.after(_TURN_S, self._send_due, self.process)

    def hung_up(self, number: int) -> None:
        """Take in the end of a connection."""
        if self.is_running:
            self._connections.pop(str(number).encode(), None)
            self.listener._connection_ended(number)

    def _send_due(self) -> None:
        self._is_due = False
        desk = self.listener._desk
        if not self.is_running or desk is None:
            return
        for envelope, frames in desk.take_replies(self._world.clock()):
            connection = self._connections.get(envelope[0])
            if connection is not None:
                connection.reply(self, list(frames))

    def end(self) -> None:
        """Free the port."""
        self.is_running = False
        self.listener._socket.port.close()


_NOTICE_S = 0.001
"""Longest time from the end of a step on the device until the worker's thread has seen it."""


@final
class SimDevice:
    """The device of an engine: counts the steps that it was given and those that it has computed."""

    def __init__(self) -> None:
        self._given = self._computed = 0
        self._waiting: list[Callable[[], None]] = []

    def given(self) -> None:
        """Take a step; it is computed later."""
        self._given += 1

    def computed(self) -> None:
        """Have computed a step."""
        self._computed += 1
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def mark(self) -> object:
        """Return a mark behind all that was given."""
        return self._given

    def is_over(self, mark: object) -> bool:
        """Tell whether everything before a mark is computed."""
        assert isinstance(mark, int)
        return self._computed >= mark

    def when_computed(self, action: Callable[[], None]) -> None:
        """Call an action when the next step is computed."""
        self._waiting.append(action)


@final
class MarksDriver:
    """Runs what waits for the device, as the thread of `ChunkMarks` does."""

    def __init__(self, world: World, process: Process, thread: SimThread) -> None:
        self._world, self._process = world, process
        self.loop: Any = thread.loop
        self.device: SimDevice = self.loop._device
        self.is_running = True
        self.device.when_computed(self._later)

    def _later(self) -> None:
        self.device.when_computed(self._later)
        self._world.after(_NOTICE_S * self._world.random("marks").random(), self._run, self._process)

    def _run(self) -> None:
        waiting = self.loop._waiting
        while not waiting.empty() and not self.loop._is_closed:
            mark, action = waiting.get()
            assert self.device.is_over(mark)
            try:
                action()
            except Exception as error:
                self.loop._trouble("showing a chunk", error)

    def end(self) -> None:
        """Stop."""
        self.is_running = False
