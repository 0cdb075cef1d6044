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
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest

from kvdev.dist import build_all
from kvdev.paths import PACKAGES, ROOT
from kvdev.uvtool import find_or_install_uv, uv_environment

pytestmark = pytest.mark.full  # environments are made by the dozen

LONG = os.environ.get("KVDEV_LONG") == "1"
PIP_FROM_CHECKOUT = "pip builds each package of a checkout in an environment of its own: about 10 s a host (--long)"
ADDRESS = "https://forge.test/team/project"
BUILDS = {"nixl-cu12": ["torch", "numpy"], "nixl-cu13": ["torch", "numpy"]}
# Brought by vLLM on every host.
BROUGHT = {"numpy": "2.2.6", "msgspec": "0.20.0", "pyzmq": "27.0.0", "typer": "0.21.0", "rich": "14.2.0"}
HOSTS: dict[str, dict[str, str]] = {
    "cu13": {"torch": "2.13.0", "vllm": "0.32.0", "nixl": "1.4.1", "nixl-cu13": "1.4.1"},
    "cu12": {"torch": "2.11.0+cu128", "vllm": "0.31.0", "nixl-cu12": "1.5.0"},
    "none": {"torch": "2.13.0", "vllm": "0.32.0"},
}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the programs that install into it."""

    folder: Path
    uv: Path
    pip: Path

    def run(self, words: list[str], cwd: Path, *, is_dry: bool = False, index: str = "") -> str:
        """Run `uv pip install ...` or `pip install ...`, as a person would with this environment active, and this index."""
        tool = [str(self.uv)] if words[0] == "uv" else [str(self.pip), "-m", "pip", "--python", str(self.folder)]
        command = [*tool, *words[1:], *(["--dry-run"] if is_dry else [])]
        environment = {**uv_environment(), "VIRTUAL_ENV": str(self.folder)}
        if index:
            environment |= {"UV_DEFAULT_INDEX": index, "PIP_INDEX_URL": index}
        ended = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stdout}"
        return ended.stdout

    def versions(self) -> dict[str, str]:
        """Return what is installed, with the versions."""
        found = self.folder.glob("lib/python3*/site-packages/*.dist-info/METADATA")
        heads = [HeaderParser().parsestr(file.read_text()) for file in found]
        return {head["Name"]: head["Version"] for head in heads}


class Bench:
    """Programs, wheels and a copy of the checkout, shared by all cells, and a way to make hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uv, self.checkout = folder, find_or_install_uv(), folder / "checkout"
        self._venv("pip", "--seed")
        self.pip = folder / "pip" / "bin" / "python"
        self.checkout.mkdir()
        for name in ("pyproject.toml", "uv.toml", "uv.lock"):
            shutil.copy(ROOT / name, self.checkout)
        junk = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT / "packages", self.checkout / "packages", ignore=junk)
        self.files = build_all(self.uv, self.checkout / "dist")

    def host(self, packages: Mapping[str, str]) -> Environment:
        """Make an environment in which these packages are installed, as far as an installer can see."""
        number = len(list(self.folder.glob("host-*")))
        venv = self._venv(f"host-{number}")
        (site,) = venv.glob("lib/python3*/site-packages")
        for name, version in packages.items():
            meta = [f"nixl-cu12=={version}", f"nixl-cu13=={version}"] if name == "nixl" else BUILDS.get(name, [])
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            needs = "".join(f"Requires-Dist: {need}\n" for need in meta)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
            (info / "WHEEL").write_text(
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            (info / "INSTALLER").write_text("test\n")
            (info / "RECORD").write_text(
                "".join(f"{info.name}/{one},,\n" for one in ("METADATA", "WHEEL", "INSTALLER", "RECORD"))
            )
        return Environment(venv, self.uv, self.pip)

    def _venv(self, name: str, *words: str) -> Path:
        command = [
            str(self.uv),
            "venv",
            "--quiet",
            "--no-config",
            "--python",
            sys.executable,
            *words,
            str(self.folder / name),
        ]
        subprocess.run(command, check=True, timeout=120, env=uv_environment())
        return self.folder / name


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    patch = pytest.MonkeyPatch()
    server, _, repository = ADDRESS.rpartition("/team/")
    patch.setenv("GITHUB_SERVER_URL", server)
    patch.setenv("GITHUB_REPOSITORY", f"team/{repository}")
    try:
        return Bench(tmp_path_factory.mktemp("matrix"))
    finally:
        patch.undo()


CLI = {"vllm-adapter": "[cli]"}
FROM_DIST = [
    "install",
    "--no-index",
    "--no-deps",
    "--find-links",
    "dist",
    "--require-hashes",
    "-r",
    "dist/requirements.txt",
]
THIRD_PARTY = ["uv", "pip", "install", "msgspec", "numpy", "pyzmq", "typer", "rich"]
WAYS = {
    ("uv", "wheels"): ["uv", "pip", *FROM_DIST],
    ("pip", "wheels"): ["pip", *FROM_DIST],
    ("uv", "checkout"): ["uv", "pip", "install", "./packages/vllm-adapter[cli]"],
    ("pip", "checkout"): ["pip", "install", *(f"./packages/{name}{CLI.get(name, '')}" for name in PACKAGES)],
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("tool", "source"), WAYS, ids=lambda word: word)
def test_the_hosts_packages_stay_as_they_are(bench: Bench, tool: str, source: str, host: str) -> None:
    if (tool, source) == ("pip", "checkout") and host != "cu13" and not LONG:
        pytest.skip(PIP_FROM_CHECKOUT)
    before = {**HOSTS[host], **BROUGHT}
    environment = bench.host(before)
    said = environment.run(WAYS[tool, source], bench.checkout)
    after = environment.versions()
    assert {name: after.pop(name) for name in PACKAGES} == dict.fromkeys(PACKAGES, "0.3.0"), said
    assert after == before, said


@pytest.mark.parametrize("extra", ["cu13", "cu12"])
def test_an_extra_brings_one_build_of_nixl_and_leaves_torch(bench: Bench, extra: str) -> None:
    environment = bench.host({**HOSTS["none"], **BROUGHT})
    words = ["uv", "pip", "install", "--find-links", "dist", f"vllm-adapter[{extra}]"]
    added = re.findall(r"^ \+ (\S+)==", environment.run(words, bench.checkout, is_dry=True), re.MULTILINE)
    assert sorted(added) == sorted([*PACKAGES, f"nixl-{extra}"])


def test_in_an_empty_environment_the_programs_start_and_the_doctor_says_which_nixl_to_install(bench: Bench) -> None:
    environment = bench.host({})
    environment.run(THIRD_PARTY, bench.checkout)
    environment.run(WAYS["uv", "wheels"], bench.checkout)
    assert not {"nixl", "nixl-cu12", "nixl-cu13", "torch", "vllm"} & set(environment.versions())
    programs = environment.folder / "bin"
    explained = subprocess.run(
        [programs / "vllm-adapter", "config", "--explain"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (explained.returncode, "remote_hosts" in explained.stdout) == (0, True), explained.stderr
    doctor = subprocess.run([programs / "kv-nixl", "doctor"], check=False, capture_output=True, text=True, timeout=60)
    assert doctor.returncode == 3, doctor.stdout
    assert "kv-nixl-agent[cu13]" in doctor.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_is_complete_and_its_links_lead_somewhere_from_an_index(bench: Bench, package: str) -> None:
    (wheel,) = (
        file for file in bench.files if file.name.startswith(f"{package.replace('-', '_')}-") and file.suffix == ".whl"
    )
    with ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    for field in ("Summary", "Author", "Keywords", "License-Expression", "Requires-Python"):
        assert metadata[field], field
    assert len(metadata.get_all("Classifier", [])) >= 5
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    needs = metadata.get_all("Requires-Dist", [])
    assert [need for need in needs if need.startswith(("nixl", "vllm", "torch")) and "extra ==" not in need] == []
    assert [need for need in needs if need.startswith(("nixl", "vllm")) and ("<" not in need or ">=" not in need)] == []


def install_lines() -> set[str]:
    """Return the lines of all pages that install something, continued lines joined."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
    line = re.compile(r"(?:^ *(?:\$ )?|`)((?:uv )?pip install \S[^`#\n]*)", re.MULTILINE)
    return {" ".join(found.split()) for page in pages for found in line.findall(page.read_text().replace("\\\n", ""))}


INSTALLS = install_lines()
IN_THE_MATRIX = [shlex.join(words) for words in WAYS.values()]


@pytest.mark.parametrize("line", sorted(INSTALLS - set(IN_THE_MATRIX)))
def test_install_lines_of_the_pages_leave_the_host_alone(bench: Bench, line: str) -> None:
    """The lines of the matrix are run for real above, these as far as an installer resolves them."""
    if line.startswith("pip install -e") and not LONG:
        pytest.skip(PIP_FROM_CHECKOUT)
    host = bench.host({**HOSTS["none" if "cu1" in line else "cu13"], **BROUGHT})
    said = host.run(shlex.split(line), bench.checkout, is_dry=True)
    assert not re.search(r"^ [-~] |Attempting uninstall", said, re.MULTILINE), said
    assert not re.search(r"^ \+ (torch|vllm)==|^Would install .*\b(torch|vllm)-\d", said, re.MULTILINE), said


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[str]:
    """An index on which a stranger has registered the five names: one version as ours, one that is higher."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        files = [f"{name.replace('-', '_')}-{version}-py3-none-any.whl" for version in ("0.3.0", "0.3.99")]
        for file in files:
            info, version = "-".join(file.split("-")[:2]) + ".dist-info", file.split("-")[1]
            with ZipFile(tmp_path / name / file, "w") as wheel:
                wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
                wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                wheel.writestr(f"{info}/RECORD", "")
        links = "".join(f'<a href="{file}">{file}</a>' for file in files)
        (tmp_path / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name in the base class)
        """Log nothing."""


def _installed(environment: Environment) -> dict[str, str]:
    """Return the installed files of our packages: a stranger's have no modules."""
    modules = {name: f"{name.replace('-', '_')}/__init__.py" for name in PACKAGES}
    (site,) = environment.folder.glob("lib/python3*/site-packages")
    return {name: environment.versions()[name] for name, module in modules.items() if (site / module).is_file()}


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_no_stranger_on_an_index_gets_in(bench: Bench, strangers: str, tool: str) -> None:
    host = bench.host({**HOSTS["cu13"], **BROUGHT})
    prefix = ["uv", "pip"] if tool == "uv" else ["pip"]
    said = host.run(
        [*prefix, "install", "--find-links", "dist", "vllm-adapter"], bench.checkout, index=strangers, is_dry=True
    )
    assert "0.3.99" in said, "an installer that asks this index takes the stranger's"
    host.run(WAYS[tool, "wheels"], bench.checkout, index=strangers)
    assert _installed(host) == dict.fromkeys(PACKAGES, "0.3.0")
    # Hints such as this one, of a command that lacks its libraries, are followed afterwards.
    host.run([*prefix, "install", "kv-handshake[cli]"], bench.checkout, index=strangers)
    assert _installed(host) == dict.fromkeys(PACKAGES, "0.3.0")


@pytest.mark.parametrize("line", sorted(line for line in INSTALLS if " dist" in line))
def test_no_line_of_the_pages_asks_an_index_for_our_packages(bench: Bench, strangers: str, line: str) -> None:
    host = bench.host({**HOSTS["cu13"], **BROUGHT})
    said = host.run(shlex.split(line), bench.checkout, index=strangers, is_dry=True)
    assert "0.3.99" not in said, said


def test_a_wheel_that_was_exchanged_in_the_folder_is_refused(bench: Bench, tmp_path: Path) -> None:
    copied = shutil.copytree(bench.checkout / "dist", tmp_path / "dist")
    with ZipFile(copied / "kv_handshake-0.3.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("kv_handshake/more.py", "")
    with pytest.raises(AssertionError, match=r"(?i)hash"):
        bench.host(BROUGHT).run(WAYS["uv", "wheels"], tmp_path)


def test_pages_name_every_way() -> None:
    assert set(IN_THE_MATRIX) <= INSTALLS
