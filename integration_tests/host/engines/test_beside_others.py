"""Our connector beside vLLM's OffloadingConnector, both under vLLM's MultiConnector."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import COMPUTED, FAILED, TRANSFERS, Fleet, ours, prompt, started_fleet

OFFLOADING: dict[str, object] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "PlainOffloading",
        "spec_module_path": "plain_offloading",
        "cpu_bytes_to_use": 64 << 20,
        "blocks_per_chunk": 1,
    },
}
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent),
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


def beside(*children: dict[str, object]) -> dict[str, object]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    configs = {"first": beside(ours(), OFFLOADING), "second": beside(OFFLOADING, ours())}
    with started_fleet("dense", configs, environment=ENVIRONMENT) as running:
        yield running


def forget_prefixes(fleet: Fleet, engine: str) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(fleet.engines[engine].url + "/reset_prefix_cache", method="POST"), timeout=30
    ) as reply:
        assert reply.status == 200


@pytest.mark.parametrize(("prefill", "decode"), [("first", "second"), ("second", "first")])
def test_hand_overs_and_loads_of_the_other_connector_are_right_and_no_error_is_logged(
    fleet: Fleet, prefill: str, decode: str
) -> None:
    mine = [prompt(100 * len(prefill) + n, 60) for n in range(3)]
    kept = [prompt(100 * len(prefill) + 50 + n, 60) for n in range(3)]
    expected, expected_kept = fleet.answers(mine, decode=prefill), fleet.answers(kept, decode=decode)
    transfers, failed = fleet.count(decode, TRANSFERS), fleet.count(decode, FAILED)
    computed = fleet.count(decode, COMPUTED, source="local_compute")
    assert fleet.answers(mine, prefill=prefill, decode=decode) == expected
    assert fleet.count(decode, TRANSFERS) - transfers == len(mine)
    assert fleet.count(decode, COMPUTED, source="local_compute") <= computed + len(mine)
    fleet.assert_all_blocks_free()
    forget_prefixes(fleet, decode)
    computed = fleet.count(decode, COMPUTED, source="local_compute")
    assert fleet.answers(kept, decode=decode) == expected_kept
    alone = fleet.count(decode, COMPUTED, source="local_compute") - computed
    assert alone < sum(map(len, kept)) / 2, f"{alone:g} tokens were computed: the other connector loaded nothing"
    assert fleet.count(decode, FAILED) == failed
    assert [line for line in fleet.log(decode).splitlines() if " ERROR " in line] == []


def test_figures_in_the_log_are_those_of_our_class(fleet: Fleet) -> None:
    """Under the name `NixlConnector` vLLM rebuilt them as its own connector's, without fence rejections."""
    end_s = time.monotonic() + 40  # vLLM writes the line every ten seconds
    lines: list[str] = []
    while not any("KVTransferConnector={'Num successful transfers'" in line for line in lines):
        assert time.monotonic() < end_s, lines[-3:]
        time.sleep(0.5)
        lines = [line for line in fleet.log("first").splitlines() if "KV Transfer metrics: " in line]
