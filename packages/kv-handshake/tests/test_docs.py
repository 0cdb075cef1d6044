"""Documents say what the code does: generated pages, the README's example, the embedding example, the tables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kv_handshake._dialect import dialect_of
from kv_handshake._errors import CODES
from kv_handshake._factors import FACTOR_GROUPS
from kv_handshake._messages import METADATA_FIELDS
from kv_handshake._states import state_diagram

PACKAGE = Path(__file__).parent.parent
WIRE = PACKAGE.parent.parent / "docs" / "wire"
needs_docs = pytest.mark.skipif(not WIRE.exists(), reason="the documents are not beside the package")


def states_page():
    return f"# The client's states\n\nGenerated from `kv_handshake._states.state_diagram`.\n\n```mermaid\n{state_diagram()}```\n"


@needs_docs
def test_states_page_is_generated():
    assert (WIRE / "states.md").read_text() == states_page()


def test_readme_lists_every_code():
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (\w+) \| ([\w ]+) \| (.+) \|$", (PACKAGE / "README.md").read_text(), re.MULTILINE
    )
    retry = {True: "yes", False: "no", None: "unknown"}
    assert rows == [(code, each.fault, retry[each.is_retry_safe], each.meaning) for code, each in CODES.items()]


def test_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "engine-a 1024\n"


def test_embedded_engine_runs():
    done = subprocess.run(
        [sys.executable, str(PACKAGE / "examples" / "embedded_engine.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.endswith("True") for line in lines[:4]] == [True, False, True, True]
    assert 'factors-differ: dtype: local "float32", peer "float16"' in lines[4]


@needs_docs
def test_protocol_page_gives_each_field_its_first_dialect():
    page = (WIRE / "protocol.md").read_text().split("## Agent metadata")[1].split("## Clock")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| (\w+) \|", page, re.MULTILINE)
    documented = {name: first for names, first in rows for name in re.findall(r"`(\w+)`", names)}
    first = {each.key: str(max(2, each.wire.since)) if each.wire.since else "ours" for each in METADATA_FIELDS}
    assert documented == first


@needs_docs
def test_wire_pages_name_every_field_and_factor():
    protocol, compatibility = (WIRE / "protocol.md").read_text(), (WIRE / "compatibility.md").read_text()
    for name in dialect_of(15).metadata_fields:
        assert f"`{name}`" in protocol
    for name in (*dialect_of(15).hash_factors, *dialect_of(2).hash_factors):
        assert f"`{name}`" in compatibility
        assert name in FACTOR_GROUPS


@needs_docs
def test_compatibility_page_lists_the_factors_of_the_id():
    section = (WIRE / "compatibility.md").read_text().split("## Compatibility id")[1]
    listed = re.findall(r"`(\w+)`", section.split("Two engines share")[0].split("`model` is left out")[0])
    assert listed == [name for name, group in FACTOR_GROUPS.items() if group == "must-match"]
