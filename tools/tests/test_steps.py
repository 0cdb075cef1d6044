"""Steps and bad input: one clear message, a log on disk, nothing left running."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvdev.engines import EngineSpec, start_all
from kvdev.paths import ROOT, STATE
from kvdev.steps import DevError, run_step
from kvdev.uvtool import find_or_install_uv

DEV = ROOT / "tools" / "dev.py"


def test_a_failed_step_names_itself_its_command_and_the_end_of_its_log() -> None:
    with pytest.raises(DevError) as caught:
        run_step("tests: failing step", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
    message = str(caught.value)
    for words in ("'tests: failing step'", "exit code 3", "-c", "the reason", "log:"):
        assert words in message
    assert (STATE / "logs" / "tests--failing-step.log").exists()


def test_a_crash_is_shown_though_a_long_dump_follows_it() -> None:
    crash = "import faulthandler, os; faulthandler.enable(); print('UCX: Assertion `x` failed', flush=True)"
    dump = "; print(*range(2000), sep=chr(10), flush=True); os.abort()"
    with pytest.raises(DevError) as caught:
        run_step("tests: crashing step", [sys.executable, "-c", crash + dump])
    message = str(caught.value)
    assert "exit code -6: SIGABRT" in message
    assert "where it crashed:" in message
    assert "UCX: Assertion" in message.split("its last lines", maxsplit=1)[0].split("where it crashed")[1]


def test_without_a_network_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    uv = find_or_install_uv()
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    words: list[str | Path] = [
        uv,
        "pip",
        "install",
        "--no-config",
        "--no-cache",
        "--dry-run",
        "--python",
        sys.executable,
        "no-such-package",
    ]
    with pytest.raises(DevError, match="No package index could be reached"):
        run_step("tests: no network", words)


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time\nwhile True:\n    open({str(mark)!r}, 'w').close(); time.sleep(0.05)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with pytest.raises(DevError, match="did not end within"):
        run_step("tests: slow step", [sys.executable, "-c", parent], timeout_s=2)
    mark.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not mark.exists()


def test_a_command_that_is_not_there_is_a_clear_message() -> None:
    with pytest.raises(DevError, match="could not start"):
        run_step("tests: no command", ["/no/such/program"])


def test_an_engine_that_dies_while_starting_is_reported_with_the_cause_and_the_end_of_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho '(Core) ERROR OSError: port in use'\nseq 200\necho 'no such model'\nexit 7\n")
    broken.chmod(0o755)
    with pytest.raises(DevError) as caught, start_all([EngineSpec("tests-broken", tmp_path, "0")], broken, quiet=True):
        pytest.fail("it cannot be healthy")
    assert "'tests-broken' ended while starting" in str(caught.value)
    end, _, errors = str(caught.value).partition("the first errors that it names:")
    assert "OSError: port in use" in errors
    assert "no such model" in end


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["fly"], "invalid choice: 'fly'"), (["bench"], "required: name"), ([], "required: VERB")],
)
def test_bad_usage_exits_with_2_and_says_why(arguments: list[str], words: str) -> None:
    finished = subprocess.run([sys.executable, DEV, *arguments], capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert words in finished.stderr


@pytest.mark.parametrize("verb", ["demo", "test", "check", "bench", "release", "affected", "lock", "env", "router"])
def test_every_verb_has_help(verb: str) -> None:
    finished = subprocess.run([sys.executable, DEV, verb, "--help"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0
    assert "usage: dev.py " + verb in finished.stdout


@pytest.mark.parametrize("version", ["(3, 8, 1)", "(3, 10, 0)", "(3, 14, 0)"])
def test_an_unsupported_python_is_told_which_to_use(version: str) -> None:
    code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({str(DEV)!r}, run_name='__main__')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert "start it with Python 3.11, 3.12 or 3.13" in finished.stderr


def test_unknown_scopes_and_benchmarks_name_the_right_ones() -> None:
    for arguments, words in ((["test", "kv-topolgy"], "the scopes are"), (["bench", "warp"], "there are")):
        finished = subprocess.run([sys.executable, DEV, *arguments], capture_output=True, text=True, check=False)
        assert finished.returncode == 1
        assert words in finished.stderr
