"""The README is true: its example runs, its table of codes is the table, its names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kv_nixl_agent
from kv_nixl_agent.errors import ERROR_CODES
from kv_nixl_agent.transfers.transfer import TABLE

README = Path(__file__).parents[1] / "README.md"
TRANSFERS = README.parents[2] / "docs" / "transfers.md"
WORDS = {True: "yes", False: "no", None: "depends"}


@pytest.mark.timeout(60)
def test_first_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    # UCX may still connect a second time when the other process has ended already.
    output = re.sub(r"^\[.*UCX  ERROR (connect|try to increase).*\n", "", done.stdout, flags=re.MULTILINE)
    assert (done.returncode, output) == (0, ""), done.stderr
    assert not re.search(r"NIXL|^[IWE]\d{4} ", done.stderr, re.MULTILINE), done.stderr


def test_every_code_is_in_the_table():
    rows = [
        f"| `{code}` | {facts.fault} | {WORDS[facts.is_retry_safe]} | {facts.meaning} |"
        for code, facts in ERROR_CODES.items()
    ]
    listed = [
        line
        for line in README.read_text().splitlines()
        if re.match(r"\| `[a-z0-9-]+` \| (local|peer|environment)", line)
    ]
    assert listed == rows


def test_everything_exported_is_documented():
    for name in (*kv_nixl_agent.__all__, "open_nixl"):
        assert f"`{name}`" in README.read_text()


def diagram():
    yield "```mermaid"
    yield "stateDiagram-v2"
    edges = {}
    for row in TABLE:
        edges.setdefault((row.state, row.target), []).append(row.event)
    for (state, target), events in edges.items():
        yield f"    {node(state)} --> {node(target)}: {', '.join(events)}"
    yield "```"
    yield ""
    yield "| state | event | next state | effects | why |"
    yield "|---|---|---|---|---|"
    for row in TABLE:
        yield f"| {row.state} | {row.event} | {row.target} | {', '.join(row.effects)} | {row.why} |"


def node(state):
    return "[*]" if state in {"new", "gone"} else state.replace("-", "_")


@pytest.mark.skipif(not TRANSFERS.is_file(), reason="the package is tested outside its repository")
def test_the_diagram_is_that_of_the_table():
    text = TRANSFERS.read_text()
    generated = text.split("a test compares them -->\n\n")[1].split("\n\n<!-- end of generated part -->")[0]
    assert generated == "\n".join(diagram())
