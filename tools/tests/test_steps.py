"""Steps, engines and bad input: one clear message, a log on disk, nothing left running."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvdev.cli import make_parser
from kvdev.engines import Engine, EngineSpec, start_all
from kvdev.paths import ROOT, STATE
from kvdev.steps import DevError, run_step
from kvdev.uvtool import find_or_install_uv

DEV = ROOT / "tools" / "dev.py"


def message_of(*command: str, timeout_s: float = 60) -> str:
    with pytest.raises(DevError) as caught:
        run_step("tests: a step", command, timeout_s=timeout_s)
    return str(caught.value)


def test_a_failed_step_names_itself_its_command_its_crash_and_the_end_of_its_log() -> None:
    crash = "import faulthandler, os; faulthandler.enable(); print('UCX: Assertion `x` failed', flush=True)"
    message = message_of(sys.executable, "-c", crash + "; print(*range(2000), sep=chr(10), flush=True); os.abort()")
    for words in ("'tests: a step'", "exit code -6: SIGABRT", "-c", "log:"):
        assert words in message
    # A dump of all threads may push the crash out of the last lines.
    assert re.search("where it crashed:.*UCX: Assertion.*its last lines", message, re.DOTALL)
    assert (STATE / "logs" / "tests--a-step.log").exists()
    assert "could not start" in message_of("/no/such/program")


def test_without_a_network_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    words = ["pip", "install", "--no-config", "--no-cache", "--dry-run", "no-such-package", "--python"]
    message = message_of(str(find_or_install_uv()), *words, sys.executable)
    assert "No package index could be reached" in message


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time\nwhile True:\n    open({str(mark)!r}, 'w').close(); time.sleep(0.05)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    assert "did not end within" in message_of(sys.executable, "-c", parent, timeout_s=2)
    mark.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not mark.exists()


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


def test_every_process_of_an_engine_sleeps_where_vllm_would_yield_in_a_loop() -> None:
    engine = Engine.__new__(Engine)
    engine.spec = EngineSpec("none", Path("model"), "0", environment={"PYTHONPATH": "of the test"})
    engine.side_channel_port, engine._sockets = 1, "sockets"
    environment = engine._environment()
    assert environment["PYTHONPATH"].endswith(":of the test")
    timed = "import os, time; t = time.perf_counter; a = t(); [os.sched_yield() for _ in range(50)]; print(t() - a)"
    done = subprocess.run([sys.executable, "-c", timed], env=environment, capture_output=True, check=True, timeout=60)
    assert float(done.stdout) > 50 * 0.0001


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fly"], 2, "invalid choice: 'fly'"),
        (["demo", "--family", "dens"], 2, "invalid choice: 'dens' (choose from"),
        (["bench"], 2, "required: name"),
        ([], 2, "required: VERB"),
        (["test", "kv-topolgy"], 1, "the scopes are"),
        (["bench", "warp"], 1, "there are"),
        (["bench", "handshake", "--gates"], 1, "takes no --gates"),
        *(
            ([verb, "--help"], 0, f"usage: dev.py {verb}")
            for verb in ("demo", "test", "check", "bench", "release", "affected", "lock", "env", "router")
        ),
    ],
)
def test_bad_usage_says_why_and_every_verb_has_help(arguments: list[str], code: int, words: str) -> None:
    finished = subprocess.run([sys.executable, DEV, *arguments], capture_output=True, text=True, check=False)
    assert finished.returncode == code
    assert words in finished.stdout + finished.stderr


@pytest.mark.parametrize("version", ["(3, 8, 1)", "(3, 10, 0)", "(3, 14, 0)"])
def test_an_unsupported_python_is_told_which_to_use(version: str) -> None:
    code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({str(DEV)!r}, run_name='__main__')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert "start it with Python 3.11, 3.12 or 3.13" in finished.stderr


def test_contributing_lists_every_verb() -> None:
    verbs = next(action for action in make_parser()._actions if action.choices).choices or ()
    listed = set(re.findall(r"dev\.py (\w+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert set(verbs) <= listed
