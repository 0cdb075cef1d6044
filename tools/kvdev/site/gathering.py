"""Gather the pages of the site in one folder: those of `docs/`, READMEs from elsewhere, and pages written from the code.

Links are those of the repository, so that pages read well there too. A link to a page of the site becomes a link inside
the site; a link to another file, such as a test, becomes its path in the repository.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from kvdev.paths import PACKAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ELSEWHERE", "gather_pages", "link_inside"]

ELSEWHERE = {
    "README.md": "project.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    **{f"packages/{name}/README.md": f"packages/{name}.md" for name in PACKAGES},
}
"""Pages of the site that lie outside `docs/` in the repository -> their place in the site."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def gather_pages(target: Path) -> list[Path]:
    """Copy all pages and pictures to `target`, links rewritten; return the pages."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for origin, place in ELSEWHERE.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / origin, target / place)
    origins = {place: origin for origin, place in ELSEWHERE.items()}
    pages = sorted(target.rglob("*.md"))
    for page in pages:
        place = str(page.relative_to(target))
        page.write_text(link_inside(page.read_text(), origins.get(place, f"docs/{place}"), place))
    return pages


def link_inside(text: str, origin: str, place: str) -> str:
    """Rewrite the links of one page, which lies at `origin` in the repository and at `place` in the site.

    From `docs/metrics.md`, `../README.md` becomes `project.md`; from `README.md`, `docs/metrics.md` becomes `metrics.md`.
    """

    def rewrite(match: re.Match[str]) -> str:
        mark, words, link, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(origin), link))  # noqa: PTH118, PTH120 - a path that need not exist
        inside = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if inside and not (ROOT / path).is_dir():
            return f"{mark}[{words}]({os.path.relpath(inside, os.path.dirname(place))}{anchor or ''})"  # noqa: PTH120
        if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists() and path.startswith("docs"):
            index = os.path.join(path, "README.md").removeprefix("docs/")  # noqa: PTH118
            return f"[{words}]({os.path.relpath(index, os.path.dirname(place))})"  # noqa: PTH120
        return words if words.strip("`") in path else f"{words} (`{path}`)"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in parts)
