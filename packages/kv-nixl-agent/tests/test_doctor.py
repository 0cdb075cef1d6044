"""The doctor's judgement, on logs and environments that are given."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial

import pytest
from helpers import exit_code

from kv_nixl_agent.tools import cli, machine, report
from kv_nixl_agent.tools.machine import Finding, check_environment
from kv_nixl_agent.tools.report import Report, Transport, examine, report_lines, try_transports
from kv_nixl_agent.tools.selftest import Bandwidth, ReadPath, SelfTest, is_tcp, read_paths, reason_in, silenced

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
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    assert by_name(check_environment({"UCX_TLS": "rc,sm"}))["ucx-tls"] == "error"
    assert "ucx-tls" not in by_name(check_environment({"UCX_TLS": "rc,cuda_copy"}))


def examined(monkeypatch, test):
    monkeypatch.setattr(report, "run_selftest", lambda **_: test)
    monkeypatch.setattr(report, "check_environment", list)
    monkeypatch.setattr(report, "try_transports", lambda _: ())
    monkeypatch.setattr(report, "check_nixl", lambda: [Finding("nixl", "ok", "fake")])
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
    monkeypatch.setattr(cli, "examine", lambda _, **__: report)
    assert exit_code("doctor", "--json") == code
    answer = json.loads(capfd.readouterr().out)
    assert (answer["severity"], answer["exit_code"]) == (severity, code)
    assert answer["paths"][0]["config"] == "cma/memory"
    assert exit_code("doctor") == code
    assert "x: text" in capfd.readouterr().out


def test_a_quick_doctor_says_what_it_leaves_out(monkeypatch, capfd):
    asked = []
    monkeypatch.setattr(report, "run_selftest", lambda **given: asked.append(given) or SelfTest(True, "ok", FAST, CMA))
    monkeypatch.setattr(report, "check_nixl", lambda: [Finding("nixl", "ok", "fake")])
    monkeypatch.setattr(report, "try_transports", pytest.fail)
    assert exit_code("doctor", "--quick") in {0, 1}
    assert asked == [{"page_sizes": (1 << 20,)}]
    assert "quick: not measured: pages below 1 MiB, and each transport by itself" in capfd.readouterr().out
    assert exit_code("doctor", "--help") == 0
    assert "half a minute" in " ".join(capfd.readouterr().out.split())


def judged(monkeypatch, tests, variables, *, obstacles=()):
    """Judge transports on self-tests that are given, by `UCX_TLS`; those in `obstacles` lack what they need."""
    candidates = [
        dataclasses.replace(each, obstacle=partial(str, "gone" if each.name in obstacles else ""))
        for each in report._CANDIDATES
    ]
    monkeypatch.setattr(report, "_CANDIDATES", candidates)
    monkeypatch.setattr(report, "run_selftest", lambda ucx_tls, **_: tests[ucx_tls])
    return {each.name: each for each in try_transports(CMA, variables)}


OVER_TCP = SelfTest(True, "ok", (Bandwidth(1 << 20, 1.5, 10.0, 9.0),), TCP)
OVER_CMA = SelfTest(True, "ok", (Bandwidth(1 << 20, 7.5, 10.0, 9.0),), CMA)
TRIALS = {"cma,tcp,self": OVER_CMA, "tcp,self": OVER_TCP, "rc,self": SelfTest(False, "No such device")}


def test_each_transport_has_a_speed_or_a_reason(monkeypatch):
    found = judged(monkeypatch, TRIALS, {}, obstacles=("cuda_ipc",))
    assert found["cma"] == Transport("cma", found["cma"].carries, "used", 7.5)
    assert found["tcp"] == Transport("tcp", found["tcp"].carries, "usable", 1.5)
    assert (found["rc"].state, found["rc"].reason) == ("unusable", "No such device")
    assert (found["cuda_ipc"].state, found["cuda_ipc"].reason) == ("unusable", "gone")


def test_a_trial_that_another_transport_carried_does_not_count(monkeypatch):
    found = judged(monkeypatch, {**TRIALS, "cma,tcp,self": OVER_TCP}, {})
    assert (found["cma"].state, found["cma"].read_gb_s) == ("unusable", None)
    assert found["cma"].reason == "UCX took tcp/lo instead"
    assert found["cuda_ipc"].state == "untried"


@pytest.mark.parametrize(
    ("ucx_tls", "forbidden"),
    [
        ("", set()),
        ("all", set()),
        ("tcp,self", {"cma", "rc", "cuda_ipc"}),
        ("\\rc,sm,tcp", {"cuda_ipc"}),
        ("rc_x,cuda", {"cma", "tcp"}),
        ("^cma", {"cma"}),
        ("^tcp,ib", {"tcp", "rc"}),
    ],
)
def test_ucx_tls_forbids_what_it_says(monkeypatch, ucx_tls, forbidden):
    found = judged(monkeypatch, TRIALS, {"UCX_TLS": ucx_tls})
    assert {name for name, each in found.items() if each.reason.startswith(f"UCX_TLS={ucx_tls} ")} == forbidden


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "E1 a.h:1] Failed to create UCX context doctor: No such device\nAgentError: plugin UCX\nEOFError",
            "No such device",
        ),
        ("W1 b.cpp:5] Unexpected UCX error: Destination is unreachable\nEOFError", "Destination is unreachable"),
        ("Traceback\nkv._errors.AgentError: plugin UCX did not start\nEOFError", "plugin UCX did not start"),
        (
            "Traceback\nRuntimeError: pages arrived with other content\n",
            "RuntimeError: pages arrived with other content",
        ),
        ("one\n  two  \n\n", "two"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure_is_the_sentence_nearest_to_its_cause(log, reason):
    assert reason_in(log) == reason


def test_output_of_libraries_and_children_is_dropped_and_ours_is_not(capfd):
    print("before")
    with pytest.raises(ValueError, match="mine"), silenced():  # noqa: PT012 - the output goes back after an exception too
        os.write(1, b"from a library, ")
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'from a child')"], check=True)
        raise ValueError("mine")
    print("after")
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_the_text_ends_with_the_verdict_and_no_line_is_long():
    findings = [Finding("a", "ok", "x"), Finding("b", "warning", "many words " * 30), Finding("c", "warning", "y")]
    tried = [
        Transport("cma", "host memory", "used", 7.25),
        Transport("rc", "RDMA", "unusable", reason="no RDMA device"),
    ]
    lines = report_lines(Report(findings, FAST, CMA, transports=tried))
    assert lines[-1] == "Works, with warnings (2 warnings). Exit code 1."
    assert max(map(len, lines)) <= 110
    assert " ".join(" ".join(lines).split()).count("many words") == 30
    text = "\n".join(lines)
    assert "7.25, used" in text
    assert report_lines(Report(findings[:1], (), ()))[-1] == "All is well. Exit code 0."
    assert "unusable: no RDMA device" in text
