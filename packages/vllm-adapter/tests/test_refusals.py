"""Start-up: each refusal and each warning alone."""

from __future__ import annotations

import pickle
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import facts

from kv_nixl_agent import AgentError
from vllm_adapter import wiring
from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.config.keys import Settings
from vllm_adapter.config.start_checks import REFUSALS, WARNINGS, host_refusals, host_warnings, kept_memory
from vllm_adapter.errors import UnsupportedHost, code_of
from vllm_adapter.wiring import start_refusals

DEALT: dict[str, Any] = {"tp": 2, "dcp": 2, "groups": (CacheGroup("latent", 16, 0, 0, ("a",)),)}
STATES = (CacheGroup("state", 16, 0, 0, ("a",)),)
REFUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "prefill-context-parallel": ({"pcp": 2}, {"pcp": 2, "kv_role": "kv_producer"}),
    "context-turns-uneven": tuple({**DEALT, "interleave_tokens": turn} for turn in (3, 32)),
    "side-channel-wildcard": tuple({"host": host} for host in ("0.0.0.0", "::", "[::]", "*", "", "::0", "0000::")),
    "side-channel-port": ({"port": 65536}, {"port": 0}, {"port": -1}),
    "sleep-mode-unsupported": ({"has_sleep_mode": True, "sleep_obstacle": "UCX_RCACHE_ENABLE=y"},),
    "computed-kv-scales": ({"computes_scales": True},),
    "elastic-expert-parallel": ({"is_elastic": True},),
    "host-resident-cache": ({"has_host_blocks": True},),
    "encoder-decoder": ({"has_encoder": True},),
    "routed-experts-lost": ({"returns_experts": True},),
    "readback-drafted-state": ({"bidirectional_kv_xfer": True, "groups": STATES, "is_speculative": True},),
    "outer-role-differs": (
        {"outer_role": "kv_producer", "kv_role": "kv_both"},
        {"outer_role": "kv_producer", "kv_role": "kv_consumer"},
    ),
    "mirror-pipeline-speculative": ({"pp": 2, "kv_role": "kv_producer", "is_mirrored": True, "is_speculative": True},),
}
WARNED: dict[str, tuple[dict[str, Any], ...]] = {
    "side-channel-localhost": ({"host": "localhost"},),
    "side-channel-link-local": ({"host": "fe80::1"}, {"host": "fe80::1%eth0"}, {"host": "169.254.3.4"}),
    "side-channel-port-low": ({"port": 600},),
    "ucx-without-host-memory": ({"ucx_tls": "cuda_ipc"}, {"ucx_tls": "cuda_copy,gdr_copy"}),
}
FINE: tuple[dict[str, Any], ...] = (
    {},
    {"pp": 4, "kv_role": "kv_consumer"},
    *({**DEALT, "interleave_tokens": turn} for turn in (1, 8, 16)),
    {"host": "127.0.0.1"},
    {"host": "::1"},
    {"host": "decode-0.decode.default.svc"},
    {"port": 65535},
    {"has_sleep_mode": True},
    {"sleep_obstacle": "UCX_RCACHE_ENABLE=y"},
    {"bidirectional_kv_xfer": True},
    {"bidirectional_kv_xfer": True, "kv_role": "kv_producer"},
    {"bidirectional_kv_xfer": True, "kv_role": "kv_consumer"},
    {"bidirectional_kv_xfer": True, "groups": STATES},
    {"bidirectional_kv_xfer": True, "is_speculative": True},
    {"groups": STATES, "is_speculative": True},
    {"outer_role": "kv_producer", "kv_role": "kv_producer"},
    {"outer_role": "kv_consumer"},
    {"pp": 2, "kv_role": "kv_producer", "is_mirrored": True, "is_speculative": True, "has_v2_runner": True},
    {"pp": 2, "kv_role": "kv_producer", "is_mirrored": True},
    {"pp": 2, "kv_role": "kv_producer", "is_speculative": True},
    {"is_mirrored": True, "is_speculative": True},
    {"ucx_tls": "rc,cuda_copy"},
    {"ucx_tls": "cuda_ipc, tcp"},
    {"ucx_tls": "\\rc_mlx5,cuda_copy"},
    {"ucx_tls": "^ib"},
    {"ucx_tls": "all"},
    {"ucx_tls": "cuda_ipc", "backends": ("LIBFABRIC",)},
)
ROWS = [(code, change) for code, changes in REFUSED.items() for change in changes]


