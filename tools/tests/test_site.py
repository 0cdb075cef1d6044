"""The site builds without a warning; its links, pictures, scripts and styles lead somewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from kvdev.site.building import SITE, build_site
from kvdev.site.gathering import link_inside
from kvdev.site.reference import configuration_page, metric_names_page
from kvdev.site.state_machines import state_machines_page
from kvdev.uvtool import find_or_install_uv
from vllm_adapter.config import describe_keys

pytestmark = pytest.mark.full  # the site is built with tools of its own


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "img":
            self.pictures.append(values.get("src", ""))
        elif tag == "script" and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") == "stylesheet":
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site() -> Path:
    build_site(find_or_install_uv())
    return SITE


def pages_of(site: Path) -> dict[Path, _Page]:
    found: dict[Path, _Page] = {}
    for file in sorted(site.rglob("index.html")):
        found[file] = _Page()
        found[file].feed(file.read_text())
    return found


def test_links_pictures_scripts_and_styles_lead_somewhere(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) > 40
    missing = []
    for file, page in pages.items():
        for link in (*page.links, *page.pictures, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme in {"https", "http", "mailto"} and link not in (*page.pictures, *page.loaded):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                missing.append(f"{file.relative_to(site)}: {link}")
    assert missing == []
    assert sum(len(page.pictures) for page in pages.values()) >= 8


def test_every_key_and_metric_is_in_the_reference() -> None:
    page = configuration_page()
    assert set(describe_keys()) == set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert len(re.findall(r"^\| `vllm:\w+`", metric_names_page(), re.MULTILINE)) > 30


def test_each_state_machine_has_a_diagram() -> None:
    assert state_machines_page().count("```mermaid") == 6


def test_links_of_the_repository_become_links_of_the_site() -> None:
    code = "\n```\n[x](../README.md)\n```\n"
    text = "[a](../README.md#try-it) [b](../tools/dev.py) ![c](layout/uneven.svg) [w](wire/README.md)"
    assert link_inside(text + code, "docs/metrics.md", "metrics.md") == (
        "[a](project.md#try-it) b (`tools/dev.py`) ![c](layout/uneven.svg) [w](wire/README.md)" + code
    )
    assert link_inside("[d](docs/adr/)", "README.md", "project.md") == "[d](adr/README.md)"
