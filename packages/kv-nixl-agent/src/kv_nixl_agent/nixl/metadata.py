"""Checksum trailer of agent metadata.

NIXL silently accepts many damaged blobs, and a blob that it rejects half-way makes the peer's name unusable for the life of the
agent. NIXL ignores bytes behind its own blob, so a 16-byte trailer is compatible both ways: readers without this package skip
it, and blobs without a trailer are still accepted.

Trailer: 8 magic bytes, CRC-32 of the blob (4 bytes, little endian), and the same CRC inverted (4 bytes). A trailer counts as
present when at least half of the magic bytes match, so that a damaged trailer counts as damage, not as absence. Complete magic
bytes anywhere else belong to a trailer that was cut or moved: a blob without its last byte is damaged even if the byte before
happens to look like the end of NIXL's blob.
"""

from __future__ import annotations

import struct
import zlib

from kv_nixl_agent.errors import AgentError

__all__ = ["add_checksum", "open_metadata", "peek_agent_name"]

_MAGIC = b"\xabKVSEAL\x01"
_TRAILER = struct.Struct("<8sII")
_HEAD = b"nixlSerDes|Agent"


def add_checksum(blob: bytes) -> bytes:
    """Return `blob` with its checksum trailer."""
    checksum = zlib.crc32(blob)
    return blob + _TRAILER.pack(_MAGIC, checksum, checksum ^ 0xFFFFFFFF)


def open_metadata(received: bytes) -> bytes:
    """Return NIXL's own blob from agent metadata with or without the trailer.

    Raises:
        AgentError: `metadata-damaged` if the trailer does not match, or the blob cannot be whole.
    """
    if len(received) > _TRAILER.size:
        magic, checksum, inverted = _TRAILER.unpack(received[-_TRAILER.size :])
        if sum(a == b for a, b in zip(magic, _MAGIC, strict=True)) >= len(_MAGIC) // 2 or _MAGIC in received:
            blob = received[: -_TRAILER.size]
            actual = zlib.crc32(blob)
            if magic == _MAGIC and actual == checksum and actual == inverted ^ 0xFFFFFFFF:
                return blob
            raise AgentError(
                "metadata-damaged",
                f"agent metadata of {len(received)} bytes has checksum {actual:08x}, its trailer says {checksum:08x}; "
                "fetch it again",
                received_bytes=len(received),
            )
    if not received.startswith(b"nixlSerDes|") or not received.endswith(b"|"):
        raise AgentError(
            "metadata-damaged",
            f"agent metadata of {len(received)} bytes does not begin and end like NIXL's; fetch it again",
            received_bytes=len(received),
        )
    return received


def peek_agent_name(blob: bytes) -> str | None:
    """Return the agent name inside NIXL's blob without loading it; None if it cannot be told."""
    start = len(_HEAD) + 8
    if not blob.startswith(_HEAD) or len(blob) < start:
        return None
    name_bytes = int.from_bytes(blob[len(_HEAD) : start], "little")
    if name_bytes > len(blob) - start:
        return None
    try:
        return blob[start : start + name_bytes].decode()
    except UnicodeDecodeError:
        return None
