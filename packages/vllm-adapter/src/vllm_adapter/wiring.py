"""Assembly of the concrete classes of the four libraries: the only module that imports them.

The lines at the end bind each concrete class to the Protocol that it implements, so that drift is a type error which names
the missing member.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from kv_handshake import Client, Codec, Listener, LocalOffer, Timing
from kv_handshake.security import ClientSecurity, ServerSecurity
from kv_nixl_agent import (
    AgentOptions,
    BackendOptions,
    PeerSpec,
    PortFactory,
    ThreadOptions,
    TransferThread,
    open_nixl,
)
from kv_scheduler_state import (
    GroupConfig,
    LeaseTable,
    SchedulerConfig,
    SchedulerState,
    WorkerState,
    prefill_request_params,
    prompt_digest,
)
from kv_scheduler_state.streams import StreamReaders, StreamWorker
from kv_topology import CostModel, Planner
from vllm_adapter import ports
from vllm_adapter.cache.envelope import metadata_fields
from vllm_adapter.cache.vllm_peer import PeerGeometry, pack_document
from vllm_adapter.config import RENEWED_PART
from vllm_adapter.config.secrets import configured_secrets
from vllm_adapter.cores import core_count, use_allowed_cores
from vllm_adapter.observe.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache
    from vllm_adapter.config import Settings
    from vllm_adapter.config.secrets import FleetSecrets

__all__ = [
    "PERMUTE_GB_S",
    "SchedulerParts",
    "WorkerParts",
    "prefill_request_params",
    "prompt_digest",
]

_SEED_BITS = 52
_NULL_BLOCK = 0
"""Block id that stands for "no block here". Source: vLLM's block pool reserves its first block for that."""

_CAPABILITIES: Mapping[str, Literal["supported"]] = {"nonce": "supported", "prompt-digest": "supported"}
"""Capabilities in our envelopes: notifications with a nonce are understood, and tickets carry a digest of their prompt."""

_STREAMING_CAPABILITIES: Mapping[str, Literal["supported"]] = {**_CAPABILITIES, "ask": "supported"}

_CORES_TO_SPARE = 8
PERMUTE_GB_S = {"DRAM": 1.2, "VRAM": 10.0}
"""Speed of permuting pages, by which "auto" decides. DRAM: as measured with torch on one core, 134 MB of 32 layers."""


@final
@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Makes the concrete parts of the scheduler's half."""

    facts: EngineFacts
    settings: Settings
    load_failure_policy: str = "fail"
    uses_host_buffer: bool = False
    reads: bool = True
    read_hold_steps: int = 0

    def make_state(self) -> ports.SchedulerState:
        """Return the request machines of this engine."""
        facts, settings = self.facts, self.settings
        config = SchedulerConfig(
            engine_id=facts.engine_id,
            host=facts.host,
            port=facts.port,
            tp=facts.tp,
            pp=facts.pp,
            dcp=facts.dcp,
            groups=tuple(map(_group_config, facts.groups, facts.context_sizes)),
            null_block=_NULL_BLOCK,
            state_backoff_tokens=facts.backoff_tokens,
            lease_s=settings.kv_lease_duration,
            heartbeat_s=settings.heartbeat_s,
            fence_slots=settings.fence_slots,
            fence_seed=secrets.randbits(_SEED_BITS) + 1,
            nonce_seed=secrets.token_hex(16),
            uses_host_buffer=self.uses_host_buffer,
            peer_networks=settings.remote_hosts,
            peer_ports=settings.peer_port_range,
            unsealed_networks=settings.unsigned_hosts,
            reads=self.reads,
            read_hold_steps=self.read_hold_steps,
            load_failure_policy="recompute" if self.load_failure_policy == "recompute" else "fail",
            bidirectional=settings.bidirectional_kv_xfer,
            recompute_threshold_tokens=settings.kv_recompute_threshold,
            readback_lease_s=settings.decoder_kv_blocks_ttl,
            stream_slots=settings.stream_slots if settings.streaming else 0,
            stream_reserve_fraction=settings.stream_reserve_fraction if settings.streaming else 0.0,
            stream_ask_s=settings.ask_wait_s,
            cache_blocks=facts.block_count,
            max_leases=settings.max_leases or None,
            max_leased_blocks=settings.max_leased_blocks or None,
            dialect=facts.connector_version,
            generation=facts.generation,
            reserved_id_prefixes=_reserved_prefixes(),
        )
        return SchedulerState(config)

    def make_listener(self) -> ports.HandshakeListener:
        """Return the side channel's listener, not yet bound."""
        settings = self.settings
        security = None
        if settings.side_channel_key:
            security = ServerSecurity.read(settings.side_channel_key, settings.side_channel_clients)
        facts = self.facts
        return Listener(*(facts.listens_on or (facts.host, facts.port)), security=security)

    @property
    def ask_wait_s(self) -> float:
        """Longest wait of a question for its answer, in seconds."""
        return self.settings.ask_wait_s

    @property
    def stream_codec(self) -> ports.Codec:
        """Encodes and decodes questions and answers."""
        return Codec()

    def make_ask_client(self) -> ports.HandshakeClient:
        """Return the client that asks peers; it compares no factors."""
        return Client(LocalOffer(policy="off"), security=_client_security(self.settings))

    def make_fleet_secrets(self) -> FleetSecrets | None:
        """Return the fleet's secrets, None if tickets are not sealed."""
        settings = self.settings
        return configured_secrets(settings.ticket_secret_files, settings.ticket_secret_variable)


