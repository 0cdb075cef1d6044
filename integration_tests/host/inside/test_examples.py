"""The example engine on PyTorch hands over for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "torch_engine.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def shown() -> list[str]:
    page = (EXAMPLES / "README.md").read_text()
    return page.split("$ python docs/examples/torch_engine.py\n")[1].split("\n```")[0].splitlines()


@pytest.mark.full
def test_decode_goes_on_from_pages_of_another_process_and_notices_a_spoilt_one() -> None:
    """Two prompts are as the page shows them; the third one's first page is spoilt, and its continuation is another."""
    done = run("--spoil")
    said = [line for line in done.stdout.splitlines() if "NIXL" not in line]
    assert done.returncode == 1, done.stderr
    assert said[:4] == shown()[:4]
    assert (said[4] == shown()[4], said[5] == shown()[5]) == (False, True)
    assert said[6] == "ANOTHER continuation and every page of prefill is free again"
