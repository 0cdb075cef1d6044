"""The site builds without a warning; its pictures, scripts and styles lead somewhere, as MkDocs' own check has it for links."""

from __future__ import annotations

import re

import pytest

from kvdev.site import SITE, configuration_page, run_docs, state_machines_page
from kvdev.uvtool import find_or_install_uv
from vllm_adapter.config.keys import describe_keys


@pytest.mark.full  # the site is built with tools of its own
def test_pages_load_nothing_from_elsewhere_and_nothing_that_is_not_there() -> None:
    run_docs(find_or_install_uv())
    pages = {file: file.read_text() for file in SITE.rglob("index.html")}
    assert len(pages) > 40
    loaded = [
        (file, link.partition("?")[0])
        for file, text in pages.items()
        for pattern in (r'<(?:img|script)\b[^>]*\bsrc="([^"]+)"', r'<link\b[^>]*rel="stylesheet"[^>]*href="([^"]+)"')
        for link in re.findall(pattern, text)
    ]
    assert len(loaded) > 80
    assert [(file, link) for file, link in loaded if not (file.parent / link).exists()] == []
    assert (SITE / "reference/state-machines/index.html").read_text().count('<div class="states">') == 6


def test_every_key_and_state_machine_is_in_the_reference() -> None:
    page = configuration_page()
    assert set(describe_keys()) == set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert state_machines_page().count("```mermaid") == 6
