"""The configuration: what is taken, what is refused, and that every key explains itself."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_engine import BLOCK, TEXT, Engine

from kv_scheduler_state import GrantOrder, GroupConfig, LeaseTable, SchedulerConfig, SchedulerStateError, StepPlan
from vllm_adapter.cli import main
from vllm_adapter.config.keys import (
    OBSOLETE_KEYS,
    Settings,
    check_whole,
    describe_keys,
    load_keys,
    load_settings,
)
from vllm_adapter.config.start_checks import streaming_warnings
from vllm_adapter.config.whole import check_transfer_config
from vllm_adapter.errors import ConfigurationError
from vllm_adapter.wiring import make_scheduler

SEALED = {"ticket_secret_files": ["/run/secrets/kv"]}


def test_every_default_is_taken_and_stands_for_nothing_given() -> None:
    given_again = {name: about["default"] for name, about in describe_keys().items()}
    assert load_settings({}) == load_settings(given_again) == (Settings(), ())


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ({"kv_lease_durations": 3}, "unknown-key", "did you mean 'kv_lease_duration'"),
        ({"qqqqq": 3}, "unknown-key", "the keys are"),
        ({"kv_lease_duration": "30"}, "wrong-type", "must be of type number, got '30'"),
        ({"kv_lease_duration": True}, "wrong-type", "must be of type number, got True"),
        ({"kv_lease_duration": 0}, "out-of-range", "between 1 and 86400, got 0"),
        ({"kv_lease_duration": float("nan")}, "out-of-range", "between 1 and 86400"),
        ({"kv_lease_duration": 10**400}, "out-of-range", "between 1 and 86400, got 1000"),
        ({"num_threads": 65}, "out-of-range", "between 0 and 64, got 65"),
        ({"num_threads": 1.5}, "wrong-type", "must be of type integer"),
        ({"backends": "UCX"}, "wrong-type", "must be of type array of strings"),
        ({"backends": ["UCX", 3]}, "wrong-type", "must be of type array of strings"),
        ({"backends": {"UCX"}}, "wrong-type", "must be of type array of strings"),
        ({"backends": []}, "out-of-range", "each once"),
        ({"backends": ["UCX", "UCX"]}, "out-of-range", "each once"),
        ({"backends": ["UCX", " "]}, "out-of-range", "names nothing"),
        ({"enforce_handshake_compat": "maybe"}, "wrong-type", "must be of type boolean"),
        ({"enforce_handshake_compat": 1}, "wrong-type", "must be of type boolean, got 1"),
        ({"compatibility_policy": "exakt"}, "out-of-range", "did you mean 'exact'"),
        ({"compatibility_policy": "\ud800"}, "out-of-range", "must be one of exact, negotiated, got '\\ud800'"),
        ({"compatibility_policy": 3}, "wrong-type", "must be of type string, got 3"),
        ({"remote_hosts": ["10.0.0.0/99"]}, "out-of-range", "10.0.0.0/99"),
        ({"unsigned_hosts": ["10.0.0.0/99"]}, "out-of-range", "'unsigned_hosts' holds '10.0.0.0/99'"),
        ({"remote_hosts": ["10.0.0.1/8"]}, "out-of-range", "write 10.0.0.0/8 or 10.0.0.1/32"),
        ({"unsigned_hosts": ["fd00::7/64"]}, "out-of-range", "write fd00::/64 or fd00::7/128"),
        ({"peer_ports": 5600}, "wrong-type", "must be of type string"),
        ({"peer_ports": "5600-5599"}, "out-of-range", "FIRST-LAST within 1 to 65535, got '5600-5599'"),
        ({"peer_ports": "0-70000"}, "out-of-range", "got '0-70000'"),
        ({"peer_ports": "a-b"}, "out-of-range", "got 'a-b'"),
        ({"peer_ports": "5600-"}, "out-of-range", "got '5600-'"),
        ({"ticket_policy": "requires"}, "out-of-range", "did you mean 'require'"),
        ({"ticket_policy": "accept-unsigned"}, "incomplete-keys", "needs ticket_secret_files"),
        ({**SEALED, "ticket_policy": "accept-unsigned"}, "incomplete-keys", "go together"),
        ({**SEALED, "unsigned_hosts": ["10.0.0.0/8"]}, "incomplete-keys", "go together"),
        ({"streaming": True, "fence_slots": 0}, "incomplete-keys", "streaming needs fence_slots"),
        ({"stream_slots": 0}, "out-of-range", "between 1 and 1024"),
        ({"stream_reserve_fraction": 1.1}, "out-of-range", "between 0 and 1"),
        ({"ask_wait_s": 31}, "out-of-range", "between 0.1 and 30"),
        ({"streaming": "perhaps"}, "wrong-type", "'streaming'"),
        ({"side_channel_key": "a"}, "incomplete-keys", "no side_channel_server_key, side_channel_clients"),
        ({"side_channel_key": "a", "side_channel_clients": "c"}, "incomplete-keys", "no side_channel_server_key"),
        ({"side_channel_server_key": "b", "side_channel_clients": "c"}, "incomplete-keys", "no side_channel_key"),
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
    mixed = {**SEALED, "ticket_policy": "accept-unsigned", "unsigned_hosts": ["10.0.0.0/8"]}
    assert [load_settings(each)[0].requires_seals for each in ({}, SEALED, mixed)] == [False, True, False]
    assert load_settings({"ticket_secret_variable": "KV_SECRETS"})[0].requires_seals


COVERED = {"streaming": True, "remote_hosts": ["10.0.0.0/8"]}


@pytest.mark.parametrize(
    ("extra", "role", "words"),
    [
        ({}, "kv_both", ""),
        (COVERED, "kv_both", ""),
        ({"streaming": True, **SEALED}, "kv_consumer", ""),
        ({"streaming": True}, "kv_producer", "nothing is streamed to or from it"),
        ({**COVERED, "stream_reserve_fraction": 0}, "kv_consumer", "ticket-early-off"),
        ({**COVERED, "stream_reserve_fraction": 0}, "kv_producer", ""),
        ({**COVERED, "stream_reserve_fraction": 1}, "kv_both", "wait forever"),
        ({**COVERED, "stream_reserve_fraction": 1}, "kv_consumer", ""),
        ({"stream_slots": 8, "ask_wait_s": 3}, None, "stream_slots, ask_wait_s: no effect without streaming"),
    ],
)
def test_streaming_that_would_not_stream_is_said_at_the_start_and_by_the_check(
    extra: dict[str, Any], role: str | None, words: str
) -> None:
    said = list(streaming_warnings(load_settings(extra)[0], role))
    assert [words in each for each in said] == [True] * bool(words)
    config = {"kv_connector": "KVTransferConnector", "kv_role": role or "kv_both", "kv_connector_extra_config": extra}
    assert [each for each in check_transfer_config(config).notes if each in said] == said


def test_words_for_booleans_are_taken_as_vllm_takes_them() -> None:
    assert load_settings({"enforce_handshake_compat": "False"})[0].enforce_handshake_compat is False


def test_obsolete_keys_are_accepted_with_a_note() -> None:
    settings, notes = load_settings(dict.fromkeys(OBSOLETE_KEYS, "False"))
    assert settings == Settings()
    assert len(notes) == len(OBSOLETE_KEYS)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["true", "False", "auto", "never", "exact", "require", "80", "10.0.0.0/8", 10**400, -(10**400)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(Settings.__struct_fields__), JSON, min_size=1, max_size=3))
def test_any_value_is_taken_for_good_or_refused_by_the_name_of_its_key(extra: dict[str, object]) -> None:
    try:
        settings, _ = load_keys(extra)
    except ConfigurationError as error:
        assert error.code in {"wrong-type", "out-of-range"}
        assert error.context["key"] in extra
        assert f"'{error.context['key']}'" in str(error)
    else:
        assert load_keys(msgspec.structs.asdict(settings))[0] == settings


def test_every_key_says_what_it_means() -> None:
    assert list(describe_keys()) == list(Settings.__struct_fields__)
    for name, about in describe_keys().items():
        assert about["description"].endswith("."), name


def test_the_command_line_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain"]) == 0
    assert "kv_lease_duration (number, default 30.0, 1 to 86400)" in capsys.readouterr().out
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Settings.__struct_fields__)
    assert schema["additionalProperties"] is False
    expected = {"type": "integer", "minimum": 0, "maximum": 64, "default": 4}
    assert schema["properties"]["num_threads"] == {**expected, "description": "Worker threads of the UCX back end."}
    assert set(schema["properties"]["ticket_policy"]["enum"]) == {"", "require", "accept-unsigned"}


@pytest.mark.never_wrong("B10")
def test_bytes_in_flight_have_a_cap_unless_it_is_taken_away() -> None:
    assert load_settings({})[0].max_inflight_bytes == 4 << 30
    assert load_settings({"max_inflight_bytes": 0})[0].max_inflight_bytes == 0


HINT = re.compile(r"names an address, not a network: write (\S+) or (\S+?)\Z")


def refusal_of_key(text: str) -> str:
    try:
        load_settings({"remote_hosts": [text]})
    except ConfigurationError as error:
        return str(error)
    return ""


def refusal_of_library(text: str) -> str:
    try:
        SchedulerConfig("D", "10.0.0.1", 5600, groups=(GroupConfig("full", BLOCK),), peer_networks=(text,))
    except SchedulerStateError as error:
        return str(error)
    return ""


NETWORKS = (
    "10.0.0.0/8", "10.0.0.1", "10.0.0.1/8", "10.0.0.1/255.0.0.0", "10.0.0.0/0.255.255.255", "fd00::7/64", "fe80::1%eth0/64",
    "", "10.0.0.01", "10.0.0.0/33", "10.0.0.0/08", "[fd00::1]", " 10.0.0.0/8", "http://10.0.0.0/8", "\uff11.2.3.4", "a",
)  # fmt: skip


@pytest.mark.parametrize("text", NETWORKS)
def test_the_configuration_and_the_library_take_the_same_networks_and_hint_alike(text: str) -> None:
    here, there = refusal_of_key(text), refusal_of_library(text)
    assert bool(here) == bool(there), (here, there)
    hints: list[tuple[str, str]] = HINT.findall(here)
    assert hints == HINT.findall(there)
    for network, alone in hints:
        assert not refusal_of_key(network) + refusal_of_key(alone), "what the hint says to write is taken"


LISTS = [name for name, about in describe_keys().items() if about["type"] == "array"]
TEXTS = [name for name, about in describe_keys().items() if about["type"] == "string" and "enum" not in about]


def test_a_text_that_names_nothing_is_refused_at_once_in_every_key() -> None:
    assert {"backends", "ticket_secret_files", "remote_hosts"} <= set(LISTS)
    assert {"ticket_secret_variable", "side_channel_key"} <= set(TEXTS)
    impossible, blank = ("\ud800", "a\udfffb", "\udc00x", "a\0b", "\0"), ("", " ", "\t\n")
    cases = [(key, [text]) for key in LISTS for text in (*impossible, *blank)]
    for key, value in [*cases, *((key, text) for key in TEXTS for text in impossible)]:
        with pytest.raises(ConfigurationError) as caught:
            load_keys({key: value})
        assert (caught.value.code, caught.value.context["key"]) == ("out-of-range", key), value
        str(caught.value).encode()


def test_bytes_of_a_file_name_that_are_no_utf_8_are_taken_as_python_reads_them() -> None:
    name = b"/run/secrets/\xff".decode(errors="surrogateescape")
    assert load_keys({"ticket_secret_files": [name]})[0].ticket_secret_files == (name,)


def test_a_mirror_needs_fences() -> None:
    check_whole(Settings(), is_mirrored=True)
    with pytest.raises(ConfigurationError, match="fence_slots") as caught:
        check_whole(Settings(fence_slots=0), is_mirrored=True)
    assert caught.value.code == "incomplete-keys"


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
