"""Change fragments: one file per change in `packages/NAME/changelog.d/`, folded into CHANGELOG.md at a release."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["KINDS", "fragments_of", "misnamed_fragments"]

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
# A leading + keeps towncrier from taking the name for the number of an issue.
_NAME = re.compile(rf"\+?[a-z0-9][a-z0-9-]*\.({'|'.join(KINDS)})\.md")


def fragments_of(package: Path) -> list[Path]:
    """List the change fragments of the package in this folder, sorted."""
    return sorted(path for path in (package / "changelog.d").glob("*.md") if _NAME.fullmatch(path.name))


def misnamed_fragments(package: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of files that a release would leave out, and of empty fragments."""
    good = set(fragments_of(package))
    for path in sorted((package / "changelog.d").glob("*")):
        if path.name == ".gitignore":
            continue
        name = f"{package.name}/changelog.d/{path.name}"
        if path not in good:
            yield name, f"not named SLUG.KIND.md with a KIND of {', '.join(KINDS)}"
        elif not path.read_text().strip():
            yield name, "empty"
