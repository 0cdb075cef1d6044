"""A port that counts handles, around any other port: what is made must be released."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_nixl_agent.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort, PortFactory, Progress, WireTelemetry

__all__ = ["RecordingPort", "recording_factory"]


@final
class RecordingPort:
    """Passes every call on and keeps the set of open handles by kind."""

    def __init__(self, port: NixlPort) -> None:
        self._port = port
        self._open: dict[str, dict[int, Handle]] = {"registration": {}, "prepared": {}, "transfer": {}}
        self.peers: set[str] = set()
        """Agent names that were added and not removed."""
        self.double_releases = 0
        self.is_closed = False

    def open_handles(self) -> Mapping[str, int]:
        """Return how many registrations, prepared lists and transfers are open."""
        return {kind: len(handles) for kind, handles in self._open.items()}

    @property
    def implementation(self) -> str:
        """Features of the port."""
        return self._port.implementation

    def register(self, kind: MemoryKind, ranges: npt.NDArray[np.uint64]) -> Handle:
        """Pass on and count."""
        return self._opened("registration", self._port.register(kind, ranges))

    def deregister(self, registration: Handle) -> None:
        """Pass on and count."""
        self._port.deregister(registration)
        self._released("registration", registration)

    def agent_metadata(self) -> bytes:
        """Pass on."""
        return self._port.agent_metadata()

    def add_peer(self, agent_metadata: bytes) -> str:
        """Pass on and note."""
        name = self._port.add_peer(agent_metadata)
        self.peers.add(name)
        return name

    def remove_peer(self, agent_name: str) -> None:
        """Pass on and note."""
        self.peers.discard(agent_name)
        self._port.remove_peer(agent_name)

    def prepare(self, agent_name: str | None, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> Handle:
        """Pass on and count."""
        return self._opened("prepared", self._port.prepare(agent_name, kind, rows))

    def release_prepared(self, prepared: Handle) -> None:
        """Pass on and count."""
        self._port.release_prepared(prepared)
        self._released("prepared", prepared)

    def make(
        self,
        local: Handle,
        local_indices: npt.NDArray[np.int32],
        peer: Handle,
        peer_indices: npt.NDArray[np.int32],
        notification: bytes,
    ) -> Handle:
        """Pass on and count."""
        made = self._port.make(local, local_indices, peer, peer_indices, notification)
        return self._opened("transfer", made)

    def post(self, transfer: Handle) -> Progress:
        """Pass on."""
        return self._port.post(transfer)

    def check(self, transfer: Handle) -> Progress:
        """Pass on; a released handle must not be asked."""
        if id(transfer) not in self._open["transfer"]:
            raise AssertionError("check of a transfer that was released")
        return self._port.check(transfer)

    def release(self, transfer: Handle) -> None:
        """Pass on and count."""
        self._port.release(transfer)
        self._released("transfer", transfer)

    def telemetry(self, transfer: Handle) -> WireTelemetry | None:
        """Pass on."""
        return self._port.telemetry(transfer)

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Pass on."""
        return self._port.notifications()

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        """Pass on."""
        self._port.send_notification(agent_name, payload)

    def close(self) -> None:
        """Pass on."""
        self.is_closed = True
        self._port.close()

    def _opened(self, kind: str, handle: Handle) -> Handle:
        self._open[kind][id(handle)] = handle
        return handle

    def _released(self, kind: str, handle: Handle) -> None:
        if self._open[kind].pop(id(handle), None) is None:
            self.double_releases += 1
            raise AgentError("nixl-not-found", f"double release of a {kind}")


def recording_factory(factory: PortFactory, ports: list[RecordingPort]) -> PortFactory:
    """Return a factory whose ports are recorded into `ports`."""

    def make(
        agent_name: str,
        backends: Sequence[tuple[str, Mapping[str, str]]],
        *,
        progress_thread: bool,
    ) -> NixlPort:
        port = RecordingPort(factory(agent_name, backends, progress_thread=progress_thread))
        ports.append(port)
        return port

    return make
