"""The site builds without a warning; its pictures, scripts and styles lead somewhere, as MkDocs' own check has it for links."""

from __future__ import annotations

import re

import pytest

from kvdev.site import SITE, run_docs
from kvdev.uvtool import find_or_install_uv


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
    assert 'id="hash-mismatch"' in (SITE / "reference/codes/index.html").read_text()
    assert 'id="kv_lease_duration"' in (SITE / "reference/configuration/index.html").read_text()
