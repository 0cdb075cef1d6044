"""Findings about a machine that need no transfer: devices, limits, environment variables, plugins, installed packages.

NIXL comes as a small package `nixl` and one build per accelerator (`nixl-cu12`, `nixl-cu13`). Installers put them beside each
other in any mixture. Nothing here imports torch, which takes seconds: its CUDA version is read from `torch/version.py`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, final

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.binding import IMPORT_NAMES, open_nixl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Finding",
    "Severity",
    "check_builds",
    "check_environment",
    "check_nixl",
    "forbidding_ptrace_scope",
    "has_gpu",
    "rdma_devices",
]

Severity = Literal["ok", "warning", "error"]

_MIN_LOCKED_BYTES: Final = 1 << 30
_MIN_FILES: Final = 4096


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about one aspect of the machine.

    Attributes:
        name: Stable kebab-case name.
        severity: `ok`, `warning` (works, with warnings) or `error` (does not work).
        message: The finding, and the remedy unless it is ok.
    """

    name: str
    severity: Severity
    message: str


def check_nixl() -> Sequence[Finding]:
    """Return findings on the NIXL package and its plugins."""
    try:
        port = open_nixl("doctor-probe", [("UCX", {})])
        plugins, implementation = port.plugins(), port.implementation
        port.close()
    except AgentError as error:
        return [Finding("nixl", "error", str(error))]
    kinds = plugins.get("UCX", ())
    loaded = ", ".join(f"{name} ({'/'.join(given)})" for name, given in sorted(plugins.items()) if given)
    absent = ", ".join(name for name, given in sorted(plugins.items()) if not given)
    note = f"; cannot be loaded here, for want of their libraries: {absent}" if absent else ""
    findings = [Finding("nixl", "ok", f"{implementation}; plugins {loaded}{note}")]
    if not has_gpu():
        findings.append(Finding("gpu", "ok", "no NVIDIA GPU: DRAM transfers only, VRAM is not tried"))
    elif "VRAM" not in kinds:
        findings.append(Finding("gpu", "error", f"a GPU is present, but the UCX plugin offers only {kinds}"))
    else:
        findings.append(Finding("gpu", "ok", "a GPU is present and the UCX plugin offers VRAM"))
    return findings


def check_environment(environment: Mapping[str, str] | None = None) -> Sequence[Finding]:
    """Return findings on devices, limits and variables."""
    variables = os.environ if environment is None else environment
    return [
        _check_rdma(),
        *_check_variables(variables),
        _check_limit("locked-memory", resource.RLIMIT_MEMLOCK, _MIN_LOCKED_BYTES, "ulimit -l unlimited"),
        _check_limit("open-files", resource.RLIMIT_NOFILE, _MIN_FILES, "ulimit -n 65536"),
        _check_ptrace(),
        _check_shared_memory(),
    ]


