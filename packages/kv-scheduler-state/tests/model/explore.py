"""Every order of events, within a bound.

`explore` walks a model breadth first. A state is a pickled world; two states with equal keys have equal futures and
are visited once. From every state the world is then *healed*: nothing fails any more and every part does the work that is left.
A world that does not settle then has a request, or a lease, that never ends, or a slot that is never returned.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Final, cast

from kv_scheduler_state.config import GroupConfig, SchedulerConfig
from kv_scheduler_state.errors import SchedulerStateError
from kv_scheduler_state.tables import Table, Transition
from kv_scheduler_state.ticket.reader import TicketReader
from kv_scheduler_state.ticket.ticket import PeerAddress
from kv_scheduler_state.values import BlockRules

from .decode import DecodeSide, GenerousPeer
from .prefill import PrefillSide
from .promises import ModelViolation, Step
from .stream_world import StreamWorld

_HEAL_STEPS: Final = 400
_MAX_TICKS: Final = 12
_CONSTANT_TYPES: Final = frozenset(
    (Table, Transition, SchedulerConfig, GroupConfig, BlockRules, TicketReader, MappingProxyType, PeerAddress)
)


@dataclass(frozen=True, slots=True)
class Exploration:
    """Result of an exploration.

    Attributes:
        states: Different states that were visited.
        depth: Steps of the shortest way to the most distant state.
        is_complete: Whether every reachable state was visited, or a bound was met.
        violation: The broken promise, or empty.
        path: Steps that lead to it.
    """

    states: int
    depth: int
    is_complete: bool
    violation: str = ""
    path: tuple[Step, ...] = ()

    def __str__(self) -> str:
        bound = "complete" if self.is_complete else "bounded"
        text = f"{self.states} states, depth {self.depth}, {bound}"
        return text if not self.violation else f"{text}; {self.violation} after {' '.join(map(str, self.path))}"


class World:
    """A prefill side, a decode side or both, and one clock."""

    def __init__(self, prefill: PrefillSide | None, decode: DecodeSide | None) -> None:
        self.prefill = prefill
        self.decode = decode
        self.now_s = 0.0

    def steps(self) -> list[Step]:
        """Return everything that may happen next."""
        steps: list[Step] = [("tick",)]
        if self.prefill is not None:
            steps += self.prefill.steps()
            if self.decode is None:
                steps += self._reader_steps(self.prefill)
        if self.decode is not None:
            steps += self.decode.steps(self.now_s)
        return steps

    def _reader_steps(self, prefill: PrefillSide) -> Iterator[Step]:
        # Without a decode side, the readers act independently, any number of times and on each worker separately.
        for request_id, prompt in prefill.prompts.items():
            if prompt.ticket is not None:
                for worker in range(len(prefill.tables)):
                    yield from (("read", request_id, reader, str(worker)) for reader in prefill.readers)
                    yield ("renew", request_id, str(worker))

    def apply(self, step: Step) -> None:
        """Let one of `steps` happen.

        Raises:
            ModelViolation: if the code under test breaks a promise, or refuses a lawful step.
        """
        try:
            if step[0] == "tick":
                self.now_s += 1.0
            elif step[0].startswith("p-"):
                cast("PrefillSide", self.prefill).apply(step, self.now_s)
            elif step[0] == "read":
                cast("PrefillSide", self.prefill).notify(step[1], step[2], self.now_s, int(step[3]))
            elif step[0] == "renew":
                cast("PrefillSide", self.prefill).renew(step[1], self.now_s, int(step[2]))
            else:
                cast("DecodeSide", self.decode).apply(step, self.now_s)
        except SchedulerStateError as error:
            raise ModelViolation(f"{step} was refused: {error}") from None

    def key(self) -> bytes:
        """Return a digest that is equal for states with equal futures; requests are interchangeable."""
        shared = self.decode.shared_key(self.now_s) if self.decode is not None else ()
        # 16 bytes instead of kilobytes; the chance that two of a million states share them is below one in 10**26.
        return blake2b(repr((sorted(self._request_keys()), shared)).encode(), digest_size=16).digest()

    def _request_keys(self) -> list[str]:
        now_s, prefill, decode = self.now_s, self.prefill, self.decode
        # Readers that one side alone knows are interchangeable, too; between two sides a name means something.
        is_named = prefill is not None and decode is not None
        count = len(prefill.prompts) if prefill is not None else len(cast("DecodeSide", decode).answers)
        return [
            repr(
                (
                    prefill and prefill.request_key(f"p{index}", now_s, is_named=is_named),
                    decode and decode.request_key(f"d{index}", now_s, is_named=is_named),
                )
            )
            for index in range(count)
        ]

    def different_steps(self) -> list[Step]:
        """Return one of `steps` for each kind of future: of two equal requests, the steps of one are enough."""
        keys = self._request_keys()
        kinds = {(step[0], keys[int(step[1][1:])], *step[2:]) if len(step) > 1 else step: step for step in self.steps()}
        return list(kinds.values())

    def heal(self) -> tuple[Step, ...]:
        """Do everything that is left to do, without faults, until nothing is left.

        Raises:
            ModelViolation: if something is left although every part did its work.
        """
        path: list[Step] = []
        ticks = 0
        while len(path) < _HEAL_STEPS and ticks < _MAX_TICKS:
            step = self._heal_step()
            if step is None or (step == ("p-poll",) and path and path[-1] == step):
                if self._is_settled():
                    return tuple(path)
                step = ("tick",)
                ticks += 1
            self.apply(step)
            path.append(step)
        raise ModelViolation(f"something never ends: {self._leftovers()}")

    def _heal_step(self) -> Step | None:
        step = self.decode.heal_step() if self.decode is not None else None
        return step if step is not None or self.prefill is None else self.prefill.heal_step()

    def _is_settled(self) -> bool:
        return all(side is None or side.is_settled() for side in (self.prefill, self.decode))

    def _leftovers(self) -> str:
        sides = [side.state for side in (self.prefill, self.decode) if side is not None]
        requests = [entry for state in sides for entry in state.snapshot(now_s=self.now_s)]
        tables = [] if self.prefill is None else [table.snapshot(now_s=self.now_s) for table in self.prefill.tables]
        return f"requests {requests}, leases {tables}"


def prefill_world(*, requests: int, readers: int = 2, workers: int = 1, is_plain: bool = False) -> World:
    """Return a prefill engine whose readers act freely."""
    return World(PrefillSide(requests=requests, readers=readers, workers=workers, is_plain=is_plain), None)


def decode_world(*, requests: int, readers: int = 2, fails_requests: bool = False, is_shared: bool = False) -> World:
    """Return a decode engine whose peer always serves; its requests may share one ticket."""
    peer = GenerousPeer(readers)
    side = DecodeSide(peer, requests=requests, fails_requests=fails_requests, is_shared=is_shared)
    return World(None, side)


def pair_world(*, requests: int, readers: int = 2, adversity: int = 0) -> World:
    """Return a prefill and a decode engine that hand over to each other."""
    prefill = PrefillSide(requests=requests, readers=readers, adversity=adversity)
    return World(prefill, DecodeSide(prefill, requests=requests, adversity=adversity))


def explore(
    make_world: Callable[[], World | StreamWorld], *, max_states: int | None = None, max_depth: int | None = None
) -> Exploration:
    """Visit every state within the bounds, heal each of them, and stop at the first broken promise.

    Args:
        make_world: Returns the first state.
        max_states: Most states to visit; None for all of them.
        max_depth: Most steps from the first state, at least 1; None for any number.
    """
    first = make_world()
    codec = _Codec()
    seen = {first.key()}
    paths: dict[int, tuple[int, Step]] = {}
    queue = deque([(0, 0, codec.save(first), first.different_steps())])
    deepest = 0
    is_complete = True
    while queue:
        number, depth, saved, steps = queue.popleft()
        is_last = max_depth is not None and depth + 1 >= max_depth
        for step in steps:
            world = codec.load(saved)
            try:
                world.apply(step)
                key = world.key()
                if key in seen:
                    continue
                if max_states is not None and len(seen) >= max_states:
                    is_complete = False
                    continue
                seen.add(key)
                following = None if is_last else (codec.save(world), world.different_steps())
                world.heal()
            except ModelViolation as error:
                path = (*_path(paths, number), step)
                return Exploration(len(seen), depth + 1, is_complete, str(error), path)
            paths[len(seen)] = (number, step)
            deepest = depth + 1
            if following is None:
                is_complete = False
            else:
                queue.append((len(seen), deepest, *following))
    return Exploration(len(seen), deepest, is_complete)


def _path(paths: dict[int, tuple[int, Step]], number: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    while number in paths:
        number, step = paths[number]
        steps.append(step)
    return tuple(reversed(steps))


class _Codec:
    """Copies worlds by pickling; objects that never change are shared, not copied."""

    def __init__(self) -> None:
        # Kept alive so that their identities stay unique.
        self._constants: list[object] = []
        self._numbers: dict[int, int] = {}

    def save(self, world: World | StreamWorld) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._number
        pickler.dump(world)
        return buffer.getvalue()

    def load(self, saved: bytes) -> World | StreamWorld:
        unpickler = pickle.Unpickler(io.BytesIO(saved))
        unpickler.persistent_load = self._constants.__getitem__
        return cast("World | StreamWorld", unpickler.load())

    def _number(self, value: object) -> int | None:
        if type(value) not in _CONSTANT_TYPES:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._constants)
            self._constants.append(value)
        return self._numbers[id(value)]
