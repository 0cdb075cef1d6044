"""Commands in the pages for newcomers are good: configurations are accepted, verbs and options exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from kvdev.arguments import make_parser
from kvdev.paths import ROOT

PAGES = [
    "README.md", "CONTRIBUTING.md", "docs/README.md", "docs/start.md", "docs/troubleshoot.md", "docs/support.md",
    "docs/operate/migrate.md",
]  # fmt: skip
COMMAND = re.compile(
    r"(?:^ *|`)((?:python3 tools/dev\.py|vllm-adapter|kv-nixl|kv-handshake|kv-topology) [^`\n]+)", re.MULTILINE
)
COMMANDS = sorted({(page, line.strip()) for page in PAGES for line in COMMAND.findall((ROOT / page).read_text())})
MODULES = {
    "vllm-adapter": "vllm_adapter",
    "kv-nixl": "kv_nixl_agent",
    "kv-handshake": "kv_handshake",
    "kv-topology": "kv_topology",
}


def call(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", MODULES[program], *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_there_are_commands_in_each_of_these_pages() -> None:
    assert {page for page, _ in COMMANDS} == set(PAGES)


def test_the_tests_that_the_readme_calls_as_witnesses_exist() -> None:
    named = set(re.findall(r"`(test_\w+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    files = [*ROOT.glob("packages/*/tests/*.py"), *ROOT.glob("integration_tests/**/*.py")]
    there = set(re.findall(r"def (test_\w+)\(", "\n".join(file.read_text() for file in files)))
    assert len(named) == 8
    assert named - there == set()


@pytest.mark.parametrize(("page", "line"), [each for each in COMMANDS if "tools/dev.py" in each[1]])
def test_a_verb_exists(page: str, line: str) -> None:
    words = shlex.split(line)[2:]
    assert make_parser().parse_args([word for word in words if word != "..."]).verb == words[0]


@pytest.mark.parametrize(("page", "line"), [each for each in COMMANDS if "tools/dev.py" not in each[1]])
def test_a_command_takes_these_words(page: str, line: str) -> None:
    program, *words = shlex.split(line)
    if words[:2] == ["config", "--check"]:
        given = words[2]
        good = '{"kv_connector": "KVTransferConnector", "kv_role": "kv_both"}'
        done = call(program, *words[:2], good if given == "CONFIG" else given)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        return
    usage = call(program, words[0], "--help").stdout
    options = [word for word in words if word.startswith("--")]
    assert usage.startswith(f"Usage: {program}")
    assert [word for word in options if word not in usage] == []
