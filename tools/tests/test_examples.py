"""Programs of docs/examples/ do what their page says, by public names alone. The one that needs torch runs in `test host`."""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from byte_oracle.oracle import expand_rows

from kv_scheduler_state import SchedulerConfig, SchedulerState
from kv_topology import BlockList, plan_transfer
from kvdev.paths import ROOT

FOLDER = ROOT / "docs" / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
LIBRARIES = ("kv_handshake", "kv_topology", "kv_nixl_agent", "kv_scheduler_state")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_an_example_uses_public_names_alone(program: Path) -> None:
    tree, used = ast.parse(program.read_text()), 0
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            public = importlib.import_module(node.module or "").__all__
            assert [each.name for each in node.names if each.name not in public] == []
            assert not any(part.startswith("_") for part in (node.module or "").split("."))
            used += len(node.names)
        elif isinstance(node, ast.Import):
            aliases |= {each.asname or each.name: each.name for each in node.names if each.name in LIBRARIES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            assert node.attr in importlib.import_module(aliases[node.value.id]).__all__, node.attr
            used += 1
    assert used > 0


def test_the_engine_has_under_250_lines() -> None:
    lines = (FOLDER / "torch_engine.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 250


def test_the_page_names_every_program() -> None:
    page = (FOLDER / "README.md").read_text()
    assert [program.name for program in PROGRAMS if f"]({program.name})" not in page] == []


def test_the_handshake_over_http_prints_what_the_page_shows() -> None:
    program = FOLDER / "handshake_over_http.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=60)
    page = (FOLDER / "README.md").read_text()
    shown = page.split("$ python docs/examples/handshake_over_http.py\n")[1].split("\n```")[0]
    assert done.stdout.splitlines() == shown.splitlines()


def test_http_answers_any_bytes_with_a_refusal() -> None:
    import http.client

    from kv_handshake import Codec

    example = load("handshake_over_http")
    listener = example.HttpListener({(0, 0): example.envelope(0, {"model": "toy"})})
    try:
        for query in (b"", b"\x00" * 100_000, b"GET / HTTP/1.1", b"\x93\xa1x\xff"):
            connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=10)
            connection.request("POST", "/", query)
            frames = example.split(connection.getresponse().read())
            refusal = Codec.decode_envelope(frames[0]).refusal
            assert refusal is not None
            assert refusal.code in {"malformed-query", "oversized-query"}
            connection.close()
    finally:
        listener.close()


# ------------------------------------------------------------------------------------------------ sketches, on plain memory


@dataclass
class Args:
    """A rank of SGLang as `KVArgs` describes it."""

    engine_rank: int
    buffers: list[np.ndarray[Any, Any]]
    page_size: int
    kv_head_num: int
    kv_data_ptrs: list[int] = field(init=False)
    kv_data_lens: list[int] = field(init=False)
    kv_item_lens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.kv_data_ptrs = [buffer.ctypes.data for buffer in self.buffers]
        self.kv_data_lens = [buffer.nbytes for buffer in self.buffers]
        self.kv_item_lens = [buffer[0].nbytes for buffer in self.buffers]


def move(plan: Any, mine: BlockList, theirs: BlockList, tokens: int) -> None:
    for rank in plan.producer_ranks:
        to, source = expand_rows(plan.local_rows(rank)), expand_rows(plan.peer_rows(rank))
        for one, other in zip(*plan.indices(rank, [mine], [theirs], tokens=tokens), strict=True):
            ctypes.memmove(int(to[one][0]), int(source[other][0]), int(to[one][1]))


def test_two_ranks_of_sglang_are_read_by_one() -> None:
    sglang = load("sglang_sketch")
    numbers = np.random.default_rng(1)
    theirs = [Args(rank, [numbers.random((6, 16, 2, 8)) for _ in range(4)], 16, 2) for rank in range(2)]
    mine = Args(0, [np.zeros((5, 32, 4, 8)) for _ in range(4)], 32, 4)
    peers = {
        (0, rank): sglang.geometry_of(args, tp_size=2, total_heads=4, element_bytes=8)
        for rank, args in enumerate(theirs)
    }
    plan = plan_transfer(sglang.geometry_of(mine, tp_size=1, total_heads=4, element_bytes=8), peers)
    move(plan, BlockList([3]), BlockList([5, 2]), 32)
    for buffer in range(4):
        whole = np.concatenate([theirs[0].buffers[buffer], theirs[1].buffers[buffer]], axis=2)
        assert np.array_equal(mine.buffers[buffer][3], np.concatenate([whole[5], whole[2]]))


def state(name: str) -> SchedulerState:
    return SchedulerState(SchedulerConfig(name, "127.0.0.1", 5600, fence_slots=8))


def test_a_request_of_sglang_from_sender_to_receiver() -> None:
    sglang = load("sglang_sketch")
    prefill, decode = state("prefill"), state("decode")
    sender = sglang.Sender(prefill, "p", 32)
    assert sender.poll() == sglang.KVPoll.WAITING_FOR_INPUT
    prefill.take_step_plan(now_s=time.monotonic())
    sender.send([4, 5])
    assert sender.poll() == sglang.KVPoll.TRANSFERRING
    receiver = sglang.Receiver(decode, "d", sender.ticket, 32)
    receiver.send_metadata([1, 2], decode_prefix_tokens=16, page_size=16)
    (order,) = decode.take_step_plan(now_s=time.monotonic()).reads
    assert (order.ticket.peer_blocks[0].ids, order.local_blocks[0].ids) == ((4, 5), (2,))
    assert receiver.poll() == sglang.KVPoll.TRANSFERRING
    receiver.ended(is_good=True)
    prefill.take_step_plan(now_s=time.monotonic())
    sender.sent()
    assert (receiver.poll(), sender.poll()) == (sglang.KVPoll.SUCCESS, sglang.KVPoll.SUCCESS)
    assert sglang.Receiver(decode, "e", {"do_remote_prefill": True}, 32).poll() == sglang.KVPoll.FAILED


@dataclass
class Info:
    """The attention part of a `RankInfo`."""

    kv_heads_per_rank: int
    tokens_per_block: int
    dims_per_head: int
    element_bytes: int
    is_mla: bool


@pytest.mark.parametrize("is_mla", [False, True])
def test_pools_of_tensorrt_llm_are_read(is_mla: bool) -> None:
    sketch = load("tensorrt_llm_sketch")
    inner = () if is_mla else (2, 4)
    theirs, mine = np.random.default_rng(2).random((6, *inner, 16, 8)), np.zeros((5, *inner, 16, 8))
    info, shard = Info(4, 16, 8, 8, is_mla), {"total_heads": 4, "tp_size": 1, "tp_rank": 0}
    local, peer = (
        sketch.geometry_of(info, {"layers.0": pool.ctypes.data}, len(pool), **shard) for pool in (mine, theirs)
    )
    assert {region.memory_kind for region in (*local.regions, *peer.regions)} == {"VRAM"}
    move(plan_transfer(local, {(0, 0): peer}), BlockList([3, 1]), BlockList([0, 4]), 32)
    assert np.array_equal(mine[[3, 1]], theirs[[0, 4]])


@dataclass
class Llm:
    """A request as TensorRT-LLM's executor has it."""

    py_request_id: int
    prompt_len: int
    block_ids: list[int]
    opaque_state: bytes | None = None


def test_a_request_of_tensorrt_llm_from_context_to_generation() -> None:
    sketch = load("tensorrt_llm_sketch")
    context, generation = sketch.Transceiver(state("context")), sketch.Transceiver(state("generation"))
    asked, answered = Llm(1, 32, [4, 5]), Llm(7, 32, [1, 2])
    context.respond_and_send_async(asked)
    answered.opaque_state = asked.opaque_state
    generation.request_and_receive_async(answered)
    assert (context.check_context_transfer_status(1), generation.check_gen_transfer_status(1)) == ([], ([], []))
    for machine in (context, generation):
        machine._state.take_step_plan(now_s=time.monotonic())
    generation.ended(received=["7"])
    context.ended(sent=["1"])
    assert (context.check_context_transfer_status(1), generation.check_gen_transfer_status(1)) == ([1], ([7], []))
    generation.request_and_receive_async(Llm(8, 32, [1, 2], b'{"do_remote_prefill": true}'))
    assert generation.check_gen_transfer_status(1) == ([], [8])
