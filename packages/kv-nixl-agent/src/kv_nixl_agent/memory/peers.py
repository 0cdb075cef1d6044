"""Peers of one agent: loads their NIXL agents, and prepares and releases their lists.

A local list is prepared once per content and shared by all peers that use it. A peer's lists are prepared when it is added.

**A NIXL agent stays loaded when its peer is removed.** Repeatedly loading and unloading a live agent leaks sockets on both
sides (5 per round over CMA, 10 over TCP, measured with bare NIXL 1.5.1); loading it once does not. So removing a peer releases
its lists, while its agent stays loaded under its name for the peer's return. The agent is unloaded when NIXL has reported its
process as disconnected, when another process takes the name, when too many agents wait, or when everything is closed.

Peers with the same agent metadata share an agent: tickets may name an engine by several addresses.

A removed peer whose handles have not all ended is *retiring*: its lists are released with the last handle.

**Checksum trailer of agent metadata.** NIXL silently accepts many damaged blobs, and a blob that it rejects half-way makes the
peer's name unusable for the life of the agent. NIXL ignores bytes behind its own blob, so a 16-byte trailer is compatible both
ways: readers without this package skip it, and blobs without a trailer are still accepted.

Trailer: 8 magic bytes, CRC-32 of the blob (4 bytes, little endian), and the same CRC inverted (4 bytes). A trailer counts as
present when at least half of the magic bytes match, so that a damaged trailer counts as damage, not as absence. Complete magic
bytes anywhere else belong to a trailer that was cut or moved: a blob without its last byte is damaged even if the byte before
happens to look like the end of NIXL's blob.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from hashlib import sha256
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError, demand
from kv_nixl_agent.memory.rows import RowTable
from kv_nixl_agent.values import MAX_CAPACITY, MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.memory.rows import MemoryTable
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort
    from kv_nixl_agent.values import FenceLocation, PeerSpec, StreamLocation

    Rows = npt.NDArray[np.uint64]

__all__ = ["Peer", "PeerTable", "add_checksum", "open_metadata", "peek_agent_name"]

_MAX_WAITING_AGENTS: Final = 1024
_TOUCH_BYTES: Final = 8

_MAGIC: Final = b"\xabKVSEAL\x01"
_TRAILER: Final = struct.Struct("<8sII")
_HEAD: Final = b"nixlSerDes|Agent"


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
    """Return the agent name inside NIXL's blob without loading it; None if it cannot be determined."""
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


