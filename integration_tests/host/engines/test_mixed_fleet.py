"""Model families in fleets of our connector and vLLM's own: each reads what the other computed, hash checks on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import zmq
from fleets import (
    BYTES,
    COMPUTED,
    FAILED,
    OWN_WORKERS,
    TRANSFERS,
    VLLM,
    Fleet,
    hosts_own,
    log_lines,
    ours,
    own_name,
    probe_environment,
    probed,
    prompt,
    quoted_lines,
    started_fleet,
)

from kvdev.engines import local_model

HITS = "vllm:prefix_cache_hits_total"
LEASE_S = 4
LONG_ONLY = pytest.mark.skipif(
    not os.environ.get("KVDEV_LONG"), reason="long: dev.py test --long host; three engines start"
)
MIXED = [("ours", "hosts"), ("hosts", "ours")]


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        pytest.param(
            "dense",
            "auto",
            marks=[pytest.mark.newest, pytest.mark.proves("dense: equal ranks, to vLLM's own, from vLLM's own")],
        ),
        pytest.param(
            "sliding-window",
            "auto",
            marks=pytest.mark.proves("windows: equal ranks, to vLLM's own, from vLLM's own"),
        ),
        pytest.param("mamba", "auto", marks=pytest.mark.proves("Mamba-2: equal ranks, to vLLM's own, from vLLM's own")),
        pytest.param(
            "dense",
            "fp8_e4m3",
            marks=[LONG_ONLY, pytest.mark.proves("fp8: equal ranks, to vLLM's own, from vLLM's own")],
        ),
    ],
)
def test_a_family_crosses_in_every_pairing(family: str, cache: str) -> None:
    """Two engines run at a time: more of them leave two cores too little to answer within vLLM's five seconds."""
    configs = {"ours": ours(), "too": ours(), "hosts": hosts_own()}
    arguments = {name: ["--kv-cache-dtype", cache] for name in configs}
    with started_fleet(family, configs, arguments=arguments) as fleet:
        for number, (prefill, decode) in enumerate([*MIXED, ("ours", "too")]):
            fleet.only(prefill, decode)
            texts = [prompt(10 * number + n, 20 + 60 * n) for n in range(4)]
            fleet.let_connect(prefill, decode)
            fleet.assert_handed_over(prefill, decode, texts, fleet.answers(texts, decode=prefill))


@pytest.mark.proves("Mamba-2: prefix hits")
def test_what_a_hybrids_prefix_hit_leaves_is_read_with_its_state() -> None:
    """The decode engine alone keeps prefixes, each with the state at the end of a block.

    Its steps are one block: of a longer step vLLM also keeps a state within it, which its CPU kernels do not give (IndexError).
    """
    configs = {"prefill": ours(), "decode": ours()}
    steps = ["--enable-prefix-caching", "--max-num-batched-tokens", "128", "--max-num-seqs", "4"]
    with started_fleet("mamba", configs, arguments={"decode": steps}) as fleet:
        turns = [prompt(n, 70) for n in range(2)]
        for more in ("", prompt(50, 40)):
            turns = [turn + more for turn in turns]
            hits, read = fleet.count("decode", HITS), fleet.count("decode", BYTES)
            fleet.assert_handed_over("prefill", "decode", turns, fleet.answers(turns, decode="prefill"))
            hits, read = fleet.count("decode", HITS) - hits, fleet.count("decode", BYTES) - read
            print(f"\n  {len(turns)} prompts of {len(turns[0])} bytes: {hits:.0f} tokens hit, {read:.0f} bytes read")
        assert hits >= len(turns) * 128


@pytest.mark.proves("leases renewed in the queue of vLLM's own and of ours: proof")
def test_both_connectors_read_from_one_another_renew_leases_and_outlive_lying_tickets() -> None:
    """A hand-over that queues for longer than its lease arrives, because the reader's heartbeats renew the lease."""
    configs = {"ours": ours(kv_lease_duration=LEASE_S), "hosts": hosts_own(kv_lease_duration=LEASE_S)}
    arguments = {name: ["--max-num-seqs", "1"] for name in configs}
    with started_fleet("dense", configs, arguments=arguments) as fleet:
        for number, (prefill, decode) in enumerate(MIXED):
            fleet.let_connect(prefill, decode)
            texts = [prompt(10 * number + n, 20 + 60 * n) for n in range(3)]
            fleet.assert_handed_over(prefill, decode, texts, fleet.answers(texts, decode=prefill))
            assert_a_queued_hand_over_arrives(fleet, prefill, decode, prompt(100 + number, 60))
        says = "vLLM's own connector"
        assert fleet.log("ours").count(says) == 1, "what is lost with this peer is said once"
        assert_no_ticket_ends_the_hosts_listener(fleet)


