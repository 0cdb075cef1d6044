"""Expressions of the dashboard, and where the alert rules are."""

from __future__ import annotations

import json
import re
from typing import Final

from kvdev.paths import ROOT

RULES: Final = ROOT / "deploy" / "prometheus" / "kv-transfer.rules.yaml"


def samples_read(expression: str) -> set[str]:
    """Return the names of the samples that an expression reads."""
    return set(re.findall(r"vllm:\w+", expression))


def panel_expressions() -> dict[str, str]:
    """Return the dashboard's expressions by `panel: curve`."""
    panels = json.loads((ROOT / "deploy" / "grafana" / "kv-transfer.json").read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", [])
    }
