"""`vllm-adapter top`: rows of a fleet, speeds between two looks, and how the view ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_adapter.cli import main
from vllm_adapter.cli.fleet import EngineRow, look
from vllm_adapter.observe import status_folder as folders
from vllm_adapter.observe.status_socket import StatusSocket

RUNNING = {"state": "running", "last_error": ""}


def rank(part: str, moved: int, at_s: float, **changes: Any) -> dict[str, Any]:
    figures = {"transfers_done": moved / 1000, "bytes_moved": moved}
    held = {"reads": 2, "reads_waiting_for_a_peer": 1, "peers": 1, "quarantined_transfers": 1, "quarantined_bytes": 512}
    return {
        "engine_id": "D",
        "part": part,
        "pid": 7,
        "thread": RUNNING,
        "received_s": at_s,
        "figures": figures,
        **held,
        **changes,
    }


def scheduler(**changes: Any) -> dict[str, Any]:
    request = {"request_id": "r1", "state": "queued", "age_s": 4.0, "waits_for": "the engine, to allocate blocks"}
    return {
        "engine_id": "D",
        "part": "scheduler",
        "pid": 6,
        "leases": 3,
        "leased_bytes": 4096,
        "oldest_requests": [request],
        **changes,
    }


def row_of(*answers: dict[str, Any], before: tuple[dict[str, Any], ...] = ()) -> EngineRow:
    (row,) = look(answers, before).rows
    return row


def test_an_engine_is_one_row_with_the_sums_of_its_ranks() -> None:
    row = row_of(scheduler(), rank("0.0", 1000, 1.0), rank("0.1", 3000, 1.0))
    assert (row.ranks, row.state, row.leases, row.leased_bytes) == (2, "running", 3, 4096)
    assert (row.reads, row.reads_waiting_for_a_peer, row.peers) == (4, 2, 1)
    assert (row.quarantined_transfers, row.quarantined_bytes) == (2, 1024)
    assert (row.transfers_done, row.bytes_moved) == (4, 4000)
    assert row.bytes_per_s is None, "there is no moment before"


def test_speeds_are_of_the_time_between_two_looks() -> None:
    before = (rank("0.0", 1000, 1.0), rank("0.1", 3000, 1.0))
    row = row_of(rank("0.0", 2000, 3.0), rank("0.1", 7000, 3.0), before=before)
    assert (row.bytes_per_s, row.transfers_per_s) == (2500.0, 2.5)
    new_process = row_of(rank("0.0", 500, 3.0, pid=8), before=before)
    assert new_process.bytes_per_s is None
    counts_anew = row_of(rank("0.0", 500, 3.0), before=before)
    assert counts_anew.bytes_per_s is None


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"thread": {"state": "dead", "last_error": "x"}}, "dead"),
        ({"is_silent": True}, "stuck"),
        ({"thread": None, "is_asleep": True}, "asleep"),
    ],
)
def test_an_engine_is_in_the_worst_state_of_its_processes(change: dict[str, Any], state: str) -> None:
    found = look([scheduler(), rank("0.0", 0, 1.0), rank("0.1", 0, 1.0, **change)])
    assert found.rows[0].state == state
    assert bool(found.troubles) is (state != "asleep")
    assert row_of(scheduler(is_draining=True), rank("0.0", 0, 1.0)).state == "drains"


def test_the_oldest_waiting_requests_of_all_engines_come_first() -> None:
    young = {"request_id": "r9", "state": "reading", "age_s": 1.0, "waits_for": "the workers"}
    idle = {"request_id": "r8", "state": "done", "age_s": 99.0}
    busy = {"request_id": "r7", "state": "local", "age_s": 98.0, "waits_for": "the engine, to finish it"}
    found = look([scheduler(), scheduler(engine_id="E", oldest_requests=[young, idle, busy])])
    assert [(each.engine_id, each.request_id) for each in found.waiting] == [("D", "r1"), ("E", "r9")]


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An engine whose rank has moved 1 MB more each time that it is asked."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(folders, "_TEMPORARY", tmp_path)
    moved = iter(range(0, 10**12, 10**6))
    sockets = [
        StatusSocket("scheduler", scheduler),
        StatusSocket("0.0", lambda: {k: v for k, v in rank("0.0", next(moved), 0.0).items() if k != "received_s"}),
    ]
    for each in sockets:
        assert each.open()
    yield tmp_path / "vllm-adapter"
    for each in sockets:
        each.close()


def test_once_looks_twice_and_prints_one_table(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--interval", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "1 engines, 3 leases, 2 reads, 0.00" in text
    assert "running" in text
    assert "the engine, to allocate blocks" in text
    assert main(["top", "D", "--once", "--json", "--interval", "0.5"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (row,) = json.loads(line)["engines"]
    assert 5e5 < row["bytes_per_s"] <= 2e6


def test_wrong_words_and_no_engine_say_so(live: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["top", "--interval", "0.1"]) == 2
    assert "must be 0.5 s at least" in capsys.readouterr().err
    assert main(["top", "nobody", "--once"]) == 3
    assert "no such engine lives in" in capsys.readouterr().err
    assert main(["top", "--folder", str(tmp_path / "empty"), "--once"]) == 3


def start(live: Path, *words: str, **more: Any) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "vllm_adapter", "top", "--folder", str(live), "--interval", "0.5", *words]
    return subprocess.Popen(command, **more)


@pytest.mark.parametrize("command", ["top", "status"])
def test_a_table_for_nobody_is_no_failure(live: Path, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "vllm_adapter", command, "--folder", str(live), *(["--once"] * (command == "top"))]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_has_seen_enough_ends_it_quietly(live: Path) -> None:
    with start(live, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert json.loads(command.stdout.readline())["engines"]
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 0


def _as_from_a_terminal() -> None:
    """Heed Ctrl-C, which a shell's background jobs ignore, and their children with them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_a_terminal_shows_the_fleet_until_q_or_ctrl_c_and_is_left_as_it_was(live: Path, end: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 160))
    seen = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                seen.extend(chunk)
        except OSError:
            pass  # the other end is closed

    terminal: dict[str, Any] = {
        "stdin": theirs,
        "stdout": theirs,
        "stderr": theirs,
        "env": {**os.environ, "TERM": "xterm"},
    }
    with start(live, **terminal, preexec_fn=_as_from_a_terminal) as command:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        until_s = time.monotonic() + 30
        while b"running" not in seen and time.monotonic() < until_s:
            time.sleep(0.05)
        if end == "q":
            os.write(ours, b"q")
        else:
            command.send_signal(signal.SIGINT)
        try:
            assert command.wait(20) == 0, bytes(seen)
        finally:
            command.kill()
    assert b"running" in seen, bytes(seen)
    os.close(theirs)
    reader.join(5)
    os.close(ours)
    assert b"\x1b[?1049h" in seen, "the view has a screen of its own"
    assert seen.rindex(b"\x1b[?1049l") > seen.rindex(b"\x1b[?1049h"), "and gives it back"
    assert b"Traceback" not in seen
