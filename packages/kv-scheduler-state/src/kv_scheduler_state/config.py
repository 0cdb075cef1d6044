"""The configuration of one engine, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from kv_scheduler_state.errors import InvalidConfig
from kv_scheduler_state.hosts import HostPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_GENERATION", "MAX_PEER_GENERATION", "GroupConfig", "SchedulerConfig"]

MAX_GENERATION = (1 << 53) - 1
"""Largest generation that is ever granted or named: routers keep JSON numbers as doubles, which round integers from 2**53 on."""

MAX_PEER_GENERATION = (1 << 63) - 1
"""Largest generation that is read from a ticket: version 0.1 granted larger ones. The top bit of a fence word marks an end."""

_COUNTS = (
    *("state_backoff_tokens", "fence_slots", "recompute_threshold_tokens", "read_hold_steps"),
    *("stream_slots", "cache_blocks", "stream_max_breaks"),
)
_SECONDS = ("lease_s", "readback_lease_s", "heartbeat_period_s", "stream_ask_s", "stream_retry_s")


def _derive(config: GroupConfig | SchedulerConfig, **values: float) -> None:
    """Set the fields that follow from the others, once; the dataclass is frozen."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


@final
@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A KV-cache group of the model.

    Attributes:
        kind: "full" keeps every block; "window" only the tail that the attention window can still see; "state" only
            the block with the running state of a recurrent layer.
        block_tokens: Tokens per scheduler block and context rank.
        window_tokens: Attention window, for kind "window".
        chunk_tokens: For kind "full" with chunked local attention: a token sees the tokens from the last multiple of this on; 0
            for all. The engine may give up the blocks of earlier tokens.
        scratch_blocks: Trailing speculative blocks behind the running state, for kind "state".
        dcp: Context ranks that share a block, so that it stands for `block_tokens * dcp` tokens of the prompt.
        span_tokens: Tokens of the prompt that one block stands for.
        sees_a_part: Whether a token sees only some of the tokens before it, so that blocks are given up before the prompt ends.
        window_blocks: Tail blocks that a window can touch: one more than fit, for a window that starts inside a block.
    """

    kind: Literal["full", "window", "state"] = "full"
    block_tokens: int = 16
    window_tokens: int = 0
    scratch_blocks: int = 0
    dcp: int = 1
    chunk_tokens: int = 0
    span_tokens: int = field(init=False, repr=False, compare=False)
    sees_a_part: bool = field(init=False, repr=False, compare=False)
    window_blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in {"full", "window", "state"}:
            raise InvalidConfig(f"kind is {self.kind!r}, must be full, window or state")
        if self.block_tokens < 1 or self.dcp < 1:
            raise InvalidConfig(f"block_tokens is {self.block_tokens} and dcp {self.dcp}, both must be at least 1")
        if (self.kind == "window") != (self.window_tokens > 0):
            raise InvalidConfig(f"a group of kind {self.kind!r} has window_tokens {self.window_tokens}")
        if self.chunk_tokens < 0 or (self.chunk_tokens and self.kind != "full"):
            raise InvalidConfig(f"a group of kind {self.kind!r} has chunk_tokens {self.chunk_tokens}")
        if self.scratch_blocks < 0 or (self.scratch_blocks and self.kind != "state"):
            raise InvalidConfig(f"a group of kind {self.kind!r} has scratch_blocks {self.scratch_blocks}")
        span_tokens = self.block_tokens * self.dcp
        window_blocks = -(-self.window_tokens // span_tokens) + 1 if self.window_tokens else 0
        sees_a_part = bool(self.window_tokens or self.chunk_tokens)
        _derive(self, span_tokens=span_tokens, sees_a_part=sees_a_part, window_blocks=window_blocks)

    def first_seen(self, token: int) -> int:
        """Return the first token that a token sees. Example: token 46 sees 15 of a window of 32, and 32 of chunks of 16."""
        if self.window_tokens:
            return max(0, token - self.window_tokens + 1)
        return token // self.chunk_tokens * self.chunk_tokens if self.chunk_tokens else 0

    def first_kept(self, token: int) -> int:
        """Return the first token of the block that holds `first_seen(token)`."""
        return self.first_seen(token) // self.span_tokens * self.span_tokens


@final
@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything that the machines of one engine need to know about it.

    Attributes:
        engine_id: Name of this engine in tickets.
        host: Address of this engine's side channel, as peers reach it.
        port: Port of this engine's side channel.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dcp: Decode-context-parallel size.
        groups: The model's KV-cache groups, in the engine's order.
        state_backoff_tokens: Trailing prompt tokens that a producer leaves to the consumer; None means 1 with a "state"
            group and 0 without. An engine with a multi-token draft module sets its lookahead here.
        lease_s: How long a producer keeps a finished prompt's blocks without hearing from a reader.
        heartbeat_s: Time between two heartbeats to one peer engine; None means a sixth of the lease.
        null_block: The engine's block id for "no block here"; None if every id is a block.
        fence_slots: Words of the fence array (8 bytes each): hand-overs that can be fenced at once; with all of them in use
            nothing is handed over. 0 opts out of fences.
        fence_seed: First generation: a random number from 1 to 2**53 - 1, so that a restarted engine repeats none. Required.
        nonce_seed: Secret that the nonces of grants are derived from: random text, so that no client can guess one. Required.
        uses_host_buffer: Whether finished chunks are saved to host memory before they can be read.
        peer_networks: Networks (CIDR) that a ticket may point into; empty allows every address and name.
        unsealed_networks: Networks (CIDR) of engines that write no seals; with fleet secrets, a ticket without a seal is only
            accepted if it points there.
        peer_ports: First and last port that a ticket may name; those below 1024 belong to the machines' own services.
        reads: Whether the engine reads from peers; otherwise every ticket to read by is refused.
        read_hold_steps: Plans for which a read is kept back: an engine that gives out blocks while a step may still write into
            them has as many steps under way, besides the one that it plans. Nothing is streamed to it then.
        load_failure_policy: The engine's treatment of a request whose read failed.
        bidirectional: Whether a decode engine hands its blocks back for the next turn.
        recompute_threshold_tokens: A readback of fewer tokens than this is not worth a transfer.
        readback_lease_s: How long a decode engine keeps its blocks for the next turn.
        max_leases: Leases that may be out at once; a prompt that ends beyond them is not handed over (`lease-quota`). None: any
            number.
        max_leased_blocks: Blocks that all leases together may keep, over all groups; beyond them likewise. None: any number.
        dialect: Connector version that this engine speaks, for consumers; None leaves it out.
        generation: Generation of this engine's memory registration, for consumers; None leaves it out.
        stream_slots: Words of streams, in front of the `fence_slots` words of plain leases in one array; 0 offers no streams.
        stream_reserve_fraction: Share of `cache_blocks` that streams may hold before their data is whole; 0 asks for none.
        cache_blocks: Blocks of the engine's pool.
        stream_ask_s: Longest wait for an answer about a stream, and from an offer to room for its blocks; ten times as long for a
            peer that says that the prompt is on its way.
        stream_retry_s: Time between two questions to a peer that does not know the id yet.
        stream_max_breaks: Broken streams of one request after which only its final ticket is asked for.
        reserved_id_prefixes: Request ids that begin with one of these cannot be notified and are refused at arrival.
        has_state: Whether the model keeps a recurrent state beside or instead of attention blocks.
        sees_parts: Whether a group gives up blocks before the prompt ends, see `GroupConfig.sees_a_part`.
        backoff_tokens: Trailing prompt tokens that the consumer recomputes itself (the N-1 rule).
        reads_streams: Whether requests with an early ticket are read while their peer computes them.
        heartbeat_period_s: Time between two heartbeats to one peer engine.
    """

    engine_id: str
    host: str
    port: int
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    state_backoff_tokens: int | None = None
    lease_s: float = 30.0
    heartbeat_s: float | None = None
    null_block: int | None = None
    fence_slots: int = 4096
    fence_seed: int = 0
    nonce_seed: str = field(default="", repr=False)
    uses_host_buffer: bool = False
    peer_networks: tuple[str, ...] = ()
    unsealed_networks: tuple[str, ...] = ()
    peer_ports: tuple[int, int] = (1024, 65535)
    reads: bool = True
    read_hold_steps: int = 0
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    bidirectional: bool = False
    recompute_threshold_tokens: int = 64
    readback_lease_s: float = 480.0
    max_leases: int | None = None
    max_leased_blocks: int | None = None
    dialect: int | None = None
    generation: int | None = None
    stream_slots: int = 0
    stream_reserve_fraction: float = 0.0
    cache_blocks: int = 0
    stream_ask_s: float = 30.0
    stream_retry_s: float = 0.1
    stream_max_breaks: int = 2
    reserved_id_prefixes: tuple[str, ...] = ()
    has_state: bool = field(init=False, repr=False, compare=False)
    sees_parts: bool = field(init=False, repr=False, compare=False)
    backoff_tokens: int = field(init=False, repr=False, compare=False)
    reads_streams: bool = field(init=False, repr=False, compare=False)
    heartbeat_period_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        has_state = any(group.kind == "state" for group in self.groups)
        is_reserving = self.cache_blocks * self.stream_reserve_fraction >= 1
        _derive(
            self,
            has_state=has_state,
            sees_parts=any(group.sees_a_part for group in self.groups),
            backoff_tokens=int(has_state) if self.state_backoff_tokens is None else self.state_backoff_tokens,
            reads_streams=not self.read_hold_steps and is_reserving,
            heartbeat_period_s=self.lease_s / 6 if self.heartbeat_s is None else self.heartbeat_s,
        )
        for problem in self._problems():
            raise InvalidConfig(f"{problem} (engine {self.engine_id!r})", engine_id=self.engine_id)
        # Refuse a bad network here, not at a request.
        HostPolicy(self.unsealed_networks, setting="unsealed_networks")
        HostPolicy(self.peer_networks, self.peer_ports)

    def _problems(self) -> Iterator[str]:
        if not self.engine_id or not self.host:
            yield "engine_id and host must not be empty"
        if not 1 <= self.port <= 65535:
            yield f"port is {self.port}, must be 1 to 65535"
        if min(self.tp, self.pp, self.dcp) < 1:
            yield f"parallel sizes are tp={self.tp} pp={self.pp} dcp={self.dcp}, all must be at least 1"
        if not self.groups:
            yield "groups is empty; a model has at least one KV-cache group"
        for name in _COUNTS:
            if (getattr(self, name) or 0) < 0:
                yield f"{name} is {getattr(self, name)}, must not be negative"
        for name in _SECONDS:
            if not 0 < getattr(self, name) < math.inf:
                yield f"{name} is {getattr(self, name)}, must be positive and finite"
        yield from self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        if not self.heartbeat_period_s < self.lease_s:
            yield f"heartbeat_s is {self.heartbeat_period_s}, must be below lease_s {self.lease_s}"
        if self.load_failure_policy not in {"fail", "recompute"}:
            yield f"load_failure_policy is {self.load_failure_policy!r}, must be fail or recompute"
        if not 1 <= self.fence_seed <= MAX_GENERATION:
            yield f"fence_seed is {self.fence_seed}, must be a random number from 1 to 2**53 - 1"
        if not self.nonce_seed:
            yield "nonce_seed is empty, must be random text"
        if self.bidirectional and self.uses_host_buffer:
            yield "bidirectional needs the decode's blocks in readable memory; it does not go with uses_host_buffer"
        if not 0 <= (self.generation or 0) <= MAX_GENERATION:
            yield f"generation is {self.generation}, must be 0 to 2**53 - 1 or None"
        for name in ("max_leases", "max_leased_blocks"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}, must be at least 1 or None"
        if not 0 <= self.stream_reserve_fraction <= 1:
            yield f"stream_reserve_fraction is {self.stream_reserve_fraction}, must be 0 to 1"

    def left_tokens(self, prompt_tokens: int) -> int:
        """Return how many trailing tokens of a prompt the producer leaves to the consumer.

        The number is also one if its engine, at the end of the prompt, gives up a block that the last token sees. A peer of
        another kind counts on the blocks of the whole prompt, so this must not change their number.
        """
        left, last = self.backoff_tokens, prompt_tokens - 1
        if left or not self.sees_parts:
            return left
        if any(last % group.span_tokens == 0 for group in self.groups if group.kind != "state"):
            return left
        return int(self.gives_up_early(prompt_tokens))

    def gives_up_early(self, tokens: int) -> bool:
        """Whether an engine, at the end of `tokens` tokens, gives up a block that the last of them sees.

        Example: a window of 32, blocks of 16. At the end of 47 tokens the block of tokens 0 to 15 is given up, of which token 46
        sees 15; at the end of 46 it is kept.
        """
        return tokens > 1 and any(
            group.sees_a_part and group.first_kept(tokens) > group.first_seen(tokens - 1) for group in self.groups
        )

    def unread_tokens(self, prompt_tokens: int) -> int:
        """Return how many trailing tokens of a prompt are not read: those that the producer leaves, or the last one.

        An engine that has loaded a whole prompt computes its last token once more, in blocks that it laid out for the token
        behind it. So it must not load the whole of a prompt at whose end it gives up a block that the last token sees.
        """
        return (
            max(self.backoff_tokens, int(self.gives_up_early(prompt_tokens)))
            if self.sees_parts
            else self.backoff_tokens
        )
