"""A peer rank, and the prepared lists of its memory and ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

from ._errors import AgentError
from ._rows import RowTable
from ._stream_layout import check_streams

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._port import Handle, MemoryKind, NixlPort
    from ._values import FenceLocation, PeerDescription, StreamLocation

    Rows = npt.NDArray[np.uint64]

__all__ = ["Peer", "PeerLists", "SharedLists"]

_TOUCH_BYTES = 8


@final
@dataclass(slots=True)
class PeerLists:
    """Prepared lists of one peer."""

    local: dict[MemoryKind, Handle] = field(default_factory=dict["MemoryKind", "Handle"])
    peer: dict[MemoryKind, Handle] = field(default_factory=dict["MemoryKind", "Handle"])
    fence: Handle | None = None
    """The peer's fence array, one descriptor per word."""


@final
class Peer:
    """A peer rank: its agent, row tables, prepared lists and number of outstanding handles."""

    __slots__ = (
        "agent_digest",
        "agent_name",
        "agent_prefix",
        "fence",
        "is_connected",
        "is_lost",
        "is_removed",
        "is_wired",
        "key",
        "lists",
        "local",
        "outstanding",
        "rows",
        "streams",
    )

    def __init__(self, spec: PeerDescription) -> None:
        self.key = spec.key
        self.agent_prefix = spec.agent_prefix
        self.local, self.rows = _tables(spec)
        self.fence: FenceLocation | None = spec.fence
        _check_fence(spec.key, spec.fence)
        self.streams: StreamLocation | None = spec.streams
        check_streams(spec.key, spec.streams)
        self.agent_digest = b""
        """Digest of the metadata that the peer's NIXL agent was loaded from."""
        self.agent_name = ""
        """Name of the peer's NIXL agent, once it is loaded."""
        self.lists = PeerLists()
        self.is_wired = False
        self.is_connected = True
        self.is_removed = False
        self.is_lost = False
        """Whether NIXL has forgotten the peer's process, so that it can say nothing more about outstanding handles."""
        self.outstanding = 0
        """Handles made for this peer and not yet released."""

    @property
    def touch_row(self) -> tuple[MemoryKind, Rows] | None:
        """Kind and row of a few bytes that a warm-up or a probe may read: of the peer's pages, else of its fence."""
        if self.rows.groups:
            kind, group = next(iter(self.rows.groups.items()))
            address, length_bytes, device = group[0, :3].tolist()
        elif self.fence is not None:
            kind, (address, device, _), length_bytes = "DRAM", self.fence, _TOUCH_BYTES
        else:
            return None
        length_bytes = min(_TOUCH_BYTES, length_bytes)
        return kind, np.array([[address, length_bytes, device, length_bytes, 1]], dtype=np.uint64)

    def describe(self) -> dict[str, object]:
        """Return the peer's state as plain values."""
        return {
            "agent_name": self.agent_name,
            "is_wired": self.is_wired,
            "is_connected": self.is_connected,
            "outstanding": self.outstanding,
            "descriptors": self.rows.count,
            "has_fence": self.fence is not None,
            "has_streams": self.streams is not None,
        }


def _tables(spec: PeerDescription) -> tuple[RowTable, RowTable]:
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


@final
class SharedLists:
    """Local prepared lists by content, with use counts: peers with equal local rows share them."""

    def __init__(self, port: NixlPort) -> None:
        self._port = port
        self._lists: dict[tuple[MemoryKind, bytes], tuple[Handle, int]] = {}

    def take(self, kind: MemoryKind, rows: Rows) -> Handle:
        """Return the prepared list of these rows, preparing it at the first use."""
        key = (kind, rows.tobytes())
        handle, users = self._lists.get(key, (None, 0))
        if handle is None:
            handle = self._port.prepare(None, kind, rows)
        self._lists[key] = (handle, users + 1)
        return handle

    def give_back(self, kind: MemoryKind, rows: Rows) -> None:
        """Give up one use; the last one releases the list."""
        key = (kind, rows.tobytes())
        handle, users = self._lists[key]
        if users > 1:
            self._lists[key] = (handle, users - 1)
            return
        del self._lists[key]
        self._port.release_prepared(handle)

    def __len__(self) -> int:
        return len(self._lists)
