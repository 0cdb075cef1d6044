"""MkDocs hook (mkdocs.yml): draw state machines when the site is built, so that a page loads nothing from elsewhere."""

from __future__ import annotations

import re

import mmdr


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace fenced Mermaid blocks by pictures."""
    return re.sub(r"^```mermaid\n(.*?)^```$", _drawn, markdown, flags=re.MULTILINE | re.DOTALL)


def _drawn(match: re.Match[str]) -> str:
    svg = mmdr.render(match.group(1)).svg().replace('width="100%"', "")
    return '<div class="states">\n' + re.sub(r"\s*\n\s*", "\n", svg) + "\n</div>"
