"""Output of the command line: text for people, plain values for programs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kv_handshake._reading import decode_envelope
from kv_handshake._text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake._compare import Comparison
    from kv_handshake._factors import Difference
    from kv_handshake._messages import AgentMetadata
    from kv_handshake._probe import ProbeResult
    from kv_handshake._queries import Rank

__all__ = ["comparison_text", "comparison_values", "probe_text", "probe_values"]

_SHOWN = 6


def probe_values(name: str, result: ProbeResult) -> dict[str, object]:
    """Return a probe as JSON values; opaque blobs become their length and SHA-256."""
    return {
        "peer": name,
        "dialect": result.recording.dialect,
        "connect_s": result.connect_s,
        "clock_offset_s": result.clock_offset_s,
        "ranks": [
            {
                "pp": rank[0],
                "tp": rank[1],
                "rtt_s": result.rtts_s[rank],
                "envelope": _envelope_values(result, rank),
                "metadata": _metadata_values(metadata),
            }
            for rank, metadata in result.peers.items()
        ],
    }


def probe_text(name: str, result: ProbeResult) -> str:
    """Return a probe as lines for a person; long lists are cut and counted."""
    lines = [f"{name}: version {result.recording.dialect}, first reply after {result.connect_s * 1000:.1f} ms"]
    if result.clock_offset_s is not None:
        lines.append(f"  clock offset {result.clock_offset_s:+.6f} s")
    for rank, metadata in result.peers.items():
        lines.append(f"  pp rank {rank[0]}, tp rank {rank[1]}: {result.rtts_s[rank] * 1000:.1f} ms")
        for key, value in {**_envelope_values(result, rank), **_metadata_values(metadata)}.items():
            if value is not None:
                lines.append(f"    {key:38} {_shorten(value)}")
    return "\n".join(lines)


def comparison_values(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as JSON values."""
    return {
        "equal": comparison.is_equal,
        "compatible": comparison.is_compatible,
        "same_hash": comparison.is_same_hash,
        "basis": comparison.basis,
        "suspects": list(comparison.suspects),
        "differences": [
            {"name": each.name, "first": each.local, "second": each.peer, "group": each.group}
            for each in comparison.differences
        ],
    }


def comparison_text(comparison: Comparison, first: str, second: str) -> str:
    """Return a comparison as lines for a person."""
    if comparison.is_equal:
        return f"{first} and {second}: no difference (compared by {comparison.basis})"
    verdict = "may exchange KV cache" if comparison.is_compatible else "must not exchange KV cache"
    lines = [f"{first} and {second}: {verdict} (compared by {comparison.basis})"]
    lines += [_difference_line(each) for each in comparison.differences]
    if comparison.suspects:
        names = ", ".join(comparison.suspects)
        lines.append(
            f"  the hashes differ and no value that could be tried explains it; suspect: {names} "
            "(--suppose FACTOR=VALUE gives further values to try)"
        )
    return "\n".join(lines)


def _difference_line(difference: Difference) -> str:
    return f"  {difference.name} ({difference.group}): {_shorten(difference.local)} against {_shorten(difference.peer)}"


def _envelope_values(result: ProbeResult, rank: Rank) -> dict[str, object]:
    envelope = decode_envelope(result.recording.payloads[rank])
    values: dict[str, object] = {"compatibility_hash": envelope.compatibility_hash, "protocol": envelope.protocol}
    if envelope.protocol is not None:
        values |= {"factors": envelope.factors, "capabilities": envelope.capabilities}
    return values


def _metadata_values(metadata: AgentMetadata) -> dict[str, object]:
    values: dict[str, Any] = msgspec.structs.asdict(metadata)
    for name in ("agent_metadata", "geometry"):
        blob = values[name]
        if blob is not None:
            values[name] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    del values["factors"]
    return values


def _shorten(value: object) -> str:
    if not isinstance(value, (tuple, list)):
        return printable(str(value))
    items = [printable(str(each)) for each in cast("Sequence[object]", value)]
    if len(items) <= _SHOWN:
        return f"[{', '.join(items)}]"
    return f"[{', '.join(items[:_SHOWN])}, ... {len(items)} in all]"
