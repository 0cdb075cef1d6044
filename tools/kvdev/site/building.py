"""`dev.py docs`: write the reference, gather the pages, build the site with MkDocs, strictly."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvdev.envs import tools_environment
from kvdev.paths import ROOT, STATE
from kvdev.site.gathering import gather_pages
from kvdev.site.reference import write_reference
from kvdev.steps import note, run_step

__all__ = ["SITE", "build_site", "run_docs"]

SITE = STATE / "site"
_SOURCE = STATE / "site-source"


def run_docs(uv: Path) -> int:
    """Build the site and print where it is."""
    started = time.monotonic()
    pages = build_site(uv)
    note(f"docs: {pages} pages in {SITE}/index.html ({time.monotonic() - started:.0f} s)")
    return 0


def build_site(uv: Path) -> int:
    """Build the site in `SITE`; return how many pages it has. Any warning of MkDocs is an error."""
    python = tools_environment(uv, "docs")
    gather_pages(_SOURCE)
    write_reference(_SOURCE / "reference")
    run_step("draw state machines", [python, Path(__file__).with_name("draw_states.py"), _SOURCE], timeout_s=120)
    command: list[str | Path] = [python, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    # MkDocs' theme advertises its successor on every build, which a log of warnings need not hold.
    run_step("build the site", command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout_s=300)
    return len(list(SITE.rglob("index.html")))
