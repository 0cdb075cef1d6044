"""Start-up: each refusal and each warning alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

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
    assert [*REFUSALS, *WARNINGS] == [*REFUSED, *WARNED]


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
