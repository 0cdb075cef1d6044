"""`dev.py release PACKAGE`: what a release of one package needs, and a rehearsal that changes nothing in the checkout.

A release has two halves. Before the tag, `dev.py release PACKAGE` folds the change fragments into CHANGELOG.md; the result is
committed and tagged `PACKAGE-vVERSION`. From the tag, the release workflow runs `dev.py release --tagged PACKAGE`, which
builds and checks the files, and publishes them. `--dry-run` does both halves on a copy.

The copy differs from the checkout in two things that need the repository's address: `[project.urls]` is added, and links
that leave the package folder become absolute. The address comes from GitHub's variables or from the remote `origin`;
where there is none, such links become plain text.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from kvdev.envs import release_environment
from kvdev.fragments import fragments_of
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.steps import fail, note, run_step
from kvdev.uvtool import uv_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["absolute_links", "release", "repository_address", "version_faults", "with_urls"]

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")
_PARTS = ("src", "examples", "tests", "README.md", "LICENSE", "CHANGELOG.md", "changelog.d", "pyproject.toml")


def release(uv: Path, package: str, *, dry_run: bool, tagged: bool) -> int:
    """Fold, build or rehearse a release of one package; return 0 when nothing stands against it."""
    if package not in PACKAGES:
        fail(f"no package named {package!r}; there are {', '.join(PACKAGES)}")
    folder = ROOT / "packages" / package
    if faults := version_faults(ROOT, package):
        fail("versions do not fit:\n  " + "\n  ".join(faults))
    version = _project(folder)["version"]
    tag = f"{package}-v{version}"
    tools = release_environment(uv).parent
    if tagged:
        _check_tag(folder, version, tag)
    elif not dry_run:
        _fold(tools, folder, package, version)
        print(
            f"CHANGELOG.md of {package} has a section for {version}. Commit it, then: git tag {tag} && git push origin {tag}"
        )
        return 0
    return _rehearse(uv, tools, package, version, folds=dry_run)


def _rehearse(uv: Path, tools: Path, package: str, version: str, *, folds: bool) -> int:
    staged = STATE / "release" / package
    dist = STATE / "release" / "dist" / package
    for stale in (staged, dist):
        shutil.rmtree(stale, ignore_errors=True)
    _stage(ROOT / "packages" / package, staged)
    pending = fragments_of(staged)
    if folds and pending:
        _fold(tools, staged, package, version)
        print(f"CHANGELOG.md would begin with:\n\n{_newest_section(staged)}")
    elif not _has_section(staged, version):
        fail(f"CHANGELOG.md of {package} has no section {version}, and changelog.d has no fragment to make it from")
    run_step(f"build {package} {version}", [uv, "build", "--quiet", "--out-dir", dist, staged], env=uv_environment())
    files = sorted(path for path in dist.iterdir() if path.suffix in {".whl", ".gz"})
    run_step(f"check metadata of {package}", [tools / "twine", "check", "--strict", *files])
    run_step(
        f"check contents of {package}", [tools / "check-wheel-contents", *(f for f in files if f.suffix == ".whl")]
    )
    for file in files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")
    print(f"{package} {version}: versions fit, metadata and contents are good; nothing was published")
    return 0


def version_faults(root: Path, package: str) -> list[str]:
    """Return what contradicts: `__version__`, the ranges of siblings, Pythons promised against Pythons that run."""
    folder = root / "packages" / package
    project = _project(folder)
    version = project["version"]
    module = folder / "src" / package.replace("-", "_") / "__init__.py"
    faults: list[str] = []
    if f'__version__ = "{version}"' not in module.read_text():
        faults.append(f"{module.relative_to(root)} does not say __version__ = {version!r}")
    for text in project["dependencies"]:
        need = Requirement(text)
        if need.name in PACKAGES:
            sibling = _project(root / "packages" / need.name)["version"]
            if sibling not in need.specifier:
                faults.append(f"{package} asks for {text}, {need.name} is {sibling}")
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    if not workspace.startswith(project["requires-python"]):
        faults.append(f"{package} promises Python {project['requires-python']}, the workspace runs {workspace}")
    return faults


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


def _stage(folder: Path, staged: Path) -> None:
    """Copy the package as it is released, links and urls completed."""
    staged.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in _PARTS:
        source = folder / part
        if source.is_dir():
            shutil.copytree(source, staged / part, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, staged / part)
    command = ["git", "remote", "get-url", "origin"]
    origin = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    address = repository_address(os.environ, origin)
    tag = f"{folder.name}-v{_project(folder)['version']}"
    if not address:
        note("no repository address (no GitHub variables, no https or ssh remote `origin`): links stay out")
    else:
        pyproject = staged / "pyproject.toml"
        pyproject.write_text(with_urls(pyproject.read_text(), folder.name, address))
    for page in (staged / "README.md", staged / "CHANGELOG.md"):
        page.write_text(absolute_links(page.read_text(), folder.name, address, tag))


def _fold(tools: Path, folder: Path, package: str, version: str) -> None:
    if not fragments_of(folder):
        fail(f"{package} has no change fragments in changelog.d: nothing to fold")
    # The template's path in towncrier.toml is meant from packages/NAME; the copy lies elsewhere.
    config = STATE / "towncrier.toml"
    template = (ROOT / "tools" / "changelog.md.jinja").as_posix()
    config.write_text((ROOT / "towncrier.toml").read_text().replace("../../tools/changelog.md.jinja", template))
    given: list[str | Path] = ["--config", config, "--dir", folder, "--name", package, "--version", version]
    command: list[str | Path] = [tools / "towncrier", "build", "--yes", *given]
    run_step(f"fold change fragments of {package}", command)


def _check_tag(folder: Path, version: str, tag: str) -> None:
    given = os.environ.get("GITHUB_REF_NAME", tag)
    if given != tag:
        fail(f"the tag {given!r} is not {tag!r}, which the version in pyproject.toml asks for")
    if pending := fragments_of(folder):
        fail(f"fragments are not folded: {', '.join(path.name for path in pending)}; run dev.py release before tagging")
    if not _has_section(folder, version):
        fail(f"CHANGELOG.md has no section for {version}")


def _has_section(folder: Path, version: str) -> bool:
    return re.search(rf"^## {re.escape(version)} ", (folder / "CHANGELOG.md").read_text(), re.MULTILINE) is not None


def _newest_section(folder: Path) -> str:
    text = (folder / "CHANGELOG.md").read_text()
    return "## " + text.split("\n## ")[1]


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project
