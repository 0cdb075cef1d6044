"""`dev.py docs`: gather the pages of the site, write its reference from the code, and build it with MkDocs, strictly.

Links are those of the repository, so that pages read well there too. A link to a page of the site becomes a link inside the
site; a link to another file, such as a test, becomes its path in the repository.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
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
    "packages/vllm-adapter/src/vllm_adapter/codes.toml": "reference/codes.md",
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
    (reference := _SOURCE / "reference").mkdir()
    for origin, place in _ELSEWHERE.items():
        shutil.copyfile(ROOT / origin, _SOURCE / place)
    origins = {place: origin for origin, place in _ELSEWHERE.items()}
    for page in _SOURCE.rglob("*.md"):
        place = str(page.relative_to(_SOURCE))
        page.write_text(link_inside(page.read_text(), origins.get(place, f"docs/{place}"), place))
    (reference / "configuration.md").write_text(configuration_page())
    (reference / "codes.md").write_text(codes_page())
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


def configuration_page() -> str:
    """Return the page of all keys of `kv_connector_extra_config`, by group, with an anchor for each key."""
    from vllm_adapter.config.keys import GROUPS, describe_keys, describe_limits

    page = ["# Configuration\n\n`vllm-adapter config --explain KEY` prints a key of `kv_connector_extra_config`."]
    for group, names in GROUPS.items():
        page.append(f"## {group}")
        page += [f"### `{name}`\n\n{describe_limits(name)}. {describe_keys()[name]['description']}" for name in names]
    return "\n\n".join(page) + "\n"


def codes_page() -> str:
    """Return the page of all codes, with an anchor for each code."""
    from vllm_adapter.cli.explain import load_codes

    page = ["---\nhide: [toc]\n---\n\n# Codes\n\n`vllm-adapter explain CODE` prints the same."]
    for code, entries in groupby(load_codes(), key=lambda entry: entry.code):
        page.append(f"## `{code}`")
        page += [f"*{each.package}.* {each.meaning}\n\n{each.consequence}\n\n**Next:** {each.next}" for each in entries]
    return "\n\n".join(page) + "\n"


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
        page.append("| state | event | next state | effects | why |\n|---|---|---|---|---|")
        for row in rows:
            page[-1] += f"\n| {row.state} | {row.event} | {row.target} | {', '.join(row.effects)} | {row.why} |"
    return "\n\n".join(page) + "\n"
