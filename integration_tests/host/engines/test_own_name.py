"""The connector under its own name: unequal tensor-parallel sizes, and the control that must fail."""

from __future__ import annotations

import os

import pytest
from pairs import Pair, prompt, started_pair

from kvdev.demo import connector_config


def exercise(pair: Pair) -> None:
    texts = [prompt(n, 20 + 60 * n) for n in range(4)]
    pair.assert_same_as_alone(texts)
    assert pair.decode_count("vllm:nixl_xfer_time_seconds_count") >= len(texts)
    assert pair.decode_count("vllm:nixl_num_failed_transfers_total") == 0
    pair.assert_same_as_alone(texts[:2])
    pair.assert_all_blocks_free()


def own_name(role: str) -> dict[str, object]:
    """The connector under its own name, which vLLM's plugin entry point makes known without a module path."""
    config = {**connector_config(role), "kv_connector": "KVTransferConnector"}
    del config["kv_connector_module_path"]
    return config


@pytest.mark.skipif(
    (os.cpu_count() or 1) < 4 and "KVDEV_ANYWAY" not in os.environ,
    reason="three ranks of real engines on fewer than 4 cores stall past a 30 s lease (set KVDEV_ANYWAY=1 to try)",
)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_unequal_tensor_parallel_sizes_under_the_connectors_own_name(prefill: int, decode: int) -> None:
    with started_pair(
        "dense",
        prefill_config=own_name("kv_producer"),
        decode_config=own_name("kv_consumer"),
        prefill_arguments=["--tensor-parallel-size", str(prefill)],
        decode_arguments=["--tensor-parallel-size", str(decode)],
        prefill_cpus="0|1" if prefill == 2 else "0",
        decode_cpus="0|1" if decode == 2 else "1",
    ) as pair:
        exercise(pair)


def test_the_corrupted_page_control_fails_under_the_connectors_own_name() -> None:
    with started_pair(
        "dense",
        prefill_config=own_name("kv_producer"),
        decode_config=own_name("kv_consumer"),
        decode_environment={"KV_TRANSFER_TEST_CORRUPT_PAGE": "1"},
    ) as pair:
        texts = [prompt(1)]
        assert pair.ask_all(texts) != pair.ask_all(texts, url=pair.prefill.url)
        assert pair.decode_count("vllm:nixl_xfer_time_seconds_count") == 1
