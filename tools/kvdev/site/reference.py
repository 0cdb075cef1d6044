"""Write the reference pages: configuration, metrics, state machines and API from the code, codes of errors from the READMEs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvdev.paths import PACKAGES, ROOT
from kvdev.site.gathering import link_inside
from kvdev.site.state_machines import state_machines_page

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vllm_adapter.observe.metric_tables import Metric

__all__ = ["API_MODULES", "configuration_page", "errors_page", "metric_names_page", "write_reference"]

API_MODULES: dict[str, tuple[str, ...]] = {
    "kv-handshake": ("kv_handshake", "kv_handshake.security", "kv_handshake.inspect"),
    "kv-topology": ("kv_topology", "kv_topology.layouts"),
    "kv-nixl-agent": ("kv_nixl_agent",),
    "kv-scheduler-state": ("kv_scheduler_state",),
    "vllm-adapter": ("vllm_adapter.config",),
}


def write_reference(folder: Path) -> None:
    """Write all generated pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configuration.md").write_text(configuration_page())
    (folder / "metric-names.md").write_text(metric_names_page())
    (folder / "state-machines.md").write_text(state_machines_page())
    (folder / "errors.md").write_text(link_inside(errors_page(), "docs/reference/errors.md", "reference/errors.md"))
    for package in PACKAGES:
        modules = "\n\n".join(f"::: {name}" for name in API_MODULES[package])
        (folder / f"api-{package}.md").write_text(f"# {package}: API\n\n{modules}\n")


def configuration_page() -> str:
    """Return the page of all keys of `kv_connector_extra_config`."""
    from vllm_adapter.config import describe_keys

    lines = [
        "# Configuration",
        "",
        "Keys of `kv_connector_extra_config`, read from the code. `vllm-adapter config --explain` prints the same.",
        "A misspelt key or a value out of range stops the engine at start and names the right one.",
        "",
        "| key | type | default | range | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {key['type']} | `{_plain(key['default'])}` | {_range(key)} | {_cell(key['description'])} |"
        for name, key in describe_keys().items()
    ]
    return "\n".join(lines) + "\n"


def metric_names_page() -> str:
    """Return the page of all names of metrics, with help texts as a scrape shows them."""
    from vllm_adapter.observe import metric_tables as tables

    lines = [
        "# Names of metrics",
        "",
        "Read from the code. [Metrics](../metrics.md) says what a bad value means.",
        "",
        "| metric | kind | help |",
        "|---|---|---|",
    ]
    rows = [(each.name, _kind(each), each.help) for each in tables.METRICS]
    rows += [(tables.INFO.name, "gauge", tables.INFO.help)]
    return "\n".join([*lines, *(f"| `{name}` | {kind} | {_cell(text)} |" for name, kind, text in sorted(rows))]) + "\n"


def _kind(metric: Metric) -> str:
    """Return the kind with the labels. Example: counter by `code`."""
    return " by ".join(filter(None, (metric.kind, ", ".join(f"`{label}`" for label in metric.labels))))


def errors_page() -> str:
    """Return the page of all codes: the sections on errors of the five READMEs, which tests compare with the code."""
    parts = [
        "# Errors",
        "Every code of the five packages; what to do about a symptom is in [Troubleshoot](../troubleshoot.md).",
    ]
    for package in PACKAGES:
        readme = (ROOT / "packages" / package / "README.md").read_text()
        section = re.split(r"^## Error(?:s| codes)$", readme, flags=re.MULTILINE)[1].split("\n## ")[0]
        parts.append(f"## {package}\n\n{section.strip()}")
    return "\n\n".join(parts) + "\n"


def _plain(value: object) -> str:
    return "[]" if value == () else ", ".join(str(one) for one in value) if isinstance(value, tuple) else str(value)


def _range(key: Mapping[str, Any]) -> str:
    if "maximum" in key:
        return f"{key['minimum']:g} to {key['maximum']:g}"
    return ", ".join(f"`{one}`" for one in key.get("enum", ()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
