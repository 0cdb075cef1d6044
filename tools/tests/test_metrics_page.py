"""`docs/metrics.md` and the tables of metrics name the same ones."""

from __future__ import annotations

import re

from kvdev.paths import ROOT
from vllm_adapter.observe import metric_tables as tables

OWN, HOSTS = "vllm:kv_transfer_", "vllm:nixl_"


def named() -> set[str]:
    return {tables.INFO.name, *(metric.name for metric in tables.METRICS)}


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = page[page.index("| `vllm:kv_transfer_") :].split("\n\n", 1)[0].splitlines()[2:]
    rows = [name for line in table for name in re.findall(r"`([a-z_]+)", line.split("|")[1])]
    assert len(rows) == len(set(rows))
    assert {OWN + name for name in rows} == {name for name in named() if name.startswith(OWN)}


def test_the_hosts_names_are_all_on_the_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    hosts = {name for name in named() if name.startswith(HOSTS)}
    assert len(hosts) == 8
    assert {name for name in hosts if f"`{name}`" not in page} == set()
