"""PromQL expressions of the dashboard and the alert rules: which samples they read, and which samples exist."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import promql_parser
from ruamel.yaml import YAML

from kvdev.paths import ROOT
from vllm_adapter.observe import metric_tables as tables

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DASHBOARD",
    "HOSTS_OWN",
    "INFO_LABELS",
    "RULES",
    "Rule",
    "panel_expressions",
    "panels",
    "rules",
    "names_in",
    "samples",
    "samples_read",
]

DASHBOARD: Final = ROOT / "deploy" / "grafana" / "kv-transfer.json"
RULES: Final = ROOT / "deploy" / "prometheus" / "kv-transfer.rules.yaml"
HOSTS_OWN: Final[Mapping[str, frozenset[str]]] = {
    "vllm:prompt_tokens_by_source_total": frozenset({"source"}),
    "vllm:time_to_first_token_seconds_bucket": frozenset({"le"}),
}
"""Samples of vLLM's own that the dashboard draws beside ours; a test on real engines finds them there."""
_EVERYWHERE: Final = frozenset({"instance", "job", "model_name", "engine"})
_VARIABLES: Final = {"$__rate_interval": "1m", "$__range": "1h", "$model": ".+", "$instance": ".+"}
INFO_LABELS: Final = frozenset({
    "adapter_version", "vllm_version", "kv_role", "memory", "backends", "compatibility_policy", "load_failure_policy",
    "lease_s", "engine_ttl_s", "peer_dialect",
})  # fmt: skip
"""Labels of `vllm:kv_transfer_info`; a test in the host's environment compares them with the connector's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Alert rule: its name, expression, severity and annotations."""

    name: str
    expression: str
    severity: str
    annotations: Mapping[str, str]


def samples() -> dict[str, frozenset[str]]:
    """Return every sample that an engine with the connector can show, with its labels, e.g. `..._bucket` with `le`."""
    found: dict[str, frozenset[str]] = dict(HOSTS_OWN)
    for metric in tables.METRICS:
        labels = frozenset(metric.labels)
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{end}": labels for end in ("sum", "count")}
            found[f"{metric.name}_bucket"] = frozenset({"le"})
        else:
            found[metric.name + ("_total" if metric.kind == "counter" else "")] = labels
    found[tables.INFO.name] = INFO_LABELS
    return {name: labels | _EVERYWHERE for name, labels in found.items()}


def samples_read(expression: str) -> dict[str, frozenset[str]]:
    """Return the samples that an expression reads, each with the labels that it is chosen or grouped by.

    Labels of `by (...)` count for every sample inside: `sum by (code) (a)` reads `a` with `code`.

    Raises:
        ValueError: when it is not PromQL.
    """
    found: dict[str, frozenset[str]] = {}
    _collect(promql_parser.parse(plain(expression)), frozenset(), found)
    return found


def plain(expression: str) -> str:
    """Return an expression of the dashboard as Prometheus takes it: Grafana's variables replaced, all engines chosen."""
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def _collect(node: Any, grouped: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    if isinstance(node, promql_parser.VectorSelector):
        named = {matcher.name for matcher in node.matchers.matchers}
        found[str(node.name)] = found.get(str(node.name), frozenset()) | grouped | named
    elif isinstance(node, promql_parser.MatrixSelector):
        _collect(node.vector_selector, grouped, found)
    elif isinstance(node, promql_parser.AggregateExpr):
        inner = frozenset(node.modifier.labels) if node.modifier else frozenset[str]()
        _collect(node.expr, grouped | inner, found)
    elif isinstance(node, promql_parser.BinaryExpr):
        _collect(node.lhs, grouped, found)
        _collect(node.rhs, grouped, found)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            _collect(argument, grouped, found)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr | promql_parser.SubqueryExpr):
        _collect(node.expr, grouped, found)


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, headings of rows among them."""
    return list(json.loads(DASHBOARD.read_text())["panels"])


def panel_expressions() -> dict[str, str]:
    """Return the dashboard's expressions by `panel: curve`."""
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels()
        for target in panel.get("targets", [])
    }


def rules() -> list[Rule]:
    """Return the alert rules of `deploy/prometheus`."""
    content: Any = YAML(typ="safe").load(RULES)
    listed = [rule for group in content["groups"] for rule in group["rules"]]
    return [Rule(rule["alert"], rule["expr"], rule["labels"]["severity"], rule["annotations"]) for rule in listed]


def names_in(text: str) -> set[str]:
    """Return the words in code quotes of a text, without labels, e.g. `num_failed_reads` of a run book."""
    return {re.split(r"[{ ]", word)[0] for word in re.findall(r"`([^`]+)`", text)}
