"""Texts as a release rewrites them, and versions that it refuses; nothing is built."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from kvdev.paths import PACKAGES, ROOT
from kvdev.release import version_faults
from kvdev.staging import absolute_links, repository_address, with_urls

ADDRESS = "https://forge.test/team/project"


@pytest.mark.parametrize("package", PACKAGES)
def test_versions_fit(package: str) -> None:
    assert version_faults(ROOT, package) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("vllm-adapter/pyproject.toml", "kv-topology>=0.3,<0.4", "kv-topology>=0.1,<0.2", "kv-topology is 0.3"),
        ("vllm-adapter/pyproject.toml", "[cu13]>=0.3,<0.4", "[cu13]>=0.1,<0.2", "kv-nixl-agent is 0.3"),
        ("vllm-adapter/pyproject.toml", '">=3.11"', '">=3.9"', "promises Python >=3.9"),
    ],
)
def test_a_version_that_does_not_fit_is_named(tmp_path: Path, file: str, old: str, new: str, words: str) -> None:
    for name in PACKAGES:
        for part in ("pyproject.toml", f"src/{name.replace('-', '_')}/__init__.py"):
            (tmp_path / "packages" / name / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "packages" / name / part, tmp_path / "packages" / name / part)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changed = tmp_path / "packages" / file
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new))
    (fault,) = version_faults(tmp_path, "vllm-adapter")
    assert words in fault


def test_links_that_leave_the_package_become_absolute_or_plain() -> None:
    text = "See [the rules](../../docs/rules.md#one), [docs/rules.md](../../docs/rules.md), [here](#here), [x](x.toml)."
    assert absolute_links(text, "kv-topology", ADDRESS, "kv-topology-v0.2.0") == (
        f"See [the rules]({ADDRESS}/blob/kv-topology-v0.2.0/docs/rules.md#one), "
        f"[docs/rules.md]({ADDRESS}/blob/kv-topology-v0.2.0/docs/rules.md), [here](#here), [x](x.toml)."
    )
    assert absolute_links(text, "kv-topology", "", "") == (
        "See the rules (docs/rules.md), docs/rules.md, [here](#here), [x](x.toml)."
    )


@pytest.mark.parametrize(
    "origin",
    [
        "https://forge.test/team/project.git",
        "git@forge.test:team/project.git",
        "ssh://git@forge.test/team/project",
        "https://forge.test/team/project/",
    ],
)
def test_the_address_comes_from_the_remote(origin: str) -> None:
    assert repository_address({}, origin + "\n") == ADDRESS


def test_urls_are_added_to_the_project() -> None:
    text = (ROOT / "packages" / "kv-topology" / "pyproject.toml").read_text()
    project = tomllib.loads(with_urls(text, "kv-topology", ADDRESS))["project"]
    assert project["urls"]["Repository"] == ADDRESS
    assert project["name"] == "kv-topology"
