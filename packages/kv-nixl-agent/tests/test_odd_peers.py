"""Odd clients of `kv-nixl serve`, odd answers to `kv-nixl doctor --peer`, odd options, children that are cut short."""

import json
import math
import os
import socket
import subprocess
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
from helpers import exit_code

from kv_nixl_agent import AgentError
from kv_nixl_agent.tools import cli, remote, report
from kv_nixl_agent.tools.remote import LiveRank, measure_ranks
from kv_nixl_agent.tools.selftest import Bandwidth, run_selftest

NONSENSE = {
    "empty": b"",
    "blank": b" \n",
    "no UTF-8": b"\xff\xfe\x00\x01",
    "Latin-1": b'["\xe9"]',
    "zero bytes": b"\0" * 100,
    "no JSON": b"name: 0.0",
    "half": b'[{"name": ',
    "digits": b"1" * 5000,
    **{f"lists {depth}": b"[" * depth + b"]" * depth for depth in (40, 950, 200_000)},
    **{f"open lists {depth}": b"[" * depth for depth in (1000, 200_000)},
    **{f"objects {depth}": b'[{"a":' * depth + b"1" + b"}]" * depth for depth in (250, 5000)},
    "number": b"5",
    "text": b'"x"',
    "null": b"null",
    "NaN": b"NaN",
    "object": b"{}",
    "numbers": b"[1]",
    "lists": b"[[[]]]",
    "nulls": b"[null]",
}


# -------------------------------------------------------------------------------------------------------------- clients


class Producer:
    """A test region without NIXL; the mood of a producer may be an exception."""

    mood = None
    agent_metadata = b"metadata"
    fence = (4096, 0, 16)

    def __init__(self, name, *, page_bytes, page_count):
        if self.mood is not None:
            raise self.mood
        self.rows = SimpleNamespace(tolist=lambda: [[0, page_bytes, 0, page_bytes, page_count]])

    def close(self):
        pass


GREETING = b'{"greeting": "kv-nixl-doctor-1"}\n'


def served(lines, monkeypatch):
    """Send each line to one server, each over a connection of its own; return the answers."""
    monkeypatch.setattr(remote, "PeerProcess", Producer)
    monkeypatch.setattr(remote, "_TIMEOUT_S", 5.0)
    bound, answers = [], []
    make = socket.create_server

    def create_server(address):
        made = make(address)
        bound.append(made.getsockname()[1])
        return made

    monkeypatch.setattr("socket.create_server", create_server)
    ended = []
    serve = partial(remote.serve_peer, "127.0.0.1", 0, sessions=len(lines))
    server = threading.Thread(target=lambda: ended.append(serve()), daemon=True)
    server.start()
    while not bound:
        assert server.is_alive()
    for line in lines:
        with socket.create_connection(("127.0.0.1", bound[0]), timeout=60) as client:
            answer = b""
            try:
                client.sendall(line)
                client.shutdown(socket.SHUT_WR)
                while piece := client.recv(65536):
                    answer += piece
            except OSError:
                pass  # closed with words of ours unread, maybe before we shut down our side
            answers.append(answer)
    server.join(60)
    assert ended == bound, "the server has served them all"
    return answers


def test_no_client_ends_the_server(monkeypatch, capsys):
    odd = [content + b"\n" for content in NONSENSE.values()] + [b"", b"\n", b"x" * (1 << 21)]
    *answers, good = served([*odd, GREETING], monkeypatch)
    assert set(answers) == {b""}
    assert json.loads(good)["fence"] == [4096, 0, 16]
    assert capsys.readouterr().err == "", "nonsense of strangers fills no log"


@pytest.mark.parametrize(
    "mood",
    [
        AgentError("backend-unavailable", "no NIXL"),
        EOFError("the child has ended"),
        RecursionError("too deep"),
        RuntimeError("no thread"),
        KeyError("x"),
        MemoryError(),
    ],
    ids=lambda mood: type(mood).__name__,
)
def test_whatever_a_client_brings_about_is_said_and_the_next_one_is_served(mood, monkeypatch, capsys):
    monkeypatch.setattr(Producer, "mood", mood)
    assert served([GREETING, GREETING], monkeypatch) == [b"", b""]
    reported = f"kv-nixl: a doctor was not served: {type(mood).__name__}: "
    assert [line[: len(reported)] for line in capsys.readouterr().err.splitlines()] == [reported] * 2


def test_a_client_that_is_gone_before_it_is_taken_ends_nothing(monkeypatch):
    server, (ours, theirs) = MagicMock(), socket.socketpair()
    theirs.close()
    bound = server.__enter__.return_value
    bound.getsockname.return_value = ("127.0.0.1", 7)
    bound.accept.side_effect = [ConnectionAbortedError(), ConnectionResetError(), (ours, None)]
    monkeypatch.setattr("socket.create_server", lambda _: server)
    assert remote.serve_peer("127.0.0.1", 7, sessions=1) == 7


# -------------------------------------------------------------------------------------------------------------- answers

REGION = {"metadata": "AAEC", "rows": [[0, 4096, 0, 4096, 4]], "fence": [4096, 0, 16]}


