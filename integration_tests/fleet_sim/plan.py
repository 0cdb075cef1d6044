"""Everything that a seed decides: the fleet, the requests and the faults; as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A KV-cache group of the model.

    Attributes:
        window_tokens: Attention window; 0 for all tokens.
        layers: Its layers.
        kind: "attention"; "latent": a vector per token, the same on all ranks; "state": a recurrent state per request.
    """

    window_tokens: int = 0
    layers: int = 1
    kind: str = "attention"


@final
@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine.

    Attributes:
        role: "prefill" or "decode".
        tp: Tensor-parallel ranks.
        blocks: Blocks of its pool, the null block among them.
        block_tokens: Tokens per block.
        order: Order of heads and tokens in a page.
        has_lag: Whether each step is ordered before the results of the step before are known.
        step_s: Duration of a step that computes.
        chunk_tokens: Most prompt tokens that a request computes in a step.
        clock_rate: Its clock's seconds per second.
        clock_offset_s: Its clock's lead.
        has_prefix_cache: Whether blocks are kept by content, and shared.
        has_mirror: Whether peers see a mirror of its cache in host memory.
        streams: Whether it hands prompts over, and reads them, while they are computed.
        has_device: Whether the forward pass runs on a device: workers are done with a step before it is.
        applies_late: Whether workers get the orders of reads after the forward pass, as vLLM 0.32 has it.
    """

    role: str
    tp: int
    blocks: int
    block_tokens: int
    order: str
    has_lag: bool
    step_s: float
    chunk_tokens: int
    clock_rate: float = 1.0
    clock_offset_s: float = 0.0
    has_prefix_cache: bool = False
    has_mirror: bool = False
    streams: bool = False
    has_device: bool = False
    applies_late: bool = False


@final
@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fleet and its configuration; durations in seconds. In a calm one every read must succeed.

    With `ends_at_sample` a request ends with the sample of its last token, as in vLLM;
    else once that token is computed, too. Transfer threads look at the wire at least every `poll_s`, and at their leases
    `tick_parts` times a lease. Of engines that stream, `stream_fraction` of the blocks may wait for their data; a question waits
    `ask_wait_s`. With `answer_s` every request has its answer within that time.
    """

    groups: tuple[GroupPlan, ...]
    engines: tuple[EnginePlan, ...]
    lease_s: float
    read_timeout_s: float
    handshake_timeout_s: float
    readback_s: float
    read_retries: int
    fence_slots: int
    max_leases: int
    max_leased_blocks: int
    max_inflight_bytes: int
    policy: str
    is_bidirectional: bool
    is_sealed: bool
    conversion: Literal["auto", "never"]
    base_latency_s: float
    bytes_per_s: float
    blocks_reads_of_stopped: bool
    notice_s: float
    patience_s: float
    faults_end_s: float
    is_calm: bool = False
    state_groups: int = 2
    ends_at_sample: bool = False
    poll_s: float = 0.02
    tick_parts: int = 12
    engine_ttl_s: float = 0.0
    stream_slots: int = 0
    stream_fraction: float = 0.5
    ask_wait_s: float = 2.0
    answer_s: float = 0.0

    @property
    def has_state(self) -> bool:
        """Whether a group keeps a recurrent state."""
        return any(group.kind == "state" for group in self.groups)


@final
@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request of a client.

    Attributes:
        at_s: Time at which the router sends its prompt to prefill.
        prefill, decode: Engines, by number.
        tokens: Length of its prompt.
        new_tokens: Tokens that decode generates.
        router_s: How long the router holds the ticket.
        readers: Decode requests that get the same ticket.
        abort: When the client gives up: "" for never, else "prefill" or "decode".
        abort_s: How long after the request reached that engine.
        damage: Change made to the ticket on its way; "" for none.
        turns: Turns of the conversation; from the second on decode's blocks may be read back.
        family: Number of the text that its prompt begins with, shared by all of that family.
        family_tokens: So many tokens of that text.
        turn_tokens: Tokens that each further turn adds; -1 for 3 and the number of the turn before.
        again: When the same prompt is sent to prefill once more under the same id: "" for never, "abort" right after the client
            gave the first one up, "leased" while its ticket is out, "end" after decode's answer.
        early: How the router sends both requests of the first turn at once, under one hand-over id: "" not at all, "both" at the
            same time, "prefill" or "decode": that one `router_s` before the other.
        prefill_tokens: Tokens that prefill generates for an early request; routers ask for one.
    """

    name: str
    at_s: float
    prefill: int
    decode: int
    tokens: int
    new_tokens: int
    router_s: float
    readers: int = 1
    abort: str = ""
    abort_s: float = 0.0
    damage: str = ""
    turns: int = 1
    family: int = 0
    family_tokens: int = 0
    turn_tokens: int = -1
    again: str = ""
    early: str = ""
    prefill_tokens: int = 1


@final
@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A fault: its kind, when, for how long, where, how bad. `second` is a link's target, or the way of a restart.

    With `request` it happens `at_s` after this request's chunk of that number was scheduled at its prefill engine, the first one
    being 1; a number beyond the last one's stands for the end of the prompt.
    """

    kind: str
    at_s: float
    duration_s: float = 0.0
    engine: int = 0
    second: int = 0
    amount: float = 0.0
    request: str = ""
    chunk: int = 0


@final
@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """All of an episode."""

    seed: int
    fleet: FleetPlan
    requests: tuple[RequestPlan, ...]
    faults: tuple[FaultPlan, ...]
