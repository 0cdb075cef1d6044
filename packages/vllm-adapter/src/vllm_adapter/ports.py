"""What the adapter needs from each of the four libraries.

The adapter is the consumer, so the Protocols live here; no library knows that they exist. `wiring.py` is the only module
that names concrete classes, and it holds one static conformance line per Protocol.

At these boundaries there are builtins, bytes, sequences, mappings, `Literal` strings and numpy arrays of a stated dtype
and shape: no enum, no torch, no other package's exception. All members are read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.uint64]
    Indices = npt.NDArray[np.int32]

BlockIds = Sequence[Sequence[int]]
"""Logical block ids, one sequence per KV-cache group, in token order."""

MemoryKind = Literal["DRAM", "VRAM"]
Fault = Literal["local", "peer", "environment"]


class CodedError(Protocol):
    """What every library's exceptions carry besides their text."""

    @property
    def code(self) -> str: ...
    @property
    def fault(self) -> Fault: ...
    @property
    def is_retry_safe(self) -> bool | None: ...
    @property
    def context(self) -> Mapping[str, object]: ...


# --------------------------------------------------------------------------------------------------------------------
# kv-handshake: every byte that crosses between engines
# --------------------------------------------------------------------------------------------------------------------


class PeerMetadata(Protocol):
    """One peer rank's metadata as it came over the side channel, validated."""

    @property
    def engine_id(self) -> str: ...
    @property
    def agent_metadata(self) -> bytes:
        """NIXL's own blob for this rank's agent."""
        ...

    @property
    def kv_caches_base_addr(self) -> Sequence[int]: ...
    @property
    def device_id(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_lens(self) -> Sequence[int]: ...
    @property
    def block_strides(self) -> Sequence[int] | None: ...
    @property
    def kv_cache_layout(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def ssm_sizes(self) -> Sequence[int]: ...
    @property
    def attn_backend_name(self) -> str: ...
    @property
    def physical_blocks_per_logical_kv_block(self) -> int: ...
    @property
    def region_names(self) -> Sequence[str] | None: ...
    @property
    def region_group_ids(self) -> Sequence[int] | None: ...
    @property
    def region_num_blocks(self) -> Sequence[int] | None: ...
    @property
    def region_mem_types(self) -> Sequence[str] | None: ...

    # Extension keys that only our own peers send; None or empty from vLLM's connector.
    @property
    def generation(self) -> int | None:
        """Bumped whenever the peer's registration changes."""
        ...

    @property
    def factors(self) -> Mapping[str, object]:
        """The inputs of the compatibility hash, so that a mismatch can be named."""
        ...

    @property
    def fence(self) -> tuple[int, int, int] | None:
        """(address, device, word count) of the peer rank's fence array."""
        ...

    @property
    def geometry(self) -> bytes | None:
        """Geometry document of the rank (kv-topology's format), opaque here."""
        ...


class HandshakeOutcome(Protocol):
    """End of one handshake with one engine: all asked ranks, or a reason."""

    @property
    def is_ok(self) -> bool: ...
    @property
    def peers(self) -> Mapping[tuple[int, int], PeerMetadata]:
        """By (pp rank, tp rank); empty unless ok."""
        ...

    @property
    def code(self) -> str:
        """Stable reason, empty when ok."""
        ...

    @property
    def message(self) -> str: ...
    @property
    def elapsed_s(self) -> float: ...


class HandshakeClient(Protocol):
    """Talks to many peers at once from one thread of its own."""

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[tuple[int, int]],
        engine_id: str,
        dialect: int,
        on_done: Callable[[HandshakeOutcome], None],
    ) -> None:
        """Start a handshake and return at once; `on_done` runs on the client's thread exactly once."""
        ...

    def close(self) -> None: ...


class HandshakeListener(Protocol):
    """Serves this engine's metadata, supervised."""

    @property
    def port(self) -> int: ...
    def start(self) -> None:
        """Bind and serve; a bind failure raises here, at once."""
        ...

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        """Serve these envelopes by (pp rank, tp rank) from now on."""
        ...

    def statistics(self) -> Mapping[str, int]: ...
    def close(self) -> None: ...


class NotificationView(Protocol):
    """A parsed notification of a peer."""

    @property
    def kind(self) -> Literal["read-complete", "heartbeat", "unknown"]: ...
    @property
    def request_ids(self) -> Sequence[str]: ...
    @property
    def reader_count(self) -> int:
        """Consumers that will report this request to this producer rank (0 for a heartbeat)."""
        ...


class WireCodec(Protocol):
    """Bytes that the adapter sends or receives outside the side channel's own loop."""

    def encode_envelope(self, metadata: Mapping[str, object], factors: Mapping[str, object], *, dialect: int) -> bytes:
        """Envelope of one rank for the listener; `metadata` by `PeerMetadata` names."""
        ...

    def compatibility_hash(self, factors: Mapping[str, object]) -> str: ...
    def read_complete(self, request_id: str, reader_count: int) -> bytes: ...
    def heartbeats(self, request_ids: Sequence[str]) -> Sequence[bytes]: ...
    def parse_notification(self, payload: bytes) -> NotificationView:
        """Never raises."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# kv-topology: which bytes of which peer rank land where
# --------------------------------------------------------------------------------------------------------------------


class PeerPlan(Protocol):
    """What one local consumer rank reads from one producer engine."""

    @property
    def producer_ranks(self) -> Sequence[tuple[int, int]]:
        """(pp, tp) ranks to read from, in order."""
        ...

    @property
    def notify_only_ranks(self) -> Sequence[tuple[int, int]]:
        """Ranks that hold replicas, are not read, and still wait for a notification."""
        ...

    @property
    def is_staged(self) -> bool: ...
    @property
    def bytes_per_token(self) -> float: ...
    def reader_count(self, producer_rank: tuple[int, int]) -> int:
        """Consumer ranks that report to this producer rank."""
        ...

    def local_rows(self, producer_rank: tuple[int, int]) -> Rows:
        """uint64 (n, 5): address, length_bytes, device, stride_bytes, count; same n as `peer_rows`."""
        ...

    def peer_rows(self, producer_rank: tuple[int, int]) -> Rows: ...
    def indices(
        self, producer_rank: tuple[int, int], local_blocks: BlockIds, peer_blocks: BlockIds
    ) -> tuple[Indices, Indices]:
        """(local, peer) int32 descriptor indices of equal length, ordered for merging; raises coded on bad ids."""
        ...


class Planner(Protocol):
    """Plans from geometry documents, the plain form in which geometry travels."""

    def target_ranks(
        self, local: Mapping[str, object], *, peer_tp: int, peer_pp: int, peer_dcp: int
    ) -> Sequence[tuple[int, int]]:
        """(pp, tp) ranks whose metadata this rank needs before it can plan."""
        ...

    def plan(
        self, local: Mapping[str, object], peers: Mapping[tuple[int, int], Mapping[str, object]], *, peer_tp: int
    ) -> PeerPlan: ...


# --------------------------------------------------------------------------------------------------------------------
# kv-nixl-agent: registration and transfers
# --------------------------------------------------------------------------------------------------------------------


class TransferResult(Protocol):
    """End of one posted read."""

    @property
    def transfer_id(self) -> str: ...
    @property
    def outcome(self) -> Literal["done", "failed", "fence-rejected", "timed-out", "cancelled"]: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def is_memory_quiet(self) -> bool:
        """False while the peer or the wire might still write into the local pages (quarantine)."""
        ...

    @property
    def bytes_moved(self) -> int: ...
    @property
    def descriptor_count(self) -> int: ...
    @property
    def post_s(self) -> float: ...
    @property
    def wire_s(self) -> float: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def fence_s(self) -> float: ...


class TransferThread(Protocol):
    """The owner thread of one NIXL agent. Methods marked *owner* may only be called on it (through `call_soon`)."""

    def agent_metadata(self) -> bytes: ...
    @property
    def fence(self) -> tuple[int, int, int]:
        """(address, device, word count) of this rank's registered fence array."""
        ...

    def start(self) -> None: ...
    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread soon; wakes it; never blocks; any thread."""
        ...

    def call_every(self, period_s: float, function: Callable[[], None]) -> None:
        """Run `function` on the owner thread about every `period_s` while it lives."""
        ...

    # owner
    def add_peer(
        self,
        peer: str,
        agent_metadata: bytes,
        *,
        local_rows: Rows,
        peer_rows: Rows,
        memory_kind: MemoryKind,
        fence: tuple[int, int, int] | None,
    ) -> None:
        """Know a peer rank's agent under the key `peer`, with its prepared lists, and wire it up."""
        ...

    def remove_peer(self, peer: str) -> None: ...
    def has_peer(self, peer: str) -> bool: ...
    def post_read(
        self,
        transfer_id: str,
        peer: str,
        local_indices: Indices,
        peer_indices: Indices,
        *,
        notification: bytes,
        deadline_s: float,
        fence: tuple[int, int] | None,
    ) -> None:
        """Queue a read; `fence` is (slot, generation) to verify after it. The end comes through `on_result`."""
        ...

    def cancel(self, transfer_id: str) -> None: ...
    def send_notification(self, peer: str, payload: bytes) -> bool: ...
    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of this rank's fence array."""
        ...

    def statistics(self) -> Mapping[str, float]: ...
    @property
    def is_alive(self) -> bool: ...
    def close(self) -> None:
        """Idempotent; ordered: transfers, prepared lists, peers, registrations."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# kv-scheduler-state: the life of a request
# --------------------------------------------------------------------------------------------------------------------


class ReadOrder(Protocol):
    """One request's read, from the scheduler to the workers."""

    @property
    def request_id(self) -> str: ...
    @property
    def peer_engine_id(self) -> str: ...
    @property
    def peer_request_id(self) -> str: ...
    @property
    def peer_host(self) -> str: ...
    @property
    def peer_port(self) -> int: ...
    @property
    def peer_tp(self) -> int: ...
    @property
    def peer_pp(self) -> int: ...
    @property
    def peer_dcp(self) -> int: ...
    @property
    def peer_generation(self) -> int | None: ...
    @property
    def peer_block_ids(self) -> BlockIds: ...
    @property
    def local_block_ids(self) -> BlockIds:
        """All empty for a notify-only order (full prefix hit, or aborted before its blocks were allocated)."""
        ...

    @property
    def fence(self) -> tuple[int, int] | None: ...
    @property
    def lease_s(self) -> float | None: ...
    @property
    def is_reported(self) -> bool:
        """Whether the scheduler waits for the end of this order."""
        ...


class HeartbeatOrder(Protocol):
    """Leases of one peer engine that are to be renewed now."""

    @property
    def peer_engine_id(self) -> str: ...
    @property
    def peer_host(self) -> str: ...
    @property
    def peer_port(self) -> int: ...
    @property
    def peer_tp(self) -> int: ...
    @property
    def peer_pp(self) -> int: ...
    @property
    def peer_dcp(self) -> int: ...
    @property
    def peer_request_ids(self) -> Sequence[str]: ...


class FenceOrder(Protocol):
    """A fence word that the workers write before the request's blocks can be read."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class GrantOrder(Protocol):
    """A lease that starts now, on the workers' clocks."""

    @property
    def request_id(self) -> str: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def fence(self) -> tuple[int, int] | None: ...


class StepPlan(Protocol):
    """What one scheduler step tells the workers."""

    @property
    def reads(self) -> Sequence[ReadOrder]: ...
    @property
    def fences(self) -> Sequence[FenceOrder]: ...
    @property
    def grants(self) -> Sequence[GrantOrder]: ...
    @property
    def releases(self) -> Sequence[str]:
        """Producer requests that will not be handed over after all."""
        ...

    @property
    def saves(self) -> Sequence[tuple[str, BlockIds]]: ...
    @property
    def heartbeats(self) -> Sequence[HeartbeatOrder]: ...
    def to_bytes(self) -> bytes: ...


class Admission(Protocol):
    """What the scheduler does with a request that has just arrived."""

    @property
    def role(self) -> Literal["none", "producer", "consumer"]: ...
    @property
    def rejected_code(self) -> str:
        """Why the ticket was refused (the request is then prefilled locally); empty otherwise."""
        ...

    @property
    def rejected_message(self) -> str: ...
    @property
    def truncate_tokens(self) -> int:
        """Trailing prompt tokens that a state-model producer must drop before the prefix lookup."""
        ...


class FinishDecision(Protocol):
    """Answer to the end of a request."""

    @property
    def keep_blocks(self) -> bool: ...
    @property
    def params(self) -> Mapping[str, object] | None:
        """`kv_transfer_params` of the response, in vLLM's wire names."""
        ...


class SchedulerState(Protocol):
    """Both machines of the scheduler process behind one facade: events in, decisions out."""

    def arrive(self, request_id: str, params: object, *, prompt_tokens: int, now_s: float) -> Admission: ...
    def external_tokens(self, request_id: str, *, computed_tokens: int) -> int:
        """Prompt tokens to load from the peer beyond the local prefix hit; free of side effects."""
        ...

    def allocate(
        self, request_id: str, *, block_ids: BlockIds, new_block_ids: BlockIds, external_tokens: int, now_s: float
    ) -> None:
        """Blocks were given to the request; `new_block_ids` are those not covered by a prefix hit."""
        ...

    def scheduled(self, request_id: str, *, new_block_ids: BlockIds, is_prompt_complete: bool) -> None:
        """A (chunk of a) prefill runs in this step (host-buffer saves)."""
        ...

    def preempt(self, request_id: str, *, now_s: float) -> None: ...
    def finish(
        self,
        request_id: str,
        *,
        reason: Literal["length", "stop", "abort", "error"],
        block_ids: BlockIds,
        computed_tokens: int,
        now_s: float,
    ) -> FinishDecision: ...
    def transfer_results(self, *, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None: ...
    def take_step_plan(self, *, now_s: float) -> StepPlan: ...
    def has_work(self) -> bool: ...
    def snapshot(self, *, now_s: float) -> Sequence[Mapping[str, object]]: ...


class LeaseEnd(Protocol):
    """A producer request whose blocks may be given back, after its fence was bumped."""

    @property
    def request_id(self) -> str: ...
    @property
    def reason(self) -> Literal["read", "expired", "released"]: ...
    @property
    def fence(self) -> tuple[int, int] | None:
        """(slot, generation to write before the blocks are reported free)."""
        ...


class LeaseTable(Protocol):
    """Producer leases on one worker: the pure part, time comes in."""

    def grant(self, request_id: str, *, lease_s: float, fence: tuple[int, int] | None, now_s: float) -> None: ...
    def renew(self, request_id: str, *, now_s: float) -> bool: ...
    def read_complete(self, request_id: str, *, reader: str, reader_count: int, now_s: float) -> str:
        """Count one reader once; "counted", "complete", "duplicate", "unknown", "expired" or "bad-count"."""
        ...

    def release(self, request_id: str, *, now_s: float) -> None: ...
    def take_ended(self, *, now_s: float) -> Sequence[LeaseEnd]:
        """Leases that ended since the last call, oldest first; expires those that are due."""
        ...

    @property
    def next_deadline_s(self) -> float | None: ...
    def live_count(self) -> int: ...
