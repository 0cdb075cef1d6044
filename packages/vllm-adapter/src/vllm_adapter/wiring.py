"""Assembly of the two sides of the connector: the only module that imports the concrete classes of the four libraries.

The lines at the end bind each class of a service to the Protocol that it implements, so that drift is a type error which names
the missing member.
"""

from __future__ import annotations

import os
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Literal

from kv_handshake import Client, Codec, Listener, LocalOffer, Timing
from kv_handshake.security import ClientSecurity, ServerSecurity
from kv_nixl_agent import (
    AgentOptions,
    BackendOptions,
    PeerSpec,
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
from kv_topology import CostModel, Planner, reshard
from vllm_adapter import ports
from vllm_adapter.cache.geometry import local_document, metadata_fields, registration_ranges
from vllm_adapter.cache.vllm_peer import PeerGeometry, pack_document
from vllm_adapter.config.keys import PERMUTE_GB_S
from vllm_adapter.config.secrets import configured_secrets
from vllm_adapter.cores import has_cores_to_spare, use_allowed_cores
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.scheduler.streams import Streaming
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.registration import Registration, memory_kind, stream_shape
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.planner import PeerPlanner
from vllm_adapter.worker.transfer.reads import ReadCoordinator
from vllm_adapter.worker.transfer.records import TransferParts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_nixl_agent import PortFactory
    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache
    from vllm_adapter.config import Settings
    from vllm_adapter.steps import ReadEnd, TraceLink
    from vllm_adapter.worker.registration import RegistrationEvents

__all__ = ["make_scheduler", "make_worker", "prefill_request_params", "prompt_digest"]

_SEED_BITS = 52
_NULL_BLOCK = 0
"""Block id that stands for "no block here". Source: vLLM's block pool reserves its first block for that."""

_CAPABILITIES: Mapping[str, Literal["supported"]] = {"nonce": "supported", "prompt-digest": "supported"}
"""Capabilities in our envelopes: notifications with a nonce are understood, and tickets carry a digest of their prompt."""

_STREAMING_CAPABILITIES: Mapping[str, Literal["supported"]] = {**_CAPABILITIES, "ask": "supported"}

_TICK_S = 0.05
_LOOK_AFTER_S = 1.0


def make_scheduler(
    facts: EngineFacts,
    settings: Settings,
    *,
    now_s: Callable[[], float] = time.monotonic,
    lease_ended: Callable[[TraceLink, str, int], None] | None = None,
    is_ending: Callable[[], bool] = lambda: False,
) -> SchedulerSide:
    """Return the scheduler's side of an engine; its listener is bound by `serve`.

    Args:
        facts: This engine.
        settings: The connector's configuration.
        now_s: The monotonic clock.
        lease_ended: Called with (link, request id, Unix time of the grant in ns) at the end of a traced lease.
        is_ending: Tells whether the host was told to end.

    Raises:
        ConfigurationError: For the files of the side channel's keys or of the fleet's secrets.
    """
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
        uses_host_buffer=facts.is_mirrored,
        peer_networks=settings.remote_hosts,
        peer_ports=settings.peer_port_range,
        unsealed_networks=settings.unsigned_hosts,
        reads=facts.reads or settings.bidirectional_kv_xfer,
        read_hold_steps=facts.read_hold_steps,
        load_failure_policy="recompute" if facts.load_failure_policy == "recompute" else "fail",
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
        reserved_id_prefixes=Codec().reserved_prefixes,
    )
    state, security = SchedulerState(config), None
    if settings.side_channel_key:
        security = ServerSecurity.read(settings.side_channel_key, settings.side_channel_clients)
    listener = Listener(*(facts.listens_on or (facts.host, facts.port)), security=security)
    fleet_secrets = configured_secrets(settings)
    streaming = None
    if state.streams is not None:
        # Last, because it starts a thread: what fails before it leaves none behind.
        client = Client(LocalOffer(policy="off"), security=_client_security(settings))
        streaming = partial(
            Streaming, facts, state.streams, Codec(), client, listener, fleet_secrets, settings.ask_wait_s
        )
    return SchedulerSide(
        facts,
        state,
        listener,
        secrets=fleet_secrets,
        streaming=streaming,
        now_s=now_s,
        lease_ended=lease_ended,
        is_ending=is_ending,
    )


def make_worker(
    facts: EngineFacts,
    settings: Settings,
    *,
    port_factory: PortFactory | None = None,
    trace: Callable[[TraceLink, ReadEnd], None] | None = None,
) -> WorkerSide:
    """Return the side of one worker; it has no memory before `register`.

    Args:
        facts: This engine and rank.
        settings: The connector's configuration.
        port_factory: Creates the NIXL port; None for the real one.
        trace: Called at the end of each traced read.
    """
    rank = facts.pp_rank, facts.tp_rank
    recorder = Recorder(ucx_tls=os.environ.get("UCX_TLS") or "unset", is_lead=rank == (0, 0))
    open_registration = partial(_open_registration, facts, settings, recorder, port_factory or open_nixl)
    return WorkerSide(facts, recorder, open_registration, WorkerState(), is_streaming=settings.streaming, trace=trace)


