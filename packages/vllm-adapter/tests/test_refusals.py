"""Start-up: each row of the table of refusals and of that of warnings, alone and in all combinations."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_adapter.config.start_checks import REFUSALS, WARNINGS, Situation, check_start
from vllm_adapter.errors import UnsupportedHost

REFUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "consumer-pipeline-parallel": (
        {"pp": 2, "kv_role": "kv_consumer"},
        {"pp": 4, "kv_role": "kv_both"},
        {"pp": 2, "kv_role": "kv_producer", "is_bidirectional": True},
    ),
    "prefill-context-parallel": ({"pcp": 2}, {"pcp": 2, "kv_role": "kv_producer"}),
    "side-channel-wildcard": tuple({"host": host} for host in ("0.0.0.0", "::", "[::]", "*", "", "::0", "0000::")),
    "side-channel-port": ({"port": 65536}, {"port": 0}, {"port": -1}),
    "sleep-mode-unsupported": ({"has_sleep_mode": True}, {"has_sleep_mode": True, "version": (0, 30)}),
    "computed-kv-scales": ({"computes_scales": True},),
    "elastic-expert-parallel": ({"is_elastic": True},),
    "host-resident-cache": ({"has_host_blocks": True},),
    "routed-experts-lost": ({"returns_experts": True},),
    "readback-drafted-state": ({"is_bidirectional": True, "has_state": True, "is_speculative": True},),
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
    {"pp": 4, "kv_role": "kv_producer"},
    {"host": "127.0.0.1"},
    {"host": "::1"},
    {"host": "decode-0.decode.default.svc"},
    {"port": 65535},
    {"has_sleep_mode": True, "version": (0, 33)},
    {"is_bidirectional": True},
    {"is_bidirectional": True, "kv_role": "kv_producer"},
    {"is_bidirectional": True, "kv_role": "kv_consumer"},
    {"is_bidirectional": True, "has_state": True},
    {"is_bidirectional": True, "is_speculative": True},
    {"has_state": True, "is_speculative": True},
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
    {"ucx_tls": "cuda_ipc", "uses_ucx": False},
)
ROWS = [(code, change) for code, changes in REFUSED.items() for change in changes]


def test_every_row_has_a_test() -> None:
    assert [row.code for row in REFUSALS] == list(REFUSED)
    assert [row.code for row in WARNINGS] == list(WARNED)


@pytest.mark.parametrize(("code", "change"), ROWS, ids=[f"{code}-{n}" for n, (code, _) in enumerate(ROWS)])
def test_a_situation_that_cannot_work_is_refused_with_the_reason(code: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedHost) as caught:
        check_start(Situation(**change))
    assert caught.value.code == code
    # The reason has the values that were found, and says what to set instead.
    text = str(caught.value)
    assert "{" not in text
    shown = [value for key, value in change.items() if key in {"host", "port", "pp", "pcp"}]
    assert all(str(value) in text for value in shown)


@pytest.mark.parametrize("change", FINE, ids=str)
def test_what_works_is_neither_refused_nor_warned_of(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check_start(Situation(**change))
    assert caplog.records == []


@pytest.mark.parametrize("code", WARNED)
def test_what_hardly_works_is_warned_of_by_its_code(code: str, caplog: pytest.LogCaptureFixture) -> None:
    for change in WARNED[code]:
        caplog.clear()
        check_start(Situation(**change))
        (record,) = caplog.records
        assert (record.levelno, code in record.getMessage()) == (logging.WARNING, True)


def test_of_two_reasons_the_first_row_is_told() -> None:
    codes = list(REFUSED)
    for one, other in itertools.permutations(codes, 2):
        for first, second in itertools.product(REFUSED[one], REFUSED[other]):
            changes = {**second, **first}
            if any(changes[key] != value for key, value in second.items()):
                continue
            with pytest.raises(UnsupportedHost) as caught:
                check_start(Situation(**changes))
            told = codes.index(caught.value.code)
            assert told <= min(codes.index(one), codes.index(other))


SITUATIONS = st.builds(
    Situation,
    version=st.sampled_from([(0, 30), (0, 31), (0, 32), (0, 33)]),
    kv_role=st.sampled_from(["kv_producer", "kv_consumer", "kv_both"]),
    outer_role=st.sampled_from(["kv_producer", "kv_consumer", "kv_both"]),
    pp=st.integers(1, 4),
    pcp=st.integers(1, 2),
    host=st.sampled_from(["10.0.0.1", "localhost", "0.0.0.0", "::", "fd00::1", "node-1"]),
    port=st.integers(-1, 65540),
    has_sleep_mode=st.booleans(),
    computes_scales=st.booleans(),
    is_bidirectional=st.booleans(),
    uses_ucx=st.booleans(),
    ucx_tls=st.sampled_from(["", "tcp", "cuda_ipc", "rc,cuda_copy"]),
)


@given(SITUATIONS)
def test_any_combination_is_accepted_if_it_can_work_and_else_refused(it: Situation) -> None:
    reads = it.kv_role in {"kv_consumer", "kv_both"}
    can_work = (
        it.pcp == 1
        and (it.pp == 1 or not (reads or it.is_bidirectional))
        and it.host not in {"0.0.0.0", "::"}
        and 1 <= it.port <= 65535
        and not it.computes_scales
        and not (it.has_sleep_mode and it.version != (0, 33))
        and not (reads and it.outer_role == "kv_producer")
    )
    try:
        check_start(it)
    except UnsupportedHost as error:
        assert not can_work, (it, error.code)
        assert error.code in REFUSED
    else:
        assert can_work, it


def test_a_situation_is_plain_values() -> None:
    assert {type(value) for value in dataclasses.astuple(Situation())} <= {bool, int, str, tuple}
