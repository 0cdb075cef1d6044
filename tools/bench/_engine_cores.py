"""Hand-overs between vLLM's engine cores without a model: `python _engine_cores.py PLAN` (host environment), a JSON line each.

A pair is two forks of this process, each on half of the cores. Each runs vLLM's `EngineCore` with its scheduler,
its executor in the same process or (`mp`) in one of its own, a model runner whose forward pass gives zeros, and a connector in
both roles, in the loop of `EngineCoreProc`. Moments are taken around hooks that all connectors have and around NIXL's Python
calls, by a clock that the processes share; with `mp` only those of the scheduler's process.
"""

# ruff: noqa: SLF001  (moments are taken where neither vLLM nor a connector has a public hook)

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kv_nixl_agent.nixl.side_effects import sleeping_progress_thread
from kvdev.engines import free_port
from kvdev.starter import preload
from vllm_adapter.worker.engine_thread import WorkerSide

BLOCK_TOKENS = 32
LAYERS = 4
"""With two heads of 32 bfloat16 elements a page, one block of a layer, has 8 KiB."""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": LAYERS, "vocab_size": 256,
    "max_position_embeddings": 1 << 17,
}  # fmt: skip
LIVE_TOKENS, RESTS = 24, 5
_ROLES = {"p": "kv_producer", "d": "kv_consumer"}
_WITHIN_S = 120.0
Stamp = tuple[str, str, float]
"""Stage, request or transfer, and the moment, or for `step` the CPU time of the engine's thread in seconds."""


