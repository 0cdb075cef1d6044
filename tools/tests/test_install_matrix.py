"""Install beside a host: whatever NIXL and torch an environment has, they stay as they are.

A host is a fresh environment in which vLLM, torch and NIXL are there as metadata alone: resolvers look at nothing else, and a
CUDA build would be several GB. Our five packages are really installed, by uv and by pip, from wheels and from a checkout.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from bare_wheels import bare_wheel

from kvdev.envs import pip_install
from kvdev.paths import PACKAGES, ROOT
from kvdev.release import build
from kvdev.uvtool import find_or_install_uv, uv_environment

pytestmark = pytest.mark.full  # environments are made by the dozen

LONG = os.environ.get("KVDEV_LONG") == "1"
PIP_FROM_CHECKOUT = "pip builds each package of a checkout in an environment of its own: about 10 s a host (--long)"
BUILDS = {"nixl-cu12": ["torch", "numpy"], "nixl-cu13": ["torch", "numpy"]}
# Brought by vLLM on every host.
BROUGHT = {"numpy": "2.2.6", "msgspec": "0.20.0", "pyzmq": "27.0.0", "typer": "0.21.0", "rich": "14.2.0"}
HOSTS: dict[str, dict[str, str]] = {
    "cu13": {"torch": "2.13.0", "vllm": "0.32.0", "nixl": "1.4.1", "nixl-cu13": "1.4.1"},
    "cu12": {"torch": "2.11.0+cu128", "vllm": "0.31.0", "nixl-cu12": "1.5.0"},
    "none": {"torch": "2.13.0", "vllm": "0.32.0"},
}
FROM_DIST = "install --no-index --no-deps --find-links dist --require-hashes -r dist/requirements.txt"
EXTRAS = {"vllm-adapter": "[cli]"}
WAYS = {
    ("uv", "wheels"): f"uv pip {FROM_DIST}",
    ("pip", "wheels"): f"pip {FROM_DIST}",
    ("uv", "checkout"): "uv pip install './packages/vllm-adapter[cli]'",
    ("pip", "checkout"): shlex.join(
        ["pip", "install", *(f"./packages/{name}{EXTRAS.get(name, '')}" for name in PACKAGES)]
    ),
}
OURS = dict.fromkeys(PACKAGES, "0.3.0")


class Environment:
    """A virtual environment in which these packages are installed, as far as an installer can see."""

    def __init__(self, folder: Path, uv: Path, packages: Mapping[str, str]) -> None:
        self.folder, self.uv = folder, uv
        command = [str(uv), "venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)]
        subprocess.run(command, check=True, timeout=120, env=uv_environment())
        (self.site,) = folder.glob("lib/python3*/site-packages")
        wheels = []
        for name, version in packages.items():
            needs = [f"nixl-cu12=={version}", f"nixl-cu13=={version}"] if name == "nixl" else BUILDS.get(name, [])
            wheels.append(bare_wheel(folder, name, version, *needs))
        if wheels:
            pip_install(uv, "bare packages of a host", folder / "bin/python", "--no-deps", *wheels)

    def run(self, line: str, cwd: Path, *, is_dry: bool = False, index: str = "") -> str:
        """Run `uv pip install ...` or `pip install ...`, as a person would with this environment active, and this index."""
        words = shlex.split(line)
        pip = [f"{sys.base_prefix}/bin/python3", "-m", "pip", "--python", str(self.folder)]
        tool = [str(self.uv)] if words[0] == "uv" else pip
        environment = {**uv_environment(), "VIRTUAL_ENV": str(self.folder)}
        if index:
            environment |= {"UV_DEFAULT_INDEX": index, "PIP_INDEX_URL": index}
        ended = subprocess.run(
            [*tool, *words[1:], *(["--dry-run"] if is_dry else [])],
            cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{line}\n{ended.stdout}"
        return ended.stdout

    def versions(self) -> dict[str, str]:
        """Return what is installed, with the versions."""
        return {one.name: one.version for one in distributions(path=[str(self.site)])}


class Bench:
    """A copy of the checkout with wheels in `dist`, shared by all cells, and a way to make hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uv, self.checkout = folder, find_or_install_uv(), folder / "checkout"
        junk = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT / "packages", self.checkout / "packages", ignore=junk)
        for name in ("pyproject.toml", "uv.toml", "uv.lock"):
            shutil.copy(ROOT / name, self.checkout)
        for name in PACKAGES:
            build(self.uv, name, self.checkout / "dist")
        self.untouched = cache(self.host)
        """Gives one host of each kind to all whose runs are dry."""

    def host(self, name: str = "") -> Environment:
        """Make a host with what vLLM brings; without a name an empty environment."""
        packages = {**HOSTS[name], **BROUGHT} if name else {}
        return Environment(self.folder / f"host-{len(list(self.folder.glob('host-*')))}", self.uv, packages)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("tool", "source"), WAYS)