LIES: tuple[dict[str, int], ...] = (
    {"kv_dialect": 2},
    {"kv_dialect": 4},
    *({"tp_size": size} for size in (2, 3, 4, 8, 1024)),
    {"pp_size": 2},
    {"tp_size": 2, "pp_size": 4, "kv_dialect": 4},
    {"dcp_size": 2, "tp_size": 2},
)


def assert_no_ticket_ends_the_hosts_listener(fleet: Fleet) -> None:
    """Its thread ends on a query of another shape and on one for a rank that it lacks; a ticket that lies provokes neither."""

    def lie(number: int, change: dict[str, int]) -> None:
        text = prompt(700 + number, 20)
        # A name in another spelling is an unknown place, so that the lie is asked about.
        name = "".join(letter.upper() if number >> bit & 1 else letter for bit, letter in enumerate("localhost"))
        params = {**fleet.take_ticket("hosts", text), "remote_host": name, **change}
        body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": params}
        # An answer or an error, by the failure policy: only that it ends matters here.
        fleet.run(lambda session: fleet.send(session, "ours", body))

    def is_served() -> bool:
        command = Path(sys.executable).with_name("kv-handshake")
        address = f"127.0.0.1:{fleet.engines['hosts'].side_channel_port}"
        words = [str(command), "probe", address, "--vllm", VLLM, "--timeout", "10"]
        return subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0

    for number, change in enumerate(LIES):
        lie(number, change)
    assert is_served(), LIES
    text, before = prompt(750, 30), fleet.count("ours", TRANSFERS)
    expected = fleet.answers([text], decode="hosts")
    assert fleet.answers([text], prefill="hosts", decode="ours") == expected
    assert fleet.count("ours", TRANSFERS) == before + 1
    print(f"\n  {len(LIES)} tickets that lied about dialect and sizes: the listener of vLLM's own connector serves")
    with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(f"tcp://127.0.0.1:{fleet.engines['hosts'].side_channel_port}")
        stranger.send(msgspec.msgpack.encode((b"get_meta_msg", 0)))
    assert not is_served(), "the same query by hand ends it: the tickets above had something to end"


def assert_a_queued_hand_over_arrives(fleet: Fleet, prefill: str, decode: str, text: str) -> None:
    expected = fleet.answers([text], decode=prefill)
    computed, failed = fleet.count(decode, COMPUTED, source="local_compute"), fleet.count(decode, FAILED)
    busy = prompt(900, 4)

    async def queue(session: aiohttp.ClientSession) -> tuple[str, float]:
        running = [
            asyncio.create_task(fleet.post(session, decode, {"prompt": busy + str(n), "max_tokens": 1900}))
            for n in range(3)
        ]
        ticket = await fleet.ticket(session, text, prefill, {})
        started = time.monotonic()
        body = {"prompt": text, "max_tokens": 24, "kv_transfer_params": ticket}
        queued = asyncio.create_task(fleet.post(session, decode, body))
        await asyncio.sleep(2 * LEASE_S)
        assert not queued.done(), "the engine was not busy long enough to show anything"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        answer = await queued
        return str(answer["choices"][0]["text"]), time.monotonic() - started

    answer, waited_s = fleet.run(queue)
    assert waited_s > 1.5 * LEASE_S, f"the engine was not busy long enough ({waited_s:.1f} s) to show anything"
    assert [answer] == expected
    assert fleet.count(decode, FAILED) == failed
    busy_tokens = sum(len(busy + str(n)) + 1 for n in range(3))
    assert fleet.count(decode, COMPUTED, source="local_compute") - computed <= busy_tokens + 1
    fleet.assert_all_blocks_free()


def reverse_weights(file: Path) -> None:
    """Put another file in the place of a checkpoint's: the values of each tensor in reverse order, all else the same."""
    data = bytearray(file.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:first]).items():
        if name != "__metadata__":
            begin, end = (first + offset for offset in tensor["data_offsets"])
            data[begin:end] = np.frombuffer(bytes(data[begin:end]), np.float32)[::-1].tobytes()
    other = file.with_suffix(".new")
    other.write_bytes(data)
    other.replace(file)


