"""Checks at start: refusals and warnings, in a table of unusable and risky conditions; `codes.toml` has the reasons.

A hand-over that can never succeed is detected at start, instead of by the first request, by an engine whose KV is silently
wrong, or by every peer. The rows read the facts about the engine and the connector's keys.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, Final

from vllm_adapter.codes import reason_of
from vllm_adapter.errors import UnsupportedHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config.keys import Settings

    Applies = Callable[[EngineFacts, Settings], bool]

__all__ = [
    "PORT_VARIABLE",
    "REFUSALS",
    "WARNINGS",
    "WITHOUT_HOOKS",
    "host_refusals",
    "host_warnings",
    "kept_memory",
    "listening_port",
    "streaming_warnings",
]

PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_SHOWN_CHARACTERS = 80
_MOST_PORTS = 65535
_LEAST_PORT = 1024
"""Lowest port that readers of tickets accept."""
_HOST_TRANSPORTS = frozenset(
    {"all", "tcp", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem", "self", "srd"}
    | {"ib", *(f"{kind}{end}" for kind in ("rc", "ud", "dc") for end in ("", "_v", "_x", "_verbs", "_mlx5"))}
)
"""Transports and their aliases by which UCX reads host memory. Source: `ucx_info -d` and UCX's documentation of UCX_TLS."""
_CUDA_IPC: Final = frozenset({"all", "cuda", "cuda_ipc"})
_OFF: Final = frozenset({"n", "no", "off", "0"})
WITHOUT_HOOKS: Final = "vLLM {}, which does not tell connectors"
"""Obstacle to sleep of a release, which it names."""


REFUSALS: Mapping[str, tuple[Applies, str]] = {
    "prefill-context-parallel": (lambda it, _: it.pcp > 1, "prefill_context_parallel_size {it.pcp}"),
    "context-turns-uneven": (
        lambda it, _: any(group.block_tokens % it.deal_of(group)[2] for group in it.groups),
        "cp_kv_cache_interleave_size {it.interleave_tokens}",
    ),
    "side-channel-wildcard": (lambda it, _: _is_wildcard(it.host), "'{it.host}'"),
    "side-channel-port": (lambda it, _: not 0 < it.port <= _MOST_PORTS, "{it.port}"),
    "sleep-mode-unsupported": (
        lambda it, _: it.has_sleep_mode and bool(it.sleep_obstacle),
        "found: {it.sleep_obstacle}",
    ),
    "computed-kv-scales": (lambda it, _: it.computes_scales, ""),
    "elastic-expert-parallel": (lambda it, _: it.is_elastic, ""),
    "host-resident-cache": (lambda it, _: it.has_host_blocks, ""),
    "encoder-decoder": (lambda it, _: it.has_encoder, ""),
    "routed-experts-lost": (lambda it, _: it.returns_experts, ""),
    "readback-drafted-state": (
        lambda it, keys: keys.bidirectional_kv_xfer and it.has_state and it.is_speculative,
        "",
    ),
    "outer-role-differs": (
        lambda it, _: it.outer_role == "kv_producer" and it.kv_role != "kv_producer",
        "outer: '{it.outer_role}', this one: '{it.kv_role}'",
    ),
    "mirror-pipeline-speculative": (
        lambda it, _: it.is_mirrored and it.is_speculative and it.pp > 1 and not it.has_v2_runner,
        "pipeline stages: {it.pp}",
    ),
}
"""By code: the condition, and the values that were found. Checked elsewhere: keys and values (`config.py`), missing NIXL back
ends (`kv-nixl-agent`)."""

WARNINGS: Mapping[str, tuple[Applies, str]] = {
    "side-channel-localhost": (lambda it, _: it.host == "localhost", ""),
    "side-channel-link-local": (lambda it, _: _is_link_local(it.host), "'{it.host}'"),
    "side-channel-port-low": (lambda it, _: it.port < _LEAST_PORT, "{it.port}"),
    "ucx-without-host-memory": (
        lambda it, keys: "UCX" in keys.backends and not _reaches_host_memory(it.ucx_tls),
        "'{it.ucx_tls}'",
    ),
}