@final
class PeerTable:
    """Peers by key.

    Args:
        port: The NIXL agent.
        memory: Registered memory, which must contain the local rows.
        last_look: Called with the peers of a name before their agent is unloaded in favour of another process, as the last chance
            to learn from NIXL that their handles have ended.
    """

    def __init__(self, port: NixlPort, memory: MemoryTable, last_look: Callable[[Sequence[Peer]], None]) -> None:
        self._port = port
        self._memory = memory
        self._last_look = last_look
        self.by_key: dict[str, Peer] = {}
        """Usable peers."""
        self._by_name: dict[str, list[Peer]] = {}
        """Usable peers, by the agent that they share."""
        self._retiring: set[Peer] = set()
        self._waiting_agents: dict[str, None] = {}
        """Names of loaded agents without a peer, longest waiting first."""
        self._local_lists: dict[tuple[MemoryKind, bytes], tuple[Handle, int]] = {}
        """Local prepared lists by content, each with its number of users."""

    def gauges(self) -> Mapping[str, float]:
        """Return gauges."""
        return {
            "peers": len(self.by_key),
            "peers_retiring": len(self._retiring),
            "agents_waiting": len(self._waiting_agents),
        }

    def get(self, key: str) -> Peer:
        """Return the peer under `key`.

        Raises:
            AgentError: `unknown-peer`.
        """
        demand("peer", key, str)
        peer = self.by_key.get(key)
        if peer is None:
            raise AgentError("unknown-peer", f"no peer {key!r}; {len(self.by_key)} are known", peer=key)
        return peer

    # ------------------------------------------------------------------------------------------- adding and removing

    def add(self, spec: PeerSpec) -> Peer:
        """Load the peer's agent and prepare its lists; nothing is kept when that fails.

        Raises:
            AgentError: `peer-known`, `agent-name`, `metadata-damaged`, `metadata-rejected`, `bad-rows`, `bad-fence`,
                `rows-unregistered`, `peer-rows-unregistered`.
        """
        if spec.key in self.by_key:
            raise AgentError("peer-known", f"peer {spec.key!r} is known; replace or remove it", peer=spec.key)
        blob = open_metadata(spec.agent_metadata)
        peer = Peer(spec)
        for kind, group in peer.local.groups.items():
            self._memory.check_local(kind, group)
        self._load(peer, blob)
        try:
            self._prepare(peer)
        except AgentError:
            self._retire_later(peer)
            raise
        self.by_key[peer.key] = peer
        return peer

    def squatters_of(self, spec: PeerSpec) -> list[str]:
        """Return the keys of peers that hold the agent's name without proof, if this peer proves that the name is its own."""
        name = peek_agent_name(spec.agent_metadata) if spec.agent_prefix else None
        holders = self._by_name.get(name, []) if name is not None and name.startswith(spec.agent_prefix) else []
        return [holder.key for holder in holders if not holder.agent_prefix]

    def _load(self, peer: Peer, blob: bytes) -> None:
        name = peek_agent_name(blob)
        if not (name or "").startswith(peer.agent_prefix):
            raise AgentError(
                "agent-name",
                f"the metadata of peer {peer.key!r} names the agent {name!r}, which does not begin with {peer.agent_prefix!r}: "
                "it is another engine's",
                peer=peer.key,
            )
        peer.agent_digest = sha256(blob).digest()
        holders = self._by_name.get(name, []) if name is not None else []
        if holders:
            holder = holders[0]
            if (holder.agent_digest, holder.agent_prefix) != (peer.agent_digest, peer.agent_prefix):
                raise AgentError(
                    "peer-known",
                    f"agent {name!r} is already the peer {holder.key!r}, whose metadata is another; it cannot be {peer.key!r} "
                    "too; replace that peer",
                    peer=peer.key,
                )
            peer.agent_name = holder.agent_name
            holders.append(peer)
            return
        try:
            peer.agent_name = self._load_agent(name, blob)
        except AgentError as error:
            if not error.code.startswith("nixl-"):
                raise
            raise AgentError(
                "metadata-rejected",
                f"NIXL cannot use the metadata of peer {peer.key!r} ({len(blob)} bytes): {error.message}; fetch it again, and "
                "check that both sides run compatible NIXL builds",
                peer=peer.key,
            ) from error
        self._by_name[peer.agent_name] = [peer]
        self._waiting_agents.pop(peer.agent_name, None)

    def _load_agent(self, name: str | None, blob: bytes) -> str:
        """Load an agent whose name may already be loaded, for the same process or for an earlier one."""
        try:
            # NIXL accepts further metadata of a process that it knows.
            return self._port.add_peer(blob)
        except AgentError:
            former = [peer for peer in self._retiring if peer.agent_name == name]
            if name is None or not (former or name in self._waiting_agents):
                raise
        # Another process has the name now. NIXL refuses two agents of one name, so the earlier one is unloaded. After that NIXL
        # can say nothing about the earlier agent's remaining handles, although their data may still land.
        self._last_look(former)
        for peer in former:
            peer.is_lost = True
        self._unload(name)
        return self._port.add_peer(blob)

    def remove(self, peer: Peer) -> None:
        """Forget a peer; its lists are released once none of its handles is outstanding."""
        del self.by_key[peer.key]
        self._retire_later(peer)

    def _retire_later(self, peer: Peer) -> None:
        peer.is_removed = True
        holders = self._by_name.get(peer.agent_name, [])
        if peer in holders:
            holders.remove(peer)
            if not holders:
                del self._by_name[peer.agent_name]
        self._retiring.add(peer)
        self.retire(peer)

    def retire(self, peer: Peer) -> None:
        """Release the lists of a removed peer if none of its handles is outstanding."""
        if peer not in self._retiring or peer.outstanding:
            return
        self._release_lists(peer)
        self._retiring.remove(peer)
        name = peer.agent_name
        if peer.is_lost or name in self._by_name or any(other.agent_name == name for other in self._retiring):
            return
        if not peer.is_connected:
            self._unload(name)
            return
        self._waiting_agents[name] = None
        if len(self._waiting_agents) > _MAX_WAITING_AGENTS:
            self._unload(next(iter(self._waiting_agents)))

    def _unload(self, name: str) -> None:
        self._waiting_agents.pop(name, None)
        with contextlib.suppress(AgentError):  # NIXL forgets a dead peer by itself
            self._port.remove_peer(name)

    # -------------------------------------------------------------------------------------------------- prepared lists

    def _prepare(self, peer: Peer) -> None:
        for kind, group in peer.local.groups.items():
            peer.local_lists[kind] = self._prepare_local(peer, kind, group)
        for kind, group in peer.rows.groups.items():
            peer.peer_lists[kind] = self._prepare_peer(peer, kind, group, "peer-rows-unregistered")
        if peer.fence is not None:
            address, device, words = peer.fence
            row = np.array([[address, 8 * words, device, 8 * words, 1]], dtype=np.uint64)
            checked = self._prepare_peer(peer, "DRAM", row, "bad-fence")
            with contextlib.suppress(AgentError):
                self._port.release_prepared(checked)

    def _prepare_local(self, peer: Peer, kind: MemoryKind, group: Rows) -> Handle:
        key = (kind, group.tobytes())
        handle, users = self._local_lists.get(key, (None, 0))
        if handle is None:
            try:
                handle = self._port.prepare(None, kind, group)
            except AgentError as error:
                raise AgentError(
                    "rows-unregistered",
                    f"NIXL cannot prepare {len(group)} local {kind} rows for peer {peer.key!r}: {error.message}",
                ) from error
        self._local_lists[key] = (handle, users + 1)
        return handle

    def _prepare_peer(self, peer: Peer, kind: MemoryKind, group: Rows, code: str) -> Handle:
        try:
            return self._port.prepare(peer.agent_name, kind, group)
        except AgentError as error:
            raise AgentError(
                code,
                f"NIXL cannot prepare {len(group)} {kind} rows of peer {peer.key!r}, the first is {group[0].tolist()}: "
                f"{error.message}; the peer's rows must lie in memory that its metadata registers",
                peer=peer.key,
            ) from error

    def _release_lists(self, peer: Peer) -> None:
        unused = list(peer.peer_lists.values())
        for kind in peer.local_lists:
            key = (kind, peer.local.groups[kind].tobytes())
            handle, users = self._local_lists.pop(key)
            if users > 1:
                self._local_lists[key] = (handle, users - 1)
            else:
                unused.append(handle)
        peer.local_lists, peer.peer_lists = {}, {}
        for prepared in unused:
            with contextlib.suppress(AgentError):
                self._port.release_prepared(prepared)

    def close(self) -> None:
        """Release everything."""
        everything = [*self.by_key.values(), *self._retiring]
        self.by_key.clear()
        self._by_name.clear()
        self._retiring.clear()
        for peer in everything:
            self._release_lists(peer)
        for name in {*(peer.agent_name for peer in everything), *self._waiting_agents}:
            self._unload(name)