def check(change: dict[str, Any]) -> tuple[list[UnsupportedHost], list[str]]:
    keys = {name: value for name, value in change.items() if name in Settings.__struct_fields__}
    others = {name: value for name, value in change.items() if name not in keys}
    here, settings = facts(**others), Settings(**keys)
    return list(host_refusals(here, settings)), list(host_warnings(here, settings))


def test_every_row_has_a_test() -> None:
    assert [*REFUSALS, *WARNINGS] == [*REFUSED, *WARNED]


@pytest.mark.parametrize(("code", "change"), ROWS, ids=[f"{code}-{n}" for n, (code, _) in enumerate(ROWS)])
def test_a_situation_that_cannot_work_is_refused_with_the_reason(code: str, change: dict[str, Any]) -> None:
    (refusal,), _ = check(change)
    assert refusal.code == code
    # The reason has the values that were found, and says what to set instead.
    text = str(refusal)
    assert "{" not in text
    shown = [value for key, value in change.items() if key in {"host", "port", "pp", "pcp"}]
    assert all(str(value) in text for value in shown)


@pytest.mark.parametrize("change", FINE, ids=str)
def test_what_works_is_neither_refused_nor_warned_of(change: dict[str, Any]) -> None:
    assert check(change) == ([], [])


@pytest.mark.parametrize("code", WARNED)
def test_what_hardly_works_is_warned_of_by_its_code(code: str) -> None:
    for change in WARNED[code]:
        refusals, (warning,) = check(change)
        assert (refusals, warning.endswith(f" ({code})")) == ([], True)


def test_blocks_are_split_where_turns_of_several_context_ranks_are_shorter() -> None:
    (latent,), (state,) = DEALT["groups"], STATES
    turns = {turn: facts(**{**DEALT, "groups": (state, latent)}, interleave_tokens=turn) for turn in (1, 8, 16)}
    assert [turn for turn, each in turns.items() if each.splits_blocks] == [1, 8]
    alone = facts(tp=2, groups=(latent, replace(latent, block_tokens=64)), interleave_tokens=1)
    assert (alone.splits_blocks, facts(dcp=2, tp=2, groups=(state,)).splits_blocks) == (False, False)
    ranks = [facts(tp=4, dcp=2, tp_rank=rank, interleave_tokens=8) for rank in range(4)]
    assert [each.deal_of(latent) for each in ranks] == [(2, 0, 8), (2, 1, 8)] * 2


@pytest.mark.parametrize(
    ("backends", "variables", "kept"),
    [
        (("UCX",), {}, ""),
        (("UCX",), {"UCX_RCACHE_ENABLE": "n", "UCX_TLS": "^cuda_ipc"}, ""),
        (("UCX",), {"UCX_TLS": "rc,cuda_copy"}, ""),
        (("UCX",), {"UCX_TLS": "^ib,cuda"}, ""),
        (("LIBFABRIC",), {}, "backends ['LIBFABRIC']"),
        (("UCX", "GDS"), {}, "backends ['UCX', 'GDS']"),
        ({"UCX": {"num_threads": "2"}}, {}, ""),
        ({"UCX": {"engine_config": "TLS=tcp"}}, {}, "UCX with an engine_config in backends"),
        (("UCX",), {"UCX_RCACHE_ENABLE": "try"}, "UCX_RCACHE_ENABLE=try"),
        *((("UCX",), {"UCX_TLS": tls}, f"UCX_TLS={tls}") for tls in ("all", "rc,cuda_ipc", "tcp,cuda", "^ib")),
    ],
    ids=str,
)
def test_memory_that_would_stay_pinned_or_mapped_in_a_sleep_is_found(
    backends: tuple[str, ...] | dict[str, dict[str, str]], variables: dict[str, str], kept: str
) -> None:
    assert kept_memory(Settings(backends=backends).backend_parameters, variables) == kept


