"""The connector in the scheduler's process: vLLM's hooks in, decisions of the request machines out."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

from vllm_adapter.host.metadata import RankEnvelope, RegistrationReport, StepMetadata
from vllm_adapter.host.vllm import drop_prompt_tail, end_reason, init_logger, select_groups
from vllm_adapter.observe.recorder import StatsBuffer
from vllm_adapter.observe.trace_links import TraceLinks
from vllm_adapter.scheduler.prefill_chunks import PrefillChunks, ScheduledTokens
from vllm_adapter.scheduler.served_registration import ServedRegistration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.trace_links import TraceLink
    from vllm_adapter.ports import FinishDecision, HandshakeListener
    from vllm_adapter.scheduler.prefill_chunks import PrefillChunk
    from vllm_adapter.wiring import SchedulerParts

__all__ = ["SchedulerSide"]

_logger = init_logger("vllm.vllm_adapter")
_T = TypeVar("_T")
_COUNT_EVERY_S = 1.0
"""Live requests are counted by a scan, so not every step."""


@final
class SchedulerSide:
    """Drives the request machines from vLLM's scheduler hooks and serves this engine's metadata to peers.

    No hook raises: what the machines refuse is logged, and the request goes on without a hand-over. A request that the host
    has already parked for a read that was then refused is reported as failed by the workers, so that it never hangs.
    """

    def __init__(
        self,
        facts: EngineFacts,
        parts: SchedulerParts,
        now_s: Callable[[], float] = time.monotonic,
        *,
        lease_ended: Callable[[TraceLink, str, int], None] | None = None,
    ) -> None:
        self._facts = facts
        self._state = parts.make_state()
        self._make_listener = parts.make_listener
        self._listener: HandshakeListener | None = None
        self._now_s = now_s
        self._chunks = PrefillChunks(facts.groups, facts.dcp) if parts.uses_host_buffer else None
        self._links = TraceLinks(lease_ended)
        self._served = ServedRegistration(facts.generation)
        self._allocated: dict[str, Callable[[], bool]] = {}
        self._restarted: list[str] = []
        self._void_reads: tuple[str, ...] = ()
        self._stats = StatsBuffer()
        self._counted: Mapping[str, int] = {}
        self._counted_s = -_COUNT_EVERY_S
        self._unsaved: set[str] = set()
        self._orphans: list[str] = []
        self._reported_orphans: set[str] = set()

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Numbers of the transferable groups among all of the scheduler's."""
        return self._facts.group_ids

    def on_new_request(self, request: Request) -> None:
        """Admit a request; a refused ticket means local prefill and one logged reason."""
        arrive = partial(
            self._state.arrive,
            request.request_id,
            request.kv_transfer_params,
            prompt_tokens=request.num_prompt_tokens,
            now_s=self._now_s(),
        )
        admission = _attempt("arrival", request.request_id, arrive)
        if admission is None:
            return
        self._links.arrived(request.request_id, request.trace_headers)
        if admission.rejected_code:
            self._stats.observe("ticket_refusal_codes", admission.rejected_code)
            _logger.warning(
                "request %s: its hand-off ticket is refused and the prompt computed here (%s: %s)",
                request.request_id,
                admission.rejected_code,
                admission.rejected_message,
            )
        if admission.truncate_tokens and not drop_prompt_tail(request, admission.truncate_tokens):
            _logger.warning("request %s: its prompt could not be shortened for the hand-off", request.request_id)
        if self._chunks is not None and admission.role == "producer":
            self._chunks.watch(request.request_id, request.num_prompt_tokens)

    def external_tokens(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Answer `get_num_new_matched_tokens`: tokens to load beyond the local prefix hit, and that they load meanwhile."""
        ask = partial(self._state.external_tokens, request.request_id, computed_tokens=computed_tokens)
        tokens = _attempt("prefix lookup", request.request_id, ask) or 0
        return tokens, tokens > 0

    def after_allocation(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Note the blocks that the scheduler gave to a request."""
        note = partial(
            self._allocate,
            request.request_id,
            block_ids=blocks.get_block_ids(),
            new_block_ids=blocks.get_unhashed_block_ids_all_groups(),
            external_tokens=external_tokens,
        )
        if request.num_preemptions:
            self._allocated[request.request_id] = note
            self._restarted.append(request.request_id)
        if _attempt("allocation", request.request_id, note) is None and external_tokens:
            self._orphans.append(request.request_id)

    def _allocate(self, request_id: str, *, block_ids: object, new_block_ids: object, external_tokens: int) -> bool:
        self._state.allocate(
            request_id,
            block_ids=select_groups(self._facts, block_ids),
            new_block_ids=select_groups(self._facts, new_block_ids),
            external_tokens=external_tokens,
            now_s=self._now_s(),
        )
        return True

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what this step tells the workers."""
        now_s = self._now_s()
        for request_id in output.preempted_req_ids or ():
            _attempt("preemption", request_id, partial(self._state.preempt, request_id, now_s=now_s))
            if request_id in self._allocated:  # a reset preempts before the step, which has started it again meanwhile
                _attempt("allocation", request_id, self._allocated[request_id])
        self._allocated.clear()
        complete = self._order_saves(output)
        orphans, self._orphans = tuple(self._orphans), []
        self._reported_orphans.update(orphans)
        plan = self._state.take_step_plan(now_s=now_s)
        if plan.heartbeats:
            self._stats.observe("heartbeat_delay", self._state.heartbeat_delay_s)
        restarted, self._restarted = tuple(self._restarted), []
        void_reads, self._void_reads = self._void_reads, ()
        return StepMetadata(
            plan,
            orphans,
            complete,
            self._links.of_reads(plan),
            restarted=restarted,
            void_reads=void_reads,
            question=self._served.question,
        )

    def _order_saves(self, output: SchedulerOutput) -> tuple[str, ...]:
        """Order this step's copies to the mirror (host-buffer mode); return the requests whose prompt is then complete."""
        if self._chunks is None:
            return ()
        complete: list[str] = []
        for step in _scheduled(self._facts, output):
            chunk = self._chunks.scheduled(step)
            if chunk is None:
                continue
            note = partial(self._save, chunk)
            if _attempt("copy to the mirror", step.request_id, note) is None:
                self._unsaved.add(step.request_id)
            elif chunk.is_prompt_complete:
                complete.append(step.request_id)
        return tuple(complete)

    def _save(self, chunk: PrefillChunk) -> bool:
        self._state.scheduled(
            chunk.request_id, new_block_ids=chunk.block_ids, is_prompt_complete=chunk.is_prompt_complete
        )
        return True

    def request_finished(self, request: Request, block_ids: object) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether a finished request's blocks stay for a peer, and what its response says."""
        decision = _attempt("end", request.request_id, partial(self._finish, request, block_ids))
        self._links.finished(request.request_id, keeps_blocks=decision is not None and decision.keep_blocks)
        if decision is None:
            return False, None
        return decision.keep_blocks, dict(decision.params) if decision.params is not None else None

    def _finish(self, request: Request, block_ids: object) -> FinishDecision:
        is_unsaved = request.request_id in self._unsaved
        self._unsaved.discard(request.request_id)
        if self._chunks is not None:
            self._chunks.forget(request.request_id)
        return self._state.finish(
            request.request_id,
            reason=end_reason(request) if self._served.is_sure and not is_unsaved else "error",
            block_ids=select_groups(self._facts, block_ids),
            computed_tokens=request.num_computed_tokens,
            now_s=self._now_s(),
        )

    def update_output(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RegistrationReport):
            _attempt("registration", "(none)", partial(self._registered, report))
        received = (output.finished_recving or set()) - self._reported_orphans
        self._reported_orphans -= output.finished_recving or set()
        failed: set[str] = getattr(output, "failed_recving", None) or set()
        note = partial(
            self._state.transfer_results,
            sent=sorted(output.finished_sending or ()),
            received=sorted(received),
            failed=sorted(failed & received),
        )
        _attempt("report of the workers", "(several)", note)
        self._links.sent(output.finished_sending or ())

    def _registered(self, report: RegistrationReport) -> bool:
        """Tell peers of the registration that the workers have now."""
        envelopes = self._served.heard(report.ranks)
        if self._served.is_sure:
            self._state.set_generation(self._served.generation)
        if envelopes is not None and self._listener is not None:
            self._listener.replace(envelopes)
            _logger.info("side channel of engine %s serves %d ranks anew", self._facts.engine_id, len(envelopes))
        return True

    def reset_cache(self) -> bool:
        """Void all KV that was computed, promised or ordered before now; True if nothing of it will be handed over or used.

        Until the workers have said which registration they have, no prompt is handed over: the host may be about to sleep.
        """
        self._served.doubt()
        reading = _attempt("reset", "(all)", partial(self._state.reset, now_s=self._now_s()))
        if reading is None:
            return False
        self._void_reads = (*self._void_reads, *reading)
        return True

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return what was observed since the last call by key, None for nothing."""
        now_s = self._now_s()
        if now_s - self._counted_s >= _COUNT_EVERY_S:
            self._counted_s, before, counts = now_s, self._counted, self._state.state_counts()
            self._counted = counts
            changes = {state: counts.get(state, 0) - before.get(state, 0) for state in {*before, *counts}}
            if any(changes.values()):
                self._stats.observe("live_requests", changes)
        return self._stats.take()

    def serve(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Serve the ranks' envelopes to peers; a port that cannot be bound stops the engine here, with the reason."""
        payloads = {rank: value.envelope for rank, value in metadata.items() if isinstance(value, RankEnvelope)}
        self._served.expect(payloads)
        if self._listener is not None:
            self._listener.replace(payloads)
            return
        listener = self._make_listener()
        listener.replace(payloads)
        listener.start()
        self._listener = listener
        _logger.info(
            "side channel of engine %s serves %d ranks on port %d", self._facts.engine_id, len(payloads), listener.port
        )

    def close(self) -> None:
        """Stop serving; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def _scheduled(facts: EngineFacts, output: SchedulerOutput) -> Iterator[ScheduledTokens]:
    """Return what a step computes, request by request, with their blocks in the transferable groups."""
    nothing = tuple[list[int], ...]([] for _ in facts.group_ids)
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        blocks = select_groups(facts, new.block_ids)
        yield ScheduledTokens(new.req_id, blocks, True, new.num_computed_tokens, tokens.get(new.req_id, 0))
    running = output.scheduled_cached_reqs
    for request_id, added, computed in zip(
        running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
    ):
        blocks = select_groups(facts, added) if added is not None else nothing
        is_fresh = request_id in running.resumed_req_ids
        yield ScheduledTokens(request_id, blocks, is_fresh, computed, tokens.get(request_id, 0))


def _attempt(hook: str, request_id: str, call: Callable[[], _T]) -> _T | None:
    """Call, and turn a refusal into one log line and None."""
    try:
        return call()
    except Exception:
        _logger.exception("request %s: %s was refused; it goes on without a hand-over", request_id, hook)
        return None