def _open_registration(
    facts: EngineFacts,
    settings: Settings,
    recorder: Recorder,
    port_factory: PortFactory,
    caches: Sequence[LayerCache],
    events: RegistrationEvents,
    *,
    generation: int,
    can_convert: bool,
) -> Registration:
    """Register a rank's memory, start its transfer thread and encode its side-channel envelope.

    Args:
        facts: This engine and rank.
        settings: The connector's configuration.
        recorder: Takes observations and log lines.
        port_factory: Creates the NIXL port.
        caches: This rank's layers, as peers are to read and write them.
        events: Callbacks for the ends of reads, leases and streams, invoked on the transfer thread.
        generation: Number of this registration.
        can_convert: Whether received pages can be permuted.

    Raises:
        AdapterError: `mixed-memory-kinds`, or as `local_document`.
    """
    document, kind = local_document(facts, caches), memory_kind(caches)
    cost = CostModel(permute_gb_s=PERMUTE_GB_S[kind])
    planner = PeerPlanner(
        document,
        PeerGeometry(reshard, facts.dealt_groups),
        Planner(staging=settings.receive_conversion if can_convert else "never", cost=cost),
        kind,
    )

    # The thread calls these only after it was started, when both coordinators exist.
    def on_result(result: ports.TransferResult) -> None:
        reads.transfer_ended(result)

    def on_quiet(transfer_id: str) -> None:
        reads.memory_quiet(transfer_id)

    def on_notification(agent_name: str, payload: bytes) -> None:
        leases.notified(agent_name, payload)

    def on_start() -> None:
        use_allowed_cores()  # it inherits the one core of the engine thread
        if events.thread_started is not None:
            events.thread_started()

    thread = TransferThread(
        f"{facts.engine_id}/{facts.pp_rank}.{facts.tp_rank}/{secrets.token_hex(4)}",
        registration_ranges(caches),
        on_result=on_result,
        on_quiet=on_quiet,
        on_notification=on_notification,
        options=_agent_options(settings),
        thread_options=ThreadOptions(on_thread_start=on_start),
        port_factory=port_factory,
    )
    attempt_s = settings.handshake_timeout_s
    handshakes = Client(
        LocalOffer(
            factors={**facts.factors, **facts.extra_factors}, policy=settings.policy, capabilities=_CAPABILITIES
        ),
        timing=Timing(deadline_s=attempt_s * settings.handshake_attempts, attempt_s=attempt_s),
        security=_client_security(settings),
    )
    codec = Codec(capabilities=_STREAMING_CAPABILITIES if settings.streaming else _CAPABILITIES)
    dialect = settings.ticket_dialect or facts.connector_version
    shared = TransferParts(
        thread, handshakes, codec, recorder, time.monotonic, facts.engine_id, PeerSpec, settings, dialect
    )
    streams = (StreamReaders(settings.read_timeout_s), stream_shape(facts)) if settings.streaming else None
    reads = ReadCoordinator(shared, planner, events.read_ended, streams)
    table = LeaseTable(requires_nonces=settings.requires_nonces)
    leases = LeaseKeeper(shared, table, events.sent)
    try:
        thread.start()
        words = thread.stream_words
        stream_worker = None if words is None else StreamWorker(words, settings.stream_slots)
        if stream_worker is not None:
            leases.use_streams(stream_worker, settings.stream_slots)
        thread.call_every(_TICK_S, leases.tick)
        thread.call_every(_LOOK_AFTER_S, reads.look_after)
        has_fence = settings.fence_slots > 0
        envelope = _encode_envelope(codec, facts, caches, document, thread, generation=generation, has_fence=has_fence)
    except BaseException:
        handshakes.close()
        thread.close()
        raise
    recorder.info(
        "registered",
        f"engine {facts.engine_id} rank {facts.tp_rank}: {len(caches)} layers registered for hand-over, "
        f"fence of {thread.fence[2]} words",
    )
    return Registration(thread, handshakes, reads, leases, recorder, envelope, stream_worker)


def _encode_envelope(
    codec: ports.Codec,
    facts: EngineFacts,
    caches: Sequence[LayerCache],
    document: GeometryDocument,
    agent: ports.TransferThread,
    *,
    generation: int,
    has_fence: bool,
) -> bytes:
    fields = metadata_fields(
        facts,
        caches,
        agent_metadata=agent.agent_metadata(),
        # An engine without fence slots announces no fence array, so that its tickets are not refused for lacking a fence.
        fence=agent.fence if has_fence else None,
        geometry=pack_document(document),
        generation=generation,
        streams=agent.streams,
    )
    factors = {**facts.factors, **facts.extra_factors}
    return codec.encode_envelope(fields, factors, dialect=facts.connector_version, rank=(facts.pp_rank, facts.tp_rank))


def _agent_options(settings: Settings) -> AgentOptions:
    stream_slots = settings.stream_slots if settings.streaming else 0
    threads = settings.num_threads if settings.backends == ("UCX",) else 0
    has_progress_thread = settings.progress_thread == "on" or (
        settings.progress_thread == "auto" and has_cores_to_spare()
    )
    return AgentOptions(
        backends=tuple(BackendOptions(name, num_threads=threads) for name in settings.backends),
        # The first words belong to streams, the others to plain leases.
        fence_words=max(settings.fence_slots, 1) + stream_slots,
        stream_slots=stream_slots,
        max_inflight_bytes=settings.max_inflight_bytes or None,
        progress_thread=has_progress_thread,
    )


def _client_security(settings: Settings) -> ClientSecurity | None:
    if not settings.side_channel_key:
        return None
    return ClientSecurity.read(settings.side_channel_key, settings.side_channel_server_key)


def _group_config(group: CacheGroup, dcp: int) -> GroupConfig:
    if group.kind == "state":
        return GroupConfig("state", group.block_tokens, scratch_blocks=group.scratch_blocks)
    if group.kind == "sliding-window":
        return GroupConfig("window", group.block_tokens, window_tokens=group.window_tokens, dcp=dcp)
    return GroupConfig("full", group.block_tokens, dcp=dcp, chunk_tokens=group.chunk_tokens)


if TYPE_CHECKING:
    _client: Callable[..., ports.HandshakeClient] = Client
    _listener: Callable[..., ports.HandshakeListener] = Listener
    _thread: Callable[..., ports.TransferThread] = TransferThread