def test_the_hosts_packages_stay_as_they_are(bench: Bench, tool: str, source: str, host: str) -> None:
    if (tool, source) == ("pip", "checkout") and host != "cu13" and not LONG:
        pytest.skip(PIP_FROM_CHECKOUT)
    environment = bench.host(host)
    said = environment.run(WAYS[tool, source], bench.checkout)
    assert environment.versions() == {**HOSTS[host], **BROUGHT, **OURS}, said


@pytest.mark.parametrize("extra", ["cu13", "cu12"])
def test_an_extra_brings_one_build_of_nixl_and_leaves_torch(bench: Bench, extra: str) -> None:
    line = f"uv pip install --find-links dist vllm-adapter[{extra}]"
    added = re.findall(r"^ \+ (\S+)==", bench.untouched("none").run(line, bench.checkout, is_dry=True), re.MULTILINE)
    assert sorted(added) == sorted([*PACKAGES, f"nixl-{extra}"])


def test_in_an_empty_environment_the_programs_start_and_the_doctor_says_which_nixl_to_install(bench: Bench) -> None:
    environment = bench.host()
    environment.run("uv pip install msgspec numpy pyzmq typer rich", bench.checkout)
    environment.run(WAYS["uv", "wheels"], bench.checkout)
    assert not {"nixl", "nixl-cu12", "nixl-cu13", "torch", "vllm"} & set(environment.versions())
    for program, words, code, said in (
        ("vllm-adapter", ["config", "--explain"], 0, "remote_hosts"),
        ("kv-nixl", ["doctor"], 3, "kv-nixl-agent[cu13]"),
    ):
        command = [str(environment.folder / "bin" / program), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
_LINE = re.compile(r"(?:^ *(?:\$ )?|`)((?:uv )?pip install \S[^`#\n]*)", re.MULTILINE)
# Lines that install something, continued ones joined.
INSTALLS = {" ".join(found.split()) for page in PAGES for found in _LINE.findall(page.read_text().replace("\\\n", ""))}


def test_pages_name_every_way() -> None:
    assert set(WAYS.values()) <= INSTALLS


@pytest.mark.parametrize("line", sorted(INSTALLS - set(WAYS.values())))
def test_install_lines_of_the_pages_leave_the_host_alone(bench: Bench, line: str) -> None:
    """The lines of the matrix are run for real above, these as far as an installer resolves them."""
    if line.startswith("pip install -e") and not LONG:
        pytest.skip(PIP_FROM_CHECKOUT)
    said = bench.untouched("none" if "cu1" in line else "cu13").run(line, bench.checkout, is_dry=True)
    assert not re.search(r"^ [-~] |Attempting uninstall", said, re.MULTILINE), said
    assert not re.search(r"^ \+ (torch|vllm)==|^Would install .*\b(torch|vllm)-\d", said, re.MULTILINE), said


@pytest.fixture
def strangers(tmp_path: Path) -> str:
    """An index on which a stranger has registered the five names: one version as ours, one that is higher."""
    for name in PACKAGES:
        folder = tmp_path / name
        folder.mkdir()
        wheels = [bare_wheel(folder, name, version).name for version in ("0.3.0", "0.3.99")]
        links = "".join(f'<a href="{wheel}">{wheel}</a>' for wheel in wheels)
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return tmp_path.as_uri()


@pytest.mark.parametrize("tool", ["uv pip", "pip"])
def test_no_stranger_on_an_index_gets_in(bench: Bench, strangers: str, tool: str) -> None:
    host = bench.host("cu13")
    said = host.run(f"{tool} install --find-links dist vllm-adapter", bench.checkout, index=strangers, is_dry=True)
    assert "0.3.99" in said, "an installer that asks this index takes the stranger's"
    # Hints such as the last one, of a command that lacks its libraries, are followed afterwards.
    for line in (f"{tool} {FROM_DIST}", f"{tool} install kv-handshake[cli]"):
        host.run(line, bench.checkout, index=strangers)
        assert host.versions().items() >= OURS.items()
        assert all((host.site / name.replace("-", "_") / "__init__.py").is_file() for name in PACKAGES)


@pytest.mark.parametrize("line", sorted(line for line in INSTALLS if " dist" in line))
def test_no_line_of_the_pages_asks_an_index_for_our_packages(bench: Bench, strangers: str, line: str) -> None:
    assert "0.3.99" not in bench.untouched("cu13").run(line, bench.checkout, index=strangers, is_dry=True)


def test_a_wheel_that_was_exchanged_in_the_folder_is_refused(bench: Bench, tmp_path: Path) -> None:
    copied = shutil.copytree(bench.checkout / "dist", tmp_path / "dist")
    with ZipFile(copied / "kv_handshake-0.3.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("kv_handshake/more.py", "")
    with pytest.raises(AssertionError, match=r"(?i)hash"):
        bench.host("none").run(WAYS["uv", "wheels"], tmp_path)
