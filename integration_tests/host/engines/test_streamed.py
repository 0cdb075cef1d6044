"""Prompts that the decode engine reads while the prefill engine computes them, through a router that asks both at once.

Every test asks one engine alone for the same texts, counts what was computed twice (nothing), and waits until every block and
slot is free. Chunks are small, so that a prompt takes many steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from commands import adapter, time_to_first_token
from fleets import BYTES, COMPUTED, FAILED, Fleet, client, ours, prompt, started_pair

STREAMED, EARLY = "vllm:kv_transfer_stream_bytes", "vllm:kv_transfer_stream_early_bytes"
TORN = "vllm:kv_transfer_num_torn_streams_total"
LIVE = "vllm:kv_transfer_live_requests"
COVERED = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
"""No fleet secret: the address in an early ticket is covered by the list of hosts."""
ARGUMENTS = {name: ["--max-num-batched-tokens", "128", "--max-num-seqs", "8"] for name in ("prefill", "decode")}
BLOCK_BYTES = 1 << 20
"""Of a block of 128 tokens of the dense family."""
LONG = 150
"""Words of a prompt that takes many chunks."""


def _streaming(role: str, **keys: object) -> dict[str, object]:
    return ours(role, **COVERED, **keys)


IS_LONG = os.environ.get("KVDEV_LONG") == "1"
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="long: dev.py test host --long; more engines start")


@pytest.fixture(
    scope="module", params=["dense", pytest.param("mamba", marks=[LONG_ONLY, pytest.mark.proves("Mamba-2: streamed")])]
)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with started_pair(request.param, configure=_streaming, arguments=ARGUMENTS, is_concurrent=True) as running:
        running.routed([prompt(1)])
        yield running


def _assert_handed_over(fleet: Fleet, texts: list[str]) -> None:
    """The texts are those of one engine, nothing is computed twice, everything is free afterwards.

    A prompt that is finished before the question for it comes is read as a whole.
    """
    computed = fleet.count("decode", COMPUTED, source="local_compute")
    failed, torn = fleet.count("decode", FAILED), fleet.count("decode", TORN)
    fleet.assert_same_as_alone(texts)
    assert fleet.count("decode", COMPUTED, source="local_compute") - computed <= len(texts)
    assert (fleet.count("decode", FAILED), fleet.count("decode", TORN)) == (failed, torn)
    fleet.assert_all_blocks_free()


@pytest.mark.proves("dense: streamed")
@pytest.mark.newest
def test_long_prompts_arrive_while_they_are_computed(fleet: Fleet) -> None:
    """A tiny model is done with 8 chunks in a fifth of a second, and the question may come later on a busy machine: ten tries."""
    bytes_before, early_before = (fleet.count("decode", f"{name}_sum") for name in (STREAMED, EARLY))
    for number in range(10):
        _assert_handed_over(fleet, [prompt(10 + number, LONG)])
        moved = fleet.count("decode", f"{STREAMED}_sum") - bytes_before
        early = fleet.count("decode", f"{EARLY}_sum") - early_before
        if early:
            break
    assert 0 < early < moved, f"{early} of {moved} bytes came before the end of the last chunk"


def test_prompts_of_all_lengths_at_once(fleet: Fleet) -> None:
    _assert_handed_over(fleet, [prompt(20 + number, words) for number, words in enumerate((4, 20, 60, 100, LONG))])


@pytest.mark.proves("dense: prefix hits")
def test_a_prefix_that_either_engine_holds_is_not_read_again(fleet: Fleet) -> None:
    if fleet.family == "mamba":
        pytest.skip("vLLM keeps no prefixes of states")
    text = prompt(30, LONG)
    fleet.answers([text], decode="prefill", max_tokens=1)
    _assert_handed_over(fleet, [text + " and more " + prompt(31, 40)])
    whole = fleet.count("decode", BYTES)
    fleet.assert_same_as_alone([text + " and more " + prompt(31, 40)])
    assert fleet.count("decode", BYTES) - whole <= BLOCK_BYTES, "the decode engine holds all but the last block"
    fleet.assert_all_blocks_free()


def test_a_trace_of_a_streamed_prompt_has_its_computation_and_the_last_read_in_one_row(fleet: Fleet) -> None:
    """Both engines arrive at once, so no clock is derived from a ticket; spans fit into what the client waited for."""
    if fleet.family == "mamba":
        pytest.skip("the same trace: once is enough")
    for number in range(10):
        name = f"streamed-{number}"
        waited_s = time_to_first_token(fleet, name, prompt(90 + number, LONG))
        seen = json.loads(adapter("trace", name, "--ttft", f"{waited_s:.6f}", "--json", code=None))
        assert (seen["prefill"]["is_known"], seen["codes"]) == (True, [])
        assert all(span["is_named"] for span in seen["spans"]), seen
        uncertain_s = max(seen["clock_uncertainty_s"].values())
        assert seen["named_s"] <= waited_s + uncertain_s, seen
        if seen["is_streamed"] and seen["early_bytes"] and uncertain_s < 0.05:
            break
    assert uncertain_s < 0.05
    assert 0 < seen["early_bytes"] < seen["bytes"], "no prompt of ten was read while it was computed"
    text = adapter("trace", name, code=None)
    print(text)
    assert "read the last blocks" in text
    assert "contradict" not in text


def test_a_client_that_goes_away_at_any_chunk_leaves_nothing_behind(fleet: Fleet) -> None:
    async def leave(number: int, after_s: float) -> None:
        body = {"model": "tiny", "prompt": prompt(40 + number, LONG), "max_tokens": 8, "temperature": 0}
        async with client() as session:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(session.post(fleet.router + "/v1/completions", json=body), after_s)

    async def run() -> None:
        for number in range(8):
            await leave(number, 0.02 + 0.03 * number)

    asyncio.run(run())
    fleet.assert_all_blocks_free()
    _assert_handed_over(fleet, [prompt(50, LONG)])


def test_a_sequential_hand_over_works_beside(fleet: Fleet) -> None:
    streams = fleet.count("decode", f"{STREAMED}_count")
    text = prompt(60, LONG)
    expected = fleet.answers([text], decode="prefill")
    assert fleet.answers([text], prefill="prefill", decode="decode") == expected
    assert fleet.count("decode", f"{STREAMED}_count") == streams
    fleet.assert_all_blocks_free()


@pytest.mark.parametrize("policy", ["fail", pytest.param("recompute", marks=LONG_ONLY)])
def test_a_prefill_engine_that_dies_in_the_middle(policy: str) -> None:
    """Each request ends: with the text of one engine alone, or with a coded error where the policy is to fail.

    Without prefix caches: what an engine computed alone, or took over, is nowhere to be found when the same prompt comes again.
    """

    def configure(role: str, **keys: object) -> dict[str, object]:
        return _streaming(role, kv_load_failure_policy=policy, read_timeout_s=6, **keys)

    few = ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--no-enable-prefix-caching"]
    arguments = {"prefill": few, "decode": few}
    with started_pair("dense", configure=configure, arguments=arguments, is_concurrent=True) as fleet:
        fleet.routed([prompt(1)])
        for number, after_s in enumerate((0.25, 0.5, 0.8, 0.15, 1.2)):
            texts = [name + prompt(70 + number, LONG + 50) for name in ("", "b ", "c ", "d ")]
            alone = fleet.answers(texts, decode="prefill")
            broken = _broken(fleet)
            ended, is_dead = asyncio.run(_ask_and_kill(fleet, texts, after_s))
            for (status, answer), expected in zip(ended, alone, strict=True):
                assert status == 200 or (policy == "fail" and is_dead and status >= 500), answer
                assert status != 200 or text_of(answer) == expected
            if is_dead:
                break
        assert is_dead, "no stream was under way in five tries"
        assert _broken(fleet) > broken, "a stream that was under way was neither torn nor failed"
        assert fleet.answers(texts, decode="decode") == alone
        fleet.assert_all_blocks_free()


def _broken(fleet: Fleet) -> float:
    """Return how many streams broke off on the decode engine, and how many reads failed there."""
    return fleet.count("decode", TORN) + fleet.count("decode", FAILED)


async def _ask_and_kill(fleet: Fleet, texts: list[str], after_s: float) -> tuple[list[tuple[int, str]], bool]:
    """Send prompts through the router, and kill the prefill engine if a stream is under way some time later.

    Returns:
        Status and body of each answer, and whether the prefill engine was killed.
    """

    async def ask(text: str) -> tuple[int, str]:
        body = {"model": "tiny", "prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with (
            client(timeout_s=200) as session,  # beyond it, a request hangs
            session.post(fleet.router + "/v1/completions", json=body) as reply,
        ):
            return reply.status, await reply.text()

    asks = [asyncio.create_task(ask(text)) for text in texts]
    await asyncio.sleep(after_s)
    is_dead = await asyncio.to_thread(_kill_mid_stream, fleet)
    return list(await asyncio.gather(*asks)), is_dead


def _kill_mid_stream(fleet: Fleet) -> bool:
    """Stop the prefill engine; kill it if the decode engine still reads a stream then, else let it go on.

    Streams stand still as long as it is stopped: a reader waits 5 s for progress, and states are counted once a second.
    """
    prefill = fleet.engines["prefill"]
    prefill.signal_all(signal.SIGSTOP)
    time.sleep(1.2)
    until_s = time.monotonic() + 1.8
    while time.monotonic() < until_s:
        if fleet.count("decode", LIVE, state="consumer-streaming"):
            fleet.end("prefill")
            return True
        time.sleep(0.1)
    prefill.signal_all(signal.SIGCONT)
    return False


def text_of(answer: str) -> str:
    """Return the text of a completion."""
    return str(json.loads(answer)["choices"][0]["text"])
