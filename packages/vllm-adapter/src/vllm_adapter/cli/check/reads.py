"""Real reads from the prefill engine's probe pages: whether the bytes arrive, over which transport, and how fast.

kv-nixl-agent reads in a process of its own, with the decode engine's choice of transports. Only the probe pages are read, which
hold a public pattern, never the cache: 256 KiB once, to compare, and at most 64 MiB a rank to measure.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from kv_nixl_agent.tools.remote import LiveRank, Measurement, measure_ranks

if TYPE_CHECKING:
    from vllm_adapter.cli.check.engine import Engine
    from vllm_adapter.cli.check.findings import Findings

__all__ = ["check_reads"]

_MOST_BYTES = 64 << 20
_MOST_RANKS = 16


def check_reads(prefill: Engine, decode: Engine, findings: Findings, *, ucx_tls: str, timeout_s: float) -> float | None:
    """Read from each prefill rank; return the slowest rank's GB/s, None if it was not measured.

    Args:
        prefill: The engine that is read from.
        decode: The engine that would read.
        findings: Where the results go.
        ucx_tls: The decode engine's choice of transports; empty for this environment's.
        timeout_s: Longest wait for each read.
    """
    ranks = [
        LiveRank(f"{stage}.{rank}", metadata.agent_metadata, metadata.fence)
        for (stage, rank), metadata in sorted(prefill.peers.items())
        if metadata.fence is not None
    ][:_MOST_RANKS]
    not_measured = "speed and transport were not measured"
    if not ranks:
        reason = "the prefill engine shows no probe pages, as vLLM's own connector and one without fence words do not"
        findings.add("transport", "no-probe-pages", f"{not_measured}: {reason}")
        return None
    try:
        if ucx_tls:
            os.environ["UCX_TLS"] = ucx_tls  # of the process that reads
        found = measure_ranks(ranks, most_bytes=_MOST_BYTES, timeout_s=timeout_s)
    except ValueError as error:  # an engine's UCX_TLS that no variable can hold
        found = Measurement([], error=f"UCX_TLS of the decode engine: {error}")
    if found.error:
        findings.add("transport", "not-measured", f"{not_measured}, because nothing could be read here: {found.error}")
        return None
    for rank in found.ranks:
        where = f"{prefill.channel}: rank {rank.name}"
        if rank.code == "peer-rows-unregistered":
            reason = f"its vllm-adapter is older than this one; {not_measured}"
            findings.add("transport", "no-probe-pages", f"{where} has no probe pages: {reason}")
        elif rank.code == "bytes-differ":
            findings.add("reads", "bytes-differ", f"{where} gave other bytes than it holds: {rank.message}")
        elif rank.code:
            reason = f"answers, and its memory cannot be read from here: {rank.message} ({rank.code})"
            findings.add("reads", "read-failed", f"{where} {reason}")
    return None if any(rank.code for rank in found.ranks) else _judge_speed(prefill, decode, found, findings)


def _judge_speed(prefill: Engine, decode: Engine, found: Measurement, findings: Findings) -> float | None:
    slowest = min(found.ranks, key=lambda rank: rank.read_gb_s)
    findings.ok(
        "reads",
        f"{len(found.ranks)} of {len(prefill.peers)} prefill ranks: the probe pages came whole (checksum "
        f"{slowest.checksum:08x}); a word takes {max(rank.word_us for rank in found.ranks):.0f} us",
    )
    ways = "; ".join(f"{path.sizes} {path.method} {path.config}" for path in found.paths)
    ways = ways or "a transport that it does not name"
    speed = f"{slowest.read_gb_s:.2f} GB/s from the slowest rank"
    if found.is_tcp:
        findings.add("transport", "tcp-fallback", f"UCX reads over TCP, by {ways}: {speed}")
    else:
        is_vram = "VRAM" in (prefill.first.region_mem_types or ())
        memory = "; of host memory: the cache lies in VRAM, whose way may differ" if is_vram else ""
        findings.ok("transport", f"UCX reads by {ways}: {speed}{memory}")
    host = decode.channel.host
    if not _is_here(host):
        where = f"measured from this machine, which is not the decode engine's ({host})"
        findings.add("transport", "measured-elsewhere", where)
    return slowest.read_gb_s or None  # too few bytes give no speed, and nothing can be divided by it


def _is_here(host: str) -> bool:
    """Return whether an address is this machine's: only those can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as one:
            try:
                one.bind(address)
            except OSError:
                continue
            return True
    return False