def has_gpu() -> bool:
    """Return whether this machine shows an NVIDIA GPU."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def rdma_devices() -> Sequence[str]:
    """Return the names of the RDMA devices."""
    return _names_in(Path("/sys/class/infiniband"))


def forbidding_ptrace_scope() -> str:
    """Return the `ptrace_scope` if it forbids reads between processes of one host; "" if such reads are allowed."""
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text().strip() if path.exists() else "0"
    return "" if scope == "0" or os.geteuid() == 0 else scope


def _names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _check_rdma() -> Finding:
    devices = rdma_devices()
    if devices:
        return Finding("rdma-devices", "ok", ", ".join(devices))
    return Finding(
        "rdma-devices",
        "warning",
        "no RDMA device: between hosts everything goes over TCP; load the NIC's driver, or pass the devices on",
    )


def _check_variables(variables: Mapping[str, str]) -> Sequence[Finding]:
    findings: list[Finding] = []
    tls = variables.get("UCX_TLS", "all")
    transports = {one.strip() for one in tls.lower().split(",")}
    if tls.startswith("^") or transports == {"all"}:
        pass
    elif transports <= {"tcp", "self"}:
        findings.append(Finding("ucx-tls", "warning", f"UCX_TLS={tls} allows TCP only; unset it to use RDMA or CMA"))
    elif has_gpu() and not any(one.startswith(("cuda", "gdr", "all")) for one in transports):
        text = f"UCX_TLS={tls} excludes CUDA although a GPU is present; add cuda"
        findings.append(Finding("ucx-tls", "error", text))
    devices = variables.get("UCX_NET_DEVICES", "all").split(",")
    known = {*rdma_devices(), *_names_in(Path("/sys/class/net"))}
    missing = [one for one in devices if one != "all" and one.split(":")[0] not in known]
    if missing:
        text = f"UCX_NET_DEVICES names {missing}, which this machine lacks; it has {sorted(known)}"
        findings.append(Finding("ucx-net-devices", "error", text))
    plugin_folder = variables.get("NIXL_PLUGIN_DIR")
    if plugin_folder is not None and not Path(plugin_folder).is_dir():
        text = "NIXL_PLUGIN_DIR is not a directory; unset it to use the wheel's own"
        findings.append(Finding("plugin-dir", "error", text))
    return findings or [Finding("variables", "ok", "no UCX or NIXL variable stands in the way")]


def _check_limit(name: str, which: int, minimum: int, remedy: str) -> Finding:
    limit = resource.getrlimit(which)[0]
    if limit == resource.RLIM_INFINITY or limit >= minimum:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        return Finding(name, "ok", shown)
    return Finding(name, "warning", f"limit {limit} is below {minimum}: registration may fail at scale; {remedy}")


def _check_ptrace() -> Finding:
    scope = forbidding_ptrace_scope()
    if not scope:
        return Finding("cma", "ok", "process_vm_readv is allowed")
    text = f"ptrace_scope {scope} forbids reads between processes of one host: they go over TCP"
    return Finding("cma", "warning", text)


def _check_shared_memory() -> Finding:
    path = Path("/dev/shm")  # noqa: S108 - the mount that UCX uses
    if not path.is_dir():
        return Finding("shared-memory", "warning", f"{path} is missing: UCX cannot use shared memory")
    free = shutil.disk_usage(path).free
    if free >= 64 << 20:
        return Finding("shared-memory", "ok", f"{free >> 20} MiB free in {path}")
    return Finding("shared-memory", "warning", f"only {free >> 20} MiB free in {path}; give the container more")


_PACKAGES: Final = tuple(name.replace("_", "-") for name in IMPORT_NAMES)
_ASSIGNED: Final = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]\s*$", re.MULTILINE)
_CUDA_BUILD: Final = re.compile(r"nixl_cu(\d+)")
_TESTED: Final = "1.5.1"
_ACCEPTED: Final = ((1, 5), (2, 0))


def check_builds(loaded: str | None, path: Sequence[str | Path] | None = None) -> Sequence[Finding]:
    """Judge the NIXL packages that are installed.

    Args:
        loaded: The module whose NIXL this process uses, for example `nixl_cu13`; None where none could be loaded.
        path: Folders to look into instead of `sys.path`.
    """
    found = list(distributions() if path is None else distributions(path=[str(folder) for folder in path]))
    return [*_check_packages(found, loaded), _check_cuda(loaded, found)]


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


def _check_cuda(loaded: str | None, found: Sequence[Distribution]) -> Finding:
    name = "nixl-cuda"
    torch = next((one for one in found if _name_of(one) == "torch"), None)
    if torch is None:
        return Finding(name, "ok", "no torch is installed: nothing says which CUDA this process uses")
    cuda, rocm = _torch_builds(torch)
    if not cuda and not rocm:
        return Finding(name, "ok", f"torch {torch.version} is built without CUDA: any build of NIXL does")
    wanted = "nixl_rocm" if rocm else f"nixl_cu{cuda.partition('.')[0]}"
    host = f"torch {torch.version} is built for {f'ROCm {rocm}' if rocm else f'CUDA {cuda}'}"
    remedy = f"install {wanted.replace('_', '-')} and uninstall builds for anything else"
    if loaded is None:
        return Finding(name, "warning", f"{host}: {remedy}")
    if loaded == wanted:
        return Finding(name, "ok", f"{host}, NIXL is {loaded}")
    text = f"{host}, but NIXL is {loaded}: it may not reach this torch's memory; {remedy}"
    return Finding(name, "error" if has_gpu() else "warning", text)


def _torch_builds(torch: Distribution) -> tuple[str, str]:
    """Return the CUDA and ROCm versions that `torch/version.py` assigns; empty where it says nothing."""
    try:
        text = Path(str(torch.locate_file("torch/version.py"))).read_text()
    except (OSError, ValueError):
        return "", ""
    values = dict(_ASSIGNED.findall(text))
    return values.get("cuda", ""), values.get("hip", "")


def _name_of(distribution: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
