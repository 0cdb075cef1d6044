"""Checks at start: refusals and warnings, in a table whose rows each name an unusable or risky condition and the reason.

A hand-over that can never succeed is detected at start, instead of by the first request, by an engine whose KV is silently
wrong, or by every peer. The rows read a `Situation` of plain values, which `situation.py` derives from the host.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from vllm_adapter.config.keys import Settings
from vllm_adapter.errors import UnsupportedHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "PORT_VARIABLE",
    "REFUSALS",
    "WARNINGS",
    "Situation",
    "check_start",
    "listening_port",
    "streaming_warnings",
]

_logger = logging.getLogger("vllm.vllm_adapter")
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_SHOWN_CHARACTERS = 80
_ONLY_WITH_STREAMING: Final = ("stream_slots", "stream_reserve_fraction", "ask_wait_s")
_MOST_PORTS = 65535
_LEAST_PORT = 1024
"""Lowest port that readers of tickets accept."""
_HOST_TRANSPORTS = frozenset(
    {"all", "tcp", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem", "self", "srd"}
    | {"ib", *(f"{kind}{end}" for kind in ("rc", "ud", "dc") for end in ("", "_v", "_x", "_verbs", "_mlx5"))}
)
"""Transports and their aliases by which UCX reads host memory. Source: `ucx_info -d` and UCX's documentation of UCX_TLS."""


@final
@dataclass(frozen=True, slots=True)
class Situation:
    """Facts that the rows check.

    Attributes:
        version: The host's (major, minor).
        kv_role: `"kv_producer"`, `"kv_consumer"` or `"kv_both"`.
        outer_role: Role of a MultiConnector around this connector; `kv_role` without one, or where it cannot be seen.
        pp: Pipeline stages.
        pcp: Prefill context-parallel size.
        host: Address at which peers reach this engine's side channel.
        port: Its port there, including the data-parallel index.
        has_sleep_mode: Whether the host may release the cache's memory.
        computes_scales: Whether the host derives the cache's scales from the first prompt.
        is_bidirectional: Whether decode engines hand blocks back for the next turn.
        uses_ucx: Whether UCX is among the back ends.
        is_mirrored: Whether peers read a mirror of the cache in host memory.
        is_speculative: Whether the host drafts tokens.
        has_v2_runner: Whether its model runner has version 2.
        has_state: Whether some layers keep a recurrent state.
        ucx_tls: `UCX_TLS` of the environment; empty for UCX's own choice.
        is_elastic: Whether data-parallel ranks may join and leave a running engine.
        has_host_blocks: Whether the host keeps a part of the cache in its own memory and swaps pages in (HiSparse).
        returns_experts: Whether answers tell which experts computed each token.
    """

    version: tuple[int, int] = (0, 32)
    kv_role: str = "kv_both"
    outer_role: str = "kv_both"
    pp: int = 1
    pcp: int = 1
    host: str = "10.0.0.1"
    port: int = 5600
    has_sleep_mode: bool = False
    computes_scales: bool = False
    is_bidirectional: bool = False
    uses_ucx: bool = True
    is_mirrored: bool = False
    is_speculative: bool = False
    has_v2_runner: bool = False
    ucx_tls: str = ""
    has_state: bool = False
    is_elastic: bool = False
    has_host_blocks: bool = False
    returns_experts: bool = False


@final
@dataclass(frozen=True, slots=True)
class Row:
    """A condition with the reason of its refusal or warning, which is formatted with the situation."""

    applies: Callable[[Situation], bool]
    reason: str


