"""Ray Serve LLM: the documented app, requests through its ingress, metrics as Ray exports them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from judging import (
    IS_LONG,
    LIVE,
    LONG_PROMPTS,
    SLOTS,
    USAGE,
    Alone,
    ask_all,
    assert_no_lease_left,
    assert_nothing_failed,
    handed_over,
    prompt,
)
from ray_cluster import RayCluster, started_cluster, streaming_words

from kvdev.engines import metric_sum, samples_of

INFO = "vllm:kv_transfer_info"
STREAMS = "vllm:kv_transfer_stream_bytes_count"
READ = "vllm:kv_transfer_read_bytes_total"
COMPUTED = "vllm:prompt_tokens_by_source_total"
"""Prompt tokens, with `source="local_compute"` those that an engine computed."""
_EXPORTED_WITHIN_S = 60.0
"""Ray's agent collects metrics every ten seconds."""


@pytest.fixture(scope="module")
def app(alone: Alone) -> Iterator[RayCluster]:
    """A cluster; each test serves what it needs."""
    assert alone  # made first: the plain engine has ended before the fleet starts
    with started_cluster("pair") as cluster:
        yield cluster


def _cache_bytes(number: int) -> int:
    """Return the bytes of a prompt's blocks: 3 blocks of 128 tokens for 300 tokens, 8192 bytes a token.

    A token has K and V in 4 layers, each with 4 heads of 64 floats.
    """
    return -(-len(prompt(number)) // 128) * 128 * 4 * 2 * 4 * 64 * 4


def eventually(condition: Callable[[], bool], within_s: float = _EXPORTED_WITHIN_S) -> None:
    """Wait until Ray has exported what makes this true; give up after a while, and let the assertion that follows tell."""
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(1)


def settles(app: RayCluster, prefill_replicas: int) -> None:
    """No lease is left but those of the last request of each replica: every request to Ray's ingress is a hand-over.

    A prompt of 300 tokens holds 3 blocks of 256.
    """
    at_rest = {LIVE: prefill_replicas + 1, SLOTS: prefill_replicas, USAGE: (prefill_replicas + 1) * 3 / 256}

    def ask_until_shown() -> None:
        eventually(lambda: bool(ask_all(app.url, [0])) and len(shown()) >= 2)

    def shown() -> set[str]:
        """Return the replicas of which all gauges are there: Ray drops those that are not set for 20 s."""
        page = app.page()
        return set.intersection(*(replicas_with(page, name) for name in (LIVE, SLOTS, INFO)))

    ask_until_shown()
    assert len(shown()) >= 2
    assert_no_lease_left(lambda: [app.page()], ask_until_shown, 60, at_rest)


def test_texts_are_those_of_one_engine_and_every_prompt_is_handed_over(app: RayCluster, alone: Alone) -> None:
    app.serve()
    app.wait_serving()
    numbers = range(1, 13)
    alone.assert_same(ask_all(app.url, numbers))
    expected = 1 + len(numbers)  # the first, when the app had started
    eventually(lambda: handed_over([app.page()]) >= expected)
    page = app.page()
    assert handed_over([page]) == expected
    # Counters are exact. The sum of a histogram is not: Ray rebuilds it from the middles of buckets.
    assert metric_sum(page, "vllm:kv_transfer_read_bytes_total") == sum(map(_cache_bytes, [0, *numbers]))
    assert_nothing_failed([page])
    # A metric that Ray's wrappers refuse is left out and logged, and ends no engine.
    assert "the connector's metric" not in app.logs()
    settles(app, prefill_replicas=1)


@pytest.mark.skipif(not IS_LONG, reason="long: both replicas are replaced once more (dev.py test --long fleet)")
def test_replicas_that_stream_work_at_once_and_nothing_is_computed_twice(app: RayCluster, alone: Alone) -> None:
    app.serve(*streaming_words())
    assert_handed_over(app, alone, LONG_PROMPTS[:4], is_streamed=True)
    settles(app, prefill_replicas=1)


@pytest.mark.skipif(not IS_LONG, reason="long: both replicas are replaced once more (dev.py test --long fleet)")
def test_a_prefill_replica_that_does_not_stream_hands_over_whole_prompts(app: RayCluster, alone: Alone) -> None:
    """Both replicas at once would lose the ticket, and every prompt would be computed twice."""
    app.serve("connector={}", *(f"decode_{word}" for word in streaming_words()))
    assert_handed_over(app, alone, LONG_PROMPTS[4:], is_streamed=False)
    assert app.logs().count("not streamed: the prefill replica does not have") == 1
    settles(app, prefill_replicas=1)


def assert_handed_over(app: RayCluster, alone: Alone, numbers: Sequence[int], *, is_streamed: bool) -> None:
    """The texts are those of one engine, and the decode replica reads each prompt once, streamed or whole, and computes none."""
    before = app.page()
    app.wait_serving()
    alone.assert_same(ask_all(app.url, numbers))
    prompts = [0, *numbers]
    expected = sum(map(_cache_bytes, prompts))
    eventually(lambda: sum(growth(before, app.page(), READ).values()) >= expected)
    page = app.page()
    ((decode, read),) = growth(before, page, READ).items()
    assert read == expected
    assert growth(before, page, STREAMS) == ({decode: len(prompts)} if is_streamed else {})
    tokens = sum(len(prompt(n)) for n in prompts)
    # Of a prompt that was read before it got its blocks vLLM counts the last token as computed.
    computed = metric_sum(page, COMPUTED, source="local_compute", ReplicaId=decode)
    assert computed <= len(prompts)
    assert metric_sum(page, COMPUTED, source="external_kv_transfer", ReplicaId=decode) >= tokens - computed
    assert_nothing_failed([page])


def growth(before: str, after: str, name: str) -> dict[str, float]:
    """Return by how much a counter has grown, for each replica of which it has."""
    grown = {
        sample.labels["ReplicaId"]: sample.value - metric_sum(before, name, ReplicaId=sample.labels["ReplicaId"])
        for sample in samples_of(after, name)
    }
    return {replica: level for replica, level in grown.items() if level}


def replicas_with(page: str, name: str) -> set[str]:
    """Return the replicas that show a metric."""
    return {sample.labels["ReplicaId"] for sample in samples_of(page, name)}
