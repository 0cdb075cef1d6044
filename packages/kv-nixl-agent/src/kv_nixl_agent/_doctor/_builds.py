"""Findings on the NIXL packages that are installed: one version, one owner per module, the build for torch's CUDA.

NIXL comes as a small package `nixl` and one build per accelerator (`nixl-cu12`, `nixl-cu13`). Installers put them beside each
other in any mixture. Nothing here imports torch, which takes seconds: its CUDA version is read from `torch/version.py`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent._bindings import IMPORT_NAMES
from kv_nixl_agent._doctor._environment import Finding, Severity, has_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Torch", "check_builds", "installed_torch"]

_PACKAGES: Final = tuple(name.replace("_", "-") for name in IMPORT_NAMES)
_CUDA_BUILD: Final = re.compile(r"nixl_cu(\d+)")
_TESTED: Final = "1.5.1"
_ACCEPTED: Final = ((1, 5), (2, 0))


@final
@dataclass(frozen=True, slots=True)
class Torch:
    """Installed torch: its version, and the CUDA or ROCm version that it is built for ("" where it is not)."""

    version: str
    cuda: str
    rocm: str


def check_builds(loaded: str | None, path: Sequence[str | Path] | None = None) -> Sequence[Finding]:
    """Judge the NIXL packages that are installed.

    Args:
        loaded: The module whose NIXL this process uses, for example `nixl_cu13`; None where none could be loaded.
        path: Folders to look into instead of `sys.path`.
    """
    found = list(distributions() if path is None else distributions(path=[str(folder) for folder in path]))
    return [*_check_packages(found, loaded), _check_cuda(loaded, installed_torch(found))]


def installed_torch(found: Sequence[Distribution]) -> Torch | None:
    """Return what is installed as torch, read from its files; None where there is none."""
    for distribution in found:
        if _name_of(distribution) == "torch":
            values = _constants(distribution)
            return Torch(distribution.version, values.get("cuda", ""), values.get("hip", ""))
    return None


def _check_packages(found: Sequence[Distribution], loaded: str | None) -> Sequence[Finding]:
    ours = [one for one in found if _name_of(one) in _PACKAGES]
    if not ours:
        return []
    listed = ", ".join(sorted(f"{_name_of(one)} {one.version}" for one in ours))
    findings = [*_check_owners(found), *_check_range(ours)]
    if len({one.version for one in ours}) > 1:
        remedy = "install one version of all that you keep, with --no-deps, and uninstall the others"
        findings.insert(0, Finding("nixl-packages", "error", f"mixed versions: {listed}; {remedy}"))
    if not findings:
        builds = [one for one in ours if _CUDA_BUILD.fullmatch(_name_of(one).replace("-", "_"))]
        note = f"; of {len(builds)} builds {loaded} is used" if len(builds) > 1 else ""
        is_tested = all(one.version == _TESTED for one in ours)
        tested = ", tested" if is_tested else f"; accepted, but the tests ran with {_TESTED} alone"
        findings.append(Finding("nixl-packages", "ok", listed + note + tested))
    return findings


def _check_owners(found: Sequence[Distribution]) -> Sequence[Finding]:
    """Name every NIXL module that more than one package claims to have installed: the later one overwrote the earlier."""
    owners: dict[str, list[str]] = {}
    for one in found:
        for module in {file.parts[0] for file in one.files or ()} & set(IMPORT_NAMES):
            owners.setdefault(module, []).append(f"{_name_of(one)} {one.version}")
    return [
        Finding(
            "nixl-owners",
            "error",
            f"module {module} was installed by {' and '.join(sorted(names))}: uninstall all of them, then install one",
        )
        for module, names in sorted(owners.items())
        if len(names) > 1
    ]


def _check_range(ours: Sequence[Distribution]) -> Sequence[Finding]:
    low, high = _ACCEPTED
    odd = sorted({one.version for one in ours if not low <= _numbers(one.version) < high})
    if not odd:
        return []
    text = f"NIXL {', '.join(odd)}: {_TESTED} is the version that was tested; {low[0]}.{low[1]} to below {high[0]} is accepted"
    return [Finding("nixl-version", "warning", text)]


def _check_cuda(loaded: str | None, torch: Torch | None) -> Finding:
    name = "nixl-cuda"
    if torch is None:
        return Finding(name, "ok", "no torch is installed: nothing says which CUDA this process uses")
    if torch.rocm:
        return _judge(loaded, "nixl_rocm", f"torch {torch.version} is built for ROCm {torch.rocm}")
    if not torch.cuda:
        return Finding(name, "ok", f"torch {torch.version} is built without CUDA: any build of NIXL does")
    wanted = f"nixl_cu{torch.cuda.partition('.')[0]}"
    return _judge(loaded, wanted, f"torch {torch.version} is built for CUDA {torch.cuda}")


def _judge(loaded: str | None, wanted: str, host: str) -> Finding:
    remedy = f"install {wanted.replace('_', '-')} and uninstall builds for anything else"
    if loaded is None:
        return Finding("nixl-cuda", "warning", f"{host}: {remedy}")
    if loaded == wanted:
        return Finding("nixl-cuda", "ok", f"{host}, NIXL is {loaded}")
    severity: Severity = "error" if has_gpu() else "warning"
    return Finding(
        "nixl-cuda", severity, f"{host}, but NIXL is {loaded}: it may not reach this torch's memory; {remedy}"
    )


def _name_of(distribution: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _constants(distribution: Distribution) -> Mapping[str, str]:
    """Return the texts that `torch/version.py` assigns; empty where that file is missing or something else."""
    try:
        text = distribution.locate_file("torch/version.py").read_text()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return {}
    values: dict[str, str] = {}
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            values[target.id] = value.value
    return values
