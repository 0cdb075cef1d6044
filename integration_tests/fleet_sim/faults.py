"""Faults of a plan, made true at their times and undone after their durations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from network import LINK_KINDS, Link, damaged
from plan import FaultPlan

from kv_handshake import Codec

if TYPE_CHECKING:
    from engine import Engine
    from fleet import Fleet


@final
class Faults:
    """Plants faults and heals them all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._world = fleet.world

    def plant(self, fault: FaultPlan) -> None:
        """Let a fault happen at its time."""

        def happen() -> None:
            if not self._world.is_healed:
                self._fleet.fault(fault.kind)
                self._world.note(self._fleet.lane(fault.engine), f"FAULT {fault.kind} {fault.duration_s:.2f} s")
                if fault.kind == "crash":
                    self._crash(fault)
                elif fault.kind == "same-id":
                    # A router sends another hand-over under the id of one that is under way, or has ended.
                    self._fleet.router.same_id(fault.request, is_other=bool(fault.second))
                elif fault.kind in LINK_KINDS:
                    self._link(fault)
                elif (engine := self._fleet.engine(fault.engine)) is not None and not engine.process.is_dead:
                    getattr(self, fault.kind.removesuffix("-at"))(fault, engine)

        if fault.request:
            self._fleet.at_chunk(f"{fault.request}-p1", fault.chunk, lambda: self._world.after(fault.at_s, happen))
        else:
            self._world.after(fault.at_s, happen)

    def heal(self) -> None:
        """End every fault: links are whole, processes run, dead engines come back."""
        self._world.is_healed = True
        self._world.note("CHECK", "faults end")
        self._fleet.network.heal()
        for slot in range(len(self._fleet.plan.fleet.engines)):
            engine = self._fleet.engine(slot)
            if engine is None or engine.process.is_dead:
                self._fleet.start(slot)
            else:
                engine.host.pool.unpress()
                if engine.process.is_stopped:
                    self._world.resume(engine.process)

    def _later(self, fault: FaultPlan, action: Callable[[], None]) -> None:
        def undo() -> None:
            if not self._world.is_healed:
                action()

        self._world.after(fault.duration_s, undo)

    def _crash(self, fault: FaultPlan) -> None:
        self._fleet.crash(fault.engine)

        def restart() -> None:
            engine = self._fleet.engine(fault.engine)
            if engine is not None and engine.process.is_dead:
                self._fleet.start(fault.engine, is_renamed=bool(fault.second))

        self._later(fault, restart)

    def _link(self, fault: FaultPlan) -> None:
        source, target = self._fleet.lane(fault.engine), self._fleet.lane(fault.second)
        name = LINK_KINDS[fault.kind]
        setattr(self._fleet.network.link(source, target), name, fault.amount if name != "is_cut" else True)
        self._later(fault, lambda: setattr(self._fleet.network.link(source, target), name, getattr(Link(), name)))

    def stop(self, fault: FaultPlan, engine: Engine) -> None:
        if not engine.process.is_stopped:
            engine.process.is_stopped = True
            self._later(fault, lambda: self._world.resume(engine.process))

    pause = stop

    def starve(self, fault: FaultPlan, engine: Engine) -> None:
        """The transfer threads of an engine get no core, while its steps go on."""
        engine.process.starved_until_s = self._world.time_s + fault.duration_s

    def blip(self, fault: FaultPlan, engine: Engine) -> None:
        """The connection that an engine's reads from another one use ends; nothing else is wrong."""
        owner = self._fleet.engine(fault.second)
        if owner is not None:
            self._fleet.fabric.disconnect(engine.process, owner.process)

    def jump(self, fault: FaultPlan, engine: Engine) -> None:
        engine.process.offset_s += fault.amount

    def forged(self, _: FaultPlan, engine: Engine) -> None:
        """A stranger's notifications: forged completions and heartbeats of live requests, and garbage."""
        draw, codec = self._world.random("forged"), Codec()
        garbage = draw.randbytes(draw.randrange(64))
        payloads = [garbage, b"KVH\x01" + draw.randbytes(20), b"HB:" + draw.randbytes(9), b""]
        for request_id in engine.host.requests:
            nonce = f"{draw.getrandbits(64):016x}"
            payloads.append(codec.read_complete(request_id, 1, nonce=nonce, consumer="stranger"))
            payloads += codec.heartbeats([(request_id, nonce)])
            payloads.append(damaged(payloads[-1], draw))
        for agent in self._fleet.fabric.agents.values():
            if agent.process is engine.process:
                for payload in payloads:
                    agent.deliver("stranger", payload)

    def reset(self, fault: FaultPlan, engine: Engine) -> None:
        """Reset the caches; with `second` what runs is preempted first."""
        engine.host.outages.reset(preempts=bool(fault.second))

    def sleep(self, fault: FaultPlan, engine: Engine) -> None:
        """Give the memory back for a while; with `second` all requests are aborted first."""
        engine.host.outages.sleep(fault.duration_s, aborts=bool(fault.second))

    def mirror(self, fault: FaultPlan, engine: Engine) -> None:
        """Let copies between device and host fail for a while."""
        if (mirror := engine.pages.mirror) is not None:

            def refuse(error: Exception | None) -> None:
                mirror.save_refusal = mirror.restore_refusal = error

            refuse(RuntimeError("a copy between device and host failed"))
            self._world.after(fault.duration_s, lambda: refuse(None))

    def abort(self, fault: FaultPlan, engine: Engine) -> None:
        """A client gives a request up, at one engine of the two."""
        engine.host.abort(f"{fault.request}-{'d' if fault.second else 'p'}1")

    def preempt(self, fault: FaultPlan, engine: Engine) -> None:
        """Memory runs short just when this request is to go on."""
        engine.host.shortages.add(f"{fault.request}-p1")

    def pressure(self, fault: FaultPlan, engine: Engine) -> None:
        engine.host.pool.press(int(fault.amount * len(engine.host.pool.free)))
        self._later(fault, engine.host.pool.unpress)


KINDS = ("crash", "stop", "pause", "jump", *LINK_KINDS, "pressure", "forged")
"""Kinds that any fleet meets; the others are drawn where they mean something."""
