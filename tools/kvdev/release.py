"""`dev.py release PACKAGE`: what a release of one package needs, and a rehearsal that changes nothing in the checkout.

A release has two halves. Before the tag, `dev.py release PACKAGE` folds the change fragments into CHANGELOG.md; the result is
committed and tagged `PACKAGE-vVERSION`. From the tag, the release workflow runs `dev.py release --tagged PACKAGE`, which
builds and checks the files, and publishes them. `--dry-run` does both halves on a copy.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from kvdev.envs import release_environment
from kvdev.fragments import fragments_of
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.staging import project_of, stage
from kvdev.steps import fail, run_step
from kvdev.uvtool import uv_environment

if TYPE_CHECKING:
    pass

__all__ = ["release", "version_faults"]


def release(uv: Path, package: str, *, dry_run: bool, tagged: bool) -> int:
    """Fold, build or rehearse a release of one package; return 0 when nothing stands against it."""
    if package not in PACKAGES:
        fail(f"no package named {package!r}; there are {', '.join(PACKAGES)}")
    folder = ROOT / "packages" / package
    if faults := version_faults(ROOT, package):
        fail("versions do not fit:\n  " + "\n  ".join(faults))
    version = project_of(folder)["version"]
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
    stage(ROOT / "packages" / package, staged)
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
    project = project_of(folder)
    version = project["version"]
    module = folder / "src" / package.replace("-", "_") / "__init__.py"
    faults: list[str] = []
    if f'__version__ = "{version}"' not in module.read_text():
        faults.append(f"{module.relative_to(root)} does not say __version__ = {version!r}")
    extras: dict[str, list[str]] = project.get("optional-dependencies", {})
    for text in [*project["dependencies"], *(need for needs in extras.values() for need in needs)]:
        need = Requirement(text)
        if need.name in PACKAGES:
            sibling = project_of(root / "packages" / need.name)["version"]
            if sibling not in need.specifier:
                faults.append(f"{package} asks for {text}, {need.name} is {sibling}")
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    if not workspace.startswith(project["requires-python"]):
        faults.append(f"{package} promises Python {project['requires-python']}, the workspace runs {workspace}")
    return faults


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
