"""A scheduler side with the real request machines and plain values in place of a host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from factories import facts
from prompts import Prompt
from stream_wires import InMemory

from kv_handshake import Codec
from kv_scheduler_state import GroupConfig, SchedulerConfig, SchedulerState
from vllm_adapter.cache.facts import CacheGroup, EngineFacts
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.chunks import ScheduledTokens
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.scheduler.streams import Streaming
from vllm_adapter.steps import StepReport

BLOCK = 16
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TEXT = "a prompt of forty characters, no more..."


def scheduler_side(
    engine: EngineFacts, now_s: Any = time.monotonic, *, listener: Any = None, client: Any = None, secrets: Any = None,
    is_ending: Any = lambda: False, **changes: Any,
) -> SchedulerSide:  # fmt: skip
    """Return a scheduler side with the real request machines; `changes` are keys of their configuration."""
    kinds = {
        "state": GroupConfig("state", BLOCK),
        "attention": GroupConfig("full", BLOCK),
        "sliding-window": GroupConfig("window", BLOCK, window_tokens=2 * BLOCK),
    }
    values: dict[str, Any] = {
        "groups": tuple(kinds[group.kind] for group in engine.groups),
        "fence_slots": 4,
        "fence_seed": 100,
        "nonce_seed": "s",
        "null_block": 0,
        "uses_host_buffer": engine.is_mirrored,
        "tp": engine.tp,
        "reserved_id_prefixes": ("HB:", "PUSH_REG:"),
        **changes,
    }
    state = SchedulerState(SchedulerConfig(engine.engine_id, "10.0.0.1", 5600, **values))
    listener, streaming = listener or InMemory(), None
    if client is not None and state.streams is not None:
        streaming = partial(Streaming, engine, state.streams, Codec(), client, listener, secrets, 5.0)
    return SchedulerSide(
        engine, state, listener, now_s=now_s, streaming=streaming, secrets=secrets, is_ending=is_ending
    )


def streaming(
    state: Any, *, listener: Any = None, client: Any = None, wait_s: float = 5.0, recorder: Any = None,
    secrets: Sequence[bytes] = (),
) -> Any:  # fmt: skip
    """Return the streamed hand-overs of an engine, whose machines may be a fake."""
    fleet: Any = SimpleNamespace(current=secrets)
    client, listener = client or InMemory(), listener or InMemory()
    return Streaming(facts(), state, Codec(), client, listener, fleet, wait_s, recorder or Recorder())


class Engine:
    """A scheduler side, its clock, and the plan of its latest step."""

    def __init__(self, name: str = "engine", *, groups: tuple[CacheGroup, ...] = (), **changes: Any) -> None:
        layers = CacheGroup("attention", BLOCK, 0, 0, ("layers.0",))
        groups = groups or (layers,)
        wire, is_asked = changes.pop("wire", None), changes.pop("is_asked", False)
        names = ("tp", "pp", "whole_reason", "is_lock_stepped", "is_mirrored")
        reported = {key: changes.pop(key) for key in names if key in changes}
        self.facts = facts(engine_id=name, groups=groups, **reported)
        self.now_s = 0.0
        self.listener: Any = wire if wire is not None and is_asked else InMemory()
        client: Any = None if wire is None else InMemory() if is_asked else wire
        self.side = scheduler_side(self.facts, lambda: self.now_s, listener=self.listener, client=client, **changes)
        self.side.serve({(0, 0): b"envelope"})

    @property
    def state(self) -> Any:
        return self.side._state

    def step(self, preempted: tuple[str, ...] = (), scheduled: tuple[ScheduledTokens, ...] = ()) -> Any:
        return self.side.build_step(preempted, scheduled).plan

    def allocate(
        self, request_id: str, blocks: list[int], *, external: int = 0, hits: int = 0, preemptions: int = 0
    ) -> None:
        groups = [blocks for _ in self.facts.groups]
        new = [blocks[hits:] for _ in self.facts.groups]
        self.side.allocated(request_id, groups, new, external_tokens=external, preemptions=preemptions)

    def prefill(self, request_id: str, text: str, **ending: Any) -> dict[str, Any] | None:
        """Compute a prompt and finish it; return its ticket."""
        blocks = list(range(1, 2 + (len(text) - 1) // BLOCK))
        self.side.arrived(Arrival(request_id, PREFILL, len(text), Prompt(text)))
        self.allocate(request_id, blocks)
        self.step()
        return self.end(request_id, text, blocks, **ending)

    def end(self, request_id: str, text: str, blocks: list[int], **ending: Any) -> dict[str, Any] | None:
        ending = {"reason": "length", "computed_tokens": len(text), "identity": Prompt(text), **ending}
        keeps, ticket = self.side.finished(Ending(request_id, **ending), [blocks for _ in self.facts.groups])
        assert keeps is (ticket is not None)
        return ticket

    def admit(self, request_id: str, ticket: Any, text: str) -> None:
        self.side.arrived(Arrival(request_id, ticket, len(text), Prompt(text)))

    def report(
        self, *, sent: tuple[str, ...] = (), received: tuple[str, ...] = (), failed: tuple[str, ...] = ()
    ) -> None:
        self.side.update_output(StepReport(sent, received, failed))

    def refusals(self) -> list[str]:
        return (self.side.take_stats() or {}).get("num_refused_tickets", [])
