"""`dev.py release PACKAGE`: build the files of a release from a copy of the package, and judge them; nothing is published.

The release workflow runs it with `--tagged` on a tag `PACKAGE-vVERSION` and publishes what it built.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tomllib
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from kvdev.envs import tools_environment
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.staging import project_of, stage
from kvdev.steps import fail, run_step
from kvdev.uvtool import uv_environment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["release", "version_faults"]


def release(uv: Path, package: str, *, tagged: bool) -> int:
    """Build the files of one package and judge them; return 0 when nothing stands against a release."""
    if package not in PACKAGES:
        fail(f"no package named {package!r}; there are {', '.join(PACKAGES)}")
    folder = ROOT / "packages" / package
    if faults := version_faults(ROOT, package):
        fail("versions do not fit:\n  " + "\n  ".join(faults))
    version = project_of(folder)["version"]
    tag = f"{package}-v{version}"
    given = os.environ.get("GITHUB_REF_NAME", tag) if tagged else tag
    if given != tag:
        fail(f"the tag {given!r} is not {tag!r}, which the version in pyproject.toml asks for")
    if re.search(rf"^## {re.escape(version)}\b", (folder / "CHANGELOG.md").read_text(), re.MULTILINE) is None:
        fail(f"CHANGELOG.md of {package} has no section for {version}")
    staged, dist = (STATE / "release" / part / package for part in ("staged", "dist"))
    for stale in (staged, dist):
        shutil.rmtree(stale, ignore_errors=True)
    stage(folder, staged)
    tools = tools_environment(uv, "release").parent
    run_step(f"build {package} {version}", [uv, "build", "--quiet", "--out-dir", dist, staged], env=uv_environment())
    files = sorted(path for path in dist.iterdir() if path.suffix in {".whl", ".gz"})
    run_step(f"check metadata of {package}", [tools / "twine", "check", "--strict", *files])
    wheels = [file for file in files if file.suffix == ".whl"]
    run_step(f"check contents of {package}", [tools / "check-wheel-contents", *wheels])
    for file in files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")
    print(f"{package} {version}: versions fit, metadata and contents are good; nothing was published")
    return 0


def version_faults(root: Path, package: str) -> list[str]:
    """Return what contradicts: the ranges of siblings, Pythons promised against Pythons that run."""
    folder = root / "packages" / package
    project = project_of(folder)
    faults: list[str] = []
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
