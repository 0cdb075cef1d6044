"""Workflows against the packages: Pythons that are promised run, packages that a change affects are tested."""

from __future__ import annotations

import re
import tomllib

import pytest

from kvdev.affected import affected_by, siblings_of
from kvdev.paths import PACKAGES, ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_pythons_that_are_promised_are_those_that_run(package: str) -> None:
    match = re.search(r"python: \[([^\]]+)\]", (WORKFLOWS / "ci.yml").read_text())
    assert match
    run = re.findall(r"3\.\d+", match.group(1))
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    promised = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert promised == run
    assert project["requires-python"] == f">={run[0]}"
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert workspace == f">={run[0]},<3.{int(run[-1].partition('.')[2]) + 1}"


def test_a_person_can_choose_every_package() -> None:
    match = re.search(r"options: \[([^\]]+)\]", (WORKFLOWS / "ci.yml").read_text())
    assert match
    assert match.group(1).split(", ") == ["all", *PACKAGES]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["packages/kv-topology/src/kv_topology/document.py"], ["kv-topology", "vllm-adapter"]),
        (["packages/vllm-adapter/README.md"], ["vllm-adapter"]),
        (
            ["packages/kv-handshake/tests/x.py", "packages/kv-nixl-agent/x"],
            ["kv-handshake", "kv-nixl-agent", "vllm-adapter"],
        ),
        (["uv.lock"], list(PACKAGES)),
        (["uv.toml"], list(PACKAGES)),
        (["tools/kvdev/testing.py"], list(PACKAGES)),
        ([".github/workflows/ci.yml"], list(PACKAGES)),
        (["docs/architecture.md", "README.md", "integration_tests/fakes/engines.py"], []),
        ([], []),
    ],
)
def test_a_change_affects_its_package_and_those_that_depend_on_it(files: list[str], expected: list[str]) -> None:
    assert affected_by(ROOT, files) == expected


def test_the_adapter_alone_depends_on_siblings() -> None:
    assert {name: siblings_of(ROOT, name) for name in PACKAGES if siblings_of(ROOT, name)} == {
        "vllm-adapter": [name for name in PACKAGES if name != "vllm-adapter"]
    }
