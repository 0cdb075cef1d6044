"""The site builds without a warning, its links and pictures lead somewhere, and its search finds what a symptom needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from kvdev.envs import browser_environment
from kvdev.paths import ROOT
from kvdev.site import drawings, terminals
from kvdev.site.building import SITE, build_site
from kvdev.site.gathering import link_inside
from kvdev.site.reference import configuration_page, metric_names_page
from kvdev.uvtool import find_or_install_uv
from vllm_adapter.config import describe_keys

# Words of an operator, the page that must be among the first three that the site's search lists, and a text that it must hold.
SYMPTOMS = [
    ("engine does not start port already in use", "troubleshoot/", "side-channel-port"),
    ("slow transfer TCP fallback instead of RDMA", "troubleshoot/", "kv-nixl doctor"),
    ("lease expired unread no heartbeat", "troubleshoot/", "kv_lease_duration"),
    ("hash mismatch engines incompatible dtype", "troubleshoot/", "--against"),
    ("quarantined bytes grow memory does not come back", "troubleshoot/", "quiet"),
    ("handshake timed out firewall", "troubleshoot/", "side channel"),
    ("cannot import nixl", "troubleshoot/", "kv-nixl doctor"),
    ("unknown key in kv_connector_extra_config misspelt", "troubleshoot/", "config --check"),
    ("rolling restart without losing requests", "operate/drain/", "SIGTERM"),
    ("go back to vllm's own connector", "operate/migrate/", "Take the key out"),
]
# Words of readers who are not in trouble, and the page that must come first or second.
SUBJECTS = [
    ("install on rocm", "operate/install/"),
    ("seal tickets with a fleet secret", "security/"),
    ("layout algebra", "layout-algebra/"),
    ("kubernetes grace period", "operate/kubernetes/"),
    ("grafana dashboard", "operate/dashboards/"),
    ("probe pages", "adr/0014-probe-pages/"),
    ("geometry document", "wire/geometry/"),
]
NOBODY_ASKS = "zzyzx"


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
    assert len(pages) > 50
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


@pytest.mark.parametrize("source", [drawings, terminals], ids=["drawings", "terminals"])
def test_the_pictures_are_those_that_the_source_draws(source: ModuleType) -> None:
    drawn = {name: draw() for name, draw in source.PICTURES.items()}
    assert {file.name: file.read_text() for file in source.FOLDER.glob("*.svg")} == drawn


def test_terminal_pictures_load_nothing_and_show_two_engines() -> None:
    for draw in terminals.PICTURES.values():
        picture = draw()
        assert "url(http" not in picture
        assert "@font-face" not in picture
        assert picture.count("running") >= 2


def test_every_key_and_metric_is_in_the_reference() -> None:
    page = configuration_page()
    assert {key.name for key in describe_keys()} == set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert len(re.findall(r"^\| `vllm:\w+`", metric_names_page(), re.MULTILINE)) > 30


def test_links_of_the_repository_become_links_of_the_site() -> None:
    code = "\n```\n[x](../README.md)\n```\n"
    text = "[a](../README.md#try-it) [b](../tools/dev.py) ![c](layout/uneven.svg) [w](wire/README.md)"
    assert link_inside(text + code, "docs/metrics.md", "metrics.md") == (
        "[a](project.md#try-it) b (`tools/dev.py`) ![c](layout/uneven.svg) [w](wire/README.md)" + code
    )
    assert link_inside("[d](docs/adr/)", "README.md", "project.md") == "[d](adr/README.md)"


# ------------------------------------------------------------------------------------------------------- in a browser

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or ""
without_one = pytest.mark.skipif(
    not BROWSER, reason="there is no chromium on this machine: pages and search were not tried"
)


def in_a_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs Chromium; on a machine that is short of cores all pages take minutes."""
    marked: Callable[..., None] = pytest.mark.timeout(900)(without_one(test))
    return marked


def opened(site: Path, *queries: str) -> dict[str, Any]:
    """Open all pages of a site in a browser, and ask its search."""
    python = browser_environment(find_or_install_uv())
    command = [str(python), str(ROOT / "tools/kvdev/site/open_pages.py"), str(site), BROWSER, *queries]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def seen(site: Path) -> dict[str, Any]:
    return opened(site, NOBODY_ASKS, *(row[0] for row in (*SYMPTOMS, *SUBJECTS)))


@in_a_browser
def test_every_page_opens_at_two_widths_without_a_fault(seen: dict[str, Any]) -> None:
    assert seen["pages"] > 50
    assert seen["faults"] == []


@in_a_browser
@pytest.mark.parametrize(("query", "page", "holds"), SYMPTOMS, ids=[row[0] for row in SYMPTOMS])
def test_the_sites_search_finds_the_page_of_a_symptom(
    site: Path, seen: dict[str, Any], query: str, page: str, holds: str
) -> None:
    assert page in list(dict.fromkeys(seen["found"][query]))[:3]
    assert holds in (site / page / "index.html").read_text()


@in_a_browser
@pytest.mark.parametrize(("query", "page"), SUBJECTS, ids=[row[0] for row in SUBJECTS])
def test_pages_for_operators_do_not_bury_the_others(seen: dict[str, Any], query: str, page: str) -> None:
    assert page in list(dict.fromkeys(seen["found"][query]))[:2]


@in_a_browser
def test_a_search_for_words_of_no_page_finds_nothing(seen: dict[str, Any]) -> None:
    assert seen["found"][NOBODY_ASKS] == []


@in_a_browser
def test_planted_faults_of_a_page_are_found(tmp_path: Path) -> None:
    body = '<div style="width: 5000px">x</div><img src="none.png"><script>nothing()</script>'
    (tmp_path / "index.html").write_text(f"<!doctype html><title>x</title>{body}")
    said = "\n".join(opened(tmp_path)["faults"])
    for fault in ("pixels too wide", "not loaded: none.png", "nothing is not defined", "at 1280", "at 390"):
        assert fault in said
