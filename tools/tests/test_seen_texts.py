"""The plug-in that compares texts which users see, while tests run, with the page of messages."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvdev.paths import ROOT
from kvdev.site.messages import messages_page
from kvdev.site.seen_texts import Templates

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """
| level | code | text | next step |
|---|---|---|---|
| error | `gone` | peer {peer} is gone after {age_s} s | look |
| warning |  | request %s: \\| stands for &lt;or> | look |

| text |
|---|
| not read: {reason} |
"""

SUITE = """
from kv_handshake import HandshakeError

SOURCE = '''
import logging
from kv_handshake import HandshakeError

def tell(text):
    logging.getLogger("kv_handshake").warning(text)
    print(f"kv-handshake: {text}")
    HandshakeError("timed-out", text)
'''
INNER = {}
exec(compile(SOURCE, "/site/kv_handshake/_new.py", "exec"), INNER)

def test_anything(capsys):
    INNER["tell"](TEXT)
    assert TEXT in capsys.readouterr().out
    HandshakeError("timed-out", "a text that only a test makes")
"""


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        ("peer 10.0.0.1 is gone after 3.5 s", True),
        ("kv-handshake: peer 10.0.0.1 is gone after 3.5 s", True),
        ("peer a is gone after 1 s; peer b is gone after 2 s", True),
        ("request r1: | stands for <or>; 290 more like this were not logged", True),
        ("not read: nobody was there", True),
        ("base_addr not read: it is too long", True),
        ("peer 10.0.0.1 is back after 3.5 s", False),
        ("peer 10.0.0.1 is gone", False),
        ("a peer is gone after 3.5 s", False),
        ("a text that nobody listed: peer a is gone after 1 s", False),
    ],
)
def test_a_text_is_known_by_its_template(text: str, is_known: bool) -> None:
    assert Templates(PAGE).know(text) is is_known


@pytest.mark.parametrize(
    ("text", "is_known"), [("the client goes on after all", True), ("a text that nobody listed", False)]
)
def test_a_run_fails_if_a_user_would_see_a_text_that_is_not_on_the_page(
    tmp_path: Path, text: str, is_known: bool
) -> None:
    (tmp_path / "test_it.py").write_text(f"TEXT = {text!r}\n{SUITE}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kvdev.site.seen_texts", "-c", "/dev/null", "test_it.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "PYTEST_PLUGINS": ""}
    ended = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert "1 passed" in ended.stdout, ended.stdout
    assert "2 texts that users saw were compared" in ended.stdout
    assert ended.returncode == (0 if is_known else 1), ended.stdout
    assert ("2 texts that users saw are not in docs/messages.md" in ended.stdout) is not is_known


def test_the_page_of_messages_knows_its_own_examples() -> None:
    known = Templates(messages_page()).know
    assert known("the transfer thread of engine P has died; restart this engine")
    assert known("kv-handshake: no reply for rank (0, 1) from 10.0.0.1 port 5600 (after 5.0 s, attempt 3)")
    assert not known("the transfer thread of engine P has gone home")
