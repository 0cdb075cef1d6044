"""Calls that an operator makes of an engine: cache resets, sleep and wake-up.

As in vLLM's core, such a call is made between two steps. A reset may preempt what runs; it does nothing else then if blocks are
in use all the same. Sleep voids all KV, gives the memory back on every rank, and loses what was in it. While the ranks give it
back, the engine's thread does nothing else: what arrives waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from world import ProcessDied

if TYPE_CHECKING:
    from host import Host
    from request import Request


@final
class Outages:
    """Times in which an engine's host does not work.

    Attributes:
        is_paused: Whether waiting requests are not admitted.
        is_asleep: Whether the cache's memory is given back.
        resets: Number of resets so far.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._engine = host.engine
        self._world = host.world
        self.is_paused = self.is_asleep = False
        self.resets = 0
        self._is_frozen = self._is_blocked = False
        self._calls: list[Callable[[], None]] = []
        self._inputs: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------------------------ the host's side

    @property
    def has_work(self) -> bool:
        """Whether a call waits for the next step."""
        return bool(self._calls)

    def may_step(self) -> bool:
        """Make the calls that wait; return whether the host may step."""
        while self._calls:
            self._calls.pop(0)()
        return not self._is_frozen

    def delays(self, action: Callable[[], None]) -> bool:
        """Keep an action for later, and return True, if the engine's thread is busy."""
        if self._is_blocked:
            self._inputs.append(action)
        return self._is_blocked

    def _call(self, action: Callable[[], None]) -> None:
        self._calls.append(action)
        self._host.wake()

    # ------------------------------------------------------------------------------------------------------ resets

    def reset(self, *, preempts: bool) -> None:
        """Reset the prefix cache and the connector before the next step."""
        self._call(lambda: self._reset(preempts=preempts))

    def _reset(self, *, preempts: bool) -> None:
        if preempts:
            self._preempt_all()
        is_empty = self._host.pool.reset()
        if preempts and not is_empty:
            self._engine.note("refuses a reset: blocks are in use")
            return
        self._void()
        self._engine.note("resets its caches")

    def _preempt_all(self) -> None:
        for request in reversed([one for one in self._host.requests.values() if one.status == "running"]):
            self._engine.fleet.fault("preemption-by-reset")
            self._host.restart(request)
            self._host.reset_preempted.append(request.request_id)

    def _void(self) -> None:
        """Void all KV from before now, and look whether leases end."""
        self.resets += 1
        if not self._engine.side.reset_cache():
            self._engine.violated("reset-refused", "the connector refused a reset")
        held: list[Request] = []
        for request in self._host.requests.values():
            if request.status in {"running", "parked"}:
                request.void_since = self.resets
            elif request.status == "held":
                held.append(request)
        steps = self._host.steps

        def look() -> None:
            is_late = self._host.steps > steps + 8 and not self.is_asleep
            for request in held:
                if is_late and request.status == "held":
                    self._engine.violated(
                        "lease-outlives-reset",
                        f"{request.request_id} is leased {self._host.steps - steps} steps after a reset",
                    )

        self._world.after(3.0, look, self._engine.process)

    # ------------------------------------------------------------------------------------------------------ sleep

    def sleep(self, duration_s: float, *, aborts: bool) -> None:
        """Sleep before the next step, and wake up after a time."""
        self._call(lambda: self._sleep(duration_s, aborts=aborts))

    def _sleep(self, duration_s: float, *, aborts: bool) -> None:
        host = self._host
        if self.is_paused:
            return
        host.settle()  # a pause is complete when no step is under way
        if aborts:
            for request_id in list(host.requests):
                host.abort(request_id)
        self.is_paused, self._is_frozen = True, not aborts
        host.pool.spoils = False
        self._preempt_all()
        for request in host.requests.values():
            if request.status == "waiting" and request.computed:
                host.holdings.free_all(request)
                request.computed = request.scheduled = request.valid = request.hit = 0
        host.pool.forget()
        self._void()
        self._engine.note("falls asleep")
        self._is_blocked = True
        try:
            for worker in self._engine.workers:
                worker.unregister()
        except ProcessDied:
            return
        finally:
            self._is_blocked = False
        self.is_asleep = self._engine.process.is_asleep = True
        self._engine.pages.lose()
        host.pool.spoils = True
        self._engine.note("is asleep")
        self._take_inputs()
        self._world.after(duration_s, lambda: self._call(self._wake_up), self._engine.process)

    def _wake_up(self) -> None:
        self.is_asleep = self._engine.process.is_asleep = False
        for worker in self._engine.workers:
            worker.restore()
        self.is_paused = self._is_frozen = False
        self._engine.note("is awake")

    def _take_inputs(self) -> None:
        inputs, self._inputs = self._inputs, []
        for action in inputs:
            action()
