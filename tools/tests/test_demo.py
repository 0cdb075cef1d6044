"""The demo without engines: families at once, answers through the client, and with `--long` on engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvdev import demo
from kvdev.cli import FAMILIES
from kvdev.paths import ROOT
from kvdev.steps import DevError

IS_LONG = os.environ.get("KVDEV_LONG") == "1"


def dev(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/dev.py"), "demo", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_families_are_listed_at_once() -> None:
    done = dev("--list-families")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(FAMILIES)


def test_an_engine_that_does_not_answer_ends_the_demo() -> None:
    with pytest.raises(DevError, match="did not answer"):
        demo.answers_of("", "http://127.0.0.1:1", ["a prompt"])


@pytest.mark.skipif(not IS_LONG, reason="starts six vLLM engines (two minutes); `test --long tools` runs it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [[], ["--corrupt"]])
def test_the_demo_shows_equal_texts_and_with_a_changed_byte_different_ones(words: list[str]) -> None:
    done = dev("--json", *words, timeout_s=400)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["identical"], report["failed_transfers"]) == (not words, 0)
    assert report["kv_bytes"] == report["kv_bytes_expected"] > 0
    if not words:
        assert report["recomputed_prompt_tokens"] == 0
        last = f"{report['transfers']} transfers, {report['kv_bytes']:,} bytes of KV"
        assert last in (ROOT / "README.md").read_text()
