"""`dev.py dist` and `dev.py release PACKAGE`: wheels and archives, built from copies of the packages, and judged; not published.

A copy differs from the checkout in two things that need the repository's address: `[project.urls]` is added, and links that
leave the package folder become absolute. The address comes from GitHub's variables or from the remote `origin`; where there
is none, such links become plain text. The release workflow runs `release --tagged` on a tag `PACKAGE-vVERSION`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

from kvdev.envs import tools_environment
from kvdev.paths import PACKAGES, ROOT, STATE, project_of
from kvdev.steps import fail, note, run_step
from kvdev.uvtool import uv_environment

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")
_PARTS = ("src", "examples", "tests", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")


def run_dist(uv: Path, options: Namespace) -> int:
    """Build the files of all packages into one folder; `requirements.txt` beside them pins the wheels by version and hash.

    So they are installed from this folder alone: no index is asked for them, where anyone may have registered their names.
    """
    files = [file for name in PACKAGES for file in build(uv, name, options.folder.resolve())]
    _judge(uv, files)
    print("\n".join(str(file) for file in files))
    return 0


def run_release(uv: Path, options: Namespace) -> int:
    """Build the files of one package and judge them; return 0 when nothing stands against a release."""
    package: str = options.package
    if package not in PACKAGES:
        fail(f"no package named {package!r}; there are {', '.join(PACKAGES)}")
    if faults := version_faults(package):
        fail("versions do not fit:\n  " + "\n  ".join(faults))
    version = project_of(ROOT / "packages" / package)["version"]
    tag = f"{package}-v{version}"
    given = os.environ.get("GITHUB_REF_NAME", tag) if options.tagged else tag
    if given != tag:
        fail(f"the tag {given!r} is not {tag!r}, which the version in pyproject.toml asks for")
    if f"\n## {version} " not in (ROOT / "packages" / package / "CHANGELOG.md").read_text():
        fail(f"CHANGELOG.md of {package} has no section for {version}")
    dist = STATE / "release" / "dist" / package
    shutil.rmtree(dist, ignore_errors=True)
    files = build(uv, package, dist)
    (dist / "requirements.txt").unlink()
    _judge(uv, files)
    for file in files:
        print(f"{_digest(file)}  {file.relative_to(ROOT)}")
    print(f"{package} {version}: versions fit, metadata and contents are good; nothing was published")
    return 0


def version_faults(package: str, root: Path = ROOT) -> list[str]:
    """Return each range of a sibling that the sibling's version is not in."""
    project = project_of(root / "packages" / package)
    faults: list[str] = []
    for text in chain(project["dependencies"], *project.get("optional-dependencies", {}).values()):
        need = Requirement(text)
        if need.name in PACKAGES:
            sibling = project_of(root / "packages" / need.name)["version"]
            if sibling not in need.specifier:
                faults.append(f"{package} asks for {text}, {need.name} is {sibling}")
    return faults


def build(uv: Path, package: str, folder: Path) -> list[Path]:
    """Build the wheel and the archive of a package; files of its other versions in that folder are removed first."""
    stem = package.replace("-", "_")
    for stale in (*folder.glob(f"{stem}-*.whl"), *folder.glob(f"{stem}-*.tar.gz")):
        stale.unlink()
    staged = STATE / "dist" / package
    _stage(ROOT / "packages" / package, staged)
    run_step(f"build {package}", [uv, "build", "--quiet", "--out-dir", folder, staged], env=uv_environment())
    wheels = sorted(wheel for name in PACKAGES for wheel in folder.glob(f"{name.replace('-', '_')}-*.whl"))
    (folder / "requirements.txt").write_text("".join(map(_pin, wheels)))
    return [*folder.glob(f"{stem}-*.whl"), *folder.glob(f"{stem}-*.tar.gz")]


def _judge(uv: Path, files: Sequence[Path]) -> None:
    tools = tools_environment(uv, "release").parent
    run_step("check metadata", [tools / "twine", "check", "--strict", *files])
    run_step("check contents", [tools / "check-wheel-contents", *(file for file in files if file.suffix == ".whl")])


def _pin(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{_digest(wheel)}\n"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _stage(folder: Path, staged: Path) -> None:
    """Copy a package as it is released, links and urls completed where the repository has an address."""
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for part in _PARTS:
        source = folder / part
        if source.is_dir():
            shutil.copytree(source, staged / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, staged / part)
    address, tag = repository_address(), f"{folder.name}-v{project_of(folder)['version']}"
    if address:
        urls = {
            "Repository": address,
            "Documentation": f"{address}/tree/main/packages/{folder.name}",
            "Changelog": f"{address}/blob/main/packages/{folder.name}/CHANGELOG.md",
            "Issues": f"{address}/issues",
        }
        with (staged / "pyproject.toml").open("a") as pyproject:
            pyproject.write("\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items()))
    else:
        note("no repository address (no GitHub variables, no https or ssh remote `origin`): links stay out")
    for page in (staged / "README.md", staged / "CHANGELOG.md"):
        page.write_text(absolute_links(page.read_text(), folder.name, address, tag))


def repository_address() -> str:
    """Return the https address of the repository without a trailing slash, or "" where nothing names it."""
    if "GITHUB_REPOSITORY" in os.environ and "GITHUB_SERVER_URL" in os.environ:
        return f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    if shutil.which("git") is None:  # as in an image that is being built
        return ""
    command = ["git", "remote", "get-url", "origin"]
    origin = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    match = re.fullmatch(r"(?:https://|git@|ssh://git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?", origin.strip())
    return f"https://{match.group(1)}/{match.group(2)}" if match else ""


def absolute_links(text: str, package: str, address: str, tag: str) -> str:
    """Rewrite Markdown links that leave the package folder; without an address, keep their label and name the file.

    `[the rules](../../docs/rules.md#one)` in packages/kv-topology becomes
    `[the rules](ADDRESS/blob/TAG/docs/rules.md#one)`, or `the rules (docs/rules.md)`.
    """

    def rewritten(match: re.Match[str]) -> str:
        label, steps, path, anchor = match.groups(default="")
        target = "/".join([*["packages", package][: 2 - steps.count("../")], path])
        if address:
            return f"[{label}]({address}/blob/{tag}/{target}{anchor})"
        return label if label == target else f"{label} ({target})"

    return _LINK.sub(rewritten, text)
