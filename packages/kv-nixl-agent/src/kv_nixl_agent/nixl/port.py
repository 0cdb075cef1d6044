"""The port: everything that this package needs from NIXL.

`binding.py` implements it over the real library, `testing.py` with memory copies. All handles are opaque.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

__all__ = ["Handle", "MEMORY_KINDS", "MemoryKind", "NixlPort", "PortFactory", "Progress"]

MemoryKind = Literal["DRAM", "VRAM"]
MEMORY_KINDS: Final[tuple[MemoryKind, MemoryKind]] = ("DRAM", "VRAM")
Progress = Literal["done", "in-progress"]
Handle = object


class NixlPort(Protocol):
    """NIXL agent, used by a single thread. Methods raise only `AgentError` with a `nixl-*` code."""

    @property
    def implementation(self) -> str:
        """Import name and version of the installed NIXL, for example `nixl_cu12 1.5.1`."""
        ...

    def register(self, kind: MemoryKind, ranges: npt.NDArray[np.uint64]) -> Handle:
        """Register memory; `ranges` is uint64 (n, 3): address, length_bytes, device."""
        ...

    def deregister(self, registration: Handle) -> None:
        """Undo a registration."""
        ...

    def agent_metadata(self) -> bytes:
        """Describe this agent and its registered memory to peers."""
        ...

    def add_peer(self, agent_metadata: bytes) -> str:
        """Load a peer's metadata and return its agent name."""
        ...

    def remove_peer(self, agent_name: str) -> None:
        """Forget a peer; unknown names are fine."""
        ...

    def prepare(self, agent_name: str | None, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> Handle:
        """Prepare a list from strided rows (n, 5), local if `agent_name` is None."""
        ...

    def release_prepared(self, prepared: Handle) -> None:
        """Release a prepared list."""
        ...

    def make(
        self,
        local: Handle,
        local_indices: npt.NDArray[np.int32],
        peer: Handle,
        peer_indices: npt.NDArray[np.int32],
        notification: bytes,
    ) -> Handle:
        """Make a read of the peer's rows into ours; an empty `notification` sends none."""
        ...

    def post(self, transfer: Handle) -> Progress:
        """Start a transfer."""
        ...

    def check(self, transfer: Handle) -> Progress:
        """Query a posted transfer, and let it make progress."""
        ...

    def release(self, transfer: Handle) -> None:
        """Release a transfer that has ended (or abandon an active one: late writes may follow)."""
        ...

    def backend(self, transfer: Handle) -> str:
        """Return the name of the back end that carried a transfer; empty where NIXL reports none; never raises."""
        ...

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return new notifications, as (agent name, payload)."""
        ...

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        """Send a notification without a transfer."""
        ...

    def close(self) -> None:
        """Destroy the agent; idempotent."""
        ...


class PortFactory(Protocol):
    """Makes the port of an agent; `testing.FakeFabric.port` is one."""

    def __call__(
        self,
        agent_name: str,
        backends: Sequence[tuple[str, Mapping[str, str]]],
        *,
        progress_thread: bool,
    ) -> NixlPort:
        """Create the agent with these backends, in order, each with its parameters."""
        ...
