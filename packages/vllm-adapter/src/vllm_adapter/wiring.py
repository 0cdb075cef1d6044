"""Assembly of the two sides of the connector: the only module that imports the concrete classes of the four libraries.

The lines at the end bind each class of a service to the Protocol that it implements, so that drift is a type error which names
the missing member.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from kv_handshake import Client, Codec, HandshakeError, Listener, LocalOffer, Timing, TransportError
from kv_handshake.security import ClientSecurity, ServerSecurity
from kv_nixl_agent import (
    AgentError,
    AgentOptions,
    BackendOptions,
    PeerSpec,
    ThreadOptions,
    TransferThread,
    open_nixl,
    try_backends,
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
from vllm_adapter.cache.geometry import metadata_fields, registration_ranges
from vllm_adapter.cache.vllm_peer import PeerPlanner, pack_document
from vllm_adapter.config.keys import PERMUTE_GB_S, declared_factors
from vllm_adapter.config.secrets import configured_secrets
from vllm_adapter.config.start_checks import host_refusals
from vllm_adapter.cores import has_cores_to_spare, use_allowed_cores
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.scheduler.streams import Streaming
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.registration import Registration, memory_kind, stream_shape
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.reads import ReadCoordinator
from vllm_adapter.worker.transfer.records import TransferParts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kv_nixl_agent import PortFactory
    from vllm_adapter.cache.facts import CacheGroup, EngineFacts
    from vllm_adapter.config import Settings
    from vllm_adapter.steps import ReadEnd, TraceLink
    from vllm_adapter.worker.registration import RankCaches, RegistrationEvents

__all__ = ["make_scheduler", "make_worker", "prefill_request_params", "prompt_digest", "start_refusals"]

_SEED_BITS = 52
_PORT_TRIES = 20
_NULL_BLOCK = 0
"""Block id that stands for "no block here". Source: vLLM's block pool reserves its first block for that."""

_CAPABILITIES: Mapping[str, Literal["supported"]] = {"nonce": "supported", "prompt-digest": "supported"}
"""Capabilities in our envelopes: notifications with a nonce are understood, and tickets carry a digest of their prompt."""

_STREAMING_CAPABILITIES: Mapping[str, Literal["supported"]] = {**_CAPABILITIES, "ask": "supported"}

_TICK_S = 0.05
_MAINTAIN_S = 1.0


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
        is_ending: Returns whether the host was asked to end.

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
        reads=facts.kv_role != "kv_producer" or settings.bidirectional_kv_xfer,
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
    state, listener = SchedulerState(config), _listener_of(facts, settings)
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
    recorder = Recorder(ucx_tls=os.environ.get("UCX_TLS") or "unset", is_lead=facts.pp_rank == facts.tp_rank == 0)
    open_registration = partial(_open_registration, facts, settings, recorder, port_factory or open_nixl)
    return WorkerSide(facts, recorder, open_registration, WorkerState(), is_streaming=settings.streaming, trace=trace)