def asked(answer):
    """Return the finding on a peer that answers so."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        sender = threading.Thread(target=lambda: (theirs.sendall(answer), theirs.shutdown(socket.SHUT_WR)))
        with patch("socket.create_connection", lambda *_, **__: ours):
            sender.start()
            found = report._try_peer("10.0.0.1", 5700)
        sender.join(60)
    return found


@pytest.fixture
def _no_reads(monkeypatch):
    monkeypatch.setattr(remote, "measure_pages", lambda *_: Bandwidth(4096, 1.0, 2.0, 3.0))


@pytest.mark.usefixtures("_no_reads")
@pytest.mark.parametrize("name", NONSENSE)
def test_an_answer_that_is_none_is_a_finding(name):
    bandwidth, finding = asked(NONSENSE[name] + b"\n")
    assert (bandwidth, finding.name, finding.severity) == (None, "peer", "error")


ODD = (None, True, -1, 2**64, 1.5, math.nan, "x", "\ud800", [], [[]], {}, {"a": 1})


@pytest.mark.usefixtures("_no_reads")
@pytest.mark.parametrize("field", [*REGION, ""])
def test_a_region_of_any_values_is_read_or_a_finding(field):
    assert asked(json.dumps(REGION).encode() + b"\n")[1].severity == "ok"
    rows = ([[0, 2**63, 0, 4096, 4]], [[0, 4096, 0, 4096, 1 << 30]], [[0, 4096, 0, 4096]])
    for odd in (*ODD, *rows):
        bandwidth, finding = asked(json.dumps({**REGION, field: odd} if field else odd).encode() + b"\n")
        assert (bandwidth is None) is (finding.severity == "error")
        assert field == "metadata" or finding.severity == "error", odd


@pytest.mark.parametrize(
    "error", [OverflowError("x"), TypeError("x"), ZeroDivisionError("x"), KeyError("x"), MemoryError()]
)
def test_whatever_reads_bring_about_is_a_finding(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(remote, "measure_pages", fail)
    bandwidth, finding = asked(json.dumps(REGION).encode() + b"\n")
    assert (bandwidth, finding.severity) == (None, "error")
    assert type(error).__name__ in finding.message


CUT_SHORT = {"half a rank": b'[{"name": "0.0"', "other names": b'[{"nam": 1}]', "too few": b"[]"}


@pytest.mark.parametrize("name", [*NONSENSE, *CUT_SHORT])
def test_a_child_that_is_cut_short_is_a_result(name, monkeypatch):
    content = {**NONSENSE, **CUT_SHORT}[name]

    def cut_short(*_, pass_fds, **__):
        os.write(pass_fds[0], content[:4096])
        return subprocess.CompletedProcess([], -9, "", "Killed")

    monkeypatch.setattr("subprocess.run", cut_short)
    found = measure_ranks([LiveRank("0.0", b"", (1, 0, 1))], most_bytes=0, timeout_s=1.0)
    assert found.error
    tested = run_selftest()
    assert not tested.is_ok
    assert tested.message


def test_a_child_that_cannot_be_started_is_a_result(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr("subprocess.run", refuse)
    assert measure_ranks([], most_bytes=0, timeout_s=1.0).error == "the reads cannot be started: no memory"


# -------------------------------------------------------------------------------------------------------------- options

ODD_NUMBERS = ["", " ", "9" * 5000, *["nan", "inf", "-1", "1e400", "99999", "x", "0x10", "1,5", "٣", "--json"]]


@pytest.mark.parametrize("option", ["--port", "--sessions"])
def test_no_number_ends_the_command_with_a_traceback(option, monkeypatch):
    served = []
    monkeypatch.setattr(cli, "serve_peer", lambda _, port, *, sessions: served.append((port, sessions)))
    for number in ODD_NUMBERS:
        assert exit_code("serve", option, number) == 2 or number.isdecimal(), number
    assert all(0 <= port <= 65535 and sessions >= 0 for port, sessions in served)


@pytest.mark.parametrize("host", ["a" * 300, "\ud800", "a\0b", "nowhere.invalid", "::1::", "256.0.0.1"])
def test_a_host_that_does_not_exist_cannot_be_served_on(host, capsys):
    assert exit_code("serve", "--host", host.encode(errors="replace").decode(), "--port", "0", "--sessions", "1") == 3
    assert "cannot serve on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "endpoint",
    [
        "nothing",
        "host:",
        ":1",
        "host:x",
        *(f"::1:{port}" for port in ("9" * 5000, "65536", "\u0665", " 80", "-1", "0")),
    ],
)
def test_a_malformed_peer_is_wrong_usage(endpoint, capsys):
    assert exit_code("doctor", "--peer", endpoint) == 2
    assert "is not HOST:PORT" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("host", ["127.0.0.1", "a" * 300, "a\0b", "\ud800"])
def test_an_unreachable_peer_is_a_finding(host):
    bandwidth, finding = report._try_peer(host, 1)
    assert (bandwidth, finding.name, finding.severity) == (None, "peer", "error")
