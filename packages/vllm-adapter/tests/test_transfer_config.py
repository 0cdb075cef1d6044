"""`vllm-adapter config --check`: a whole `--kv-transfer-config`, every problem named with what is right."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_values import JSON

from vllm_adapter.cli import main
from vllm_adapter.config.whole import HOST_KEYS, ROLES, check_transfer_config

GOOD: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "vllm_adapter",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
OWN = {"kv_connector": "KVTransferConnector", "kv_role": "kv_consumer"}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu": 1}}


def several(*children: object, **more: object) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


def extra(**keys: object) -> dict[str, Any]:
    return {**GOOD, "kv_connector_extra_config": keys}


@pytest.mark.parametrize(
    "config",
    [
        GOOD,
        OWN,
        {**GOOD, "engine_id": None, "kv_port": 14579, "kv_buffer_device": "cpu", "enable_permute_local_kv": True},
        {**GOOD, "kv_connector_module_path": "vllm_adapter.host.connector", "kv_load_failure_policy": "recompute"},
        extra(kv_lease_duration=60, backends=["UCX"], bidirectional_kv_xfer=True),
        extra(side_channel_key="/run/kv/keys/k.key_secret"),
        extra(ticket_secrets=["/f"], unsigned_hosts=["10.1.0.0/16"]),
        several(GOOD, OFFLOADING),
    ],
)
def test_good_configurations(config: dict[str, Any]) -> None:
    assert check_transfer_config(config).problems == ()


MODULE, POLICY, CHILD = "kv_connector_module_path", "kv_load_failure_policy", "extra.connectors[0]"
BAD: list[tuple[object, str, str, str]] = [
    (extra(side_channel_clients="/k"), "incomplete-keys", "extra", "needs side_channel_key"),
    (extra(unsigned_hosts=["10.1.0.0/16"]), "incomplete-keys", "extra", "needs ticket_secrets"),
    (several({**GOOD, "engine_id": "p0"}), "out-of-range", "extra.connectors[0].engine_id", "set it outside"),
    ({**GOOD, "kv_rol": "kv_both"}, "unknown-key", "kv_rol", "did you mean 'kv_role'?"),
    ({**GOOD, "kv_connector_extra": {}}, "unknown-key", "kv_connector_extra", "mean 'kv_connector_extra_config'?"),
    ({**GOOD, "kv_lease_duration": 3}, "unknown-key", "kv_lease_duration", "belongs into 'kv_connector_extra_config'"),
    ({**GOOD, "kv_lease_durations": 3}, "unknown-key", "kv_lease_durations", "'kv_lease_duration' in"),
    ({**GOOD, "kv_role": "kv_boths"}, "unknown-role", "kv_role", "did you mean 'kv_both'?"),
    ({**GOOD, "kv_role": "prefill"}, "unknown-role", "kv_role", "kv_producer, kv_consumer, kv_both"),
    ({"kv_connector": "KVTransferConnector"}, "missing-key", "kv_role", "is missing"),
    ({"kv_role": "kv_both"}, "missing-key", "kv_connector", "is missing"),
    ({**GOOD, MODULE: "vllm_adaptor"}, "wrong-module-path", MODULE, "'vllm_adapter'"),
    ({**GOOD, MODULE: ""}, "wrong-module-path", MODULE, "'vllm_adapter'"),
    ({**OWN, "kv_connector": "NixlConnector"}, "hosts-own-connector", MODULE, "vLLM's own connector"),
    ({**OWN, "kv_connector": "KVTransferConector"}, "unknown-connector", "kv_connector", "mean 'KVTransferConnector'?"),
    ({**GOOD, POLICY: "recomput"}, "out-of-range", POLICY, "did you mean 'recompute'?"),
    ({**GOOD, "kv_port": "14579"}, "wrong-type", "kv_port", "must be a number"),
    ({**GOOD, "kv_port": True}, "wrong-type", "kv_port", "must be a number"),
    ({**GOOD, "kv_connector_extra_config": []}, "wrong-type", "extra", "must be an object"),
    ({**GOOD, "engine_id": ""}, "out-of-range", "engine_id", "must not be empty"),
    (extra(peer_port="1"), "unknown-key", "extra.peer_port", "did you mean 'peer_ports'"),
    (extra(kv_recompute_threshold=-1), "out-of-range", "extra.kv_recompute_threshold", "got -1"),
    (several(), "missing-key", "extra.connectors", "list is missing"),
    (several(OFFLOADING, {**GOOD, "kv_role": "both"}), "unknown-role", "extra.connectors[1].kv_role", "kv_both"),
    (
        several({**GOOD, "kv_connector": "NixlConector"}),
        "unknown-connector",
        f"{CHILD}.kv_connector",
        "mean 'NixlConnector'?",
    ),
    (several(7), "not-an-object", "extra.connectors[0]", "got 7"),
    ([1], "not-an-object", "", "JSON object"),
    ("text", "not-an-object", "", "JSON object"),
]


@pytest.mark.parametrize(("config", "code", "key", "words"), BAD)
def test_a_problem_is_named_with_what_is_right(config: object, code: str, key: str, words: str) -> None:
    (problem,) = check_transfer_config(config).problems
    assert (problem.code, problem.key.replace("kv_connector_extra_config", "extra", 1)) == (code, key)
    assert words in problem.message
    name = problem.key.rpartition(".")[2]
    assert not name or len(re.findall(rf"\b{re.escape(name)}(?!\w)", f"{problem.key}: {problem.message}")) == 1, (
        "named once"
    )


def test_all_problems_are_reported_at_once() -> None:
    config = {**extra(peer_port="1", kv_lease_duration=0), "kv_role": "x", "kv_rank": 1}
    assert [problem.key for problem in check_transfer_config(config).problems] == [
        "kv_rank",
        "kv_role",
        "kv_connector_extra_config.peer_port",
        "kv_connector_extra_config.kv_lease_duration",
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (several({**GOOD, POLICY: "fail"}, kv_load_failure_policy="recompute"), "vLLM obeys"),
        (extra(fence_slots=8), "fence_slots is not read any more: 4096 hand-overs can be fenced at once"),
        (OWN, "vLLM's default is 'fail': a prompt whose KV cannot be read ends with HTTP 500"),
    ],
)
def test_what_will_not_have_its_effect_is_noted(config: dict[str, Any], words: str) -> None:
    (note,) = check_transfer_config(config).notes
    assert words in note


@pytest.mark.parametrize("outer", ROLES)
@pytest.mark.parametrize("inner", ROLES)
def test_a_child_that_reads_below_a_producer_is_a_problem(outer: str, inner: str) -> None:
    problems = check_transfer_config(several(OFFLOADING, {**GOOD, "kv_role": inner}, kv_role=outer)).problems
    keys = [(problem.code, problem.key) for problem in problems]
    is_bad = outer == "kv_producer" and inner != "kv_producer"
    assert keys == [("outer-role-differs", "kv_connector_extra_config.connectors[1].kv_role")] * is_bad


NAMES = st.sampled_from([*HOST_KEYS, "connectors", "num_threads"]) | st.text(max_size=6)
VALUES = JSON | st.sampled_from([*ROLES, "NixlConnector", "MultiConnector", "vllm_adapter"])
CONFIGS = st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), max_size=6)


@given(JSON | CONFIGS | CONFIGS.map(lambda config: several(config, GOOD)))
def test_any_json_is_judged_and_nothing_raises(config: object) -> None:
    verdict = check_transfer_config(config)
    for problem in verdict.problems:
        assert problem.code
        assert problem.message


def test_text_file_and_standard_input_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, bad = tmp_path / "config.json", {**GOOD, "kv_role": "x"}
    for config, code in ((GOOD, 0), (bad, 1)):
        text = json.dumps(config)
        file.write_text(text)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert [main(["config", "--check", source]) for source in (text, str(file), "-", f"  {text}")][:3] == [code] * 3
    assert "did you mean" not in capsys.readouterr().out


def test_the_result_as_json_is_json_whatever_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {
        "{": "not-json",
        str(tmp_path / "no.json"): "unreadable",
        json.dumps({**GOOD, "kv_role": "x"}): "unknown-role",
    }
    for source, code in sources.items():
        assert main(["config", "--json", "--check", source]) == 1
        reported = json.loads(capsys.readouterr().out)
        assert reported["is_good"] is False
        assert [problem["code"] for problem in reported["problems"]] == [code]
    assert main(["config", "--check", json.dumps(GOOD), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"is_good": True, "problems": [], "notes": []}


def test_bad_usage_has_an_exit_code_of_its_own() -> None:
    for words in (["config"], ["config", "--check"], ["config", "--explain", "--check", "{}"], ["conf"]):
        assert main(words) == 2


def test_what_a_start_here_would_refuse_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = extra(ticket_secrets=[str(tmp_path / "secret")], side_channel_key=str(tmp_path / "no"))
    assert main(["config", "--check", json.dumps(config), "--json"]) == 1
    codes = {problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]}
    assert codes == {"invalid-secret", "invalid-key-file"}
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "secret").chmod(0o600)
    assert main(["config", "--check", json.dumps(extra(ticket_secrets=[str(tmp_path / "secret")]))]) == 0
    assert capsys.readouterr().out == "good\n"
    assert main(["config", "--check", json.dumps(several(OFFLOADING))]) == 0, "no key of a MultiConnector is ours"