def _open_registration(
    facts: EngineFacts,
    settings: Settings,
    recorder: Recorder,
    port_factory: PortFactory,
    rank_caches: RankCaches,
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
        rank_caches: This rank's layers and their geometry.
        events: Callbacks for the ends of reads, leases and streams, invoked on the transfer thread.
        generation: Number of this registration.
        can_convert: Whether received pages can be permuted.

    Raises:
        AdapterError: `mixed-memory-kinds`.
    """
    rank = facts.pp_rank, facts.tp_rank
    (caches, document, stages), kind = rank_caches, memory_kind(rank_caches.layers)
    cost = CostModel(permute_gb_s=PERMUTE_GB_S[kind])
    planner = PeerPlanner(
        document,
        facts.dealt_groups,
        reshard,
        Planner(staging=settings.receive_conversion if can_convert else "never", cost=cost),
        kind,
        stages,
        release="" if settings.policy == "off" else str(facts.factors.get("vllm_version", "")),
        drafts_states=facts.is_speculative and facts.has_state,
        cache_dtype=facts.factors.get("cache_dtype"),
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
        options=_agent_options(settings, sleeps=facts.has_sleep_mode),
        thread_options=ThreadOptions(on_thread_start=on_start),
        port_factory=port_factory,
    )
    attempt_s, factors = settings.handshake_timeout_s, {**facts.factors, **facts.extra_factors}
    handshakes = Client(
        LocalOffer(factors, settings.policy, _CAPABILITIES, declared_factors(settings.policy, settings.may_differ)),
        timing=Timing(deadline_s=attempt_s * settings.handshake_attempts, attempt_s=attempt_s),
        security=_client_security(settings),
    )
    codec = Codec(capabilities=_STREAMING_CAPABILITIES if settings.streaming else _CAPABILITIES)
    dialect = facts.connector_version
    shared = TransferParts(
        thread, handshakes, codec, recorder, time.monotonic, facts.engine_id, PeerSpec, settings, dialect
    )
    readers = StreamReaders(settings.read_timeout_s)
    reads = ReadCoordinator(shared, planner, events.read_ended, readers, stream_shape(facts))
    table = LeaseTable(requires_nonces=settings.requires_nonces)
    leases = LeaseKeeper(shared, table, events.sent)
    try:
        thread.start()
        words = thread.stream_words
        leases.stream_worker = None if words is None else StreamWorker(words, settings.stream_slots)
        thread.call_every(_TICK_S, leases.tick)
        thread.call_every(_MAINTAIN_S, reads.maintain)
        fields = {
            **metadata_fields(facts, caches),
            "agent_metadata": thread.agent_metadata(),
            "fence": thread.fence,
            "streams": thread.streams,
            "geometry": pack_document(document),
            "generation": generation,
        }
        envelope = codec.encode_envelope(fields, factors, dialect=dialect, rank=rank)
    except BaseException:
        handshakes.close()
        thread.close()
        raise
    recorder.info(
        "registered",
        f"engine {facts.name} rank {facts.tp_rank}: {len(caches)} layers registered for hand-over, "
        f"fence of {thread.fence[2]} words",
    )
    return Registration(thread, handshakes, reads, leases, recorder, envelope)


def _agent_options(settings: Settings, *, sleeps: bool) -> AgentOptions:
    # Memory that the host may release must not stay pinned in a cache, nor mapped by a peer.
    engine_config = {"RCACHE_ENABLE": "n", "TLS": "^cuda_ipc"} if sleeps else {}
    stream_slots = settings.stream_slots if settings.streaming else 0
    # As with vLLM's own connector threads are the default of UCX without other back ends.
    threads = settings.num_threads if [*settings.backends] == ["UCX"] else 0
    has_progress_thread = settings.progress_thread == "on" or (
        settings.progress_thread == "auto" and has_cores_to_spare()
    )
    return AgentOptions(
        backends=tuple(
            BackendOptions(name, num_threads=threads, engine_config=engine_config, parameters=given)
            for name, given in settings.backend_parameters.items()
        ),
        # The first words belong to streams, the others to plain leases.
        fence_words=settings.fence_slots + stream_slots,
        stream_slots=stream_slots,
        max_inflight_bytes=settings.max_inflight_bytes or None,
        progress_thread=has_progress_thread,
    )


def start_refusals(
    settings: Settings, facts: EngineFacts | None = None, *, is_worker: bool = False, binds: bool = False
) -> tuple[Exception, ...]:
    """Return each coded error by which an engine with this configuration does not start, as far as no device is needed.

    Args:
        settings: The connector's configuration, each key checked.
        facts: The engine; None if only its configuration is known.
        is_worker: Whether this process only reads from peers: it may be on a host without the fleet's secrets.
        binds: Whether to try NIXL back ends other than the default, and the side channel's port: on its host alone, before the
            engine listens on it. A taken one is tried again for 5 s, in which an engine before this one may end.
    """
    checks: list[Callable[[], object]] = [partial(_client_security, settings)]
    if not is_worker:
        checks += [partial(_server_security, settings), partial(configured_secrets, settings)]
    found: dict[str, Exception] = {}
    if facts is not None:
        found = {str(each): each for each in host_refusals(facts, settings)}
        checks += [partial(_try_port, facts, settings)] if binds and not found else []
    if binds and settings.backends != ("UCX",):
        options = _agent_options(settings, sleeps=facts is not None and facts.has_sleep_mode)
        named = [(each.name, each.as_parameters()) for each in options.backends]
        checks.append(partial(try_backends, named))
    for check in checks:
        try:
            check()
        except (AdapterError, AgentError, HandshakeError) as error:
            found.setdefault(str(error), error)  # two checks read one key file
    return tuple(found.values())


def _try_port(facts: EngineFacts, settings: Settings) -> None:
    for _ in range(_PORT_TRIES):
        with suppress(TransportError), _listener_of(facts, settings):
            return
        time.sleep(0.25)
    with _listener_of(facts, settings):
        pass


def _listener_of(facts: EngineFacts, settings: Settings) -> Listener:
    place, security = facts.listens_on or (facts.host, facts.port), _server_security(settings)
    return Listener(*place, splits_blocks=facts.splits_blocks, security=security)


def _server_security(settings: Settings) -> ServerSecurity | None:
    if not settings.side_channel_key:
        return None
    return ServerSecurity.read(settings.side_channel_key, settings.client_keys)


def _client_security(settings: Settings) -> ClientSecurity | None:
    if not settings.side_channel_key:
        return None
    return ClientSecurity.read(settings.side_channel_key, settings.server_keys)


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
