"""The connector under its own name, and the control that must fail."""

from __future__ import annotations

from pairs import prompt, started_pair

from kvdev.demo import connector_config


def own_name(role: str) -> dict[str, object]:
    """The connector under its own name, which vLLM's plugin entry point makes known without a module path."""
    config = {**connector_config(role), "kv_connector": "KVTransferConnector"}
    del config["kv_connector_module_path"]
    return config


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
