"""A whole engine but for the model: vLLM's real scheduler, our connector in both roles, memory, and NIXL or its fake.

The worker's hooks are called as vLLM's model runner calls them. "Computing" a prompt writes pages that tell token, position and
the weights that were loaded, so that a page shows who wrote it, and when.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch as patched

import pytest
import torch
from engine import BLOCK, FULL, SOME_TOKEN, Engine
from engines import free_port
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import gpu_worker

from vllm_adapter import KVTransferConnector, wiring
from vllm_adapter.host import vllm as vllm_seam

LAYER = "layers.0"
CALLS_SLEEP_HOOKS = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
TESTS = Path(__file__).resolve().parents[3] / "packages" / "vllm-adapter" / "tests"


def adapters_tests(name: str) -> ModuleType:
    """Return a module of the adapter's tests, such as those of the recorded layouts."""
    sys.path.insert(0, str(TESTS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TESTS))


class Layer(AttentionLayerBase):  # type: ignore[misc]
    """A layer as the host keeps it by name, with the back end that the host gave it and, on CPU, the kernel that it chose."""

    def __init__(self, backend: Any, isa: str = "") -> None:
        self.backend, self.isa = backend, isa

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


class FullEngine(Engine):
    """An engine with one worker."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        fabric: Any,
        *,
        sleeps: bool = False,
        reads_ahead: bool = True,
        **options: Any,
    ) -> None:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        patch.setattr(vllm_seam, "_ranks", lambda: (0, 0))
        if fabric is not None:
            patch.setattr(wiring, "open_nixl", fabric.port)
        super().__init__(folder, model_folder=folder.parent / "model", **options)
        self.config.compilation_config.static_forward_context[LAYER] = Layer(FlashAttentionBackend)
        self.config.model_config.enable_sleep_mode = sleeps and CALLS_SLEEP_HOOKS
        self.weights = 1
        self.sent: list[str] = []
        self.received: dict[str, bool] = {}
        self.memory = torch.zeros((self._blocks, FULL.num_kv_heads, BLOCK, 2 * FULL.head_size))
        with set_current_vllm_config(self.config):
            self.worker: Any = KVTransferConnector(self.config, KVConnectorRole.WORKER, self.scheduler.kv_cache_config)
        self.worker.register_kv_caches({LAYER: self.memory})
        if reads_ahead:
            self._watch_reads_ahead()
            # vLLM makes the scheduler last.
            self.connector.bind_gpu_block_pool(self.scheduler.kv_cache_manager.block_pool)
        self.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self._core: Any = None

    # ------------------------------------------------------------------------------------------------ vLLM's hooks

    def _work(self, output: Any, sent: set[str], received: set[str], failed: set[str]) -> KVConnectorOutput:
        assert not sent | received | failed, "this engine's worker reports by itself"
        worker = self.worker
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        for request_id, tokens in output.num_scheduled_tokens.items():
            self._compute(request_id, tokens)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        self.sent += sorted(results.finished_sending)
        self._note(results.finished_recving, results.failed_recving)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=report,
        )

    def _note(self, ended: Collection[str], failed: Collection[str]) -> None:
        for request_id in ended:
            assert request_id not in self.received, "a read was reported twice"
            self.received[request_id] = request_id not in failed

    def _watch_reads_ahead(self) -> None:
        """Note the orders and ends of reads that pass between the halves without the host."""
        read, take = self.side.read_ahead, self.side.take_ends_ahead

        def ordered(orders: Any) -> None:
            self.plans.append(orders)
            read(orders)

        def taken() -> Any:
            report = take()
            self._note(report.received, report.failed)
            return report

        self.side.read_ahead, self.side.take_ends_ahead = ordered, taken

    def _compute(self, request_id: str, tokens: int) -> None:
        request = self.scheduler.requests[request_id]
        (blocks,) = self.blocks(request_id)
        for position in range(request.num_computed_tokens - tokens, request.num_computed_tokens):
            # A step that is scheduled ahead takes the token that the step before it samples.
            known = request.all_token_ids
            token = known[position] if position < len(known) else SOME_TOKEN
            self.memory[blocks[position // BLOCK], :, position % BLOCK] = content(self.weights, position, token)

    def sleep(self, *, mode: str = "keep") -> None:
        """Sleep as vLLM does."""
        with self._host() as core:
            core.sleep(1, mode)

    def wake(self, *, weights: int | None = None, tags: list[str] | None = None) -> bool:
        """Wake up as vLLM does, by steps with `tags`; return whether the engine is fully awake."""
        self.weights = weights or self.weights
        with self._host() as core:
            is_awake = bool(core.wake_up(tags))
        if not CALLS_SLEEP_HOOKS and self.worker.get_handshake_metadata() is not None:
            self.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        return is_awake

    def discard(self) -> None:
        """Let the connector go of memory that is then unmapped, without a word to the scheduler."""
        self.worker.unregister_kv_caches()
        self.memory.fill_(float("nan"))

    def _suspend(self, _level: int) -> None:
        if not CALLS_SLEEP_HOOKS:
            self.worker.unregister_kv_caches()
        self.memory.fill_(float("nan"))

    def _resume(self, tags: list[str] | None) -> None:
        if tags is None or "kv_cache" in tags:
            self.memory.fill_(-1.0)
            if not CALLS_SLEEP_HOOKS:
                self.worker.restore_kv_caches()

    @contextmanager
    def _host(self) -> Iterator[Any]:
        """Yield vLLM's own core with its executor and its worker of a GPU around this engine; only the memory is ours.

        Before 0.33 the memory calls the hooks, in 0.33's order.
        """
        place: Any = SimpleNamespace(rank_in_group=0)
        if self._core is None:
            worker, core = object.__new__(gpu_worker.Worker), object.__new__(EngineCore)
            worker.vllm_config = self.config
            worker._sleep_saved_parameters, worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}, {}
            worker._sleep_mode_backend = SimpleNamespace(suspend=self._suspend, resume=self._resume)
            executor = object.__new__(UniProcExecutor)
            executor.driver_worker, executor.sleeping_tags = worker, set()
            executor.reset_mm_cache = executor.reset_encoder_cache = lambda: None
            core.scheduler, core.model_executor, core.mm_receiver_cache = self.scheduler, executor, None
            core.vllm_config = self.config
            self._core = core
        device = SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (0, 0), is_available=lambda: False)
        fakes: dict[str, Any] = {"has_kv_transfer_group": lambda: True, "get_kv_transfer_group": lambda: self.worker}
        fakes |= {name: lambda: place for name in ("get_pp_group", "get_tp_group")}
        with patched.multiple(gpu_worker, **fakes), patched.object(torch, "accelerator", device):
            yield self._core

    # ---------------------------------------------------------------------------------------------- what tests do

    def prefill(self, request_id: str, prompt: list[int]) -> dict[str, Any] | None:
        """Compute a prompt for another engine; return the ticket, if there is one."""
        self.add(request_id, prompt, max_tokens=1, params={"do_remote_decode": True})
        for _ in range(16):
            self.step()
            if request_id in self.outputs:
                return self.outputs[request_id][-1].kv_transfer_params
        raise AssertionError(f"{request_id} was not computed")

    def until(
        self,
        condition: Callable[[], object] = lambda: True,
        *,
        received: str = "",
        sent: str = "",
        within_s: float = 20,
    ) -> None:
        """Step until something is so, a request's read has ended, or its blocks are free."""
        until_s = time.monotonic() + within_s
        while (received and received not in self.received) or (sent and sent not in self.sent) or not condition():
            assert time.monotonic() < until_s, f"{received}{sent} did not come: {self.state.snapshot(now_s=0.0)}"
            self.step()
            time.sleep(0.002)

    def assert_has(self, request_id: str, prompt: list[int], weights: int) -> None:
        """Assert that a request's pages hold its prompt as computed with these weights; the last token perhaps with its own."""
        (blocks,) = self.blocks(request_id)
        for position, token in enumerate(prompt):
            page = self.memory[blocks[position // BLOCK], :, position % BLOCK]
            if position < len(prompt) - 1 or not torch.equal(page, content(self.weights, position, token)):
                torch.testing.assert_close(page, content(weights, position, token), rtol=0, atol=0)

    @property
    def side(self) -> Any:
        """The worker's half."""
        return self.worker._worker_side

    @property
    def agent_name(self) -> str:
        """NIXL's name of this worker's agent."""
        return str(self.side._registration.agent._name)

    @contextmanager
    def transfers_held(self) -> Iterator[None]:
        """Keep the transfer thread from doing anything meanwhile."""
        gate, is_held = threading.Event(), threading.Event()
        self.side._registration.agent.call_soon(lambda: (is_held.set(), gate.wait(60)))
        assert is_held.wait(60)
        try:
            yield
        finally:
            gate.set()

    def close(self) -> None:
        """Stop both halves."""
        self.worker.shutdown()
        self.connector.shutdown()


def content(weights: int, position: int, token: int) -> torch.Tensor:
    """Return the one true content of a token's place in a page: (heads, elements)."""
    heads, elements = FULL.num_kv_heads, 2 * FULL.head_size
    return weights * 4e6 + position * 16000 + token * 256 + torch.arange(heads * elements).view(heads, elements)


def hand_over(
    producer: FullEngine, consumer: FullEngine, number: str, tokens: list[int], *, freed_within_s: float = 20
) -> dict[str, Any]:
    """Hand a prompt over, look at its pages, end both sides' requests; return the ticket."""
    ticket = producer.prefill(f"p{number}", tokens)
    assert ticket is not None
    consumer.add(f"d{number}", tokens, params=ticket)
    consumer.until(received=f"d{number}")
    assert consumer.received[f"d{number}"]
    consumer.assert_has(f"d{number}", tokens, producer.weights)
    producer.until(sent=f"p{number}", within_s=freed_within_s)
    consumer.run()
    return ticket
