"""Real reads from the prefill engine's probe pages: do the bytes come, over which transport, and how fast.

`kv-nixl measure` does the reading, in a process of its own with the decode engine's choice of transports. Only the probe pages
are read, which hold a public pattern, never the cache: 256 KiB once, to compare, and at most 64 MiB a rank to measure.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast, final

from vllm_adapter.cli.values import misfit, parse_json
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import Number  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cli.check.engine import Engine
    from vllm_adapter.cli.check.findings import Findings

__all__ = ["Reading", "check_reads"]

_MOST_BYTES = 64 << 20
_MOST_RANKS = 16
_GRACE_S = 60.0


class _Rank(TypedDict):
    name: str
    code: str
    message: str
    checksum: Number
    word_us: Number
    read_gb_s: Number


class _Path(TypedDict):
    sizes: str
    method: str
    config: str


class _Measured(TypedDict):
    """The answer of `kv-nixl measure`."""

    error: str
    is_tcp: bool
    ranks: list[_Rank]
    paths: list[_Path]


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """How reads are made and judged.

    Attributes:
        timeout_s: Longest wait for each read.
        ucx_tls: The decode engine's choice of transports; empty or None for this environment's.
        allows_tcp: Whether TCP is no reason against.
    """

    timeout_s: float
    ucx_tls: str | None
    allows_tcp: bool


def check_reads(prefill: Engine, decode: Engine, reading: Reading, findings: Findings) -> float | None:
    """Read from each prefill rank; return the slowest rank's GB/s, None if it was not measured."""
    ranks = _ranks(prefill)
    if not ranks:
        findings.note(
            "transport",
            "no-probe-pages",
            "speed and transport were not measured: the prefill engine shows no probe pages, as vLLM's own connector and one "
            "without fence words do not",
            "kv-nixl serve there and kv-nixl doctor --peer here measure between the two machines",
        )
        return None
    answer = _measure(ranks, reading)
    if answer.get("error"):
        findings.note(
            "transport",
            "not-measured",
            f"speed and transport were not measured, because nothing could be read here: {answer['error']}",
            "kv-nixl doctor says what is missing; run this where the decode engine's packages are installed",
        )
        return None
    read: list[Mapping[str, Any]] = answer["ranks"]
    good = [_judge_rank(prefill, each, findings) for each in read]
    if not all(good):
        return None
    return _judge_speed(prefill, decode, answer, reading, findings)


def _ranks(prefill: Engine) -> Sequence[Mapping[str, object]]:
    """Return what `kv-nixl measure` takes, of the ranks with fence words."""
    return [
        {
            "name": f"{stage}.{rank}",
            "agent_metadata": base64.b64encode(metadata.agent_metadata).decode(),
            "fence": list(metadata.fence),
        }
        for (stage, rank), metadata in sorted(prefill.peers.items())
        if metadata.fence is not None
    ][:_MOST_RANKS]


def _measure(ranks: Sequence[Mapping[str, object]], reading: Reading) -> dict[str, Any]:
    """Run `kv-nixl measure`; return its answer, or one with an `error`."""
    words = ["--json", "--bytes", str(_MOST_BYTES), "--timeout", str(reading.timeout_s)]
    environment = {**os.environ, **({"UCX_TLS": reading.ucx_tls} if reading.ucx_tls else {})}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kv_nixl_agent", "measure", *words],
            input=json.dumps(ranks),
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GRACE_S + len(ranks) * 4 * reading.timeout_s,
            check=False,
        )
        answer = parse_json(done.stdout, "the answer of kv-nixl measure")
    except subprocess.TimeoutExpired as error:
        return {"error": f"kv-nixl measure did not end within {error.timeout:.0f} s"}
    except (OSError, ValueError) as error:  # ValueError: an engine's UCX_TLS that no variable can hold
        return {"error": f"kv-nixl measure cannot be started: {error}"}
    except AdapterError:
        return {"error": "kv-nixl measure gave no answer"}
    if wrong := misfit(answer, _Measured):
        return {"error": f"the answer of kv-nixl measure cannot be read, is it of another version? {wrong}"}
    measured = cast("dict[str, Any]", answer)
    if not measured["error"] and len(measured["ranks"]) != len(ranks):
        return {"error": f"kv-nixl measure reported {len(measured['ranks'])} ranks, asked for {len(ranks)}"}
    return measured


def _judge_rank(prefill: Engine, read: Mapping[str, Any], findings: Findings) -> bool:
    """Tell what the reads of one rank gave; False if it gave no figure."""
    code, where = read["code"], f"{prefill.channel}: rank {read['name']}"
    if not code:
        return True
    if code == "peer-rows-unregistered":
        findings.note(
            "transport",
            "no-probe-pages",
            f"{where} has no probe pages: its vllm-adapter is older than this one; speed and transport were not measured",
            "kv-nixl serve there and kv-nixl doctor --peer here measure between the two machines",
        )
    elif code == "bytes-differ":
        findings.refuse(
            "reads",
            "bytes-differ",
            f"{where} gave other bytes than it holds: {read['message']}",
            "do not hand over between these; file a bug with the output of kv-nixl doctor of both machines",
        )
    else:
        findings.refuse(
            "reads",
            "read-failed",
            f"{where} answers, and its memory cannot be read from here: {read['message']} ({code})",
            "kv-nixl doctor on both machines; a firewall may block UCX's ports, and UCX_NET_DEVICES may name a NIC that "
            "does not reach the other. --no-read leaves this out",
        )
    return False


def _judge_speed(
    prefill: Engine, decode: Engine, answer: Mapping[str, Any], reading: Reading, findings: Findings
) -> float:
    read: list[Mapping[str, Any]] = answer["ranks"]
    slowest = min(read, key=lambda each: float(each["read_gb_s"]))
    speed = float(slowest["read_gb_s"])
    findings.ok(
        "reads",
        f"{len(read)} of {len(prefill.peers)} prefill ranks: the probe pages came whole (checksum "
        f"{int(slowest['checksum']):08x}); a word takes {max(float(each['word_us']) for each in read):.0f} us",
    )
    ways = "; ".join(f"{path['sizes']} {path['method']} {path['config']}" for path in answer["paths"])
    ways = ways or "a transport that it does not tell"
    if answer["is_tcp"]:
        findings.refuse(
            "transport",
            "tcp-fallback",
            f"UCX reads over TCP, by {ways}: {speed:.2f} GB/s from the slowest rank",
            "kv-nixl doctor says which transports work and why others do not; without RDMA, --allow-tcp accepts this",
            is_allowed=reading.allows_tcp,
        )
    else:
        findings.ok("transport", f"UCX reads by {ways}: {speed:.2f} GB/s from the slowest rank{_of_memory(prefill)}")
    if not _is_here(decode.channel.host):
        findings.note(
            "transport",
            "measured-elsewhere",
            f"measured from this machine, which is not the decode engine's ({decode.channel.host})",
            "run this on the decode engine's machine for its speed and transport",
        )
    return speed


def _of_memory(prefill: Engine) -> str:
    kinds = set(prefill.first.region_mem_types or ())
    return "; of host memory: the cache lies in VRAM, whose way may differ" if "VRAM" in kinds else ""


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