class Core:
    """An engine core in this process and the moments that were taken in it."""

    def __init__(self, kind: str, role: str, plan: Mapping[str, Any], folder: str) -> None:
        self.stamps: list[Stamp] = []
        self.step_s = self._began_s = 0.0
        self._last_read: tuple[Any, ...] = ()
        from nixl._api import nixl_agent  # NIXL reads the environment of the engine

        self._watch_nixl(nixl_agent)
        if kind == "ours":
            _watch(WorkerSide, "read_ahead", before=lambda _, orders: self._orders(orders))
            _watch(
                WorkerSide, "take_ends_ahead", after=lambda report, _: self._note(report.received, "result", "taken in")
            )
        with sleeping_progress_thread(nixl_agent) if kind == "own" else nullcontext():
            self.core = self._made(kind, role, plan, folder)
        self._watch_core()

    def stamp(self, stage: str, name: str) -> None:
        """Note a moment."""
        self.stamps.append((stage, name, time.monotonic()))

    def add(self, requests: Mapping[str, Mapping[str, Any] | None], tokens: int, answer_tokens: int) -> None:
        """Queue requests, by their names with `kv_transfer_params`, all at once, as the thread of vLLM's input socket does."""
        fields = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
        made: dict[str, Any] = {}
        for name, params in requests.items():
            extra = {"kv_transfer_params": params} if params else None
            sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, temperature=0.0, extra_args=extra)
            text = [(zlib.crc32(name.encode()) + place * 7 + place // 250) % 250 for place in range(tokens)]
            request = EngineCoreRequest(
                request_id=name, prompt_token_ids=text, sampling_params=sampling, arrival_time=time.time(), **fields
            )
            made[name] = self.core.preprocess_add_request(request)
        for name, request in made.items():
            self.stamp("queued", name)
            self.core.input_queue.put_nowait((EngineCoreRequestType.ADD, request))

    def abort(self, names: Sequence[str]) -> None:
        """Queue an abort."""
        self.core.input_queue.put_nowait((EngineCoreRequestType.ABORT, names))

    def pace(self, step_s: float) -> None:
        """Let each step that computes take so long."""
        self.step_s = step_s

    def taken(self) -> list[Stamp]:
        """Return all moments since the last call."""
        stamps, self.stamps = self.stamps, []
        return stamps

    def cpu_s(self) -> float:
        """Return the CPU time of this process."""
        return time.process_time()

    def bare_reads(self, count: int) -> list[float]:
        """Repeat the last read of data without its connector; the seconds that making, posting and polling one takes."""
        agent, *arguments = self._last_read
        found: list[float] = []
        for _ in range(count):
            time.sleep(0.02)
            began_s = time.monotonic()
            handle = agent.make_prepped_xfer("READ", *arguments)
            state = agent.transfer(handle)
            while state != "DONE":
                state = agent.check_xfer_state(handle)
            found.append(time.monotonic() - began_s)
            agent.release_xfer_handle(handle)
        self.stamps.clear()
        return found

    # --------------------------------------------------------------------------------------------------- made and watched

    def _made(self, kind: str, role: str, plan: Mapping[str, Any], folder: str) -> Any:
        torch.set_num_threads(1)

        def forward(_runner: object, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            time.sleep(self.step_s)
            return torch.zeros((len(input_ids), MODEL["hidden_size"]), dtype=torch.bfloat16, device=input_ids.device)

        GPUModelRunner._model_forward = forward
        # As asynchronous scheduling sets it, which the CPU platform switches off.
        VllmConfig.max_concurrent_batches = property(lambda _: plan["in_flight"])
        transfer = {"kv_connector": "NixlConnector", "kv_role": _ROLES[role], "engine_id": f"{kind}-{role}"}
        if kind == "ours":
            transfer["kv_connector_module_path"] = "vllm_adapter"
        most = plan["most_tokens"] + 2 * BLOCK_TOKENS
        arguments = EngineArgs(
            model=f"{folder}/model", skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
            block_size=BLOCK_TOKENS, max_model_len=most, max_num_batched_tokens=max(most, plan["live"] * LIVE_TOKENS),
            max_num_seqs=max(plan["live"] + 1, 64), enable_prefix_caching=False,
            num_gpu_blocks_override=max(3 * most // BLOCK_TOKENS, 2 * plan["live"]), kv_cache_memory_bytes=1 << 28,
            kv_transfer_config=None if kind == "none" else transfer, disable_log_stats=False, gpu_memory_utilization=0.05,
            distributed_executor_backend=plan["executor"],
        )  # fmt: skip
        config = arguments.create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # not as the CPU platform says, so it is patched, too
        core: Any = object.__new__(EngineCoreProc)
        core.input_queue, core.output_queue = queue.Queue(), queue.Queue()
        core.engine_index, core.engines_running, core.shutdown_state = 0, False, EngineShutdownState.RUNNING
        core.tensor_ipc_receiver, core.publish_dp_lb_stats, core.last_counts = None, False, (0, 0)
        core.process_input_queue_block, core.enable_fault_tolerance, core.has_coordinator = True, False, False
        EngineCore.__init__(core, config, Executor.get_class(config), True)
        return core

    def _watch_core(self) -> None:
        scheduler, ran = self.core.scheduler, set[str]()

        def ends(received: str, sent: str, output: Any) -> None:
            self._note(output.finished_recving, received)
            self._note(output.finished_sending, sent)

        def taken_in(_: None, output: Any) -> None:
            ends("taken in", "freed", output)
            for name in output.finished_sending or ():
                self.core.output_queue.put((name, None))

        def runs(output: Any, *_: object) -> None:
            for name in output.num_scheduled_tokens.keys() - ran:
                ran.add(name)
                self.stamp("runs", name)

        def ended(has_run: bool) -> None:
            self.stamps += [("step", "", time.thread_time() - self._began_s)] if has_run else []

        if has_kv_transfer_group() and (worker := get_kv_transfer_group()):
            _watch(worker, "start_load_kv", before=lambda *_: self._orders(worker._get_connector_metadata()))
            _watch(worker, "get_transfer_results", after=lambda found, *_: ends("result", "sent", found))
        _watch(scheduler, "_update_from_kv_xfer_finished", after=taken_in)
        _watch(scheduler, "schedule", after=runs)
        _watch(self.core, "_process_engine_step", before=self._begins, after=ended)
        _watch(self.core.output_queue, "put_nowait", before=self._puts)

    def _orders(self, metadata: Any) -> None:
        plan = getattr(metadata, "plan", None)  # ours
        self._note([read.request_id for read in plan.reads] if plan else metadata.reqs_to_recv, "order")

    def _note(self, names: Iterable[str] | None, *stages: str) -> None:
        for name in names or ():
            for stage in stages:
                self.stamp(stage, name)

    def _begins(self) -> None:
        self._began_s = time.thread_time()

    def _puts(self, item: Any) -> None:
        for one in item[1].outputs:
            self.stamp("token", one.request_id)

    def _watch_nixl(self, nixl_agent: Any) -> None:
        posted = set[int]()

        def makes(_agent: Any, operation: str, *arguments: Any, **_more: Any) -> None:
            # A fence word has one descriptor; data have one per layer and block.
            if operation == "READ" and len(arguments[1]) > 1:
                self._last_read = (_agent, *arguments[:4])

        def posts(_agent: Any, handle: Any, *_: object) -> None:
            posted.add(id(handle))
            self.stamp("post", "")

        def looks(state: str, _agent: Any, handle: Any, *_: object) -> None:
            if state == "DONE" and id(handle) in posted:
                posted.discard(id(handle))
                self.stamp("done", "")

        _watch(nixl_agent, "make_prepped_xfer", before=makes)
        _watch(nixl_agent, "transfer", before=posts, after=looks)
        _watch(nixl_agent, "check_xfer_state", after=looks)


def _nothing(*_: object, **__: object) -> None:
    pass


def _watch(
    owner: Any, name: str, *, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing
) -> None:
    """Let a method of an object or a class be watched: `before` gets its arguments, `after` its result and they."""
    call = getattr(owner, name)

    def watched(*arguments: Any, **more: Any) -> Any:
        before(*arguments, **more)
        found = call(*arguments, **more)
        after(found, *arguments)
        return found

    setattr(owner, name, watched)


def _serve(
    connection: Any, kind: str, role: str, cores: set[int], plan: Mapping[str, Any], folder: str, port: int
) -> None:
    """Be one engine of a pair until the connection ends; commands are methods of `Core` with their arguments."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no engine outlives the process that measures
    os.sched_setaffinity(0, cores)
    log = os.open(f"{folder}/{kind}-{role}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    # The forward pass that is replaced is that of the first runner; the CPU platform takes the last one for the executor, too.
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(plan["executor"] == "mp"))
    engine, lock = Core(kind, role, plan, folder), threading.Lock()

    def send(*message: Any) -> None:
        with lock:
            connection.send(message)

    def write() -> None:
        while True:
            name, outputs = engine.core.output_queue.get()
            if outputs is None:
                send(name, "freed", 0, None)
                continue
            for one in outputs.outputs:
                send(one.request_id, str(one.finish_reason or ""), len(one.new_token_ids), one.kv_transfer_params)

    threading.Thread(target=_obey, args=(connection, engine, send), daemon=True).start()
    threading.Thread(target=write, daemon=True).start()
    send(None, "up")
    engine.core.run_busy_loop()


def _obey(connection: Any, engine: Core, send: Callable[..., None]) -> None:
    try:
        while True:
            command, *arguments = connection.recv()
            answer = getattr(engine, command)(*arguments)
            if answer is not None:
                send(None, answer)
    except EOFError:
        os._exit(0)


# ----------------------------------------------------------------------------------------------------------- from outside


class Engine:
    """An engine core in a process of its own."""

    def __init__(self, kind: str, role: str, cores: set[int], plan: Mapping[str, Any], folder: str) -> None:
        context = multiprocessing.get_context("fork")
        self.tokens: dict[str, int] = {}
        self.tickets: dict[str, Any] = {}
        self.freed: set[str] = set()
        self._answers: list[Any] = []
        self._log = f"{folder}/{kind}-{role}.log"
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, role, cores, plan, folder, free_port()))
        self._process.start()
        theirs.close()

    def order(self, command: str, *arguments: Any) -> None:
        """Let it run a method of its `Core`."""
        self._connection.send((command, *arguments))

    def ask(self, *command: Any) -> Any:
        """Let it run a method; return the answer. Without a method wait until it is up."""
        if command:
            self.order(*command)
        self.until(lambda: self._answers)
        return self._answers.pop()

    def until(self, condition: Callable[[], object]) -> None:
        """Take messages until something is so."""
        until_s = time.monotonic() + _WITHIN_S
        while not condition():
            if not self._connection.poll(max(0.0, until_s - time.monotonic())):
                raise TimeoutError(f"no message: {self._log}")
            name, *message = self._connection.recv()
            if name is None:
                self._answers += message
                continue
            event, tokens, ticket = message
            if event == "freed":
                self.freed.add(name)
            elif event not in {"", "length", "abort"}:
                raise RuntimeError(f"{name} ended by {event}: {self._log}")
            self.tokens[name] = self.tokens.get(name, 0) + tokens
            self.tickets |= {name: ticket} if ticket else {}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, kind: str, plan: Mapping[str, Any], folder: str) -> None:
        cores = sorted(os.sched_getaffinity(0))
        halves = cores[::2], cores[1::2] or cores
        self.engines = [Engine(kind, role, set(own), plan, folder) for role, own in zip("pd", halves, strict=True)]
        self.prefill, self.decode = self.engines
        self._kind = kind
        self._count = 0

    def wait(self) -> None:
        """Wait until both are up."""
        for engine in self.engines:
            engine.ask()

    def hand_over(self, blocks: int, at_once: int, beside_s: float) -> list[Stamp]:
        """Hand prompts over, all queued at once at decode; with `beside_s` while another request runs in such steps."""
        prefill, decode, tokens = self.prefill, self.decode, blocks * BLOCK_TOKENS - 5
        self._count += 1
        beside, names = f"beside{self._count}", [f"{self._count}.{number}" for number in range(at_once)]
        prefill.order("add", {name: {"do_remote_decode": True} for name in names}, tokens, 1)
        prefill.until(lambda: prefill.tickets.keys() >= set(names))
        if beside_s:
            decode.ask("taken")
            decode.order("pace", beside_s)
            decode.order("add", {beside: None}, 16, 4000)
            decode.until(lambda: decode.tokens.get(beside, 0) > 8)
        time.sleep(0.01 + 0.01 * (0.618 * self._count % 1))  # follows no beat
        decode.order("add", {name: prefill.tickets[name] for name in names}, tokens, 1)
        decode.until(lambda: decode.tokens.keys() >= set(names))
        prefill.until(lambda: prefill.freed >= set(names))
        if beside_s:
            few = decode.tokens[beside] + 5
            decode.until(lambda: decode.tokens[beside] > few)
            decode.order("abort", [beside])
            decode.order("pace", 0.0)
        stamps: list[Stamp] = decode.ask("taken")
        return stamps + [stamp for stamp in prefill.ask("taken") if stamp[0] in {"sent", "freed"}]

    def plain(self, count: int, tokens: int) -> list[Stamp]:
        """Let the decode engine answer prompts of its own, all at once."""
        self._count += 1
        names = [f"plain{self._count}.{number}" for number in range(count)]
        self.decode.ask("taken")
        self.decode.order("add", dict.fromkeys(names), 16, tokens)
        self.decode.until(lambda: all(self.decode.tokens.get(name) == tokens for name in names))
        stamps: list[Stamp] = self.decode.ask("taken")
        return stamps

    def rest_share(self, within_s: float) -> float:
        """Return the share of a core that both processes take at rest, so long after a hand-over or, without, a plain prompt."""
        self.plain(1, 1) if self._kind == "none" else self.hand_over(1, 1, 0.0)
        time.sleep(within_s)
        before_s = sum(engine.ask("cpu_s") for engine in self.engines)
        time.sleep(within_s)
        return float(sum(engine.ask("cpu_s") for engine in self.engines) - before_s) / within_s

    def close(self) -> None:
        """End both engines."""
        for engine in self.engines:
            engine.close()


def _measure(plan: Mapping[str, Any], kinds: Sequence[str], rounds: int, folder: str, *, rests: int = 0) -> None:
    pairs: dict[str, Pair] = {}

    def by_turns(case: str, times: int, take: Callable[[Pair], Any]) -> None:
        for number in range(times):
            for kind in list(pairs)[:: 1 if number % 2 else -1]:
                time.sleep(0.03 + 0.04 * (0.618 * number % 1))  # so that the code runs as cold as in an engine
                print(json.dumps([kind, case, take(pairs[kind])]), flush=True)

    try:
        for kind in kinds:
            # Kept before it is up: Python waits at its exit for an engine that was not closed.
            pairs[kind] = Pair(kind, plan, folder)
            pairs[kind].wait()
        for name, case in plan["cases"].items():
            hand_over = partial(Pair.hand_over, blocks=case[0], at_once=case[1], beside_s=case[2])
            for pair in pairs.values():
                hand_over(pair)
            by_turns(name, rounds, hand_over)
            if name.startswith("one"):
                by_turns(name.replace("one", "bare"), 1, lambda pair: pair.decode.ask("bare_reads", rounds))
        if plan["cases"]:
            by_turns("plain", rounds, lambda pair: pair.plain(1, 1))
            by_turns("live", 4, lambda pair: pair.plain(plan["live"], LIVE_TOKENS))
        by_turns("rest", rests, lambda pair: pair.rest_share(plan["rest_s"]))
    finally:
        for pair in pairs.values():
            pair.close()


def main() -> None:
    """Measure pairs of both kinds by turns, then one with NIXL's progress thread as it is, which slows all down; then at rest."""
    plan = json.loads(sys.argv[1])
    preload()
    with tempfile.TemporaryDirectory(prefix="hand-over-") as folder:
        (model := Path(folder) / "model").mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        try:
            _measure(plan, ["ours", "own"], plan["rounds"], folder)
            if plan["shipped_rounds"]:
                for kinds, cases in ((["shipped"], dict([*plan["cases"].items()][:1])), (["ours", "none"], {})):
                    more = {**plan, "cases": cases, "live": 1}
                    _measure(more, kinds, plan["shipped_rounds"], folder, rests=RESTS)
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                sys.stderr.write(f"{log.name}:\n{log.read_text()[-2000:]}\n")
            raise


if __name__ == "__main__":
    main()
