"""The doctor's judgement, on logs and environments that are given."""

import json

import pytest

from kv_nixl_agent import _cli
from kv_nixl_agent._doctor import _environment, _report
from kv_nixl_agent._doctor._environment import Finding, check_environment
from kv_nixl_agent._doctor._report import Report, examine
from kv_nixl_agent._doctor._selftest import Bandwidth, SelfTest
from kv_nixl_agent._doctor._transports import ReadPath, is_tcp, read_paths

LOG = """
[1795219524.924020] [vm:26730:0]   +--------+-------------+-----------------------------------+
[1795219524.924020] [vm:26730:0]   | me self cfg#0                                            |
[1795219524.924020] [vm:26730:0]   | remote memory write by ucp_put* from host memory to host |
[1795219524.924020] [vm:26730:0]   | 0..inf | zero-copy   | tcp/write                         |
[1795219524.9]   +--------+-------------+-----------------------------------+
[1795219524.9]   | me intra-node cfg#1                                       |
[1795219524.9]   | remote memory read by ucp_get* into host memory from host |
[1795219524.9]   +--------+-------------+-----------------------------------+
[1795219524.9]   | Range  | Description |              Config               |
[1795219524.9]   +--------+-------------+-----------------------------------+
[1795219524.9]   | 0..16K | zero-copy   | cma/memory                        |
[1795219524.9]   | 16K..inf | software emulation   | tcp/lo                   |
[1795219524.9]   +--------+-------------+-----------------------------------+
some other line
"""


def test_read_paths_are_taken_from_the_table_of_reads_only():
    assert read_paths(LOG) == [
        ReadPath("host", "host", "0..16K", "zero-copy", "cma/memory"),
        ReadPath("host", "host", "16K..inf", "software emulation", "tcp/lo"),
    ]
    assert [is_tcp(path) for path in read_paths(LOG)] == [False, True]
    assert read_paths("no table") == []


def by_name(findings):
    return {finding.name: finding.severity for finding in findings}


@pytest.mark.parametrize(
    ("variables", "name", "severity"),
    [
        ({}, "variables", "ok"),
        ({"UCX_TLS": "tcp"}, "ucx-tls", "warning"),
        ({"UCX_TLS": "tcp,self"}, "ucx-tls", "warning"),
        ({"UCX_TLS": "^tcp"}, "variables", "ok"),
        ({"UCX_NET_DEVICES": "mlx5_77:1"}, "ucx-net-devices", "error"),
        ({"NIXL_PLUGIN_DIR": "/nowhere/at/all"}, "plugin-dir", "error"),
    ],
)
def test_variables(variables, name, severity):
    assert by_name(check_environment(variables))[name] == severity


def test_a_transport_list_without_cuda_is_an_error_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(_environment, "has_gpu", lambda: True)
    assert by_name(check_environment({"UCX_TLS": "rc,sm"}))["ucx-tls"] == "error"
    assert "ucx-tls" not in by_name(check_environment({"UCX_TLS": "rc,cuda_copy"}))


def examined(monkeypatch, test):
    monkeypatch.setattr(_report, "run_selftest", lambda: test)
    monkeypatch.setattr(_report, "check_environment", list)
    monkeypatch.setattr(_report, "check_nixl", lambda: [Finding("nixl", "ok", "fake")])
    return examine()


FAST = (Bandwidth(4096, 5.0, 10.0, 9.0),)
CMA = (ReadPath("host", "host", "0..inf", "zero-copy", "cma/memory"),)
TCP = (ReadPath("host", "host", "0..inf", "software emulation", "tcp/lo"),)


@pytest.mark.parametrize(
    ("test", "severity", "word"),
    [
        (SelfTest(True, "ok", FAST, CMA), "ok", "cma/memory"),
        (SelfTest(True, "ok", FAST, TCP), "warning", "READS GO OVER TCP"),
        (SelfTest(True, "ok", FAST, ()), "warning", "not known"),
        (SelfTest(True, "ok", (Bandwidth(4096, 0.1, 10.0, 9.0),), CMA), "warning", "1% of memcpy"),
        (SelfTest(False, "it broke"), "error", "it broke"),
    ],
)
def test_severity(monkeypatch, test, severity, word):
    report = examined(monkeypatch, test)
    assert report.severity == severity
    assert any(word in finding.message for finding in report.findings)


@pytest.mark.parametrize(("severity", "code"), [("ok", 0), ("warning", 1), ("error", 3)])
def test_exit_code_and_json(monkeypatch, capfd, severity, code):
    report = Report([Finding("x", severity, "text")], FAST, CMA)
    monkeypatch.setattr(_cli, "examine", lambda _: report)
    assert _cli.main(["doctor", "--json"]) == code
    answer = json.loads(capfd.readouterr().out)
    assert (answer["severity"], answer["exit_code"]) == (severity, code)
    assert answer["paths"][0]["config"] == "cma/memory"
    assert _cli.main(["doctor"]) == code
    assert "x: text" in capfd.readouterr().out


@pytest.mark.parametrize("endpoint", ["nothing", "host:", ":1", "host:x", "host:70000"])
def test_a_malformed_peer_is_wrong_usage(endpoint, capsys):
    with pytest.raises(SystemExit) as stop:
        _cli.main(["doctor", "--peer", endpoint])
    assert stop.value.code == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_an_unreachable_peer_is_an_error():
    _, finding = _report._try_peer("127.0.0.1", 1)
    assert (finding.name, finding.severity) == ("peer", "error")
