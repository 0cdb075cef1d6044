"""An engine process: production's scheduler side and worker sides, over simulated memory, with its host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from checks import EngineChecks
from drivers import SimDevice
from facts import facts
from gathering import Ranks
from pages import HEAD_SIZE, HEADS, Pages, layer_names
from plan import EnginePlan, GroupPlan
from world import Process

from vllm_adapter.cache.facts import CacheGroup, EngineFacts, GroupKind
from vllm_adapter.config import Settings
from vllm_adapter.wiring import make_scheduler, make_worker
from vllm_adapter.worker.engine_thread import WorkerSide

if TYPE_CHECKING:
    from fleet import Fleet


@final
class Engine:
    """A living engine at a slot of the fleet.

    Args:
        fleet: The fleet.
        slot: Number of its slot, which stands for its host and port.
        name: Its engine id.
        life: Number of this life, the generation that its tickets carry.
    """

    def __init__(self, fleet: Fleet, slot: int, name: str, life: int) -> None:
        self.fleet, self.slot, self.name, self.life = fleet, slot, name, life
        self.plan: EnginePlan = fleet.plan.fleet.engines[slot]
        self.lane = fleet.lane(slot)
        rate, offset_s = self.plan.clock_rate, self.plan.clock_offset_s
        self.process = Process(self.lane, offset_s=offset_s, rate=rate)
        self.pages = Pages(self.plan, fleet.plan.fleet.groups, fleet.plan.fleet.state_groups)
        self.checks = EngineChecks(self)
        self.device = SimDevice() if self.plan.has_device and not self.plan.has_mirror else None
        self.settings = _settings(fleet, self.plan)
        self.workers: list[WorkerSide] = []
        self.ranks = Ranks(self.plan.tp)
        self.side: Any = None
        fleet.world.act(self.process, self._start)
        from host import Host

        self.host = Host(self)

    def _start(self) -> None:
        payloads: dict[tuple[int, int], bytes] = {}
        port: Any = self.fleet.fabric.port
        for rank in range(self.plan.tp):
            worker = make_worker(self._facts(rank), self.settings, port_factory=port)
            worker.register(self.pages.caches(rank), self.pages.converter(rank), self.pages.mirror, marks=self.device)
            assert worker.registration.envelope is not None
            payloads[0, rank] = worker.registration.envelope
            self.workers.append(worker)
        policy = self.fleet.plan.fleet.policy
        here = replace(self._facts(0), load_failure_policy=policy, is_mirrored=self.plan.has_mirror)
        self.side = make_scheduler(here, self.settings, now_s=self.fleet.world.clock)
        self.side.serve(payloads)
        self.side.bind_free_blocks(lambda: len(self.host.pool.free))

    def _facts(self, rank: int) -> EngineFacts:
        groups, names = self.fleet.plan.fleet.groups, layer_names(self.fleet.plan.fleet.groups)
        host, port = self.fleet.place(self.slot)
        return facts(
            self.name,
            host=host,
            port=port,
            tp=self.plan.tp,
            tp_rank=rank,
            total_kv_heads=HEADS if any(group.kind == "attention" for group in groups) else 1,
            head_size=HEAD_SIZE,
            block_count=self.plan.blocks,
            generation=self.life,
            layout="LBHNC" if self.plan.order == "HND" else "LBNHC",
            groups=tuple(
                CacheGroup(_kind(group), self.plan.block_tokens, group.window_tokens, 0, names[number])
                for number, group in enumerate(groups)
            ),
            state_groups=self.fleet.plan.fleet.state_groups,
        )

    def note(self, text: str) -> None:
        """Write a line into the log."""
        self.fleet.world.note(self.lane, text)

    def violated(self, kind: str, text: str) -> None:
        """Note a promise that this engine has broken."""
        self.fleet.world.violated(kind, f"{self.name}: {text}")

    def on_workers(self, hook: str, orders: Any) -> None:
        """Call a hook of every worker with a step's orders."""
        for worker in self.workers:
            getattr(worker, hook)(orders)

    def die(self) -> None:
        """End as by SIGKILL."""
        self.process.is_dead = True
        for rank in self.workers:
            rank._registration = None
        self.fleet.listeners.pop(self.fleet.place(self.slot), None)


def _kind(group: GroupPlan) -> GroupKind:
    kinds: dict[str, GroupKind] = {"latent": "latent", "state": "state"}
    return kinds.get(group.kind, "sliding-window" if group.window_tokens else "attention")


def _settings(fleet: Fleet, engine: EnginePlan) -> Settings:
    plan = fleet.plan.fleet
    return Settings(
        progress_thread="off",
        kv_lease_duration=plan.lease_s,
        read_timeout_s=plan.read_timeout_s,
        handshake_timeout_s=plan.handshake_timeout_s,
        handshake_attempts=2,
        read_retries=plan.read_retries,
        fence_slots=plan.fence_slots,
        engine_ttl=plan.engine_ttl_s,
        max_leases=plan.max_leases,
        max_leased_blocks=plan.max_leased_blocks,
        max_inflight_bytes=plan.max_inflight_bytes,
        bidirectional_kv_xfer=plan.is_bidirectional,
        decoder_kv_blocks_ttl=plan.readback_s,
        kv_recompute_threshold=1,
        receive_conversion=plan.conversion,
        ticket_secrets=("env:SIM_FLEET_SECRET",) if plan.is_sealed else (),
        streaming=engine.streams,
        stream_slots=max(1, plan.stream_slots),
        stream_reserve_fraction=plan.stream_fraction,
        ask_wait_s=plan.ask_wait_s,
        remote_hosts=("10.0.0.0/24",) if engine.streams else (),
    )