@final
@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Makes the concrete parts of the worker's half."""

    facts: EngineFacts
    settings: Settings
    port_factory: PortFactory | None = None
    """Creates the NIXL port; None for the real one."""

    @property
    def ucx_tls(self) -> str:
        """Transports that UCX may choose from, as this process is configured; `"unset"` is UCX's own default."""
        return os.environ.get("UCX_TLS") or "unset"

    @property
    def peer_spec(self) -> type[ports.PeerSpec]:
        """Class of the value that describes a peer rank to the transfer thread."""
        return PeerSpec

    def make_planner(self, memory_kind: ports.MemoryKind, *, can_convert: bool) -> ports.Planner:
        """Return the planner for geometry documents; without a converter it makes only plans that need no conversion."""
        cost = CostModel(permute_gb_s=PERMUTE_GB_S[memory_kind])
        return Planner(staging=self.settings.receive_conversion if can_convert else "never", cost=cost)

    @property
    def codec(self) -> ports.Codec:
        """Encodes and decodes the bytes that cross between engines."""
        return Codec(capabilities=_STREAMING_CAPABILITIES if self.settings.streaming else _CAPABILITIES)

    @property
    def peer_geometry(self) -> PeerGeometry:
        """Derives the geometry of peers."""
        return PeerGeometry(Planner().reshard, self.facts.dealt_groups)

    def make_lease_table(self) -> ports.LeaseTable:
        """Return an empty lease table."""
        return LeaseTable(renewal_fraction=RENEWED_PART, requires_nonces=self.settings.requires_nonces)

    def make_stream_worker(self, words: ports.StreamWords) -> ports.StreamWorker:
        """Return the writer of the words of prompts that are streamed from this rank."""
        return StreamWorker(words, self.settings.stream_slots)

    def make_stream_readers(self, stall_s: float) -> ports.StreamReaders:
        """Return the state machine of streams that this rank reads; `stall_s` without progress ends a stream."""
        return StreamReaders(stall_s)

    def make_worker_state(self) -> ports.WorkerState:
        """Return the state of this rank's hand-overs on its engine thread."""
        return WorkerState()

    def make_recorder(self) -> Recorder:
        """Return this rank's recorder."""
        return Recorder(ucx_tls=self.ucx_tls, is_lead=(self.facts.pp_rank, self.facts.tp_rank) == (0, 0))

    def make_transfer_thread(
        self,
        regions: Sequence[tuple[int, int, int, ports.MemoryKind]],
        *,
        on_result: Callable[[ports.TransferResult], None],
        on_quiet: Callable[[str], None],
        on_notification: Callable[[str, bytes], None],
        on_start: Callable[[], None] | None = None,
    ) -> ports.TransferThread:
        """Return this rank's transfer thread, not yet started; `on_start` is its first call."""
        # Without this, UCX keeps registrations of freed memory. Source: vLLM sets the same before NIXL is imported.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        facts, settings = self.facts, self.settings
        is_ucx_only = settings.backends == ("UCX",)
        backends = tuple(
            BackendOptions(name, num_threads=settings.num_threads if is_ucx_only else 0) for name in settings.backends
        )
        options = AgentOptions(
            backends=backends,
            # The first words belong to streams, the others to plain leases.
            fence_words=max(settings.fence_slots, 1) + (settings.stream_slots if settings.streaming else 0),
            stream_slots=settings.stream_slots if settings.streaming else 0,
            max_inflight_bytes=settings.max_inflight_bytes or None,
            progress_thread=_wants_progress_thread(settings.progress_thread),
        )
        return TransferThread(
            f"{facts.engine_id}/{facts.pp_rank}.{facts.tp_rank}/{secrets.token_hex(4)}",
            regions,
            on_result=on_result,
            on_quiet=on_quiet,
            on_notification=on_notification,
            options=options,
            thread_options=ThreadOptions(on_thread_start=_starting(on_start)),
            port_factory=self.port_factory or open_nixl,
        )

    def make_handshake_client(self) -> ports.HandshakeClient:
        """Return a client that checks peers against this engine's factors."""
        settings = self.settings
        policy = settings.policy
        offer = LocalOffer(
            factors={**self.facts.factors, **self.facts.extra_factors},
            policy=policy,
            capabilities=_CAPABILITIES,
        )
        attempt_s = settings.handshake_timeout_s
        timing = Timing(deadline_s=attempt_s * settings.handshake_attempts, attempt_s=attempt_s)
        return Client(offer, timing=timing, security=_client_security(settings))

    def encode_envelope(
        self,
        caches: Sequence[LayerCache],
        document: Mapping[str, object],
        agent: ports.TransferThread,
        *,
        generation: int,
    ) -> bytes:
        """Return this rank's envelope for the listener, with the number of this registration."""
        facts = self.facts
        fields = metadata_fields(
            facts,
            caches,
            agent_metadata=agent.agent_metadata(),
            # An engine without fence slots announces no fence array, so that its tickets are not refused for lacking a fence.
            fence=agent.fence if self.settings.fence_slots else None,
            geometry=pack_document(document),
            generation=generation,
            streams=agent.streams,
        )
        factors = {**facts.factors, **facts.extra_factors}
        rank = (facts.pp_rank, facts.tp_rank)
        return self.codec.encode_envelope(fields, factors, dialect=facts.connector_version, rank=rank)