def test_an_error_crosses_processes_with_its_code() -> None:
    error = UnsupportedHost("a port is taken", code="side-channel-port", fault="environment", context={"port": 1})
    same = pickle.loads(pickle.dumps(error))
    assert str(same) == "a port is taken (side-channel-port)"
    assert (type(same), same.fault, same.context) == (UnsupportedHost, "environment", {"port": 1})


def test_all_that_a_start_refuses_is_found_at_once() -> None:
    missing = "/run/no-such-file"
    settings = Settings(ticket_secrets=(missing,), side_channel_key=missing)
    assert [code_of(error) for error in start_refusals(settings)] == ["invalid-key-file", "invalid-secret"]
    assert [code_of(error) for error in start_refusals(settings, is_worker=True)] == ["invalid-key-file"]
    (refusal,) = start_refusals(Settings(), facts(port=70000), binds=True)
    assert code_of(refusal) == "side-channel-port", "one cause, one code"


def test_back_ends_are_tried_on_the_host_alone_and_the_default_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def refuse(named: list[object]) -> None:
        tried.extend(named)
        raise AgentError("backend-unavailable", "no such plugin")

    monkeypatch.setattr(wiring, "try_backends", refuse)
    for settings, binds in ((Settings(), True), (Settings(backends=("NONE",)), False)):
        assert start_refusals(settings, binds=binds) == ()
    for here in (None, facts(host="127.0.0.1", port=1024)):
        *_, refusal = start_refusals(Settings(backends={"NONE": {"size": "2"}}), here, binds=True)
        assert code_of(refusal) == "backend-unavailable"
    assert tried == 2 * [("NONE", {"size": "2"})]


@pytest.mark.parametrize("sleeps", [False, True])
def test_back_ends_other_than_the_default_are_tried_as_the_agent_will_create_them(
    monkeypatch: pytest.MonkeyPatch, *, sleeps: bool
) -> None:
    tried: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(wiring, "try_backends", tried.extend)
    monkeypatch.setattr(wiring, "_try_port", lambda *_: None)
    here = facts(has_sleep_mode=sleeps)
    for backends in (("UCX",), {"UCX": {"num_threads": "2"}}, ("UCX", "GDS")):
        for binds in (False, True):
            assert not start_refusals(Settings(backends=backends), here, binds=binds)
    assert [name for name, _ in tried] == ["UCX", "UCX", "GDS"]
    assert tried[0][1]["num_threads"] == "2"
    assert all(("RCACHE_ENABLE=n" in given.get("engine_config", "")) == sleeps for _, given in tried)


def test_a_port_of_another_process_is_refused_one_that_becomes_free_is_not_and_it_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wiring, "_PORT_TRIES", 8)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = facts(host="127.0.0.1", port=taken.getsockname()[1])
        assert start_refusals(Settings(), here) == ()
        (refusal,) = start_refusals(Settings(), here, binds=True)
        assert code_of(refusal) == "bind-failed"
        reader = socket.create_connection(taken.getsockname())
        threading.Timer(0.5, taken.close).start()  # as an engine before this one that is ending
        served = taken.accept()[0]
        assert start_refusals(Settings(), here, binds=True) == ()
    served.close()
    reader.close()  # in this order the port is in TIME-WAIT
    states = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert any(local.endswith(f":{here.port:04X}") and state == "06" for local, _, state in states)
    assert start_refusals(Settings(), here, binds=True) == start_refusals(Settings(), here, binds=True) == ()
