"""The dashboard and the alert rules: readable for Prometheus, and about samples and run books that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kvdev.expressions import RULES, Rule, names_in, panel_expressions, plain, rules, samples, samples_read
from kvdev.paths import ROOT
from kvdev.prometheus import find_promtool
from vllm_adapter.observe import metric_tables as tables

CASES = RULES.with_name("kv-transfer.tests.yaml")
EXPRESSIONS = {**panel_expressions(), **{rule.name: rule.expression for rule in rules()}}
KNOWN = samples()


@pytest.fixture(scope="module")
def tool() -> Path:
    found = find_promtool()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def wrong_in(expression: str) -> list[str]:
    """Return what an expression reads that no engine shows."""
    read = samples_read(expression)
    unknown = [name for name in read if name not in KNOWN]
    labels = [f"{name}{{{label}}}" for name in read.keys() & KNOWN for label in read[name] - KNOWN[name]]
    return sorted([*unknown, *labels])


def section(anchor: str) -> str:
    """Return the section of a page, e.g. `docs/troubleshoot.md#it-is-slow`; a section that is not there fails."""
    page, _, wanted = anchor.partition("#")
    for part in (ROOT / page).read_text().split("\n## ")[1:]:
        heading = part.partition("\n")[0]
        if re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") == wanted:
            return part
    raise AssertionError(f"no section {anchor}")


def promtool(tool: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_reads_samples_and_labels_that_exist(name: str) -> None:
    read = samples_read(EXPRESSIONS[name])
    assert read, "it reads nothing"
    assert wrong_in(EXPRESSIONS[name]) == []


def test_every_metric_of_the_connector_is_drawn() -> None:
    ours = {tables.INFO.name, *(metric.name for metric in tables.METRICS)}
    read = {name for text in panel_expressions().values() for name in samples_read(text)}
    drawn = {name for name in ours if read & {name, *(f"{name}_{end}" for end in ("total", "bucket", "count"))}}
    assert ours - drawn == set()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_a_rules_run_book_speaks_of_what_the_rule_watches(rule: Rule) -> None:
    anchor = rule.annotations["runbook"]
    page, _, heading = anchor.partition("#")
    assert rule.annotations["runbook_url"].endswith(f"}}}}/{Path(page).stem}/#{heading}")
    metrics = {name.removeprefix("vllm:kv_transfer_") for name in samples_read(rule.expression)}
    watched = {re.sub(r"_(total|bucket|count)$", "", name) for name in metrics}
    assert watched & names_in(section(anchor)), f"{anchor} names none of {watched}"


def test_each_rule_has_a_case_that_fires_and_one_that_is_quiet() -> None:
    names = [str(case["name"]).partition(":")[0] for case in YAML(typ="safe").load(CASES)["tests"]]
    expected = [f"{rule.name} {word}" for rule in rules() for word in ("fires", "is quiet")]
    assert sorted(names[:-1]) == sorted(expected)


def test_the_page_names_each_rule_with_its_severity() -> None:
    page = (ROOT / "docs/operate/dashboards.md").read_text()
    named = re.findall(r"^\| `(KvTransfer\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert sorted(named) == sorted((rule.name, rule.severity) for rule in rules())


def test_prometheus_reads_the_rules_and_each_fires_when_it_must(tool: Path) -> None:
    done = promtool(tool, "test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_expressions_of_the_dashboard(tool: Path, tmp_path: Path) -> None:
    texts = panel_expressions().values()
    recorded = [{"record": f"panel:{number}", "expr": plain(text)} for number, text in enumerate(texts)]
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    done = promtool(tool, "check", "rules", "--lint=none", tmp_path / "panels.yaml")
    assert (done.returncode, f"{len(recorded)} rules found" in done.stdout) == (0, True), done.stdout + done.stderr
