"""The doctor as a command, on this machine."""

import json
import os
import subprocess
import sys

import pytest

DOCTOR = [sys.executable, "-m", "kv_nixl_agent.tools.cli", "doctor", "--json"]


def run(command, **variables):
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stderr == "", "NIXL's log is none of the report"
    return done.returncode, json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_doctor_with_a_peer():
    serve = [sys.executable, "-m", "kv_nixl_agent.tools.cli", "serve", "--port", "0", "--sessions", "1"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        endpoint = server.stdout.readline().split()[-1]
        code, report = run([*DOCTOR, "--peer", endpoint])
        assert server.wait(30) == 0
    assert code == report["exit_code"] != 3, report["findings"]
    assert report["peer_bandwidth"]["read_gb_s"] > 0
    assert report["paths"], "no transport was named"
    transports = {each["name"]: each for each in report["transports"]}
    assert transports["tcp"]["read_gb_s"] > 0
    assert all(each["read_gb_s"] or each["reason"] for each in transports.values())
    assert {row["page_bytes"] for row in report["bandwidth"]} == {4096, 16384, 65536, 1 << 20}


@pytest.mark.full
@pytest.mark.timeout(200)
def test_tcp_is_shouted():
    code, report = run(DOCTOR, UCX_TLS="tcp")
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert code == 1
    assert findings["ucx-tls"]["severity"] == "warning"
    assert "READS GO OVER TCP" in findings["transports"]["message"]
    transports = {each["name"]: each for each in report["transports"]}
    assert transports["tcp"]["state"] == "used"
    assert transports["cma"]["reason"] == "UCX_TLS=tcp leaves it out"
