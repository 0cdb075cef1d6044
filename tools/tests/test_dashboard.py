"""The dashboard and the alert rules: readable for Prometheus, and about samples and run books that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from debian import find_debian_program
from ruamel.yaml import YAML

from kvdev.dashboards import RULES, panel_expressions, samples_read
from kvdev.paths import ROOT
from vllm_adapter.observe import metric_tables as tables

CASES: dict[str, Any] = YAML(typ="safe").load(RULES.with_name("kv-transfer.cases.yaml"))
EVERY_RULE = [rule for group in YAML(typ="safe").load(RULES)["spec"]["groups"] for rule in group["rules"]]
ALERTS: dict[str, Any] = {rule["alert"]: rule for rule in EVERY_RULE if "alert" in rule}
RECORDED: dict[str, str] = {rule["record"]: rule["expr"] for rule in EVERY_RULE if "record" in rule}
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
OURS = {metric.name: [metric.name + end for end in ENDINGS[metric.kind]] for metric in tables.METRICS}
OURS[tables.INFO.name] = [tables.INFO.name]
HOSTS_OWN = {
    "vllm:prompt_tokens_by_source_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
}
"""Samples of vLLM's own that rules and the dashboard read beside ours; a test on real engines finds them there."""


def whole(expression: str) -> str:
    """Return an expression with those of the recorded series that it reads behind it."""
    return "\n".join([expression, *(text for name, text in RECORDED.items() if name in expression)])


def test_every_expression_reads_samples_that_exist_and_every_metric_is_drawn() -> None:
    known = HOSTS_OWN.union(*OURS.values())
    for name, text in {
        **panel_expressions(),
        **RECORDED,
        **{name: rule["expr"] for name, rule in ALERTS.items()},
    }.items():
        assert samples_read(whole(text)), name
        assert set(re.findall(r"kv_transfer:\w+(?::\w+)?", text)) <= set(RECORDED), name
        assert samples_read(text) - known == set(), name
    drawn = set[str]().union(*map(samples_read, panel_expressions().values()))
    assert [name for name, samples in OURS.items() if not drawn & set(samples)] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_a_rules_run_book_speaks_of_what_the_rule_watches(alert: str) -> None:
    notes = ALERTS[alert]["annotations"]
    page, _, heading = notes["runbook"].partition("#")
    assert notes["runbook_url"].endswith(f"}}}}/{Path(page).stem}/#{heading}")
    assert ("code_url" in notes) == ("$labels.code" in notes["summary"])
    sections = {
        re.sub(r"[^a-z0-9 -]", "", part.partition("\n")[0].lower()).replace(" ", "-"): part
        for part in (ROOT / page).read_text().split("\n## ")
    }
    read = {name.removeprefix("vllm:kv_transfer_") for name in samples_read(whole(ALERTS[alert]["expr"]))}
    watched = {re.sub(r"_(total|bucket|count)$", "", name) for name in read}
    assert watched & set(re.findall(r"`([^`{ ]+)", sections[heading])), f"{notes['runbook']} names none of {watched}"


def test_each_rule_has_a_case_that_fires_and_one_that_is_quiet_and_is_on_the_page() -> None:
    found = set[str]()
    for case in CASES["tests"]:
        words = case["name"].partition(":")[0]
        (firing,) = case["promql_expr_test"]
        labels = [sample["labels"] for sample in firing["exp_samples"]]
        assert firing["expr"] == 'ALERTS{alertstate="firing"}'
        assert [f'alertname="{words.removesuffix(" fires")}"' in each for each in labels] == [True] * words.endswith(
            "fires"
        )
        found.add(words)
    assert found == {f"{name} {word}" for name in ALERTS for word in ("fires", "is quiet")}
    page = (ROOT / "docs/operate/dashboards.md").read_text()
    named = re.findall(r"^\| `(KvTransfer\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert dict(named) == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}


def as_grafana(expression: str) -> str:
    for variable, value in {"$__rate_interval": "1m", "$__range": "1h", "$model": ".+", "$instance": ".+"}.items():
        expression = expression.replace(variable, value)
    return expression


def test_prometheus_reads_rules_and_panels_and_each_rule_fires_when_it_must(tmp_path: Path) -> None:
    promtool = find_debian_program("promtool", "prometheus")
    texts = [as_grafana(text) for text in panel_expressions().values()]
    recorded = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    # In the first row, a dashboard without engines is not green, and a counter that begins at 50 is not 0.
    first_row = [text for text in texts if "vector(" in text]
    assert first_row[0].startswith("(sum((vllm:kv_transfer_num_failed_reads_total")
    blind = [{"expr": text, "eval_time": "30m", "exp_samples": [{"value": -1}]} for text in first_row]
    fifty = [{"expr": first_row[0], "eval_time": "13m", "exp_samples": [{"value": 50}]}]
    born = CASES["tests"][0]["input_series"]
    more = [
        {"input_series": [], "promql_expr_test": blind},
        {"interval": "1m", "input_series": born, "promql_expr_test": fifty},
    ]
    panels = {"groups": [{"name": "panels", "rules": recorded}]}
    files = {"panels": panels, "cases": {**CASES, "tests": [*CASES["tests"], *more]}}
    # Without the operator, one line of the page makes a rule file.
    (line,) = re.findall(r"^(sed .*rules.yaml) > ", (ROOT / "docs/operate/dashboards.md").read_text(), re.MULTILINE)
    subprocess.run(["sh", "-c", f"{line} > {tmp_path}/rules.yaml"], cwd=ROOT, check=True)
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))
    for words in (["test", "rules", "cases.yaml"], ["check", "rules", "--lint=none", "panels.yaml"]):
        done = subprocess.run([promtool, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
