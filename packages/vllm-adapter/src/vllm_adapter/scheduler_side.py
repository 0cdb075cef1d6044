"""The connector in the scheduler's process: vLLM's hooks in, decisions of the request machines out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

from vllm_adapter._host import drop_prompt_tail, end_reason, init_logger, select_groups
from vllm_adapter.metadata import RankEnvelope, StepMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_adapter.facts import EngineFacts
    from vllm_adapter.ports import HandshakeListener
    from vllm_adapter.wiring import SchedulerParts

__all__ = ["SchedulerSide"]

_logger = init_logger("vllm.vllm_adapter")


@final
class SchedulerSide:
    """Drives the request machines from vLLM's scheduler hooks and serves this engine's metadata to peers."""

    def __init__(
        self,
        facts: EngineFacts,
        parts: SchedulerParts,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._state = parts.make_state()
        self._make_listener = parts.make_listener
        self._listener: HandshakeListener | None = None
        self._now_s = now_s

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Numbers of the transferable groups among all of the scheduler's."""
        return self._facts.group_ids

    def on_new_request(self, request: Request) -> None:
        """Admit a request; a refused ticket means local prefill and one logged reason."""
        admission = self._state.arrive(
            request.request_id, request.kv_transfer_params, prompt_tokens=request.num_prompt_tokens, now_s=self._now_s()
        )
        if admission.rejected_code:
            _logger.warning(
                "request %s: its hand-off ticket is refused and the prompt computed here (%s: %s)",
                request.request_id,
                admission.rejected_code,
                admission.rejected_message,
            )
        if admission.truncate_tokens and not drop_prompt_tail(request, admission.truncate_tokens):
            _logger.warning("request %s: its prompt could not be shortened for the hand-off", request.request_id)

    def external_tokens(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Answer `get_num_new_matched_tokens`: tokens to load beyond the local prefix hit, and that they load meanwhile."""
        tokens = self._state.external_tokens(request.request_id, computed_tokens=computed_tokens)
        return tokens, tokens > 0

    def after_allocation(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Note the blocks that the scheduler gave to a request."""
        self._state.allocate(
            request.request_id,
            block_ids=select_groups(self._facts, blocks.get_block_ids()),
            new_block_ids=select_groups(self._facts, blocks.get_unhashed_block_ids_all_groups()),
            external_tokens=external_tokens,
            now_s=self._now_s(),
        )

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what this step tells the workers."""
        for request_id in output.preempted_req_ids or ():
            self._state.preempt(request_id, now_s=self._now_s())
        return StepMetadata(self._state.take_step_plan(now_s=self._now_s()))

    def request_finished(self, request: Request, block_ids: object) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether a finished request's blocks stay for a peer, and what its response says."""
        decision = self._state.finish(
            request.request_id,
            reason=end_reason(request),
            block_ids=select_groups(self._facts, block_ids),
            computed_tokens=request.num_computed_tokens,
            now_s=self._now_s(),
        )
        return decision.keep_blocks, dict(decision.params) if decision.params is not None else None

    def update_output(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        self._state.transfer_results(
            sent=sorted(output.finished_sending or ()),
            received=sorted(output.finished_recving or ()),
            failed=sorted(getattr(output, "failed_recving", None) or ()),
        )

    def serve(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Serve the ranks' envelopes to peers; a port that cannot be bound stops the engine here, with the reason."""
        payloads = {rank: value.envelope for rank, value in metadata.items() if isinstance(value, RankEnvelope)}
        if self._listener is None:
            listener = self._make_listener()
            listener.replace(payloads)
            listener.start()
            self._listener = listener
            _logger.info(
                "side channel of engine %s serves %d ranks on port %d",
                self._facts.engine_id,
                len(payloads),
                listener.port,
            )
        else:
            self._listener.replace(payloads)

    def close(self) -> None:
        """Stop serving; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