def host_refusals(facts: EngineFacts, settings: Settings) -> Iterator[UnsupportedHost]:
    """Yield an error for each row of `REFUSALS` that applies to this engine."""
    for code, (applies, found) in REFUSALS.items():
        if applies(facts, settings):
            context = {"kv_role": facts.kv_role, "host": facts.host, "pp": facts.pp, "pcp": facts.pcp}
            yield UnsupportedHost(reason_of(code, found.format(it=facts)), code=code, context=context)


def host_warnings(facts: EngineFacts, settings: Settings) -> Iterator[str]:
    """Yield a sentence with its code for each row of `WARNINGS` that applies to this engine."""
    for code, (applies, found) in WARNINGS.items():
        if applies(facts, settings):
            yield f"{reason_of(code, found.format(it=facts))} ({code})"


def _is_wildcard(host: str) -> bool:
    address = _address(host)
    return host.strip() in {"", "*"} if address is None else address.is_unspecified


def _is_link_local(host: str) -> bool:
    address = _address(host)
    return address is not None and (address.is_link_local or getattr(address, "scope_id", None) is not None)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _reaches_host_memory(ucx_tls: str) -> bool:
    """Return whether a UCX_TLS has a transport for host memory; a list that only excludes some is trusted."""
    return not ucx_tls or ucx_tls.startswith("^") or not _transports(ucx_tls).isdisjoint(_HOST_TRANSPORTS)


def _transports(ucx_tls: str) -> set[str]:
    return {name.strip().lower().removeprefix("\\") for name in ucx_tls.removeprefix("^").split(",")}


def kept_memory(backends: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]) -> str:
    """Return by what deregistered memory would stay pinned or mapped; empty where nothing keeps it.

    Sources: vLLM's own connector sleeps with UCX alone, without its registration cache and CUDA IPC, whose mappings peers keep.
    NIXL lets variables of the environment override an agent's parameters.
    """
    if list(backends) != ["UCX"]:
        return f"backends {list(backends)}"
    if "engine_config" in backends["UCX"]:  # it replaces the one that leaves the cache and CUDA IPC out
        return "UCX with an engine_config in backends"
    cache, tls = environment.get("UCX_RCACHE_ENABLE", "n"), environment.get("UCX_TLS", "")
    if cache.lower() not in _OFF:
        return f"UCX_RCACHE_ENABLE={cache}"
    names = _transports(tls)
    has_ipc = names.isdisjoint({"cuda", "cuda_ipc"}) if tls.startswith("^") else not names.isdisjoint(_CUDA_IPC)
    return f"UCX_TLS={tls}" if has_ipc else ""


def streaming_warnings(settings: Settings) -> Iterator[str]:
    """Yield a sentence if streaming is on and nothing would be streamed."""
    if settings.streaming and not settings.has_secrets and not settings.remote_hosts:
        yield (
            "streaming: without ticket_secrets or remote_hosts this engine refuses early tickets (ticket-early-uncovered), so "
            "nothing is streamed to or from it"
        )


def listening_port(read: Callable[[], int], data_parallel_index: int) -> int:
    """Return the port on which an engine's side channel listens: the environment's port plus the data-parallel index.

    Args:
        read: Returns the number in `PORT_VARIABLE`, or its default.
        data_parallel_index: The engine's place among those of its data-parallel group. Source: vLLM's own connector adds it.

    Raises:
        UnsupportedHost: `side-channel-port`: the variable holds no number.
    """
    try:
        return read() + data_parallel_index
    except ValueError:
        value = os.environ.get(PORT_VARIABLE, "")
        hint = ""
        if "://" in value:
            hint = (
                "; Kubernetes sets it so in every pod beside a Service named vllm-nixl-side-channel: rename that Service, set "
                "the variable in the pod's env, or enableServiceLinks to false in its spec"
            )
        raise UnsupportedHost(
            f"{PORT_VARIABLE} is {value[:_SHOWN_CHARACTERS]!r}, which is not a number: it must be a port, 1 to 65535{hint}",
            code="side-channel-port",
            fault="environment",
            context={"variable": PORT_VARIABLE, "value": value},
        ) from None