@final
class Peer:
    """A peer rank: its agent, row tables, prepared lists and number of outstanding handles."""

    def __init__(self, spec: PeerSpec) -> None:
        self.key = spec.key
        self.agent_prefix = spec.agent_prefix
        self.local, self.rows = _tables(spec)
        _check_fence(spec.key, spec.fence)
        _check_streams(spec.key, spec.streams)
        self.fence = spec.fence
        self.streams = spec.streams
        self.touch = self._find_touch()
        """Kind and row of a few bytes that a warm-up or a probe may read: of the peer's pages, else of its fence."""
        self.agent_digest = b""
        """Digest of the metadata that the peer's NIXL agent was loaded from."""
        self.agent_name = ""
        """Name of the peer's NIXL agent, once it is loaded."""
        self.local_lists: dict[MemoryKind, Handle] = {}
        self.peer_lists: dict[MemoryKind, Handle] = {}
        self.is_connected = True
        self.is_removed = False
        self.is_lost = False
        """Whether NIXL has forgotten the peer's process, so that it can say nothing more about outstanding handles."""
        self.outstanding = 0
        """Handles made for this peer and not yet released."""
        self.parts_on_wire = 0
        """Posted parts of transfers in progress."""

    def note_failure(self, error: AgentError) -> None:
        """Record an error of NIXL about this peer."""
        if error.code == "nixl-disconnected":
            self.is_connected = False

    def _find_touch(self) -> tuple[MemoryKind, Rows] | None:
        if self.rows.groups:
            kind, group = next(iter(self.rows.groups.items()))
            address, length_bytes, device = group[0, :3].tolist()
        elif self.fence is not None:
            kind, (address, device, _), length_bytes = "DRAM", self.fence, _TOUCH_BYTES
        else:
            return None
        length_bytes = min(_TOUCH_BYTES, length_bytes)
        return kind, np.array([[address, length_bytes, device, length_bytes, 1]], dtype=np.uint64)


def _tables(spec: PeerSpec) -> tuple[RowTable, RowTable]:
    local_kind = spec.local_kind
    if local_kind is None:
        if not isinstance(spec.memory_kind, str):
            raise AgentError("bad-rows", "with one memory kind per peer row, the local kinds must be given too")
        local_kind = spec.memory_kind
    local, rows = RowTable(spec.local_rows, local_kind), RowTable(spec.peer_rows, spec.memory_kind)
    if bool(local.count) != bool(rows.count):
        raise AgentError(
            "bad-rows",
            f"peer {spec.key!r} has {local.count} local descriptors and {rows.count} of its own; a peer has rows on both "
            "sides, or on none if it is only notified",
        )
    return local, rows


def _check_fence(key: str, fence: FenceLocation | None) -> None:
    if fence is not None and (fence[0] <= 0 or fence[0] % 8 or fence[1] < 0 or not 0 < fence[2] <= 1 << 24):
        raise AgentError("bad-fence", f"peer {key!r} names a fence array {fence} that cannot be", peer=key)


def _check_streams(key: str, location: StreamLocation | None) -> None:
    if location is None:
        return
    address, device, slots, capacity = location
    is_sized = 0 < slots <= MAX_SLOTS and 0 < capacity <= MAX_CAPACITY
    if not is_sized or device < 0 or not 0 < address < 1 << 62 or address % 8:
        raise AgentError("bad-streams", f"peer {key!r} names stream memory {location} that is out of range", peer=key)
