"""The dashboard and the alert rules: readable for Prometheus, and about samples and run books that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kvdev.dashboards import RULES, find_promtool, panel_expressions, samples_read
from kvdev.paths import ROOT
from vllm_adapter.observe import metric_tables as tables

CASES = RULES.with_name("kv-transfer.tests.yaml")
GROUPS: list[Any] = YAML(typ="safe").load(RULES)["groups"]
ALERTS: dict[str, Any] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
OURS = {metric.name: [metric.name + end for end in ENDINGS[metric.kind]] for metric in tables.METRICS}
OURS[tables.INFO.name] = [tables.INFO.name]
HOSTS_OWN = {"vllm:prompt_tokens_by_source_total", "vllm:time_to_first_token_seconds_bucket"}
"""Samples of vLLM's own that the dashboard draws beside ours; a test on real engines finds them there."""


def test_every_expression_reads_samples_that_exist_and_every_metric_is_drawn() -> None:
    known = HOSTS_OWN.union(*OURS.values())
    for name, text in {**panel_expressions(), **{name: rule["expr"] for name, rule in ALERTS.items()}}.items():
        assert samples_read(text), name
        assert samples_read(text) - known == set(), name
    drawn = set[str]().union(*map(samples_read, panel_expressions().values()))
    assert [name for name, samples in OURS.items() if not drawn & set(samples)] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_a_rules_run_book_speaks_of_what_the_rule_watches(alert: str) -> None:
    notes = ALERTS[alert]["annotations"]
    page, _, heading = notes["runbook"].partition("#")
    assert notes["runbook_url"].endswith(f"}}}}/{Path(page).stem}/#{heading}")
    sections = {
        re.sub(r"[^a-z0-9 -]", "", part.partition("\n")[0].lower()).replace(" ", "-"): part
        for part in (ROOT / page).read_text().split("\n## ")
    }
    read = {name.removeprefix("vllm:kv_transfer_") for name in samples_read(ALERTS[alert]["expr"])}
    watched = {re.sub(r"_(total|bucket|count)$", "", name) for name in read}
    assert watched & set(re.findall(r"`([^`{ ]+)", sections[heading])), f"{notes['runbook']} names none of {watched}"


def test_each_rule_has_a_case_that_fires_and_one_that_is_quiet_and_is_on_the_page() -> None:
    names = [str(case["name"]).partition(":")[0] for case in YAML(typ="safe").load(CASES)["tests"]]
    assert sorted(names[:-1]) == sorted(f"{name} {word}" for name in ALERTS for word in ("fires", "is quiet"))
    page = (ROOT / "docs/operate/dashboards.md").read_text()
    named = re.findall(r"^\| `(KvTransfer\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert dict(named) == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}


def test_prometheus_reads_rules_and_panels_and_each_rule_fires_when_it_must(tmp_path: Path) -> None:
    promtool = find_promtool()
    if isinstance(promtool, str):
        pytest.skip(promtool)
    recorded = []
    for number, text in enumerate(panel_expressions().values()):
        for variable, value in {"$__rate_interval": "1m", "$__range": "1h", "$model": ".+", "$instance": ".+"}.items():
            text = text.replace(variable, value)  # noqa: PLW2901 - as Grafana does
        recorded.append({"record": f"panel:{number}", "expr": text})
    panels = tmp_path / "panels.yaml"
    panels.write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    for words in (["test", "rules", CASES], ["check", "rules", "--lint=none", panels]):
        done = subprocess.run([promtool, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
