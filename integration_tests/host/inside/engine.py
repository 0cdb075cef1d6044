"""The scheduler's half of an engine: vLLM's real scheduler and our connector, and a model runner that only says so.

No process, no model, no network: a step asks the scheduler what to run, claims that it ran, and reports what the test says
the workers saw. What the connector orders from its workers is kept for the test to look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_adapter.plugin import CONNECTOR_NAME, register

BLOCK = 16
STOP_TOKEN = 99
SOME_TOKEN = 7
_HEADS = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}

FULL = FullAttentionSpec(block_size=BLOCK, **_HEADS)
WINDOW = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK, **_HEADS)
CACHED_STATE = MambaSpec(
    block_size=BLOCK, shapes=((64, 3), (4, 16, 16)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align"
)
"""A state with prefix caching: kept at block boundaries, so that a prefix can be hit."""
STATE = MambaSpec(block_size=2048, shapes=((64, 3), (4, 16, 16)), dtypes=(torch.float32, torch.float32))

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The params that a router sends to the prefill engine."""


def _model_folder(folder: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Engine:
    """An engine's scheduler.

    Attributes:
        scheduler: vLLM's.
        config: The engine's configuration.
        plans: Messages of the connector to the workers, step by step.
        outputs: All outputs of a request, by its id.
        stats: Observations of the connector that vLLM passes on to its metrics, step by step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_folder: Path | None = None,
        specs: tuple[KVCacheSpec, ...] = (FULL,),
        blocks: int = 64,
        batch_tokens: int = 256,
        role: str = "kv_both",
        policy: str = "fail",
        prefix_caching: bool = True,
        mamba_cache_mode: str = "none",
        draft_tokens: int = 0,
        dcp: int = 1,
        is_last_a_drafters: bool = False,
        scheduler_class: type[Scheduler] = Scheduler,
        **extra: object,
    ) -> None:
        register()
        model_path = _model_folder(model_folder or folder)
        model = ModelConfig(model=model_path, skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(
                block_size=BLOCK, enable_prefix_caching=prefix_caching, mamba_cache_mode=mamba_cache_mode
            ),
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=batch_tokens,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=False,
                async_scheduling=False,
                watermark=0.0,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector=CONNECTOR_NAME,
                kv_role=role,
                kv_connector_extra_config=dict(extra),
                engine_id=folder.name,
                kv_load_failure_policy=policy,
            ),
        )
        # No attention of a CPU is split over context ranks, and nothing here runs it.
        config.parallel_config.tensor_parallel_size = config.parallel_config.decode_context_parallel_size = dcp
        # The platform of a CPU switches it off in the configuration.
        config.scheduler_config.async_scheduling = issubclass(scheduler_class, AsyncScheduler)
        self.config = config
        groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
        groups[-1].is_eagle_group = is_last_a_drafters  # its prefix hits end a block earlier
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK * dcp, sha256)
        self._blocks = blocks
        with set_current_vllm_config(config):
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=math.lcm(*(spec.block_size for spec in specs)) * dcp,
                hash_block_size=BLOCK * dcp,
                log_stats=True,
            )
        # A drafter of so many tokens makes the scheduler reserve beyond those that it runs.
        self.scheduler.num_lookahead_tokens = draft_tokens
        self.plans: list[Any] = []
        self.outputs: dict[str, list[Any]] = {}
        self.stats: list[dict[str, Any]] = []

    # ------------------------------------------------------------------------------------------------ what happens

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        max_tokens: int = 4,
        params: dict[str, Any] | None = None,
        is_refused: bool = False,
        is_session: bool = False,
        media: Iterable[MultiModalFeatureSpec] = (),
        lora: LoRARequest | None = None,
        **sampled: Any,
    ) -> Request:
        """Queue a request; with `is_refused` as vLLM queues one that its frontend refused: to be aborted at once.

        With `is_session` its prompt goes on with the next request of the same id, up to one without it.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[STOP_TOKEN],
            extra_args={"kv_transfer_params": params} if params is not None else None,
            **sampled,
        )
        sampling.update_from_generation_config({}, eos_token_id=50)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            mm_features=list(media),
            abort_immediately=is_refused,
            resumable=is_session,
            lora_request=lora,
        )
        self.scheduler.add_request(request)
        if is_refused:
            self.abort(request_id)
        return request

    def take_over(self, producer: Engine, tokens: list[int], **options: Any) -> Request:
        """Queue a prompt as `d` that another engine has computed as `p`, and run a step, which orders its read."""
        request = self.add("d", tokens, params=hand_over(producer, "p", tokens), **options)
        self.step()
        return request

    def step(
        self,
        *,
        sent: Iterable[str] = (),
        received: Iterable[str] = (),
        failed: Iterable[str] = (),
        token: int = SOME_TOKEN,
    ) -> dict[str, int]:
        """Run one step and report ends of transfers with it; returns tokens scheduled by request."""
        output, ran = self._run(set(sent), set(received), set(failed), token)
        self._take(output, ran)
        return dict(output.num_scheduled_tokens)

    def _run(
        self, sent: set[str], received: set[str], failed: set[str], token: int
    ) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Schedule a step and let the workers run it."""
        output = self.scheduler.schedule()
        return output, self._ran(output, sent, received, failed, token)

    def _ran(
        self, output: SchedulerOutput, sent: set[str], received: set[str], failed: set[str], token: int
    ) -> ModelRunnerOutput:
        """Let the workers run a step."""
        scheduler = self.scheduler
        self.plans.append(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            sampled.append([token] if request.num_computed_tokens >= request.num_tokens else [])
        reported = self._work(output, sent, received, failed)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: number for number, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            # As vLLM's model runners do: a step that computes reports even nothing.
            kv_connector_output=None if reported.is_empty() and not ids else reported,
        )

    def _take(self, output: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        """Let the scheduler take in what a step has brought."""
        for outputs in self.scheduler.update_from_output(output, ran).values():
            observed = outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats
            self.stats += [observed] if observed else []
            for one in outputs.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)

    def _work(self, output: Any, sent: set[str], received: set[str], failed: set[str]) -> KVConnectorOutput:
        """Be the workers in a step: report what the test says they saw."""
        return KVConnectorOutput(finished_sending=sent, finished_recving=received | failed, failed_recving=failed)

    def run(self, steps: int = 64, **reports: Any) -> None:
        """Step until nothing is left; what is reported goes with the first step."""
        for number in range(steps):
            if not self.scheduler.has_requests():
                self.assert_nothing_left()
                return
            self.step(**(reports if number == 0 else {}))
        raise AssertionError(f"requests are left after {steps} steps: {list(self.scheduler.requests)}")

    def abort(self, request_id: str) -> None:
        """Abort a request as a client that goes away does."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # ------------------------------------------------------------------------------------------------- what is seen

    def ticket(self, request_id: str) -> dict[str, Any]:
        """Return the hand-over ticket in a request's last output."""
        params = self.outputs[request_id][-1].kv_transfer_params
        assert params is not None, f"{request_id} got no ticket"
        return dict(params)

    def orders(self, kind: str) -> list[Any]:
        """Return all orders of a kind (`reads`, `leases`, `cancels`, `heartbeats`, ...) so far."""
        return [order for plan in self.plans for order in getattr(plan.plan, kind)]

    @property
    def reads(self) -> list[Any]:
        """All reads so far whose end the workers report."""
        return [order for order in self.orders("reads") if order.is_reported]

    @property
    def notifications(self) -> list[Any]:
        """All orders so far that only notify a peer."""
        return [order for order in self.orders("reads") if not order.is_reported]

    @property
    def state(self) -> Any:
        """The connector's request machines."""
        return self.connector._scheduler_side._state

    @property
    def connector(self) -> Any:
        """Our connector."""
        return self.scheduler.connector

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Return a request's blocks by group."""
        return tuple(tuple(group) for group in self.scheduler.kv_cache_manager.get_block_ids(request_id))

    @property
    def free_blocks(self) -> int:
        """Free blocks."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def assert_nothing_left(self) -> None:
        """Assert that no request, block or machine is left."""
        assert not self.scheduler.requests
        assert self.free_blocks == self._blocks - 1  # the placeholder is not free
        assert self.state.live_count == 0, self.state.snapshot(now_s=0.0)


def ids(lists: Any) -> tuple[tuple[int, ...], ...]:
    """Return the block ids of an order's block lists, group by group."""
    return tuple(tuple(blocks.ids) for blocks in lists)


def tokens_of(read: Any) -> int:
    """Return how many tokens a read brings: from the first token of its whole groups on."""
    return int(read.tokens - max(blocks.first_token for blocks in read.local_blocks))


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return a prompt whose blocks are unlike those of other seeds."""
    return [(seed * 31 + n * 7) % 48 for n in range(tokens)]


def hand_over(
    producer: Engine, request_id: str, tokens: list[int], *, lora: LoRARequest | None = None
) -> dict[str, Any]:
    """Prefill a prompt on one engine and return the ticket for the other."""
    producer.add(request_id, tokens, max_tokens=1, params=dict(PREFILL), lora=lora)
    producer.step()
    while request_id not in producer.outputs:
        producer.step()
    return producer.ticket(request_id)
