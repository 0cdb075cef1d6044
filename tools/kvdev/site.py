"""`dev.py docs`: gather the pages of the site, write its reference from the code, and build it with MkDocs, strictly.

Links are those of the repository, so that pages read well there too. A link to a page of the site becomes a link inside the
site; a link to another file, such as a test, becomes its path in the repository.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from kvdev.envs import tools_environment
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.steps import run_step

SITE = STATE / "site"
_SOURCE = STATE / "site-source"
_ELSEWHERE = {
    "README.md": "project.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    **{f"packages/{name}/README.md": f"packages/{name}.md" for name in PACKAGES},
}
"""Pages of the site that lie outside `docs/` in the repository -> their place in the site."""
_API = {
    "kv-handshake": ("kv_handshake", "kv_handshake.security", "kv_handshake.inspect"),
    "kv-topology": ("kv_topology", "kv_topology.layouts"),
    "kv-nixl-agent": ("kv_nixl_agent",),
    "kv-scheduler-state": ("kv_scheduler_state",),
    "vllm-adapter": ("vllm_adapter.config",),
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def run_docs(uv: Path, _options: object = None) -> int:
    """Build the site in `SITE`. Any warning of MkDocs is an error."""
    python = tools_environment(uv, "docs")
    shutil.rmtree(_SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", _SOURCE)
    (_SOURCE / "packages").mkdir()
    for origin, place in _ELSEWHERE.items():
        shutil.copyfile(ROOT / origin, _SOURCE / place)
    origins = {place: origin for origin, place in _ELSEWHERE.items()}
    for page in _SOURCE.rglob("*.md"):
        place = str(page.relative_to(_SOURCE))
        page.write_text(link_inside(page.read_text(), origins.get(place, f"docs/{place}"), place))
    reference = _SOURCE / "reference"
    reference.mkdir()
    (reference / "configuration.md").write_text(configuration_page())
    (reference / "state-machines.md").write_text(state_machines_page())
    for package, modules in _API.items():
        parts = [f"# {package}: API", *(f"::: {name}" for name in modules)]
        (reference / f"api-{package}.md").write_text("\n\n".join(parts) + "\n")
    command: list[str | Path] = [python, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    # MkDocs' theme advertises its successor on every build, which a log of warnings need not hold.
    run_step("build the site", command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout_s=300)
    print(SITE / "index.html")
    return 0


def link_inside(text: str, origin: str, place: str) -> str:
    """Rewrite the links of one page, which lies at `origin` in the repository and at `place` in the site.

    From `docs/metrics.md`, `../README.md` becomes `project.md`; from `README.md`, `docs/metrics.md` becomes `metrics.md`.
    """

    def rewrite(match: re.Match[str]) -> str:
        mark, words, link, anchor = match.groups(default="")
        path = os.path.normpath(os.path.join(os.path.dirname(origin), link))  # noqa: PTH118, PTH120 - a path that need not exist
        if path.startswith("docs") and (ROOT / path / "README.md").exists():
            path += "/README.md"
        inside = _ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if inside:
            return f"{mark}[{words}]({os.path.relpath(inside, os.path.dirname(place))}{anchor})"  # noqa: PTH120
        return words if words.strip("`") in path else f"{words} (`{path}`)"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in parts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    cells = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in cells)


def configuration_page() -> str:
    """Return the page of all keys of `kv_connector_extra_config`."""
    from vllm_adapter.config.keys import describe_keys

    rows = []
    for name, key in describe_keys().items():
        default = ", ".join(map(str, key["default"])) or "[]" if isinstance(key["default"], list) else key["default"]
        limits = ", ".join(f"`{one}`" for one in key.get("enum", ()))
        limits = f"{key['minimum']:g} to {key['maximum']:g}" if "maximum" in key else limits
        rows.append((f"`{name}`", key["type"], f"`{default}`", limits, key["description"]))
    about = "Keys of `kv_connector_extra_config`. `vllm-adapter config --explain` prints the same."
    return f"# Configuration\n\n{about}\n\n{_table(('key', 'type', 'default', 'range', 'meaning'), rows)}"


def state_machines_page() -> str:
    """Return the page of state machines: a diagram and a table of each."""
    from kv_scheduler_state import tables

    page = ["# State machines of a hand-over", "An event that a state does not list raises `IllegalTransition`."]
    for title in ("Producer", "Consumer", "Lease", "Stream producer", "Stream consumer", "Stream reader"):
        rows: Sequence[tables.Transition] = getattr(tables, f"{title.upper().replace(' ', '_')}_TABLE").rows
        page += [f"## {title}", "```mermaid\nstateDiagram-v2"]
        ordered = sorted(rows, key=lambda row: (row.state, row.target))
        for (state, target), edges in groupby(ordered, key=lambda row: (row.state, row.target)):
            # Not every program that draws diagrams takes a hyphen.
            ends = ["[*]" if end in {tables.NEW, tables.GONE} else end.replace("-", "_") for end in (state, target)]
            page[-1] += f"\n    {' --> '.join(ends)}: {', '.join(edge.event for edge in edges)}"
        page[-1] += "\n```"
        cells = ((row.state, row.event, row.target, ", ".join(row.effects), row.why) for row in rows)
        page.append(_table(("state", "event", "next state", "effects", "why"), cells))
    return "\n\n".join(page) + "\n"
