"""A port that counts handles, around any other port: what is made must be released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.port import Handle, PortFactory

_MADE = {"register": "registration", "prepare": "prepared", "make": "transfer"}
_RELEASED = {"deregister": "registration", "release_prepared": "prepared", "release": "transfer"}


class RecordingPort:
    """Passes every call on and keeps the set of open handles by kind."""

    def __init__(self, port: Any) -> None:
        self._port = port
        self._open: dict[str, dict[int, Handle]] = {kind: {} for kind in _MADE.values()}
        self.peers: set[str] = set()
        """Agent names that were added and not removed."""
        self.double_releases = 0
        self.is_closed = False

    def open_handles(self) -> Mapping[str, int]:
        """Return how many registrations, prepared lists and transfers are open."""
        return {kind: len(handles) for kind, handles in self._open.items()}

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._port, name)
        if name in _MADE:
            return lambda *arguments: self._opened(_MADE[name], inner(*arguments))
        if name in _RELEASED:
            return lambda handle: self._released(_RELEASED[name], handle, inner)
        return inner

    def add_peer(self, agent_metadata: bytes) -> str:
        """Pass on and note."""
        name: str = self._port.add_peer(agent_metadata)
        self.peers.add(name)
        return name

    def remove_peer(self, agent_name: str) -> None:
        """Pass on and note."""
        self.peers.discard(agent_name)
        self._port.remove_peer(agent_name)

    def check(self, transfer: Handle) -> Any:
        """Pass on; a released handle must not be polled."""
        if id(transfer) not in self._open["transfer"]:
            raise AssertionError("check of a transfer that was released")
        return self._port.check(transfer)

    def close(self) -> None:
        """Pass on and note."""
        self.is_closed = True
        self._port.close()

    def _opened(self, kind: str, handle: Handle) -> Handle:
        self._open[kind][id(handle)] = handle
        return handle

    def _released(self, kind: str, handle: Handle, release: Callable[[Handle], object]) -> None:
        release(handle)
        if self._open[kind].pop(id(handle), None) is None:
            self.double_releases += 1
            raise AgentError("nixl-not-found", f"double release of a {kind}")


def recording_factory(factory: PortFactory, ports: list[RecordingPort]) -> Any:
    """Return a factory whose ports are recorded into `ports`."""

    def make(*arguments: Any, **named: Any) -> RecordingPort:
        ports.append(RecordingPort(factory(*arguments, **named)))
        return ports[-1]

    return make
