"""The connector class that vLLM loads; it forwards each hook to the scheduler or worker side of this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from vllm_adapter import __version__
from vllm_adapter.config.keys import load_settings
from vllm_adapter.config.start_checks import host_warnings, streaming_warnings
from vllm_adapter.host.cache_config import layer_caches
from vllm_adapter.host.device_streams import device_selector, request_amx, streams_of
from vllm_adapter.host.factory import register_connector
from vllm_adapter.host.metrics import PromMetrics, TransferStats
from vllm_adapter.host.requests import arrival_of, ending_of, scheduled_tokens
from vllm_adapter.host.shutdown import warn_of_short_drain, watch_for_shutdown
from vllm_adapter.host.torch_mirror import TorchMirror
from vllm_adapter.host.torch_pages import TorchPages
from vllm_adapter.host.vllm import (
    P2P_HITS,
    all_stages,
    engine_facts,
    extra_config,
    free_blocks,
    has_content_ids,
    info_of,
    labels_of,
    sleep_obstacle,
    start_line,
)
from vllm_adapter.observe.answers import StatusSocket
from vllm_adapter.observe.hand_overs import SpanWriter
from vllm_adapter.observe.recorder import tag_lines
from vllm_adapter.scheduler.ahead import ReadsHere
from vllm_adapter.steps import EndsAhead, RankRegistration, StepOrders, StepReport
from vllm_adapter.wiring import make_scheduler, make_worker, start_refusals

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.scheduler.chunks import ScheduledTokens
    from vllm_adapter.scheduler.side import SchedulerSide
    from vllm_adapter.worker.engine_thread import WorkerSide

__all__ = ["KVTransferConnector", "NixlConnector", "NixlPullConnector"]

_logger = init_logger("vllm.vllm_adapter")
_NOTHING = StepReport()
_ASKS_FOR_STEPS = hasattr(KVConnectorBase_V1, "has_pending_push_work")


@dataclass(slots=True)
class _Engine:
    """An engine whose halves may both live in this process, and share this.

    Attributes:
        is_whole: Whether both are in this process.
        reads: Ends of reads that are taken in ahead of their report.
        leases: The same of leases.
        worker: The worker's half, once it is made here.
        invalid_blocks: Blocks to report to the host as not loaded.
    """

    is_whole: bool = False
    reads: EndsAhead = field(default_factory=EndsAhead)
    leases: EndsAhead = field(default_factory=EndsAhead)
    worker: WorkerSide | None = None
    invalid_blocks: set[int] = field(default_factory=set[int])


_engines_here: dict[str, _Engine] = {}
"""By id, until the other half of the same engine is made in this process, too."""

# vLLM carries the messages between the two sides as they are: of its classes of metadata they need no more than the name.
KVConnectorMetadata.register(StepOrders)
KVConnectorHandshakeMetadata.register(RankRegistration)
KVConnectorWorkerMetadata.register(StepReport)


class KVTransferConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands finished prompts over between engines (pull) through NIXL.

    The engine creates one instance in the scheduler's process and one in each worker's process.
    """

    _cache_hit_source = P2P_HITS
    supports_divergent_local_hybrid_hits = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings, notes = load_settings(extra_config(vllm_config))
        is_worker = role == KVConnectorRole.WORKER
        facts = engine_facts(vllm_config, kv_cache_config, is_worker=False, settings=settings)
        # Before the facts of a worker, which waits for its other ranks and reads the weights.
        for refusal in start_refusals(settings, facts, is_worker=is_worker):
            raise refusal
        if is_worker:
            facts = engine_facts(vllm_config, kv_cache_config, is_worker=True, settings=settings)
        else:
            for warning in (*notes, *host_warnings(facts, settings), *streaming_warnings(settings)):
                _logger.warning(warning)
        self._has_content_ids = has_content_ids(vllm_config)
        self._facts = facts
        self._is_streaming = settings.streaming
        # A hand-over restores every group whose local hit lags behind that of full attention: states, which are read whole, but
        # no window and no second full group. With False the scheduler counts the prefix that all groups have in common.
        self.supports_divergent_local_hybrid_hits = facts.completes_uneven_hits(len(kv_cache_config.kv_cache_groups))
        self._report = _NOTHING
        # With more ranks an end is one only on all of them.
        self._engine = _engine_of(facts.engine_id) if facts.tp * facts.pp * facts.pcp == 1 else _Engine()
        spans = _span_writer(vllm_config, facts, is_worker=is_worker)
        # vLLM calls the hooks of this connector's own role alone.
        self._side: SchedulerSide | WorkerSide
        if is_worker:
            trace = spans.read_ended if spans is not None else None
            worker = self._side = self._worker_side = self._engine.worker = make_worker(facts, settings, trace=trace)
            answers = {"status": worker.status, "trace": worker.hand_overs}
            part = f"{facts.pp_rank}.{facts.tp_rank}"
            self._status = StatusSocket(part, answers, {**facts.identity, "adapter_version": __version__})
        else:
            labels = labels_of(vllm_config, settings)
            warn_of_short_drain(vllm_config, settings.kv_lease_duration)
            lease_ended = spans.lease_ended if spans is not None else None
            is_ending = watch_for_shutdown()
            side = make_scheduler(facts, settings, lease_ended=lease_ended, is_ending=is_ending)
            self._side = self._scheduler_side = side
            _logger.info(start_line(labels, facts))
            answers = {"status": side.status, "trace": side.hand_overs, "revoke": side.revoke_leases}
            self._status = StatusSocket("scheduler", answers, {**facts.identity, **labels, **settings.terms})
        self._status.open()

    # ---------------------------------------------------------------------------------------------- both

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for head-major pages, which can be split by head without copying; latent caches have no heads."""
        model = vllm_config.model_config
        return None if model.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return whether the cache's memory can be let go and registered again with these back ends."""
        settings, _ = load_settings(dict(kv_transfer_config.kv_connector_extra_config or {}))
        return not sleep_obstacle(settings)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return statistics that wrap `data`, or empty statistics."""
        return TransferStats(data=data) if data is not None else TransferStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Register the Prometheus metrics."""
        settings, _ = load_settings(extra_config(vllm_config))
        info = {index: info_of(vllm_config, settings, index) for index in per_engine_labelvalues}
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, info=info)

    def shutdown(self) -> None:
        """Stop this side; idempotent."""
        _engines_here.pop(self._facts.engine_id, None)
        self._status.close()
        self._side.close()

    # ---------------------------------------------------------------------------------------------- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Count free blocks in this pool before a prompt is read while its peer computes it; read short prompts into some."""
        self._scheduler_side.bind_free_blocks(gpu_block_pool.get_num_free_blocks)
        worker, cache = self._engine.worker, self._kv_cache_config
        # Its blocks are zeroed once they are given; or nothing asks for steps until they are free (`has_pending_push_work`).
        is_unfit = getattr(cache, "needs_kv_cache_zeroing", True) or not _ASKS_FOR_STEPS
        if worker is not None and not is_unfit and self._facts.reads_ahead(len(cache.kv_cache_groups)):
            self._scheduler_side.read_ahead(
                free_blocks(gpu_block_pool),
                ReadsHere(
                    worker.read_ahead,
                    worker.take_ends_ahead,
                    lambda: worker.generation,
                    self._engine.invalid_blocks,
                ),
            )

    def on_new_request(self, request: Request) -> None:
        """Admit a request that came with params; all others stay the engine's own business."""
        if request.kv_transfer_params is not None:
            self._scheduler_side.arrived(arrival_of(request, has_content_ids=self._has_content_ids))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that a peer holds beyond the local prefix hit; None: ask again later. This may read them."""
        return self._scheduler_side.external_tokens(request.request_id, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002
        """Return all transferable groups: a hand-over carries the request's own blocks.

        The host does not zero these blocks, because that would race the read, so the read writes every byte of them.
        """
        return self._facts.group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record a request's blocks; the blocks of requests without a hand-over are not even listed."""
        side = self._scheduler_side
        side.lacks_blocks = False
        if num_external_tokens or request.request_id in side.followed:
            side.allocated(
                request.request_id,
                blocks.get_block_ids(),
                blocks.get_unhashed_block_ids_all_groups(),
                external_tokens=num_external_tokens,
                preemptions=request.num_preemptions,
            )

    def has_pending_push_work(self) -> bool:
        """Let the host go on with its steps until the blocks that short reads took from its pool are free again."""
        ahead = self._scheduler_side.ahead
        return ahead is not None and bool(ahead.reads)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return this step's orders for the workers."""
        side, prompts = self._scheduler_side, self._scheduler_side.chunks.prompts
        scheduled: Iterable[ScheduledTokens] = ()
        if prompts:
            spans = side.chunks.span_tokens
            scheduled = scheduled_tokens(scheduler_output, self._facts.group_ids, spans, prompts)
        preempted = scheduler_output.preempted_req_ids or ()
        is_empty = not scheduler_output.num_scheduled_tokens
        return cast("KVConnectorMetadata", side.build_step(preempted, scheduled, is_empty=is_empty))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether a finished request's blocks are kept for a peer (one cache group)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether a finished request's blocks are kept for a peer."""
        if request.request_id not in self._scheduler_side.admitted:
            return False, None
        ending = ending_of(request, has_content_ids=self._has_content_ids)
        return self._scheduler_side.finished(ending, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the workers' reports."""
        meta: object = connector_output.kv_connector_worker_meta
        ours = meta if isinstance(meta, StepReport) else _NOTHING
        reads, leases = self._engine.reads, self._engine.leases
        if reads.reported or reads.ahead:  # the host takes in what is in its output after this call
            connector_output.finished_recving = reads.take(connector_output.finished_recving or set())
        if leases.reported or leases.ahead:
            connector_output.finished_sending = leases.take(connector_output.finished_sending or set())
        sent, received = connector_output.finished_sending or (), connector_output.finished_recving or ()
        if not (sent or received) and ours is _NOTHING:
            return  # as after most steps
        failed = getattr(connector_output, "failed_recving", None) or ()
        report = StepReport(sent, received, failed, ours.registrations, ours.failures, ours.stream_ends)
        self._scheduler_side.update_output(report)

    def reset_cache(self) -> bool:
        """Invalidate all KV computed so far: the weights have changed, or the memory is about to be discarded."""
        return self._scheduler_side.reset_cache()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Serve the ranks' metadata (one pipeline stage)."""
        self.set_xfer_handshake_metadata_pp_aware({(0, tp_rank): value for tp_rank, value in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve the ranks' metadata, by (pipeline stage, tensor-parallel rank).

        Beside other connectors the metadata may come from another connector; our workers are then asked for theirs.
        """
        ours = cast("dict[tuple[int, int], object]", metadata)
        registrations = {rank: value for rank, value in ours.items() if isinstance(value, RankRegistration)}
        envelopes = {rank: one.envelope for rank, one in registrations.items() if one.envelope is not None}
        generations = {registrations[rank].generation for rank in envelopes}
        self._scheduler_side.serve(envelopes, metadata, generations.pop() if len(generations) == 1 else None)

    # ---------------------------------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache tensors and prepare to serve and read peers."""
        select_device = device_selector(kv_caches.values())
        request_amx(kv_caches.values())
        mirror = TorchMirror(kv_caches) if self._facts.is_mirrored else None
        kv_caches = kv_caches if mirror is None else mirror.tensors
        caches = layer_caches(
            kv_caches, self._kv_cache_config, self._vllm_config.compilation_config.static_forward_context
        )
        pages = TorchPages(kv_caches.values())
        marks = streams_of(next(iter(kv_caches.values())).device)
        self._worker_side.register(
            caches, pages, mirror, select_device=select_device, marks=marks, all_stages=all_stages
        )

    def unregister_kv_caches(self) -> None:
        """End all transfers and deregister the cache's memory before the host unmaps it (sleep mode); idempotent."""
        self._worker_side.unregister()

    def restore_kv_caches(self) -> None:
        """Register the cache again after the host has mapped it again; do nothing if it was never deregistered."""
        self._worker_side.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's registration, whose envelope the side channel serves."""
        registration = self._worker_side.registration
        return cast("KVConnectorHandshakeMetadata", registration) if registration.envelope is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Write the fence and progress words of streams that must change before the step writes into any block."""
        orders: object = kv_connector_metadata
        if self._is_streaming and isinstance(orders, StepOrders):
            self._worker_side.before_forward(orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Hand this step's orders to the worker side."""
        orders: object = self._connector_metadata
        if isinstance(orders, StepOrders):
            self._worker_side.apply(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request's forward pass runs only once all its layers have been read."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: peers read the pages in place."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step computed to the mirror (host-buffer mode); publish the progress of streams."""
        orders: object = self._connector_metadata
        if (self._is_streaming or self._facts.is_mirrored) and isinstance(orders, StepOrders):
            self._worker_side.save(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the hand-overs that ended since the last step."""
        self._report = report = self._worker_side.take_report()
        if self._engine.is_whole and (report.received or report.sent):
            self._engine.reads.reported.update(set(report.received).difference(report.failed))
            if not has_kv_transfer_group() or get_kv_transfer_group() is self:
                # A connector around this one may hold the end of a lease back until the blocks are of no use to others, either.
                self._engine.leases.reported.update(report.sent)
        return KVConnectorTransferResults(set(report.sent), set(report.received), set(report.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that were answered as loaded and hold something else."""
        invalid = self._engine.invalid_blocks.copy()
        self._engine.invalid_blocks.clear()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the reports for the scheduler half alone: a registration, reasons of failed reads, and ends of streams."""
        report, self._report = self._report, _NOTHING
        if not (report.registrations or report.failures or report.stream_ends):
            # The host passes no empty report on, and the ends of the next step may go ahead with this one.
            return cast("KVConnectorWorkerMetadata", _NOTHING) if self._engine.is_whole else None
        return cast("KVConnectorWorkerMetadata", report)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the interval's statistics."""
        observed = self._side.take_stats()
        return TransferStats(data=observed) if observed is not None else None


def _engine_of(engine_id: str) -> _Engine:
    """Return what both halves of an engine share in this process; the first one makes it."""
    engine = _engines_here.pop(engine_id, None)
    if engine is None:
        engine = _engines_here[engine_id] = _Engine()
    else:
        engine.is_whole = True
    return engine


def _span_writer(config: VllmConfig, facts: EngineFacts, *, is_worker: bool) -> SpanWriter | None:
    """Return the span writer; None where the engine does not trace. OpenTelemetry is imported only where it traces."""
    if config.observability_config.otlp_traces_endpoint is None:
        return None
    return SpanWriter(facts.engine_id, (facts.pp_rank, facts.tp_rank) if is_worker else None)


NixlConnector = KVTransferConnector
NixlPullConnector = KVTransferConnector
"""The same connector under the two names of vLLM's own, the first of which all its checks look for in a configuration.

The class itself keeps its own name, and vLLM's factory knows it by that name: beside other connectors, vLLM looks up the class
of statistics that crossed processes by class name, and under `NixlConnector` it would find vLLM's own.
"""
register_connector("KVTransferConnector", __name__)
tag_lines()
