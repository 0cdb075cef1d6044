"""Workflows against the packages: Pythons that are promised run, packages that a change affects are tested."""

from __future__ import annotations

import re
import tomllib

import pytest

from kvdev.affected import affected_by
from kvdev.paths import PACKAGES, ROOT, project_of

CI = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_pythons_that_are_promised_are_those_that_run(package: str) -> None:
    (run,) = (re.findall(r"3\.\d+", listed) for listed in re.findall(r"python: \[([^\]]+)\]", CI))
    project = project_of(ROOT / "packages" / package)
    assert [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one] == run
    assert project["requires-python"] == f">={run[0]}"
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert workspace == f">={run[0]},<3.{int(run[-1].partition('.')[2]) + 1}"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        *(([f"packages/{name}/x"], [name, "vllm-adapter"]) for name in PACKAGES[:4]),
        (["packages/vllm-adapter/README.md"], ["vllm-adapter"]),
        *(([file], list(PACKAGES)) for file in ("uv.lock", "uv.toml", "tools/x.py", ".github/workflows/ci.yml")),
        (["docs/architecture.md", "README.md", "integration_tests/pyproject.toml"], []),
    ],
)
def test_a_change_affects_its_package_and_those_that_depend_on_it(files: list[str], expected: list[str]) -> None:
    assert affected_by(files) == expected
