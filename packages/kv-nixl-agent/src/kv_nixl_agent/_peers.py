"""Peers of one agent and their prepared lists.

A local list is prepared once per content and shared by all peers that use it; a peer's lists are prepared when it is
added, released when many other peers were used since, and prepared again on demand.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, final

import numpy as np

from ._errors import AgentError
from ._metadata import open_metadata, peek_agent_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from ._memory import MemoryTable
    from ._port import Handle, MemoryKind, NixlPort
    from ._rows import RowTable

    Rows = npt.NDArray[np.uint64]

__all__ = ["Peer", "PeerTable"]


@final
class Peer:
    """One peer rank: its agent, its tables and what is prepared for them."""

    __slots__ = (
        "agent_name",
        "fence",
        "fence_list",
        "is_connected",
        "is_lost",
        "is_removed",
        "is_wired",
        "key",
        "last_used",
        "local",
        "local_lists",
        "outstanding",
        "peer_lists",
        "rows",
    )

    def __init__(
        self, key: str, agent_name: str, local: RowTable, rows: RowTable, fence: tuple[int, int, int] | None
    ) -> None:
        self.key = key
        self.agent_name = agent_name
        self.local = local
        self.rows = rows
        self.fence = fence
        self.local_lists: dict[MemoryKind, Handle] = {}
        self.peer_lists: dict[MemoryKind, Handle] = {}
        self.fence_list: Handle | None = None
        self.is_wired = False
        self.is_connected = True
        self.is_removed = False
        self.is_lost = False
        """Whether NIXL can tell no more about its outstanding handles."""
        self.last_used = 0
        self.outstanding = 0
        """Handles posted to this peer that have not ended."""

    @property
    def is_prepared(self) -> bool:
        """Whether all its lists are ready."""
        return bool(self.peer_lists)


class _SharedLists:
    """Local prepared lists by content, counted by use."""

    def __init__(self, port: NixlPort) -> None:
        self._port = port
        self._lists: dict[tuple[MemoryKind, bytes], tuple[Handle, int]] = {}

    def take(self, kind: MemoryKind, rows: Rows) -> Handle:
        key = (kind, rows.tobytes())
        handle, users = self._lists.get(key, (None, 0))
        if handle is None:
            handle = self._port.prepare(None, kind, rows)
        self._lists[key] = (handle, users + 1)
        return handle

    def give_back(self, kind: MemoryKind, rows: Rows) -> None:
        key = (kind, rows.tobytes())
        handle, users = self._lists[key]
        if users > 1:
            self._lists[key] = (handle, users - 1)
            return
        del self._lists[key]
        self._port.release_prepared(handle)

    def __len__(self) -> int:
        return len(self._lists)


@final
class PeerTable:
    """All peers by key, and those that are removed but still have handles outstanding."""

    def __init__(self, port: NixlPort, memory: MemoryTable, *, max_prepared: int, is_seal_required: bool) -> None:
        self._port = port
        self._memory = memory
        self._max_prepared = max_prepared
        self._is_seal_required = is_seal_required
        self._by_key: dict[str, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._retiring: set[Peer] = set()
        self._shared = _SharedLists(port)
        self._uses = 0

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def all(self) -> Sequence[Peer]:
        """Peers that can be used."""
        return list(self._by_key.values())

    def statistics(self) -> Mapping[str, float]:
        """Return gauges."""
        return {
            "peers": len(self._by_key),
            "peers_retiring": len(self._retiring),
            "peers_prepared": sum(peer.is_prepared for peer in self._by_key.values()),
            "local_lists": len(self._shared),
        }

    def get(self, key: str) -> Peer:
        """Return the peer under `key`.

        Raises:
            AgentError: `unknown-peer`.
        """
        peer = self._by_key.get(key)
        if peer is None:
            raise AgentError("unknown-peer", f"no peer {key!r}; {len(self._by_key)} are known", peer=key)
        return peer

    def add(
        self, key: str, agent_metadata: bytes, local: RowTable, rows: RowTable, fence: tuple[int, int, int] | None
    ) -> Peer:
        """Load the peer's agent and prepare its lists; nothing is kept when that fails.

        Raises:
            AgentError: `peer-known`, `metadata-damaged`, `metadata-rejected`, `bad-fence`, `rows-unregistered`,
                `peer-rows-unregistered`.
        """
        if key in self._by_key:
            raise AgentError("peer-known", f"peer {key!r} is known; replace it", peer=key)
        blob = open_metadata(agent_metadata, is_seal_required=self._is_seal_required)
        for kind, group in local.groups.items():
            self._memory.check_local(kind, group)
        if fence is not None and (fence[0] <= 0 or fence[0] % 8 or fence[1] < 0 or not 0 < fence[2] <= 1 << 24):
            raise AgentError("bad-fence", f"peer {key!r} names a fence array {fence} that cannot be", peer=key)
        try:
            agent_name = self._load(blob, key)
        except AgentError as error:
            if not error.code.startswith("nixl-"):
                raise
            raise AgentError(
                "metadata-rejected",
                f"NIXL cannot use the metadata of peer {key!r} ({len(blob)} bytes): {error}; fetch it again, and check "
                "that both sides run compatible NIXL builds",
                peer=key,
            ) from error
        peer = Peer(key, agent_name, local, rows, fence)
        self._by_name[agent_name] = peer
        try:
            self.prepare(peer)
        except AgentError:
            self._retire_later(peer)
            raise
        self._by_key[key] = peer
        return peer

    def _load(self, blob: bytes, key: str) -> str:
        """Load a peer's agent, also one whose name still has handles outstanding."""
        name = peek_agent_name(blob)
        holder = None if name is None else self._by_name.get(name)
        if holder is not None:
            raise AgentError(
                "peer-known",
                f"agent {name!r} is already the peer {holder.key!r}, it cannot be {key!r} too; replace that peer",
                peer=key,
            )
        old = [peer for peer in self._retiring if peer.agent_name == name]
        try:
            # The same process, known again while reads of its former key are on their way: NIXL just takes it.
            return self._port.add_peer(blob)
        except AgentError:
            if not old or name is None:
                raise
        # Another process under the name: NIXL refuses two of a name, so the old one goes. Of its handles in quarantine
        # NIXL knows nothing from then on, although their data may still land.
        for peer in old:
            peer.is_lost = True
        self._port.remove_peer(name)
        return self._port.add_peer(blob)

    def remove(self, key: str) -> Peer:
        """Forget the peer under `key`; NIXL lets go of it once nothing is outstanding.

        Raises:
            AgentError: `unknown-peer`.
        """
        peer = self.get(key)
        del self._by_key[key]
        self._retire_later(peer)
        return peer

    def _retire_later(self, peer: Peer) -> None:
        peer.is_removed = True
        if self._by_name.get(peer.agent_name) is peer:
            del self._by_name[peer.agent_name]
        self._retiring.add(peer)
        self.retire(peer)

    def retire(self, peer: Peer) -> None:
        """Release a removed peer if nothing of it is outstanding."""
        if peer not in self._retiring or peer.outstanding:
            return
        self._release_lists(peer)
        self._retiring.remove(peer)
        is_named = peer.agent_name in self._by_name
        if not is_named and all(other.agent_name != peer.agent_name for other in self._retiring):
            with contextlib.suppress(AgentError):  # NIXL forgets a dead peer by itself
                self._port.remove_peer(peer.agent_name)

    def prepare(self, peer: Peer) -> None:
        """Make sure that the peer's lists are ready, and that not too many peers' are.

        Raises:
            AgentError: `rows-unregistered`, `peer-rows-unregistered`, `bad-fence`.
        """
        self._uses += 1
        peer.last_used = self._uses
        if peer.is_prepared:
            return
        try:
            for kind, group in peer.local.groups.items():
                peer.local_lists[kind] = self._prepare_local(peer, kind, group)
            for kind, group in peer.rows.groups.items():
                peer.peer_lists[kind] = self._prepare_peer(peer, kind, group, "peer-rows-unregistered")
            if peer.fence is not None:
                address, device, words = peer.fence
                row = np.array([[address, 8, device, 8, words]], dtype=np.uint64)
                peer.fence_list = self._prepare_peer(peer, "DRAM", row, "bad-fence")
        except AgentError:
            self._release_lists(peer)
            raise
        self._evict(peer)

    def _prepare_local(self, peer: Peer, kind: MemoryKind, group: Rows) -> Handle:
        try:
            return self._shared.take(kind, group)
        except AgentError as error:
            raise AgentError(
                "rows-unregistered",
                f"NIXL cannot prepare {len(group)} local {kind} rows for peer {peer.key!r}: {error}",
            ) from error

    def _prepare_peer(self, peer: Peer, kind: MemoryKind, group: Rows, code: str) -> Handle:
        try:
            return self._port.prepare(peer.agent_name, kind, group)
        except AgentError as error:
            raise AgentError(
                code,
                f"NIXL cannot prepare {len(group)} {kind} rows of peer {peer.key!r}, the first is {group[0].tolist()}: "
                f"{error}; the peer's rows must lie in memory that its metadata registers",
                peer=peer.key,
            ) from error

    def _evict(self, newest: Peer) -> None:
        ready = [peer for peer in self._by_key.values() if peer.is_prepared and peer is not newest]
        excess = len(ready) + 1 - self._max_prepared
        if excess > 0:
            idle = sorted((peer for peer in ready if peer.outstanding == 0), key=lambda peer: peer.last_used)
            for peer in idle[:excess]:
                self._release_lists(peer)

    def _release_lists(self, peer: Peer) -> None:
        for kind in list(peer.local_lists):
            del peer.local_lists[kind]
            with contextlib.suppress(AgentError):
                self._shared.give_back(kind, peer.local.groups[kind])
        for kind in list(peer.peer_lists):
            with contextlib.suppress(AgentError):
                self._port.release_prepared(peer.peer_lists.pop(kind))
        if peer.fence_list is not None:
            with contextlib.suppress(AgentError):
                self._port.release_prepared(peer.fence_list)
            peer.fence_list = None

    def close(self) -> None:
        """Release everything."""
        everything = [*self._by_key.values(), *self._retiring]
        self._by_key.clear()
        self._by_name.clear()
        self._retiring.clear()
        for peer in everything:
            self._release_lists(peer)
        for name in {peer.agent_name for peer in everything}:
            with contextlib.suppress(AgentError):
                self._port.remove_peer(name)