@pytest.mark.never_wrong("A14")
def test_another_checkpoint_under_the_same_path_and_an_override_are_refused_by_name(tmp_path: Path) -> None:
    """The checkpoint is replaced in place while engines run, as fleets are updated; decode computes with what it has loaded."""
    model = tmp_path / "model"
    shutil.copytree(local_model(Path(os.environ["KVDEV_UV"]), "dense", VLLM)[1], model)
    words = ["--model", str(model), "--no-enable-prefix-caching"]
    override = ["--hf-overrides", json.dumps({"rms_norm_eps": 0.3})]
    reads = ours(kv_load_failure_policy="recompute")
    arguments = {"prefill": words, "overridden": [*words, *override], "replaced": words, "same": words}
    arguments["unlike"] = [*words, "--dtype", "bfloat16"]
    texts = [prompt(number, 60) for number in range(3)]
    configs = {"prefill": ours(), "overridden": reads, "same": reads, "unlike": reads}
    with started_fleet("dense", configs, arguments=arguments) as fleet:
        fleet.assert_handed_over("prefill", "same", texts, fleet.answers(texts, decode="prefill"))
        before = len(fleet.log("unlike"))
        fleet.answers(texts[:1], prefill="prefill", decode="unlike")
        assert log_lines(fleet.log("unlike")[before:]) == quoted_lines("another dtype"), fleet.log("unlike")[before:]
        fleet.end("unlike")
        fleet.end("same")
        for file in model.glob("*.safetensors"):
            reverse_weights(file)
        with started_fleet("dense", {"replaced": reads}, arguments=arguments) as later:
            fleet.engines |= later.engines
            for engine, said in (
                ("overridden", 'model_config: local {"rms_norm_eps": 0.3}'),
                ("replaced", "model_weights: "),
            ):
                alone = fleet.answers(texts, decode=engine)
                assert alone != fleet.answers(texts, decode="prefill"), "the KV of one would not show in the other"
                assert fleet.answers(texts, prefill="prefill", decode=engine) == alone
                assert fleet.count(engine, TRANSFERS) == 0
                assert said in fleet.log(engine)
            del fleet.engines["replaced"]


@pytest.mark.proves(
    "latent: equal ranks, to vLLM's own, from vLLM's own", "experts: proof", "pages mirrored in host memory: proof"
)
def test_latent_attention_crosses_between_all_pairings_and_through_a_host_buffer(tmp_path: Path) -> None:
    """vLLM's own connector on both ends is the reference: one engine alone is none for this family.

    On CPU its decode and prefill kernels for latent attention disagree without any connector: to generate n tokens at
    once and to ask n times for one token gives different texts.
    """
    texts = [prompt(0, 20), prompt(3, 200)]
    configs = {"hosts": hosts_own(), "peer": hosts_own(), "ours": ours(), "mirrored": probed()}
    with started_fleet("mla", configs, environments={"mirrored": probe_environment(tmp_path, "MIRROR")}) as fleet:
        fleet.only("hosts", "peer")
        fleet.let_connect("hosts", "peer")
        # Each by itself: the batch that a prompt is computed in changes its text here.
        expected = [fleet.answers([text], prefill="hosts", decode="peer")[0] for text in texts]
        for prefill, decode in [*MIXED, ("ours", "mirrored"), ("mirrored", "ours")]:
            fleet.only(prefill, decode)
            fleet.let_connect(prefill, decode)
            for text, answer in zip(texts, expected, strict=True):
                fleet.assert_handed_over(prefill, decode, [text], [answer])


ONE_AND_TWO = {
    "ours": (ours, own_name),
    "ours to hosts": (ours, hosts_own),
    "hosts to ours": (hosts_own, ours),
}


@pytest.mark.proves("dense: unequal ranks", "unequal ranks with vLLM's own: proof")
@pytest.mark.parametrize("makers", ONE_AND_TWO.values(), ids=ONE_AND_TWO)
def test_unequal_tensor_parallel_sizes(makers: tuple[Any, Any]) -> None:
    """Ranks that wait for one another spin, and on few cores that delays the first hand-over: nothing may run out of time."""
    is_mixed = hosts_own in makers
    if is_mixed and len(os.sched_getaffinity(0)) < 4 and "KVDEV_ANYWAY" not in os.environ:
        pytest.skip("vLLM's own connector cannot wait for ranks that share cores (KVDEV_ANYWAY=1 tries)")
    patience = {"read_timeout_s": 720.0}
    one, two = (make(kv_lease_duration=300, **({} if make is hosts_own else patience)) for make in makers)
    with started_fleet(
        "dense",
        {"one": one, "two": two},
        arguments={"two": ["--tensor-parallel-size", "2"]},
        environment=OWN_WORKERS,
        cores={"two": "0|1"},
    ) as fleet:
        for number, (prefill, decode) in enumerate([("one", "two"), ("two", "one")][: 1 if is_mixed else 2]):
            texts = [prompt(10 * number + n, 20 + 60 * n) for n in range(2)]
            fleet.let_connect(prefill, decode)
            fleet.assert_handed_over(prefill, decode, texts, fleet.answers(texts, decode=prefill))
