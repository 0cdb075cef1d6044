"""The Grafana dashboard in `deploy/grafana`, written from `kvdev.panels` with Grafana's own builders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as Curves
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvdev.panels import ROWS
from kvdev.paths import ROOT

if TYPE_CHECKING:
    from kvdev.panels import Panel, Query

__all__ = ["DASHBOARD", "dashboard_text", "write_dashboard"]

DASHBOARD: Final = ROOT / "deploy" / "grafana" / "kv-transfer.json"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="$datasource")
_WIDTH: Final = 24
"""Columns of Grafana's grid."""
_NO_COLUMNS: Final = ("Time", "Value", "__name__", "job", "engine")
"""Columns of every sample that say nothing about an engine."""
_FIRST_COLUMNS: Final = ("instance", "kv_role", "adapter_version", "vllm_version", "model_name")


def dashboard_text() -> str:
    """Return the dashboard as Grafana imports it."""
    made = (
        Dashboard("kv-transfer: hand-over of KV caches")
        .uid("kv-transfer")
        .description("Hand-overs between vLLM engines with vllm-adapter. Written by `python3 tools/dev.py dashboard`.")
        .tags(["vllm", "kv-transfer"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("model", "Model", "label_values(vllm:kv_transfer_info, model_name)"))
        .with_variable(
            _variable("instance", "Engine", 'label_values(vllm:kv_transfer_info{model_name=~"$model"}, instance)')
        )
    )
    number = 0
    for title, panels in ROWS:
        made = made.with_row(Row(title))
        for panel in panels:
            number += 1
            made = made.with_panel(_drawn(panel).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def write_dashboard() -> int:
    """Write `deploy/grafana/kv-transfer.json`; return the exit code 0."""
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(dashboard_text())
    print(f"{DASHBOARD.relative_to(ROOT)}: {sum(len(panels) for _, panels in ROWS)} panels")
    return 0


def _variable(name: str, label: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
    )


def _drawn(panel: Panel) -> Curves | Stat | Table:
    if panel.kind == "stat":
        return _stat(panel)
    if panel.kind == "table":
        return _table(panel)
    legend = (
        common_builders.VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .calcs(["mean", "max"])
        .show_legend(True)
    )
    drawn = (
        Curves()
        .title(panel.title)
        .description(panel.about)
        .unit(panel.unit)
        .datasource(_SOURCE)
        .min(0)
        .height(8)
        .span(_WIDTH // 3)
        .fill_opacity(10)
        .legend(legend)
    )
    for place, query in enumerate(panel.queries):
        drawn = drawn.with_target(_target(query, place).range())
    return drawn


def _stat(panel: Panel) -> Stat:
    red = [Threshold(value=None, color="green"), Threshold(value=0.5, color="red")]
    return (
        Stat()
        .title(panel.title)
        .description(panel.about)
        .unit(panel.unit)
        .datasource(_SOURCE)
        .height(4)
        .span(_WIDTH // 6)
        .decimals(0)
        .color_mode(BigValueColorMode.BACKGROUND)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(BigValueGraphMode.NONE)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(red))
        .with_target(_target(panel.queries[0], 0).instant())
    )


def _table(panel: Panel) -> Table:
    """Return a table over the whole width: a sample has a dozen labels."""
    target = _target(panel.queries[0], 0).instant().format(PromQueryFormat.TABLE)
    columns = {
        "excludeByName": dict.fromkeys(_NO_COLUMNS, True),
        "indexByName": {name: place for place, name in enumerate(_FIRST_COLUMNS)},
    }
    return (
        Table()
        .title(panel.title)
        .description(panel.about)
        .datasource(_SOURCE)
        .height(6)
        .span(_WIDTH)
        .with_transformation(DataTransformerConfig("organize", options=columns))
        .with_target(target)
    )


def _target(query: Query, place: int) -> Dataquery:
    """Return a query of a panel; the first is `A`, the second `B`."""
    return Dataquery().expr(query.expression).legend_format(query.legend).ref_id(chr(ord("A") + place))
