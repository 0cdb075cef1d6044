"""Texts as a release rewrites them, versions that it refuses, and the neutral lock; nothing is built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvdev.locking import bindings, is_neutral, neutralise
from kvdev.paths import PACKAGES, ROOT
from kvdev.release import absolute_links, version_faults

ADDRESS = "https://forge.test/team/project"
LOCK = """
[[package]]
name = "numpy"
version = "2.4.6"
source = { registry = "https://packages.example.org/simple" }
sdist = { url = "https://files.example.org/packages/ab/cd/numpy-2.4.6.tar.gz", hash = "sha256:aa", size = 3 }
wheels = [
    { url = "https://files.example.org/packages/ef/numpy-2.4.6-cp311-manylinux.whl#sha256=bb", hash = "sha256:bb" },
    { url = "file:///srv/wheels/numpy-2.4.6-cp312-manylinux.whl", hash = "sha256:cc" },
]
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_versions_fit(package: str) -> None:
    assert version_faults(package) == []


@pytest.mark.parametrize("range_of", ["kv-topology>=", "kv-nixl-agent[cu13]>="])
def test_a_version_that_does_not_fit_is_named(tmp_path: Path, range_of: str) -> None:
    for name in PACKAGES:
        init = f"src/{name.replace('-', '_')}/__init__.py"
        for part in ("pyproject.toml", init):
            (tmp_path / "packages" / name / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "packages" / name / part, tmp_path / "packages" / name / part)
    changed = tmp_path / "packages" / "vllm-adapter" / "pyproject.toml"
    changed.write_text(changed.read_text().replace(f'"{range_of}0.3,<0.4"', f'"{range_of}0.1,<0.2"'))
    (fault,) = version_faults("vllm-adapter", tmp_path)
    assert f"{range_of.partition('[')[0].rstrip('>=')} is 0.3" in fault


def test_links_that_leave_the_package_become_absolute_or_plain() -> None:
    text = "See [the rules](../../docs/rules.md#one), [docs/rules.md](../../docs/rules.md), [here](#here), [x](x.toml)."
    assert absolute_links(text, "kv-topology", ADDRESS, "kv-topology-v0.2.0") == (
        f"See [the rules]({ADDRESS}/blob/kv-topology-v0.2.0/docs/rules.md#one), "
        f"[docs/rules.md]({ADDRESS}/blob/kv-topology-v0.2.0/docs/rules.md), [here](#here), [x](x.toml)."
    )
    assert absolute_links(text, "kv-topology", "", "") == (
        "See the rules (docs/rules.md), docs/rules.md, [here](#here), [x](x.toml)."
    )


def test_a_neutral_lock_has_no_address_and_the_same_file_names_and_hashes() -> None:
    neutral = neutralise(LOCK)
    assert (is_neutral(neutral), is_neutral(LOCK)) == (True, False)
    assert "example.org" not in neutral
    assert "/srv" not in neutral
    assert 'url = "https://index.invalid/files/numpy-2.4.6.tar.gz", hash = "sha256:aa"' in neutral
    assert bindings(neutral) == bindings(LOCK) > {f"numpy==2.4.6 sha256:{digest}" for digest in ("aa", "bb", "cc")}
    assert not is_neutral(neutral + 'git = "https://forge.test/team/project"')
