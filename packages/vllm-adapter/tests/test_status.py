"""`vllm-adapter status`: the socket of each process, what it answers, and how the command merges it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from factories import facts

from kv_scheduler_state import PeerAddress
from vllm_adapter.cache.names import engine_name
from vllm_adapter.cli import engines, main
from vllm_adapter.cli.engines import ask_all, http_ports, of_engine
from vllm_adapter.cli.status import print_tables, troubles
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import StatusSocket
from vllm_adapter.worker.transfer.records import PeerEngine

Serve = Callable[..., StatusSocket]
pytestmark = pytest.mark.usefixtures("no_engines")


@pytest.fixture
def folder(no_engines: Path) -> Path:
    """Return the folder that engines and the command use here."""
    return no_engines


def ask(path: Path, request: str = "status") -> bytes:
    reply = engines._exchange(path, time.monotonic() + 60, request)
    return b"" if isinstance(reply, OSError) else reply[0]


# -------------------------------------------------------------------------------------------------------- the socket


def test_only_its_user_reaches_a_socket_and_nothing_is_left_of_a_closed_one(folder: Path, serve: Serve) -> None:
    served = serve({"engine_id": "P"})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
    assert json.loads(ask(served.path))["engine_id"] == "P"
    served.close()
    served.close()
    assert list(folder.iterdir()) == []
    assert not served._thread.is_alive()


@pytest.mark.parametrize("spoil", ["open", "link", "file", "thread"])
def test_a_socket_that_cannot_be_opened_is_one_line_and_no_engine_ends(
    folder: Path, spoil: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spoil == "open":
        folder.mkdir(mode=0o755)
    elif spoil == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    elif spoil == "file":
        folder.write_text("")
    refused = StatusSocket("scheduler", {})
    with caplog.at_level(logging.DEBUG, "vllm.vllm_adapter"), monkeypatch.context() as full:
        if spoil == "thread":
            full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert not refused.open()
        refused.close()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert str(folder) in record.getMessage()


@pytest.mark.parametrize("runtime", ["/" + "x" * 300, "/nowhere", "nowhere/here"])
def test_any_runtime_folder_in_the_environment_leaves_the_engine_alone(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.is_dir` raises for a name that is too long, and for a folder below one of another user's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert StatusSocket("scheduler", {}).path.parent.name == f"vllm-adapter-{os.getuid()}"


def test_a_process_without_an_answer_is_trouble_of_the_engine_that_is_asked_for() -> None:
    silent: Any = {"socket": "/s", "error": "no answer within 3 s"}
    answers: list[Any] = [{"engine_id": "P", "part": "scheduler"}, {"engine_id": "D", "part": "scheduler"}, silent]
    assert of_engine(answers, "P") == [answers[0], silent]
    assert troubles(of_engine(answers, "P")) == ["/s: no answer within 3 s"]
    assert of_engine(answers, "X") == []


def test_texts_of_clients_do_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"request_id": "r\x1b]0;owned\x07", "state": "leased\n", "[/]": 1, "key\x1b[2J": 2}
    answer: Any = {"engine_id": "P\x1b[2J", "part": "scheduler", "oldest_leases": [request]}
    print_tables([answer, {"socket": "/s", "error": "bad\x1b[2J"}], with_requests=True)
    printed = capsys.readouterr().out
    assert "owned" in printed
    assert "\\x1b" in printed
    assert not {"\x1b", "\x07"} & set(printed)


def test_sockets_of_dead_processes_are_removed_and_those_of_live_ones_stay(folder: Path, serve: Serve) -> None:
    live = serve({"engine_id": "P"})
    stale = folder / "1-scheduler-0000.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(stale))
        dead.listen()
    assert [answer["engine_id"] for answer in ask_all()] == ["P"]
    assert not stale.exists()
    assert live.path.exists()


@pytest.mark.parametrize("kind", ["open-to-others", "of-another-user", "a-link"])
def test_a_folder_that_others_could_fill_is_reported_and_nothing_in_it_is_asked(
    folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked: list[int] = []
    serve(lambda: asked.append(1) or {"engine_id": "made-up"})
    if kind == "open-to-others":
        folder.chmod(0o701)
    elif kind == "of-another-user":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))
    (answer,) = ask_all(folder)
    assert answer["socket"] == str(folder)
    assert "is not a folder of user" in str(answer["error"])
    assert main(["status", "--folder", str(folder)]) == 1
    assert not asked


def test_a_link_and_a_file_beside_the_sockets_are_not_asked(folder: Path, serve: Serve, tmp_path: Path) -> None:
    served = serve({"engine_id": "P"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as elsewhere:
        elsewhere.bind(str(tmp_path / "of-another-service"))
        elsewhere.listen()
        elsewhere.setblocking(False)
        (folder / "0-scheduler.sock").symlink_to(tmp_path / "of-another-service")
        (folder / "1-scheduler.sock").write_text("no socket")
        assert [answer.get("engine_id") for answer in ask_all()] == ["P"]
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert served.path.exists()


def test_many_silent_sockets_cost_one_timeout_in_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(100)]
    for number, each in enumerate(silent):
        each.bind(str(folder / f"{number}.sock"))
        each.listen()
    exchange, ends_s = engines._exchange, set[float]()
    monkeypatch.setattr(engines, "_exchange", lambda file, *rest: ends_s.add(rest[0]) or exchange(file, *rest))
    answers = ask_all(timeout_s=0.3)
    for each in silent:
        each.close()
    assert len(answers) == 100
    assert all("no answer within 0.3 s" in str(answer["error"]) for answer in answers)
    assert len(ends_s) == 1, "all are given up at the same time"


def test_a_client_that_says_nothing_or_something_else_keeps_nobody_out_for_long(serve: Serve) -> None:
    asked: list[int] = []
    served = serve(lambda: asked.append(1) or {"engine_id": "P"})
    assert ask(served.path, "GET / HTTP/1.1\r") == b""
    assert ask(served.path, "x" * 100_000) == b""
    assert asked == [], "nothing is described for them"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(served.path))
        assert json.loads(ask(served.path))["engine_id"] == "P"


def test_asking_in_a_loop_is_answered_ten_times_a_second_and_no_more(serve: Serve) -> None:
    served = serve({"engine_id": "P"})
    began_s = time.monotonic()
    for _ in range(6):
        ask(served.path)
    assert time.monotonic() - began_s >= 0.5


def test_a_look_that_fails_is_logged_and_the_next_one_is_answered(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(Mock(side_effect=[KeyError("gone"), {"engine_id": "P"}]))
    assert main(["status"]) == 1
    assert "KeyError: 'gone'" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["engines"]) == ["P"]


# --------------------------------------------------------------------------------------------------------- the command

WORKER = {
    "engine_id": "prefill-0",
    "part": "0.0",
    "pid": 12,
    "thread": {"state": "running", "last_error": ""},
    "leases": 2,
    "reads": 0,
    "streams": 1,
    "peers": 0,
    "quarantined_transfers": 1,
    "quarantined_bytes": 13312,
    "stalled_transfers": 0,
    "figures": {"transfers_done": 4.0, "bytes_moved": 8 << 20, "recent_bytes_per_s": 2.5e6},
}
SCHEDULER = {
    "engine_id": "prefill-0",
    "part": "scheduler",
    "pid": 11,
    "leases": 2,
    "leased_blocks": 3,
    "leased_bytes": 2048,
    "oldest_requests": [{"request_id": "[r1]", "state": "leased", "age_s": 1.25, "waits_for": "the workers"}],
}


STREAM = {
    "request_id": "cmpl-9",
    "peer_engine_id": "prefill-1",
    "stage": "watching",
    "tokens_finished": 1344,
    "tokens": 1900,
    "bytes": 176_160_768,
    "age_s": 1.62,
}


def test_the_processes_of_an_engine_are_rows_of_one_table(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    identity = {"name": "prefill-0", "kv_role": "kv_producer", "side_channel": "10.0.0.1:5600", "model": "tiny"}
    serve({**WORKER, **identity, "oldest_streams": [STREAM]}, "0.0")
    serve({**WORKER, **identity, "part": "0.1", "streams": 0}, "0.1")
    serve({**SCHEDULER, **identity})
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["prefill-0", "prefill", "10.0.0.1:5600", "tiny"] in [line.split() for line in lines]
    (scheduler,) = [line for line in lines if " scheduler " in line]
    (worker,) = [line for line in lines if " 0.0 " in line]
    assert lines.index(scheduler) < lines.index(worker)
    assert "2 (3 blocks, 2.0 kB)" in scheduler
    for part in ("prefill-0", "running", "0 + 1 streamed", "1 (13.3 kB)", "4 in 8.4 MB, 2.5 MB/s lately"):
        assert part in worker
    assert "\n".join(lines).count("streamed") == 1
    assert main(["status", "--requests"]) == 0
    out = capsys.readouterr().out
    assert "[r1]" in out, "an id is no markup"
    row = next(line.split() for line in out.splitlines() if "cmpl-9" in line)
    assert row == ["cmpl-9", "prefill-1", "watching", "1344", "1900", "176.2", "MB", "1.6", "s"]


_FIRST_ANSWERS = """
import importlib, sys
from pathlib import Path
from vllm_adapter.cli import engines
from vllm_adapter.observe import answers