def _client_security(settings: Settings) -> ClientSecurity | None:
    if not settings.side_channel_key:
        return None
    return ClientSecurity.read(settings.side_channel_key, settings.side_channel_server_key)


def _wants_progress_thread(choice: str) -> bool:
    if choice == "auto":
        return core_count() > _CORES_TO_SPARE
    return choice == "on"


def _starting(on_start: Callable[[], None] | None) -> Callable[[], None]:
    """Return the start function of a transfer thread: it leaves the engine thread's core, then calls `on_start`."""

    def start() -> None:
        use_allowed_cores()
        if on_start is not None:
            on_start()

    return start


def _group_config(group: CacheGroup, dcp: int) -> GroupConfig:
    if group.kind == "state":
        return GroupConfig("state", group.block_tokens, scratch_blocks=group.scratch_blocks)
    if group.kind == "sliding-window":
        return GroupConfig("window", group.block_tokens, window_tokens=group.window_tokens, dcp=dcp)
    return GroupConfig("full", group.block_tokens, dcp=dcp, chunk_tokens=group.chunk_tokens)


def _reserved_prefixes() -> tuple[str, ...]:
    """Return the id prefixes that no notification can name."""
    return Codec().reserved_prefixes


if TYPE_CHECKING:
    _client: Callable[..., ports.HandshakeClient] = Client
    _listener: Callable[..., ports.HandshakeListener] = Listener
    _codec: Callable[..., ports.Codec] = Codec
    _planner: Callable[..., ports.Planner] = Planner
    _plan: Callable[..., ports.PeerPlan] = Planner().plan
    _thread: Callable[..., ports.TransferThread] = TransferThread
