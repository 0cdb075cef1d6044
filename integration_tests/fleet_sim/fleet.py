"""A fleet: engines at slots, a router, a network, and what breaks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from drivers import ClientDriver, ListenerDriver, MarksDriver, TransferDriver
from network import Network
from nixl_fake import Fabric
from plan import EpisodePlan
from world import Process, World

from kv_handshake import Listener
from kv_handshake.net.loop import Loop as ClientLoop
from vllm_adapter.worker.streams import ChunkMarks

if TYPE_CHECKING:
    from engine import Engine
    from holdings import Work
    from router import Router
    from seams import SimThread, SimThreads


@final
class Fleet:
    """All that lives in an episode."""

    def __init__(self, plan: EpisodePlan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.network = Network(self.world, plan.fleet.base_latency_s, plan.fleet.bytes_per_s)
        self.fabric = Fabric(self)
        self.listeners: dict[tuple[str, int], Any] = {}
        self.threads: SimThreads
        self.router: Router
        self.is_sealed = plan.fleet.is_sealed
        self.whole: set[str] = set()
        self._watchers: dict[tuple[str, int], list[Callable[[], None]]] = {}
        self._engines: list[Engine | None] = [None] * len(plan.fleet.engines)
        self.connection_numbers = itertools.count(1)
        self._lives = itertools.count(1)
        self._ids = itertools.count(1)
        self._first_ids: list[int] = []
        self._names: list[str] = []
        self._families: dict[int, list[int]] = {}

    # ------------------------------------------------------------------------------------------------------ slots

    def lane(self, slot: int) -> str:
        """Return the name of a slot in the log and on the network, such as `P0`."""
        return f"{self.plan.fleet.engines[slot].role[0].upper()}{slot}"

    def place(self, slot: int) -> tuple[str, int]:
        """Return host and port of a slot's side channel."""
        return f"10.0.0.{slot + 1}", 5600

    def slot_at(self, address: str, port: int) -> str:
        """Return the lane at an address, empty for none."""
        for slot in range(len(self._engines)):
            if self.place(slot) == (address, port):
                return self.lane(slot)
        return ""

    def engine(self, slot: int) -> Engine | None:
        """Return the newest engine of a slot."""
        return self._engines[slot]

    def living(self) -> list[Engine]:
        """Return the engines that live."""
        return [one for one in self._engines if one is not None and not one.process.is_dead]

    def start(self, slot: int, *, is_renamed: bool = False) -> None:
        """Start an engine at a slot, again or for the first time."""
        from engine import Engine

        life = next(self._lives)
        former = self._engines[slot]
        name = former.name if former is not None else self.lane(slot)
        if is_renamed:
            name = f"{self.lane(slot)}.{life}"
        self._engines[slot] = Engine(self, slot, name, life)
        self.world.note(self.lane(slot), f"engine {name} starts")

    def crash(self, slot: int) -> None:
        """Kill an engine."""
        engine = self._engines[slot]
        if engine is None or engine.process.is_dead:
            return
        self.world.note(self.lane(slot), f"engine {engine.name} is killed")
        engine.die()
        self.router.engine_died(engine)

    # ------------------------------------------------------------------------------------------------------ chunks

    def at_chunk(self, request_id: str, number: int, action: Callable[[], None]) -> None:
        """Run an action when this chunk of a request has been scheduled; number 0 stands for the end of its prompt."""
        self._watchers.setdefault((request_id, number), []).append(action)

    def counter_of(self, process: Process) -> Callable[[Sequence[Sequence[int]]], None]:
        """Return what counts the bytes that reads of a process move for streams, before and after the last chunk."""

        def count(copies: Sequence[Sequence[int]]) -> None:
            engine = next((one for one in self.living() if one.process is process), None)
            if engine is not None:
                for _, target, size in copies:
                    engine.host.holdings.count_bytes(target, size)

        return count

    def chunks_scheduled(self, work: Sequence[Work]) -> None:
        """Run the actions for chunks of prompts that are scheduled; number 0 is the last one of a prompt."""
        for item in work:
            request, chunk = item.request, item.chunk
            if request.hand_over_id and chunk.computed_tokens < request.prompt_tokens:
                request.chunks += 1
                self._reached(request.request_id, request.chunks)
                if chunk.computed_tokens + chunk.new_tokens >= request.prompt_tokens:
                    self._reached(request.request_id, 0)

    def chunks_computed(self, work: Sequence[Work]) -> None:
        """Note prompts whose last chunk has been computed."""
        for item in work:
            request = item.request
            if request.hand_over_id and item.chunk.computed_tokens + len(item.ids) >= request.prompt_tokens:
                self.whole.add(request.hand_over_id)

    def _reached(self, request_id: str, number: int) -> None:
        """Take in that a request has come to a chunk."""
        for action in self._watchers.pop((request_id, number), ()):
            action()

    # ------------------------------------------------------------------------------------------------------ seams

    def adopt(self, thread: SimThread) -> object:
        """Drive a thread that production started."""
        process = self.world.current
        assert process is not None
        if isinstance(thread.loop, Listener):
            return ListenerDriver(self.world, process, thread)
        if isinstance(thread.loop, ChunkMarks):
            return MarksDriver(self.world, process, thread)
        kind = ClientDriver if isinstance(thread.loop, ClientLoop) else TransferDriver
        return kind(self.world, self.threads, process, thread)

    # ------------------------------------------------------------------------------------------------------ tokens

    def family_ids(self, family: int, count: int) -> list[int]:
        """Return the first ids of a text that several conversations begin with."""
        if family not in self._families:
            self._families[family] = self.new_ids(f"family {family}", 80)
        return self._families[family][:count]

    def new_ids(self, name: str, count: int) -> list[int]:
        """Return ids of new tokens of a conversation."""
        ids = list(itertools.islice(self._ids, count))
        self._first_ids.append(ids[0])
        self._names.append(name)
        return ids

    def whose(self, token_id: int) -> str:
        """Return whose token an id is, in words."""
        at = bisect.bisect_right(self._first_ids, token_id) - 1
        if at < 0 or token_id >= 1 << 31 or token_id > self._first_ids[-1] + 1000:
            return "no token at all (a free or spoiled page, or another head or layer)"
        return f"token id {token_id} of conversation {self._names[at]}"

    def fault(self, kind: str) -> None:
        """Count a fault."""
        self.world.counts[f"fault {kind}"] += 1
