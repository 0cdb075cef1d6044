"""A scheduler side with the real request machines and plain values in place of a host."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from factories import facts
from stream_wires import Wire

from kv_handshake import Codec
from kv_scheduler_state import GroupConfig, SchedulerConfig, SchedulerState
from vllm_adapter.cache.facts import CacheGroup, EngineFacts
from vllm_adapter.config.secrets import FleetSecrets
from vllm_adapter.scheduler.chunks import ScheduledTokens
from vllm_adapter.scheduler.hooks import Arrival, Ending
from vllm_adapter.scheduler.side import SchedulerSide

BLOCK = 16
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TEXT = "a prompt of forty characters, no more..."


class Listener:
    """A side channel that only remembers."""

    port = 1

    def __init__(self) -> None:
        self.served: list[dict[Any, bytes]] = []
        self.is_closed = False

    def replace(self, envelopes: Any) -> None:
        self.served.append(dict(envelopes))

    def start(self) -> None:
        pass

    def take_asks(self, on_ask: Any, on_gone: Any, *, wait_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Parts:
    """The concrete parts of a scheduler side, as `wiring.SchedulerParts` makes them."""

    facts: EngineFacts
    uses_host_buffer: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    listener: Listener = field(default_factory=Listener)
    secrets: FleetSecrets | None = None
    wire: Wire | None = None
    """The side channel on which streams are asked for; None for an engine that does not stream."""
    is_asked: bool = False
    """Whether the wire leads to this engine, and not from it."""

    ask_wait_s = 5.0
    stream_codec = Codec()

    @property
    def streams(self) -> bool:
        return self.wire is not None

    def make_ask_client(self) -> Any:
        assert self.wire is not None
        return self.wire.client()

    def make_state(self) -> SchedulerState:
        kinds = {
            "state": GroupConfig("state", BLOCK),
            "attention": GroupConfig("full", BLOCK),
            "sliding-window": GroupConfig("window", BLOCK, window_tokens=2 * BLOCK),
        }
        values: dict[str, Any] = {
            "groups": tuple(kinds[group.kind] for group in self.facts.groups),
            "fence_slots": 4,
            "fence_seed": 100,
            "null_block": 0,
            "uses_host_buffer": self.uses_host_buffer,
            "tp": self.facts.tp,
            "reserved_id_prefixes": ("HB:", "PUSH_REG:"),
            **self.changes,
        }
        return SchedulerState(SchedulerConfig(self.facts.engine_id, "10.0.0.1", 5600, **values))

    def make_fleet_secrets(self) -> FleetSecrets | None:
        return self.secrets

    def make_listener(self) -> Any:
        return self.wire.listener() if self.wire is not None and self.is_asked else self.listener


@dataclass
class Prompt:
    """A prompt of which two different ones have different digests."""

    text: str
    refusal: str = ""

    def digest(self, tokens: int) -> str | None:
        if self.refusal or tokens > len(self.text):
            return None
        return hashlib.sha256(self.text[:tokens].encode()).hexdigest()

    def media(self, tokens: int) -> None:
        """Return None: the prompt has no media."""


class Engine:
    """A scheduler side, its clock, and the plan of its latest step."""

    def __init__(self, name: str = "engine", *, groups: tuple[CacheGroup, ...] = (), **changes: Any) -> None:
        layers = CacheGroup("attention", BLOCK, 0, 0, ("layers.0",))
        groups = groups or (layers,)
        uses_host_buffer = changes.pop("uses_host_buffer", False)
        wire, is_asked = changes.pop("wire", None), changes.pop("is_asked", False)
        told = {key: changes.pop(key) for key in ("tp", "whole_reason", "is_lock_stepped") if key in changes}
        self.facts = facts(engine_id=name, groups=groups, group_ids=tuple(range(len(groups))), **told)
        self.parts = Parts(self.facts, uses_host_buffer, changes, wire=wire, is_asked=is_asked)
        self.now_s = 0.0
        self.side = SchedulerSide(self.facts, self.parts, lambda: self.now_s)  # type: ignore[arg-type]
        self.side.serve({(0, 0): wire.envelope if wire is not None else b"envelope"})

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
        self.side.update_output(sent=sent, received=received, failed=failed)

    def refusals(self) -> list[str]:
        return (self.side.take_stats() or {}).get("ticket_refusal_codes", [])
