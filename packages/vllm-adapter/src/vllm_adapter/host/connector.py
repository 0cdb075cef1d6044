"""The connector that vLLM loads: forwards each hook to the side that lives in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_adapter.config import load_settings
from vllm_adapter.host.metadata import RankEnvelope, RegistrationReport, StepMetadata
from vllm_adapter.host.metrics import PromMetrics, TransferStats
from vllm_adapter.host.torch_mirror import TorchMirror
from vllm_adapter.host.torch_pages import TorchPages
from vllm_adapter.host.vllm import (
    P2P_HITS,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    engine_facts,
    extra_config,
    init_logger,
    is_tracing,
    layer_caches,
    load_failure_policy,
    wants_host_buffer,
)
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.wiring import SchedulerParts, WorkerParts
from vllm_adapter.worker.engine_thread import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.host.vllm import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorStats
    from vllm_adapter.observe.spans import SpanWriter

__all__ = ["KVTransferConnector", "NixlConnector"]

_logger = init_logger("vllm.vllm_adapter")


class KVTransferConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands finished prompts over between engines (pull), through NIXL.

    The engine loads one instance in the scheduler's process and one in each worker's.
    """

    _cache_hit_source = P2P_HITS

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings, notes = load_settings(extra_config(vllm_config))
        for note in notes:
            _logger.info(note)
        is_worker = role == KVConnectorRole.WORKER
        facts = engine_facts(vllm_config, kv_cache_config, is_worker=is_worker)
        self._cache_config = kv_cache_config
        self._has_mirror = wants_host_buffer(vllm_config)
        self._mirror: TorchMirror | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if is_worker:
            spans = _span_writer(vllm_config, facts, (facts.pp_rank, facts.tp_rank))
            trace = spans.read_ended if spans is not None else None
            parts = WorkerParts(facts, settings)
            self._worker = WorkerSide(facts, parts, trace=trace)
        else:
            spans = _span_writer(vllm_config, facts, None)
            policy = load_failure_policy(vllm_config)
            self._scheduler = SchedulerSide(
                facts,
                SchedulerParts(facts, settings, policy, self._has_mirror),
                lease_ended=spans.lease_ended if spans is not None else None,
            )

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A hand-over restores every group of the request, so a lagging local state does not matter."""
        return True

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a scheduler hook was called on the worker's connector")
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a worker hook was called on the scheduler's connector")
        return self._worker

    # ---------------------------------------------------------------------------------------------- both

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for head-major pages, which split by head without copying; latent caches have no heads."""
        model = vllm_config.model_config
        return None if model.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, config: object) -> bool:  # noqa: ARG003  (the same for all of them)
        """Tell the host that the cache's memory can be given back and registered anew."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return statistics over `data`, or empty ones."""
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
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop this side; idempotent."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # ---------------------------------------------------------------------------------------------- scheduler

    def on_new_request(self, request: Request) -> None:
        """Admit a request."""
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that a peer holds beyond the local prefix hit; free of side effects."""
        return self._scheduler_side.external_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002
        """Return all transferable groups: a hand-over carries the request's own blocks."""
        return self._scheduler_side.group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note a request's blocks."""
        self._scheduler_side.after_allocation(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return this step's orders for the workers."""
        return self._scheduler_side.build_step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Decide what becomes of a finished request's blocks (one cache group)."""
        return self._scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide what becomes of a finished request's blocks."""
        return self._scheduler_side.request_finished(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        self._scheduler_side.update_output(connector_output)

    def reset_cache(self) -> bool:
        """Void what was computed or promised before now: other weights, or memory that is about to be discarded."""
        return self._scheduler_side.reset_cache()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Serve the ranks' metadata (one pipeline stage)."""
        self._scheduler_side.serve({(0, tp_rank): value for tp_rank, value in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve the ranks' metadata, by (pipeline stage, tensor-parallel rank)."""
        self._scheduler_side.serve(metadata)

    # ---------------------------------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache tensors and get ready for peers."""
        if self._has_mirror:
            self._mirror = TorchMirror(kv_caches)
            kv_caches = self._mirror.tensors
        caches = layer_caches(kv_caches, self._cache_config)
        self._worker_side.register(caches, TorchPages(kv_caches.values()), self._mirror)

    def unregister_kv_caches(self) -> None:
        """End all transfers and give the cache's memory back, before the host unmaps it (sleep mode); idempotent."""
        self._worker_side.unregister()

    def restore_kv_caches(self) -> None:
        """Register the cache anew after the host has mapped it again; does nothing if it was never given back."""
        self._worker_side.restore()

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Take the platform's operation for copies between device and host."""
        if self._mirror is not None:
            self._mirror.use(copy_operation)

    def get_handshake_metadata(self) -> RankEnvelope | None:
        """Return what the side channel serves for this rank."""
        envelope = self._worker_side.envelope
        return RankEnvelope(envelope) if envelope is not None else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Hand this step's orders to the transfer thread."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self._worker_side.start_step(
                metadata.plan,
                metadata.orphans,
                metadata.links,
                restarted=metadata.restarted,
                void_reads=metadata.void_reads,
                question=metadata.question,
            )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request's forward only runs once all its layers are there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: readers take the pages as they are."""

    def wait_for_save(self) -> None:
        """Copy what this step computed to the mirror (host-buffer mode); else readers take the pages as they are."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self._worker_side.save(metadata.plan, metadata.complete)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return what ended since the last step."""
        results = self._worker_side.take_results()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def build_connector_worker_meta(self) -> RegistrationReport | None:
        """Return what this rank has registered, if the scheduler must know."""
        side = self._worker_side
        said = side.take_report()
        return RegistrationReport({side.rank: said}) if said is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the interval's statistics."""
        side = self._worker or self._scheduler
        observed = side.take_stats() if side is not None else None
        return TransferStats(data=observed) if observed is not None else None


class NixlConnector(KVTransferConnector):
    """The same connector under the name that vLLM's own checks look for."""


def _span_writer(config: VllmConfig, facts: EngineFacts, rank: tuple[int, int] | None) -> SpanWriter | None:
    """Return what writes spans, None where the engine does not trace; OpenTelemetry is only imported where it does."""
    if not is_tracing(config):
        return None
    from vllm_adapter.observe.spans import SpanWriter

    return SpanWriter(facts.engine_id, rank)