REFUSALS: Mapping[str, Row] = {
    "consumer-pipeline-parallel": Row(
        lambda it: it.pp > 1 and (it.kv_role != "kv_producer" or it.is_bidirectional),
        "an engine with {it.pp} pipeline stages cannot read hand-overs (kv_role '{it.kv_role}'): set kv_role to 'kv_producer' "
        "without bidirectional_kv_xfer, or pipeline_parallel_size to 1",
    ),
    "prefill-context-parallel": Row(
        lambda it: it.pcp > 1,
        "prefill_context_parallel_size is {it.pcp}: how its ranks share a prompt's blocks is not planned here; set it to 1, or "
        "use vLLM's own NixlConnector on this producer",
    ),
    "side-channel-wildcard": Row(
        lambda it: _is_wildcard(it.host),
        "VLLM_NIXL_SIDE_CHANNEL_HOST is '{it.host}', and tickets tell peers to connect to that: set it to an address of this "
        "host that peers can reach (under Kubernetes the pod's IP), or advertised_host to the address in front of it",
    ),
    "side-channel-port": Row(
        lambda it: not 0 < it.port <= _MOST_PORTS,
        "the side channel's port is {it.port} (VLLM_NIXL_SIDE_CHANNEL_PORT or advertised_port, plus the data-parallel index): it "
        "must be 1 to 65535",
    ),
    "sleep-mode-unsupported": Row(
        lambda it: it.has_sleep_mode and it.version < (0, 33),
        "enable_sleep_mode needs vLLM 0.33 or newer beside a KV connector, found {it.version[0]}.{it.version[1]}: an older one "
        "unmaps the cache without telling the connector, while peers read from it",
    ),
    "computed-kv-scales": Row(
        lambda it: it.computes_scales,
        "calculate_kv_scales derives the cache's scales from this engine's first prompt, so that every engine has others and "
        "reads wrong KV: use a checkpoint with scales, or none",
    ),
    "elastic-expert-parallel": Row(
        lambda it: it.is_elastic,
        "enable_elastic_ep lets ranks join and leave this engine, and tickets name ranks and ports that are gone then: switch it "
        "off, and change the number of engines instead",
    ),
    "host-resident-cache": Row(
        lambda it: it.has_host_blocks,
        "HiSparse keeps a part of this engine's cache in host memory, and this connector registers one kind of memory: leave "
        "HiSparse out, or use vLLM's own NixlConnector",
    ),
    "routed-experts-lost": Row(
        lambda it: it.returns_experts,
        "enable_return_routed_experts tells of tokens that this engine computes, so it would leave out those of a prompt that "
        "another engine computed: switch it off beside a KV connector",
    ),
    "readback-drafted-state": Row(
        lambda it: it.is_bidirectional and it.has_state and it.is_speculative,
        "bidirectional_kv_xfer cannot hand back the states of a model that decodes speculatively: vLLM leaves the state after "
        "the last accepted token in a block that it does not tell; switch bidirectional_kv_xfer or speculative decoding off",
    ),
    "outer-role-differs": Row(
        lambda it: it.outer_role == "kv_producer" and it.kv_role != "kv_producer",
        "the MultiConnector around this connector has kv_role '{it.outer_role}', and this one '{it.kv_role}': vLLM obeys the "
        "outer one, so nothing would keep a step that still runs from writing into blocks that a read fills; set both alike",
    ),
    "mirror-pipeline-speculative": Row(
        lambda it: it.is_mirrored and it.is_speculative and it.pp > 1 and not it.has_v2_runner,
        "kv_buffer_device is 'cpu' on an engine with {it.pp} pipeline stages and speculative decoding: vLLM's model runner "
        "version 1 does not tell stages before the last one when to copy what they computed, so peers would read pages that were "
        "never copied; set kv_buffer_device to the device's own, or leave speculative decoding to the engines that decode",
    ),
}
"""By code; the first match wins. Checked elsewhere: keys and values (`config.py`), missing NIXL back ends (`kv-nixl-agent`)."""

WARNINGS: Mapping[str, Row] = {
    "side-channel-localhost": Row(
        lambda it: it.host == "localhost",
        "VLLM_NIXL_SIDE_CHANNEL_HOST is 'localhost' (its default), so only engines on this host can read from this one: set it "
        "to an address of this host that peers can reach",
    ),
    "side-channel-link-local": Row(
        lambda it: _is_link_local(it.host),
        "VLLM_NIXL_SIDE_CHANNEL_HOST is '{it.host}', an address of one link or with a zone, and peers of this kind refuse "
        "tickets that point there: set it to an address that all peers can reach",
    ),
    "side-channel-port-low": Row(
        lambda it: it.port < _LEAST_PORT,
        "the side channel's port is {it.port}, and peers of this kind refuse tickets that point below 1024: take a higher one",
    ),
    "ucx-without-host-memory": Row(
        lambda it: it.uses_ucx and not _reaches_host_memory(it.ucx_tls),
        "UCX_TLS is '{it.ucx_tls}', without a transport for host memory: fence words cannot be read, so every read will fail; "
        "add one, e.g. tcp, sm or rc",
    ),
}


def check_start(situation: Situation, *, warns: bool = True) -> None:
    """Refuse unusable configurations, and warn about risky ones.

    Args:
        situation: The engine's configuration.
        warns: Whether this process warns on behalf of all of its engine.

    Raises:
        UnsupportedHost: with the code and the reason of the first row that applies.
    """
    it = situation
    for code, row in REFUSALS.items():
        if row.applies(it):
            context = {"kv_role": it.kv_role, "host": it.host, "pp": it.pp, "pcp": it.pcp}
            raise UnsupportedHost(row.reason.format(it=it), code=code, context=context)
    for code, row in WARNINGS.items():
        if warns and row.applies(it):
            _logger.warning("%s (%s)", row.reason.format(it=it), code)


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
    names = {name.strip().lower().removeprefix("\\") for name in ucx_tls.split(",")}
    return not ucx_tls or ucx_tls.startswith("^") or not names.isdisjoint(_HOST_TRANSPORTS)


def streaming_warnings(settings: Settings, role: str | None = None) -> Iterator[str]:
    """Yield a sentence per such setting.

    Args:
        settings: The connector's keys, already checked.
        role: The engine's `kv_role`; None if it is not known.
    """
    if not settings.streaming:
        unused = [name for name in _ONLY_WITH_STREAMING if getattr(settings, name) != getattr(Settings(), name)]
        if unused:
            yield f"{', '.join(unused)}: no effect without streaming"
        return
    if not settings.has_secrets and not settings.remote_hosts:
        yield (
            "streaming: without ticket_secret_files, ticket_secret_variable or remote_hosts this engine refuses early tickets "
            "(ticket-early-uncovered), so nothing is streamed to or from it"
        )
    if role != "kv_producer" and not settings.stream_reserve_fraction:
        yield "stream_reserve_fraction is 0: this engine refuses to read early (ticket-early-off) and computes these prompts"
    if role == "kv_both" and settings.stream_reserve_fraction == 1:
        yield "stream_reserve_fraction is 1 with kv_role 'kv_both': two engines that prefill for each other may wait forever"


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
