"""Programs of docs/examples/ do what their page says, by public names alone. The one that needs torch runs in `test host`."""

from __future__ import annotations

import ast
import ctypes
import importlib
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from byte_oracle.oracle import expand_rows

from kv_scheduler_state import SchedulerConfig, SchedulerState
from kv_topology import BlockList, plan_transfer
from kvdev.paths import ROOT

FOLDER = ROOT / "docs" / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
PAGE = (FOLDER / "README.md").read_text()
LIBRARIES = ("kv_handshake", "kv_topology", "kv_nixl_agent", "kv_scheduler_state")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_an_example_is_on_the_page_and_uses_public_names_alone(program: Any) -> None:
    assert f"]({program.name})" in PAGE
    used: list[tuple[str, str]] = []
    aliases: dict[str, str] = {}
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            aliases |= {each.asname or each.name: each.name for each in node.names if each.name in LIBRARIES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
            used += [(node.module or "", each.name) for each in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            used.append((aliases[node.value.id], node.attr))
    assert used
    assert [(module, name) for module, name in used if name not in importlib.import_module(module).__all__] == []


def test_the_engine_has_under_250_lines() -> None:
    assert sum(bool(line.strip()) for line in (FOLDER / "torch_engine.py").read_text().splitlines()) < 250


def test_the_handshake_over_http_prints_what_the_page_shows() -> None:
    program = str(FOLDER / "handshake_over_http.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=60)
    shown = PAGE.split("$ python docs/examples/handshake_over_http.py\n")[1].split("\n```")[0]
    assert done.stdout.splitlines() == shown.splitlines()


# ------------------------------------------------------------------------------------------------ sketches, on plain memory


def move(plan: Any, mine: BlockList, theirs: BlockList, tokens: int) -> None:
    for rank in plan.producer_ranks:
        to, source = expand_rows(plan.local_rows(rank)), expand_rows(plan.peer_rows(rank))
        for one, other in zip(*plan.indices(rank, [mine], [theirs], tokens=tokens), strict=True):
            ctypes.memmove(int(to[one][0]), int(source[other][0]), int(to[one][1]))


def state(name: str) -> SchedulerState:
    return SchedulerState(SchedulerConfig(name, "127.0.0.1", 5600, fence_slots=8, fence_seed=1, nonce_seed="n"))


def kv_args(rank: int, buffers: list[Any], page_size: int, kv_head_num: int) -> Any:
    """Return a rank of SGLang as `KVArgs` describes it."""
    return SimpleNamespace(
        engine_rank=rank,
        page_size=page_size,
        kv_head_num=kv_head_num,
        kv_data_ptrs=[buffer.ctypes.data for buffer in buffers],
        kv_data_lens=[buffer.nbytes for buffer in buffers],
        kv_item_lens=[buffer[0].nbytes for buffer in buffers],
    )


def test_two_ranks_of_sglang_are_read_by_one() -> None:
    sglang: Any = importlib.import_module("sglang_sketch")
    numbers = np.random.default_rng(1)
    theirs = [[numbers.random((6, 16, 2, 8)) for _ in range(4)] for _ in range(2)]
    mine = [np.zeros((5, 32, 4, 8)) for _ in range(4)]
    peers = {
        (0, rank): sglang.geometry_of(kv_args(rank, buffers, 16, 2), tp_size=2, total_heads=4, element_bytes=8)
        for rank, buffers in enumerate(theirs)
    }
    local = sglang.geometry_of(kv_args(0, mine, 32, 4), tp_size=1, total_heads=4, element_bytes=8)
    move(plan_transfer(local, peers), BlockList([3]), BlockList([5, 2]), 32)
    for number, buffer in enumerate(mine):
        whole = np.concatenate([theirs[0][number], theirs[1][number]], axis=2)
        assert np.array_equal(buffer[3], np.concatenate([whole[5], whole[2]]))


def test_a_request_of_sglang_from_sender_to_receiver() -> None:
    sglang: Any = importlib.import_module("sglang_sketch")
    prefill, decode = state("prefill"), state("decode")
    sender = sglang.Sender(prefill, "p", range(32))
    assert sender.poll() == sglang.KVPoll.WAITING_FOR_INPUT
    prefill.take_step_plan(now_s=time.monotonic())
    sender.send([4, 5])
    receiver = sglang.Receiver(decode, "d", sender.ticket, range(32))
    receiver.send_metadata([1, 2], decode_prefix_tokens=16, page_size=16)
    (order,) = decode.take_step_plan(now_s=time.monotonic()).reads
    assert (order.ticket.peer_blocks[0].ids, order.local_blocks[0].ids) == ((4, 5), (2,))
    assert (sender.poll(), receiver.poll()) == (sglang.KVPoll.TRANSFERRING, sglang.KVPoll.TRANSFERRING)
    receiver.ended(is_good=True)
    prefill.take_step_plan(now_s=time.monotonic())
    sender.sent()
    assert (receiver.poll(), sender.poll()) == (sglang.KVPoll.SUCCESS, sglang.KVPoll.SUCCESS)
    assert sglang.Receiver(decode, "o", sender.ticket, range(1, 33)).poll() == sglang.KVPoll.FAILED  # another prompt
    assert sglang.Receiver(decode, "e", {"do_remote_prefill": True}, range(32)).poll() == sglang.KVPoll.FAILED


@pytest.mark.parametrize("is_mla", [False, True])
def test_pools_of_tensorrt_llm_are_read(is_mla: bool) -> None:
    sketch: Any = importlib.import_module("tensorrt_llm_sketch")
    inner = () if is_mla else (2, 4)
    theirs, mine = np.random.default_rng(2).random((6, *inner, 16, 8)), np.zeros((5, *inner, 16, 8))
    sizes = {"kv_heads_per_rank": 4, "tokens_per_block": 16, "dims_per_head": 8, "element_bytes": 8}
    info, shard = SimpleNamespace(**sizes, is_mla=is_mla), {"total_heads": 4, "tp_size": 1, "tp_rank": 0}
    local, peer = (
        sketch.geometry_of(info, {"layers.0": pool.ctypes.data}, len(pool), **shard) for pool in (mine, theirs)
    )
    assert {region.memory_kind for region in (*local.regions, *peer.regions)} == {"VRAM"}
    move(plan_transfer(local, {(0, 0): peer}), BlockList([3, 1]), BlockList([0, 4]), 32)
    assert np.array_equal(mine[[3, 1]], theirs[[0, 4]])


def llm(number: int, blocks: list[int], opaque_state: bytes | None = None) -> Any:
    """Return a request as TensorRT-LLM's executor has it."""
    return SimpleNamespace(
        py_request_id=number, prompt_len=32, prompt_token_ids=range(32), block_ids=blocks, opaque_state=opaque_state
    )


def test_a_request_of_tensorrt_llm_from_context_to_generation() -> None:
    sketch: Any = importlib.import_module("tensorrt_llm_sketch")
    context, generation = sketch.Transceiver(state("context")), sketch.Transceiver(state("generation"))
    asked = llm(1, [4, 5])
    context.respond_and_send_async(asked)
    generation.request_and_receive_async(llm(7, [1, 2], asked.opaque_state))
    assert (context.check_context_transfer_status(1), generation.check_gen_transfer_status(1)) == ([], ([], []))
    for machine in (context, generation):
        machine._state.take_step_plan(now_s=time.monotonic())
    generation.ended(received=["7"])
    context.ended(sent=["1"])
    assert (context.check_context_transfer_status(1), generation.check_gen_transfer_status(1)) == ([1], ([7], []))
    generation.request_and_receive_async(llm(8, [1, 2], b'{"do_remote_prefill": true}'))
    assert generation.check_gen_transfer_status(1) == ([], [8])
