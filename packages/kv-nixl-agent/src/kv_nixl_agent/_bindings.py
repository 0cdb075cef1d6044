"""The only module that loads NIXL: it finds the package and opens agents."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from ._errors import AgentError
from ._nixl_port import NixlBinding, attempt
from ._progress import sleeping_progress_thread
from ._request_pool import POOL
from ._worker_turns import WorkerTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._nixl_api import NixlAgent

__all__ = ["IMPORT_NAMES", "available_plugins", "find_nixl", "loaded_build", "open_nixl"]

IMPORT_NAMES: Final = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
"""Modules to try, in this order; `nixl` itself loads one of the others."""

# vLLM sets the same before its first import: without a bound, UCX's registration cache keeps unmapped memory.
_BEFORE_IMPORT: Final = MappingProxyType({"UCX_RCACHE_MAX_UNRELEASED": "1024"})

# Accepted by the UCX plugin, although it does not list them.
_UNLISTED: Final = frozenset({"num_threads", "split_batch_size", "engine_config"})


def find_nixl() -> Any:  # noqa: ANN401 - the library is dynamic behind this seam
    """Return the first NIXL Python package that imports.

    Raises:
        AgentError: `nixl-missing`, naming what was tried and why each failed.
    """
    for name, value in _BEFORE_IMPORT.items():
        os.environ.setdefault(name, value)
    reasons: list[str] = []
    for name in IMPORT_NAMES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise AgentError(
        "nixl-missing",
        "no NIXL package can be imported ("
        + "; ".join(reasons)
        + "); install the build for torch's CUDA, nixl-cu12 or nixl-cu13: pip install 'kv-nixl-agent[cu13]'",
    )


def loaded_build() -> str | None:
    """Return the module that NIXL is loaded from, for example `nixl_cu13`; None where none can be loaded."""
    try:
        return _build_of(find_nixl())
    except AgentError:
        return None


def _build_of(module: Any) -> str:  # noqa: ANN401
    return str(module.nixl_agent.__module__).split(".")[0]


def _version_of(module: Any) -> str:  # noqa: ANN401
    name = _build_of(module)
    for candidate in (name, name.replace("_", "-"), "nixl"):
        try:
            return f"{name} {importlib.metadata.version(candidate)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{name} (version unknown)"


def available_plugins() -> Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]]:
    """Return (memory kinds, default parameters) of every NIXL plugin that can be loaded here."""
    module = find_nixl()
    POOL.watch()
    agent = attempt("create agent", lambda: module.nixl_agent("plugin-query", module.nixl_agent_config(backends=[])))
    result: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {}
    for name in agent.get_plugin_list():
        kinds = tuple(str(kind).removesuffix("_SEG") for kind in agent.get_plugin_mem_types(name))
        result[str(name)] = (kinds, dict(agent.get_plugin_params(name)))
    POOL.zero()
    return result


def open_nixl(
    agent_name: str,
    backends: Sequence[tuple[str, Mapping[str, str]]],
    *,
    progress_thread: bool = True,
) -> NixlBinding:
    """Create a NIXL agent with its backends; the default `PortFactory`.

    Raises:
        AgentError: `nixl-missing`, `backend-unavailable`.
    """
    module = find_nixl()
    POOL.watch()

    def create() -> NixlAgent:
        arguments: dict[str, object] = {
            "backends": [],
            "capture_telemetry": True,
            "enable_prog_thread": progress_thread,
        }
        modes = getattr(module, "nixl_thread_sync_t", None)
        if modes is not None:
            arguments["sync_mode"] = modes[
                "NIXL_THREAD_SYNC_RW"
            ]  # the WorkerTurns of this thread and NIXL's own threads
        with sleeping_progress_thread(module.nixl_agent):
            return cast("NixlAgent", module.nixl_agent(agent_name, module.nixl_agent_config(**arguments)))

    agent = attempt("create agent", create)
    plugins = list(agent.get_plugin_list())
    for name, parameters in backends:
        if name not in plugins:
            raise AgentError(
                "backend-unavailable", f"NIXL has no plugin {name!r} here; it has {', '.join(plugins)}", backend=name
            )
        known = agent.get_plugin_params(name)
        POOL.zero()
        unknown = sorted(set(parameters) - set(known) - _UNLISTED)
        if known and unknown:
            raise AgentError(
                "backend-unavailable",
                f"plugin {name} has no parameters {unknown}; it has {', '.join(sorted(known))}",
                backend=name,
            )
        create_backend: Callable[[], None] = functools.partial(agent.create_backend, name, dict(parameters))
        try:
            attempt("create_backend", create_backend)
        except AgentError as error:
            raise AgentError(
                "backend-unavailable", f"plugin {name} did not start with {dict(parameters)}: {error}", backend=name
            ) from error
    turns = [WorkerTurns(agent, agent_name, parameters) for name, parameters in backends if name == "UCX"]
    return NixlBinding(agent, _version_of(module), next(iter(turns), None))