content = sys.argv[1].encode()
engines._exchange = lambda *_: (content, 1.0, 2.0)
sys.setswitchinterval(1e-6)
for _ in range(60):
    engines.Answer = importlib.reload(answers).Answer  # a type that msgspec has not seen
    found = engines.ask_all(Path(sys.argv[2]))
    assert len(found) == 16, found
    assert not any("error" in each for each in found), found
"""


def test_complete_answers_of_many_processes_never_end_the_command(folder: Path) -> None:
    """msgspec describes a type at its first use, in Python: two threads that began that at once ended with SIGSEGV."""
    folder.mkdir(mode=0o700)
    for number in range(16):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(str(folder / f"{number}.sock"))
    answer = json.dumps({**SCHEDULER, **WORKER, "hand_overs": [{"moments": {"read": 1.0}}]})
    ended = subprocess.run(
        [sys.executable, "-c", _FIRST_ANSWERS, answer, folder], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"thread": {"state": "dead", "last_error": "OSError: gone"}}, "has died; restart this engine (OSError: gone)"),
        ({"thread": {"state": "stuck", "last_error": ""}}, "does not answer"),
        ({"is_silent": True}, "does not answer"),
    ],
)
def test_a_thread_in_trouble_is_said_and_is_the_exit_code(
    serve: Serve, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    serve({**WORKER, **change}, "0.0")
    assert main(["status"]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["status", "--json"]) == 1
    assert said in json.loads(capsys.readouterr().out)["troubles"][0]


@pytest.mark.parametrize(
    ("state", "is_said"), [("off", True), ("unknown-build", True), ("zeroed", False), ("not-loaded", False)]
)
def test_a_rank_that_a_dying_consumer_can_end_is_said_and_is_no_trouble(
    serve: Serve, capsys: pytest.CaptureFixture[str], state: str, is_said: bool
) -> None:
    serve({**WORKER, "thread": {"state": "running", "last_error": "", "ucx_requests": state}}, "0.0")
    assert main(["status"]) == 0
    assert (f"UCX's requests are not zeroed ({state})" in " ".join(capsys.readouterr().out.split())) is is_said


def test_no_engine_is_an_error_that_says_where_was_looked(
    folder: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 3
    assert f"no live engine found in {folder} and {folder.parent}/tmp/vllm-adapter-" in capsys.readouterr().err
    serve(SCHEDULER)
    assert main(["status", "decode-7"]) == 3
    assert "'decode-7'; there are prefill-0" in capsys.readouterr().err
    assert main(["status", "decode-7", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"engines": {}, "troubles": []}


UUID = "6f01b388-470c-4abb-860b-75c77936f9d2"


def test_an_engine_is_meant_by_name_id_side_channel_or_process_and_by_a_beginning_that_is_its_own() -> None:
    older = [{"engine_id": name, "pid": pid} for name, pid in (("ab", 1), ("ab", 2), ("abc", 3), ("x1", 4))]
    older[0]["side_channel"] = "h:1"  # as a scheduler's; ranks said nothing of it
    named = [
        {"engine_id": engine_id, "name": engine_name(engine_id, "kv_producer", at), "side_channel": at, "pid": pid}
        for engine_id, at, pid in ((UUID, "h:5", 5), (UUID, "h:5", 6), ("twin", "h:7", 7), ("twin", "h:8", 8))
    ]
    answers: list[Any] = [*older, *named]
    for word, pids in {
        "ab": [1, 2], "abc": [3], "x": [4], "3": [3], "2": [1, 2], "y": [], "h:1": [1, 2],
        "prefill@h:5": [5, 6], "pre": [5, 6], UUID: [5, 6], "6f01": [5, 6], "h:5": [5, 6], "6": [5, 6],
        "h:8": [8], "7": [7], "twin at h:7": [7],
    }.items():  # fmt: skip
        assert [answer["pid"] for answer in of_engine(answers, word)] == pids, word
    for word, several in (("a", "ab or abc"), ("twin", "twin at h:7 or twin at h:8")):
        with pytest.raises(AdapterError, match=f"'{word}' may mean {several} [(]ambiguous-engine[)]"):
            of_engine(answers, word)


@pytest.mark.parametrize(
    ("engine_id", "name", "peer"),
    [
        ("prefill-0", "prefill-0", "engine prefill-0 at [fd00::1]:5600"),
        ("prefill-0_dp1", "prefill-0_dp1", "engine prefill-0_dp1 at [fd00::1]:5600"),
        (UUID, "decode@[fd00::1]:5600", "engine at [fd00::1]:5600"),
        (f"{UUID}_dp1", "decode@[fd00::1]:5600", "engine at [fd00::1]:5600"),
    ],
)
def test_an_id_that_vllm_made_up_names_no_engine(engine_id: str, name: str, peer: str) -> None:
    here = facts(engine_id=engine_id, host="fd00::1", port=5600, kv_role="kv_consumer")
    there = PeerEngine(PeerAddress(engine_id, "fd00::1", 5600, 1, 1, 1), 0.0, 0.0)
    assert (here.name, there.text) == (name, peer)
    assert there.key((0, 0)) == f"{engine_id}@[fd00::1]:5600/1.1.1/0.0"


def test_http_ports_are_those_on_which_the_parent_of_the_scheduler_listens() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as scheduler,
    ):
        pids = [(scheduler.pid, os.getpid()), (scheduler.pid, os.getppid()), (os.getpid(), None)]
        ports = [http_ports({"pid": pid, "parent_pid": parent}) for pid, parent in pids]
        scheduler.communicate(b"\n")
        assert http.getsockname()[1] in ports[0]
    assert ports[1:] == [[], []], "another process is not its parent"


def watching(folder: Path, *words: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_adapter", "status", "--folder", str(folder), "--watch", "0.5", *words]
    return subprocess.Popen(command, text=True, **more)


def test_a_watch_is_a_line_of_json_each_time_and_ends_with_its_reader(
    folder: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--watch", "0.1"]) == 2
    assert "--watch must be 0.5 s at least" in capsys.readouterr().err
    assert main(["status", "--watch", "1"]) == 3, "no engine, nothing to watch"
    serve(SCHEDULER)
    with watching(folder, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        for _ in range(2):
            assert list(json.loads(command.stdout.readline())["engines"]) == ["prefill-0"]
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 0


def test_a_terminal_is_drawn_anew_until_ctrl_c(folder: Path, serve: Serve) -> None:
    serve(WORKER, "0.0")
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 160))
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's background jobs ignore Ctrl-C
    with watching(
        folder, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}, preexec_fn=heeds
    ) as command:
        seen = b""
        while seen.count(b"prefill-0") < 2:
            seen += os.read(ours, 65536)
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 0, seen
    os.close(theirs)
    os.close(ours)
    assert seen.count(b"\x1b[2J") >= 2


# --------------------------------------------------------------------------------------------------- vllm-adapter revoke


def serve_leases(serve: Serve, revoked: list[str], name: str = "prefill-0", pid: int = 11) -> None:
    """Serve the processes of an engine; its name is noted when its leases are revoked."""

    def revoke() -> dict[str, object]:
        revoked.append(name)
        return {"engine_id": name, "part": "scheduler", "leases": 2, "leased_blocks": 3, "leased_bytes": 2048}

    serve({**WORKER, "engine_id": name}, "0.0")
    serve({**SCHEDULER, "engine_id": name, "pid": pid}, revoke=revoke)


def test_leases_of_the_engine_that_is_meant_are_revoked_and_of_no_other(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    revoked: list[str] = []
    serve_leases(serve, revoked)
    serve_leases(serve, revoked, "prefill-1", 21)
    assert main(["revoke", "prefill-0"]) == 0
    said = "engine prefill-0: 2 leases revoked, 3 blocks (2048 bytes on each rank) come back\n"
    assert capsys.readouterr().out == said
    assert main(["revoke", "21", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leased_blocks"] == 3
    assert revoked == ["prefill-0", "prefill-1"]
    assert main(["revoke", "prefill"]) == 3, "which of the two is not clear"
    assert "'prefill' may mean prefill-0 or prefill-1 (ambiguous-engine)" in capsys.readouterr().err
    assert revoked == ["prefill-0", "prefill-1"]


def test_an_engine_of_an_older_version_revokes_nothing_and_says_so(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(SCHEDULER)
    assert main(["revoke", "prefill-0"]) == 1
    assert "revoked nothing: an engine of an older version does not know 'revoke'" in capsys.readouterr().err


def test_an_empty_name_revokes_nothing_though_one_engine_alone_runs(serve: Serve) -> None:
    """As of a script whose variable is not set: every name begins with the empty text."""
    revoked: list[str] = []
    serve_leases(serve, revoked)
    assert [main(["revoke", name]) for name in ("", " ", "prefill-0")] == [3, 3, 0]
    assert revoked == ["prefill-0"]
