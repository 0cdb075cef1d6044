"""Findings about a machine that need no transfer: devices, limits, environment variables, plugins."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, final

from kv_nixl_agent._bindings import available_plugins, open_nixl
from kv_nixl_agent._errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Finding", "Severity", "check_environment", "check_nixl", "has_gpu"]

Severity = Literal["ok", "warning", "error"]

_MIN_LOCKED_BYTES: Final = 1 << 30
_MIN_FILES: Final = 4096


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about one aspect of the machine.

    Attributes:
        name: Stable kebab-case name.
        severity: `ok`, `warning` (works, but not as hoped) or `error` (does not work).
        message: The finding, and the remedy unless it is ok.
    """

    name: str
    severity: Severity
    message: str


def check_nixl() -> Sequence[Finding]:
    """Return findings on the NIXL package and its plugins."""
    try:
        port = open_nixl("doctor-probe", [("UCX", {})])
        plugins = available_plugins()
    except AgentError as error:
        return [Finding("nixl", "error", f"{error.code}: {error}")]
    implementation = port.features.implementation
    port.close()
    kinds = plugins.get("UCX", ((), {}))[0]
    loaded = ", ".join(f"{name} ({'/'.join(given)})" for name, (given, _) in sorted(plugins.items()) if given)
    absent = ", ".join(name for name, (given, _) in sorted(plugins.items()) if not given)
    note = f"; cannot be loaded here, for want of their libraries: {absent}" if absent else ""
    findings = [Finding("nixl", "ok", f"{implementation}; plugins {loaded}{note}")]
    if not has_gpu():
        findings.append(Finding("gpu", "ok", "no NVIDIA GPU: DRAM transfers only, VRAM is not looked at"))
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
    """Tell whether this machine shows an NVIDIA GPU."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _check_rdma() -> Finding:
    folder = Path("/sys/class/infiniband")
    devices = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if devices:
        return Finding("rdma-devices", "ok", ", ".join(devices))
    return Finding(
        "rdma-devices",
        "warning",
        "no RDMA device: between hosts everything goes over TCP; load the NIC's driver, or pass the devices on",
    )


def _check_variables(variables: Mapping[str, str]) -> Sequence[Finding]:
    findings: list[Finding] = []
    transports = [one.strip().lstrip("^") for one in variables.get("UCX_TLS", "all").lower().split(",")]
    is_exclusion = variables.get("UCX_TLS", "").startswith("^")
    if transports != ["all"] and not is_exclusion:
        if set(transports) <= {"tcp", "self"}:
            findings.append(
                Finding(
                    "ucx-tls", "warning", f"UCX_TLS={variables['UCX_TLS']} allows TCP only; unset it to use RDMA or CMA"
                )
            )
        elif has_gpu() and not any(one.startswith(("cuda", "gdr", "all")) for one in transports):
            findings.append(
                Finding(
                    "ucx-tls",
                    "error",
                    f"UCX_TLS={variables['UCX_TLS']} excludes CUDA although a GPU is present; add cuda",
                )
            )
    devices = variables.get("UCX_NET_DEVICES", "all").split(",")
    known = {entry.name for folder in ("infiniband", "net") for entry in _entries(Path("/sys/class") / folder)}
    missing = [one for one in devices if one != "all" and one.split(":")[0] not in known]
    if missing:
        findings.append(
            Finding(
                "ucx-net-devices",
                "error",
                f"UCX_NET_DEVICES names {missing}, which this machine lacks; it has {sorted(known)}",
            )
        )
    plugin_folder = variables.get("NIXL_PLUGIN_DIR")
    if plugin_folder is not None and not Path(plugin_folder).is_dir():
        findings.append(
            Finding("plugin-dir", "error", "NIXL_PLUGIN_DIR is not a directory; unset it to use the wheel's own")
        )
    return findings or [Finding("variables", "ok", "no UCX or NIXL variable stands in the way")]


def _entries(folder: Path) -> Sequence[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _check_limit(name: str, which: int, minimum: int, remedy: str) -> Finding:
    limit = resource.getrlimit(which)[0]
    if limit == resource.RLIM_INFINITY or limit >= minimum:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        return Finding(name, "ok", shown)
    return Finding(name, "warning", f"limit {limit} is below {minimum}: registration may fail at scale; {remedy}")


def _check_ptrace() -> Finding:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text().strip() if path.exists() else "0"
    if scope == "0" or os.geteuid() == 0:
        return Finding("cma", "ok", f"process_vm_readv is allowed (ptrace_scope {scope})")
    return Finding(
        "cma", "warning", f"ptrace_scope {scope} forbids reads between processes of one host: they go over TCP"
    )


def _check_shared_memory() -> Finding:
    path = Path("/dev/shm")  # noqa: S108 - the mount that UCX uses
    if not path.is_dir():
        return Finding("shared-memory", "warning", f"{path} is missing: UCX cannot use shared memory")
    free = shutil.disk_usage(path).free
    if free >= 64 << 20:
        return Finding("shared-memory", "ok", f"{free >> 20} MiB free in {path}")
    return Finding("shared-memory", "warning", f"only {free >> 20} MiB free in {path}; give the container more")
