"""Construction of the connector's sides from vLLM's configuration: one in the scheduler's process, one in each worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_adapter.host.shutdown import ShutdownWatch, warn_of_short_drain
from vllm_adapter.host.situation import labels_of, start_line
from vllm_adapter.host.vllm import init_logger, is_tracing, load_failure_policy, may_read, read_hold_steps
from vllm_adapter.observe.spans import SpanWriter
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.wiring import SchedulerParts, WorkerParts
from vllm_adapter.worker.engine_thread import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config import Settings

__all__ = ["make_scheduler_side", "make_worker_side"]

_logger = init_logger("vllm.vllm_adapter")


def make_worker_side(config: VllmConfig, facts: EngineFacts, settings: Settings) -> WorkerSide:
    """Return the side of one worker; it has no memory before `register`."""
    spans = _span_writer(config, facts, (facts.pp_rank, facts.tp_rank))
    return WorkerSide(facts, WorkerParts(facts, settings), trace=spans.read_ended if spans is not None else None)


def make_scheduler_side(
    config: VllmConfig, facts: EngineFacts, settings: Settings, *, has_mirror: bool
) -> SchedulerSide:
    """Return the scheduler's side, log the start of this engine, and watch for the host's shutdown.

    Args:
        config: vLLM's configuration.
        facts: This engine, as the connector sees it.
        settings: The connector's own configuration.
        has_mirror: Whether the workers mirror their caches in host memory.
    """
    spans = _span_writer(config, facts, None)
    policy = load_failure_policy(config)
    watch = ShutdownWatch()
    watch.install()
    warn_of_short_drain(config, settings.kv_lease_duration)
    _logger.info(start_line(labels_of(config, settings), facts))
    reads = may_read(config) or settings.bidirectional_kv_xfer
    return SchedulerSide(
        facts,
        SchedulerParts(facts, settings, policy, has_mirror, reads, read_hold_steps(config)),
        lease_ended=spans.lease_ended if spans is not None else None,
        is_ending=watch.is_requested,
    )


def _span_writer(config: VllmConfig, facts: EngineFacts, rank: tuple[int, int] | None) -> SpanWriter | None:
    """Return the span writer; None where the engine does not trace. OpenTelemetry is imported only where it traces."""
    if not is_tracing(config):
        return None
    return SpanWriter(facts.engine_id, rank)
