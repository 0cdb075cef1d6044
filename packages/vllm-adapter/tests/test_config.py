"""The configuration: what is taken, what is refused, and that every key explains itself."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_values import JSON
from scheduler_engine import TEXT, Engine

from kv_scheduler_state import GrantOrder, LeaseTable, SchedulerConfig, SchedulerStateError, StepPlan
from vllm_adapter.cli import main
from vllm_adapter.config.keys import (
    GROUPS,
    OLD_KEYS,
    Keys,
    Settings,
    describe_keys,
    load_keys,
    load_settings,
)
from vllm_adapter.config.start_checks import streaming_warnings
from vllm_adapter.config.whole import check_transfer_config
from vllm_adapter.errors import ConfigurationError
from vllm_adapter.wiring import make_scheduler

SEALED = {"ticket_secrets": ["/run/secrets/kv"]}


def test_every_default_is_taken_and_stands_for_nothing_given() -> None:
    given_again = {name: about["default"] for name, about in describe_keys().items()}
    assert load_settings({}) == load_settings(given_again) == (Settings(), ())


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ({"kv_lease_durations": 3}, "unknown-key", "did you mean 'kv_lease_duration'"),
        (
            {"qqqqq": 3},
            "unknown-key",
            "kv_connector_extra_config.qqqqq: no such key; list all with `vllm-adapter config",
        ),
        ({"kv_lease_duration": "30"}, "wrong-type", "must be of type number, got '30'"),
        ({"kv_lease_duration": True}, "wrong-type", "must be of type number, got True"),
        ({"kv_lease_duration": 0}, "out-of-range", "between 1 and 86400, got 0"),
        ({"kv_lease_duration": float("nan")}, "out-of-range", "between 1 and 86400"),
        ({"kv_lease_duration": 10**400}, "out-of-range", "between 1 and 86400, got 1000"),
        ({"num_threads": 65}, "out-of-range", "between 0 and 64, got 65"),
        ({"num_threads": 1.5}, "wrong-type", "must be of type integer"),
        ({"backends": "UCX"}, "wrong-type", "must be of type array of strings or object"),
        ({"backends": ["UCX", 3]}, "wrong-type", "must be of type array of strings or object"),
        ({"backends": {"UCX"}}, "wrong-type", "must be of type array of strings or object"),
        ({"backends": []}, "out-of-range", "each once"),
        ({"backends": ["UCX", "UCX"]}, "out-of-range", "each once"),
        ({"backends": ["UCX", " "]}, "out-of-range", "names nothing"),
        ({"enforce_handshake_compat": "maybe"}, "wrong-type", "must be of type boolean"),
        ({"enforce_handshake_compat": 1}, "wrong-type", "must be of type boolean, got 1"),
        ({"compatibility_policy": "exakt"}, "out-of-range", "did you mean 'exact'"),
        ({"compatibility_policy": "\ud800"}, "out-of-range", "must be one of exact, negotiated, off, got '\\ud800'"),
        ({"compatibility_policy": 3}, "wrong-type", "must be of type string, got 3"),
        ({"remote_hosts": ["10.0.0.0/99"]}, "out-of-range", "10.0.0.0/99"),
        ({"unsigned_hosts": ["10.0.0.0/99"]}, "out-of-range", "unsigned_hosts: holds '10.0.0.0/99'"),
        ({"remote_hosts": ["10.0.0.1/8"]}, "out-of-range", "write 10.0.0.0/8 or 10.0.0.1/32"),
        ({"unsigned_hosts": ["fd00::7/64"]}, "out-of-range", "write fd00::/64 or fd00::7/128"),
        ({"peer_ports": 5600}, "wrong-type", "must be of type string"),
        ({"peer_ports": "5600-5599"}, "out-of-range", "FIRST-LAST within 1 to 65535, got '5600-5599'"),
        ({"peer_ports": "0-70000"}, "out-of-range", "got '0-70000'"),
        ({"peer_ports": "a-b"}, "out-of-range", "got 'a-b'"),
        ({"peer_ports": "5600-"}, "out-of-range", "got '5600-'"),
        ({"unsigned_hosts": ["10.0.0.0/8"]}, "incomplete-keys", "needs ticket_secrets"),
        ({"fence_slot": 8}, "unknown-key", "config.fence_slot: no such key"),
        ({"streaming": "perhaps"}, "wrong-type", "config.streaming: must be"),
        ({"side_channel_server_key": "b"}, "incomplete-keys", "needs side_channel_key"),
        ({"ticket_policy": "require"}, "incomplete-keys", "ticket_policy needs ticket_secrets"),
        ({**SEALED, "ticket_policy": "accept-unsigned"}, "incomplete-keys", "go together"),
        ({**SEALED, "ticket_policy": "require", "unsigned_hosts": ["10.0.0.0/8"]}, "incomplete-keys", "go together"),
        ({"backends": {"": {}}}, "out-of-range", "each once"),
        ({"backends": {"UCX": {"ucx_devices": "\ud800"}}}, "out-of-range", "half of a surrogate pair"),
    ],
)
def test_a_wrong_key_or_value_names_what_is_right(extra: dict[str, object], code: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(extra)
    assert caught.value.code == code
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "port", "codes"), [({}, 5600, []), ({}, 80, ["ticket-host"]), ({"peer_ports": "80"}, 80, [])]
)
def test_a_ticket_names_only_ports_within_peer_ports(given: dict[str, object], port: int, codes: list[str]) -> None:
    settings, _ = load_settings(given)
    ticket = Engine("P").prefill("p", TEXT)
    assert ticket is not None
    ticket["remote_port"] = port
    consumer = Engine("D")
    consumer.side = make_scheduler(consumer.facts, settings)
    consumer.admit("d", ticket, TEXT)
    assert consumer.refusals() == codes


def test_seals_are_required_as_soon_as_there_is_a_secret() -> None:
    mixed = {**SEALED, "unsigned_hosts": ["10.0.0.0/8"]}
    assert [load_settings(each)[0].requires_seals for each in ({}, SEALED, mixed)] == [False, True, False]
    assert load_settings({"ticket_secrets": ["env:KV_SECRETS"]})[0].requires_seals


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ""),
        ({"streaming": True, "remote_hosts": ["10.0.0.0/8"]}, ""),
        ({"streaming": True, **SEALED}, ""),
        ({"streaming": True}, "nothing is streamed to or from it"),
    ],
)
def test_streaming_that_would_not_stream_is_said_at_the_start_and_by_the_check(
    extra: dict[str, Any], words: str
) -> None:
    said = list(streaming_warnings(load_settings(extra)[0]))
    assert [words in each for each in said] == [True] * bool(words)
    config = {"kv_connector": "KVTransferConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    assert [each for each in check_transfer_config(config).notes if each in said] == said


def test_words_for_booleans_are_taken_as_vllm_takes_them() -> None:
    assert load_settings({"bidirectional_kv_xfer": "False"})[0].bidirectional_kv_xfer is False
    assert load_settings({"bidirectional_kv_xfer": "true"})[0].bidirectional_kv_xfer is True


FORMER: dict[str, tuple[object, str, object]] = {
    "num_threads": (2, "num_threads", 2),
    "enforce_handshake_compat": ("False", "policy", "off"),
    "advertised_port": (31000, "advertised_port", 31000),
    "ticket_secret_files": (["/f"], "secret_sources", ("/f",)),
    "ticket_secret_variable": ("NAME", "secret_sources", ("env:NAME",)),
    "side_channel_server_key": ("/s", "server_keys", "/s"),
    "side_channel_clients": ("/c", "client_keys", "/c"),
    "ticket_policy": ("require", "ticket_policy", "require"),
    "max_leases": (7, "max_leases", 7),
}
"""Former keys that count still: a value, and where it is seen."""


@pytest.mark.parametrize("key", OLD_KEYS)
def test_a_former_key_is_taken_with_a_warning_that_names_its_place(key: str) -> None:
    value, place, seen = FORMER.get(key, ("any value whatever", "", None))
    settings, (note,) = load_keys({key: value})
    assert note.startswith(f"kv_connector_extra_config.{key} {'counts still; write' if place else 'is not read any'} ")
    assert note.endswith(OLD_KEYS[key][1])
    assert getattr(settings, place) == seen if place else settings == Settings()
    if place:
        with pytest.raises(ConfigurationError) as caught:
            load_keys({key: {"of": "no such type"}})
        assert (caught.value.code, caught.value.context["key"]) == ("wrong-type", key)


@pytest.mark.parametrize(
    ("read_s", "handshake_s", "wait_s"), [(60, 5, 30), (0.1, 2, 0.05), (36, 3, 18), (240, 20, 30), (3600, 60, 30)]
)
def test_handshakes_and_streams_wait_by_the_patience_of_reads(read_s: float, handshake_s: float, wait_s: float) -> None:
    settings, _ = load_settings({"read_timeout_s": read_s})
    assert (settings.handshake_timeout_s, settings.ask_wait_s) == (handshake_s, wait_s)


def test_certificates_stand_beside_an_engines_own_and_those_of_clients_may_stand_apart(tmp_path: Path) -> None:
    settings, _ = load_settings({"side_channel_key": str(tmp_path / "fleet.key_secret")})
    assert settings.server_keys == settings.client_keys == str(tmp_path)
    (tmp_path / "clients").mkdir()
    assert (settings.server_keys, settings.client_keys) == (str(tmp_path), str(tmp_path / "clients"))


WORDS = ("true", "False", "auto", "never", "exact", "80", "10.0.0.0/8", "\ud800", 10**400, -(10**400))
VALUES = JSON | st.sampled_from(WORDS) | st.lists(st.sampled_from(WORDS), max_size=3)


@given(st.dictionaries(st.sampled_from([*Keys.__struct_fields__, *FORMER]), VALUES, min_size=1, max_size=3))
def test_any_value_is_taken_for_good_or_refused_by_the_name_of_its_key(extra: dict[str, object]) -> None:
    try:
        settings, _ = load_keys(extra)
    except ConfigurationError as error:
        assert error.code in {"wrong-type", "out-of-range"}
        assert error.context["key"] in extra
        assert f".{error.context['key']}: " in str(error)
    else:
        same = {key: value for key, value in msgspec.structs.asdict(settings).items() if key in extra}
        assert load_keys(same)[0] == settings


def test_every_key_says_what_it_means() -> None:
    assert list(describe_keys()) == list(Keys.__struct_fields__)
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(describe_keys())
    for name, about in describe_keys().items():
        assert about["description"].endswith("."), name


EXPLAINED = (
    "\nLeases\n  kv_lease_duration (number, default 30, 1 to 86400)\n",
    "  max_leased_blocks (integer, default 0, 0 to 2147483648)\n",
    "  streaming (boolean, default false)\n",
    "  backends (array or object, default UCX)\n",
    "  compatibility_policy (string, default exact, one of exact, negotiated, off)\n",
)


def test_the_command_line_explains(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["config", "--explain"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^  (\w+) \(", said, re.MULTILINE) == [name for names in GROUPS.values() for name in names]
    for words in EXPLAINED:
        assert words in said
    assert max(map(len, said.splitlines())) <= 80
    explained = {
        "kv_lease_duration": "Leases\n  kv_lease_duration (number, default 30, 1 to 86400)\n      Seconds",
        "fence_slots": "fence_slots is not read any more: 4096 hand-overs can be fenced at once\n",
    }
    for key, start in explained.items():
        assert main(["config", "--explain", key]) == 0
        assert capsys.readouterr().out.startswith(start)
    assert main(["config", "--explain", "peer_port"]) == 2
    assert "config.peer_port: no such key; did you mean 'peer_ports'? (unknown-key)" in capsys.readouterr().err
    assert main(["config", "peer_ports"]) == 2
    assert "--explain" in capsys.readouterr().err
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {*Keys.__struct_fields__, *OLD_KEYS}
    assert schema["additionalProperties"] is False
    lease = schema["properties"]["kv_lease_duration"]
    assert {**lease, "description": ""} == {
        "type": "number", "minimum": 1, "maximum": 86400, "default": 30.0, "description": "",
    }  # fmt: skip
    assert {name for name, about in schema["properties"].items() if about.get("deprecated")} == {*OLD_KEYS}


@pytest.mark.never_wrong("B10")
def test_bytes_in_flight_have_a_cap() -> None:
    assert load_settings({"max_inflight_bytes": 0})[0].max_inflight_bytes == 4 << 30


HINT = re.compile(r"names an address, not a network: write (\S+) or (\S+?)\Z")


def refusals(text: str) -> tuple[str, str]:
    """Return what the configuration and the library say of a network that they do not take."""
    library = partial(SchedulerConfig, "D", "10.0.0.1", 5600, fence_seed=1, nonce_seed="n")
    said = ["", ""]
    for number, take in enumerate(
        (lambda: load_settings({"remote_hosts": [text]}), lambda: library(peer_networks=(text,)))
    ):
        try:
            take()
        except (ConfigurationError, SchedulerStateError) as error:
            said[number] = error.message
    return said[0], said[1]


NETWORKS = (
    "10.0.0.0/8", "10.0.0.1", "10.0.0.1/8", "10.0.0.1/255.0.0.0", "10.0.0.0/0.255.255.255", "fd00::7/64", "fe80::1%eth0/64",
    "", "10.0.0.01", "10.0.0.0/33", "10.0.0.0/08", "[fd00::1]", " 10.0.0.0/8", "http://10.0.0.0/8", "\uff11.2.3.4", "a",
)  # fmt: skip


@pytest.mark.parametrize("text", NETWORKS)
def test_the_configuration_and_the_library_take_the_same_networks_and_hint_alike(text: str) -> None:
    here, there = refusals(text)
    assert bool(here) == bool(there), (here, there)
    hints: list[tuple[str, str]] = HINT.findall(here)
    assert hints == HINT.findall(there)
    for network, alone in hints:
        assert not refusals(network)[0] + refusals(alone)[0], "what the hint says to write is taken"


LISTS = [name for name, about in describe_keys().items() if about["type"] == "array"]
TEXTS = [name for name, about in describe_keys().items() if about["type"] == "string" and "enum" not in about]


def test_a_text_that_names_nothing_is_refused_at_once_in_every_key() -> None:
    assert {"ticket_secrets", "remote_hosts"} <= set(LISTS)
    assert {"advertised_host", "side_channel_key"} <= set(TEXTS)
    impossible, blank = ("\ud800", "a\udfffb", "\udc00x", "a\0b", "\0"), ("", " ", "\t\n")
    cases = [(key, [text]) for key in LISTS for text in (*impossible, *blank)]
    for key, value in [*cases, *((key, text) for key in TEXTS for text in impossible)]:
        with pytest.raises(ConfigurationError) as caught:
            load_keys({key: value})
        assert (caught.value.code, caught.value.context["key"]) == ("out-of-range", key), value
        str(caught.value).encode()


def test_bytes_of_a_file_name_that_are_no_utf_8_are_taken_as_python_reads_them() -> None:
    name = b"/run/secrets/\xff".decode(errors="surrogateescape")
    assert load_keys({"ticket_secrets": [name]})[0].ticket_secrets == (name,)


def test_a_producer_renews_to_the_time_that_its_reader_believes() -> None:
    settings, _ = load_settings({"kv_lease_duration": 60})
    table = LeaseTable()
    table.apply(StepPlan(grants=(GrantOrder("r", settings.kv_lease_duration, None),)), now_s=0.0)
    ends: list[int] = []
    for second in range(1, 200):
        if second == 50:
            assert table.renew("r", nonce="", now_s=second)
        ends += [second for _ in table.take_ended(now_s=second)]
    assert ends == [50 + settings.renewed_s] == [90]
