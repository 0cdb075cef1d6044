"""A package as an index shows it: a copy with `[project.urls]` and with links that lead somewhere from there.

The copy differs from the checkout in two things that need the repository's address: `[project.urls]` is added, and links
that leave the package folder become absolute. The address comes from GitHub's variables or from the remote `origin`;
where there is none, such links become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from typing import TYPE_CHECKING, Any

from kvdev.paths import ROOT
from kvdev.steps import note

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["absolute_links", "project_of", "repository_address", "stage", "with_urls"]

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")
_PARTS = ("src", "examples", "tests", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")


def repository_address(environment: Mapping[str, str], origin: str) -> str:
    """Return the https address of the repository without a trailing slash, or "" where nobody says it."""
    if environment.get("GITHUB_REPOSITORY") and environment.get("GITHUB_SERVER_URL"):
        return f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
    match = re.fullmatch(r"(?:https://|git@|ssh://git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?", origin.strip())
    return f"https://{match.group(1)}/{match.group(2)}" if match else ""


def absolute_links(text: str, package: str, address: str, tag: str) -> str:
    """Rewrite Markdown links that leave the package folder; without an address, keep their label and name the file.

    `[the rules](../../docs/rules.md#one)` in packages/kv-topology becomes
    `[the rules](ADDRESS/blob/TAG/docs/rules.md#one)`, or `the rules (docs/rules.md)`.
    """

    def rewritten(match: re.Match[str]) -> str:
        label, steps, path, anchor = match.groups(default="")
        base = ["packages", package]
        target = "/".join([*base[: len(base) - steps.count("../")], path])
        if address:
            return f"[{label}]({address}/blob/{tag}/{target}{anchor})"
        return label if label == target else f"{label} ({target})"

    return _LINK.sub(rewritten, text)


def with_urls(text: str, package: str, address: str) -> str:
    """Add `[project.urls]` to the text of a pyproject."""
    urls = {
        "Repository": address,
        "Documentation": f"{address}/tree/main/packages/{package}",
        "Changelog": f"{address}/blob/main/packages/{package}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    return text.rstrip() + "\n\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())


def stage(folder: Path, staged: Path) -> None:
    """Copy a package as it is released, links and urls completed where the repository has an address."""
    staged.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in _PARTS:
        source = folder / part
        if source.is_dir():
            shutil.copytree(source, staged / part, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, staged / part)
    address = repository_address(os.environ, _origin())
    tag = f"{folder.name}-v{project_of(folder)['version']}"
    if not address:
        note("no repository address (no GitHub variables, no https or ssh remote `origin`): links stay out")
    else:
        pyproject = staged / "pyproject.toml"
        pyproject.write_text(with_urls(pyproject.read_text(), folder.name, address))
    for page in (staged / "README.md", staged / "CHANGELOG.md"):
        page.write_text(absolute_links(page.read_text(), folder.name, address, tag))


def _origin() -> str:
    """Return the address of the remote `origin`; "" where there is none, or no git (as in an image that is being built)."""
    command = ["git", "remote", "get-url", "origin"]
    if shutil.which("git") is None:
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def project_of(folder: Path) -> dict[str, Any]:
    """Return the table `[project]` of a package."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project
