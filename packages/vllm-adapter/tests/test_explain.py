"""`vllm-adapter explain`: every code of the five packages has an entry, and every entry is a code that its packages use."""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from kv_nixl_agent.transfers.transfer import TABLE
from kv_scheduler_state import tables
from vllm_adapter.cli import main
from vllm_adapter.cli.explain import load_codes

PACKAGES = ("kv_handshake", "kv_topology", "kv_nixl_agent", "kv_scheduler_state", "vllm_adapter")
NO_CODES = {  # causes of log lines, kinds, outcomes, capabilities, layouts, names of threads and documents
    *re.findall(
        r"\S+",
        """accept-unsigned already-in-use bad-count bad-id bad-nonce bad-reader computed-here cross-heads doctor-peer doctor-probe
        doctor-producer nvidia-smi precise-sleeps quiet-nixl rcache-bound sleeping-progress switch-interval unknown-build
        worker-turns zeroed-requests engine-a engine-dropped
        engine-let-go engine-ready external-tokens fence-rejected gated-delta given-up hash-explained hash-unexplained
        heads-outer in-progress keys-by-channel keys-changed lease-ended lease-revoked long-heartbeat message-too-long
        messages-too-long mirror-copy must-match no-count no-go not-loaded not-notified not-utf8 pairs-in-tiles prompt-digest
        push-reader push-registration read-complete read-whole refused-order second-attempt sliding-window sticky-error
        stream-answer stream-answered stream-ask stream-fence stream-question stream-reader stream-torn stream-twice
        tail-not-shortened thread-errors thread-stuck too-many-connections too-many-consumers utf-8 vllm-adapter vllm-cpu
        words-late""",
    )
}
_TABLES = [*(table.rows for name, table in vars(tables).items() if name.endswith("_TABLE")), TABLE]
STEPS = {word for rows in _TABLES for row in rows for word in (row.state, row.event, row.target, *row.effects)}


def words_of(package: str) -> set[str]:
    """Return the texts of a package's source that may be codes, docstrings left out."""
    folder = Path(import_module(package).__file__ or "").parent
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
        found |= {node.value for node in constants if isinstance(node.value, str)}
    return found


def test_every_code_has_an_entry_and_every_entry_is_a_code() -> None:
    words = {package.replace("_", "-"): words_of(package) for package in PACKAGES}
    entries = load_codes()
    known = {each.code for each in entries}
    given = {word for found in words.values() for word in found if re.fullmatch(r"[a-z]+[a-z0-9]*(-[a-z0-9]+)+", word)}
    assert {word for word in given - known - NO_CODES - STEPS if not word.startswith("kv-")} == set()
    assert {"hash-mismatch", "fence-mismatch", "ticket-seal", "no-room", "lease-quota", "tcp-only"} <= given
    used = [(each.code, package) for each in entries for package in each.package.split(", ")]
    assert [(code, package) for code, package in used if code not in words[package]] == []
    assert len(set(used)) == len(used)
    assert [each for each in entries if not all(each) or not each.next.strip()] == []


def test_a_code_is_explained_as_it_stands_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "(hash-mismatch)"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("hash-mismatch (kv-handshake)\n  meaning      The compatibility hashes differ.\n")
    assert "vllm-adapter check PREFILL DECODE" in " ".join(said.split())
    for pasted in ("(hash-mismatch),", "`hash-mismatch`.", "[HASH-MISMATCH]:", ' "hash-mismatch"'):
        assert main(["explain", pasted]) == 0
        assert capsys.readouterr().out == said
    assert main(["explain", "wrong-type", "--json"]) == 0
    packages = [entry["package"] for entry in json.loads(capsys.readouterr().out)]
    assert packages == ["kv-handshake", "kv-nixl-agent", "kv-topology", "vllm-adapter"]
    assert main(["explain"]) == 0
    listed = re.findall(r"^([a-z]\S*) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == [each.code for each in load_codes()]


def test_an_unknown_code_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for word, hint in (("fence-mismach", "'fence-mismatch' or "), ("qqq", "list them with `vllm-adapter explain`")):
        assert main(["explain", word]) == 2
        said = capsys.readouterr().err
        assert hint in said
        assert said.endswith("(unknown-code)\n")
