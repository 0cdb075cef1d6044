"""`NixlBinding`: the port over a NIXL agent made by `_bindings.py`. Normalises its answers and codes its errors."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar, cast, final

from ._descriptors import refuse_without_descriptors
from ._errors import AgentError
from ._port import Handle, MemoryKind, PortFeatures, Progress, WireTelemetry
from ._rows import expand_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from ._nixl_api import NixlAgent
    from ._worker_turns import WorkerTurns

__all__ = ["NixlBinding", "attempt"]

_Result = TypeVar("_Result")

_CODES: Final = MappingProxyType(
    {
        "nixlInvalidParamError": "nixl-invalid-param",
        "nixlNotFoundError": "nixl-not-found",
        "nixlMismatchError": "nixl-mismatch",
        "nixlNotPostedError": "nixl-not-posted",
        "nixlNotAllowedError": "nixl-not-allowed",
        "nixlNotSupportedError": "nixl-not-supported",
        "nixlRepostActiveError": "nixl-active",
        "nixlRemoteDisconnectError": "nixl-disconnected",
        "nixlCancelledError": "nixl-cancelled",
        "nixlBackendError": "nixl-backend",
    }
)


def attempt(what: str, call: Callable[[], _Result]) -> _Result:
    """Run a NIXL call and translate its exceptions.

    NIXL's own frames hold its agent, and an error may outlive the agent: without that traceback the agent is freed when it is
    closed, not at some later garbage collection.
    """
    try:
        return call()
    except AgentError:
        raise
    except Exception as error:
        code = _CODES.get(type(error).__name__, "nixl-unknown")
        error.__traceback__ = None
        raise AgentError(code, f"NIXL failed in {what}: {type(error).__name__}: {error}", call=what) from error


def _progress(what: str, state: str) -> Progress:
    if state == "DONE":
        return "done"
    if state == "PROC":
        return "in-progress"
    raise AgentError("nixl-backend", f"NIXL answered {what} with the state {state}", call=what)


@final
class _Held:
    """Wraps a NIXL handle, which keeps the C++ agent alive. Emptied on release, so that stray references keep nothing alive."""

    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner: object | None = inner


@final
class NixlBinding:
    """`NixlPort` over a real `nixl_agent`."""

    def __init__(self, agent: NixlAgent, implementation: str, turns: WorkerTurns | None = None) -> None:
        self._agent: NixlAgent | None = agent
        self._turns = turns
        self._implementation = implementation
        self._strided: bool | None = None
        self._held: set[_Held] = set()

    @property
    def features(self) -> PortFeatures:
        """Features of this agent."""
        agent = self._live()
        return PortFeatures(
            implementation=self._implementation,
            strided_rows=self._strided is not False,
            telemetry=True,
            backends=tuple(agent.backends),
            backend_parameters={name: dict(agent.get_backend_params(name)) for name in agent.backends},
        )

    def register(self, kind: MemoryKind, ranges: npt.NDArray[np.uint64]) -> Handle:
        """Register memory with every backend that supports its kind."""
        descriptors = attempt("register_memory", lambda: self._live().register_memory(ranges, kind))
        if descriptors is None:
            raise AgentError("nixl-invalid-param", f"register_memory refused {len(ranges)} ranges")
        return descriptors

    def deregister(self, registration: Handle) -> None:
        """Undo a registration."""
        attempt("deregister_memory", lambda: self._live().deregister_memory(registration))

    def agent_metadata(self) -> bytes:
        """Describe this agent to peers."""
        return bytes(attempt("get_agent_metadata", lambda: self._live().get_agent_metadata()))

    def add_peer(self, agent_metadata: bytes) -> str:
        """Load a peer's metadata, if there are descriptors for it; NIXL returns bytes although it is annotated str."""
        refuse_without_descriptors()
        name = attempt("add_remote_agent", lambda: self._live().add_remote_agent(agent_metadata))
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        if not text:
            raise AgentError("nixl-mismatch", "add_remote_agent returned no agent name")
        if self._turns is not None:
            self._turns.met_peer()
        return text

    def remove_peer(self, agent_name: str) -> None:
        """Forget a peer."""
        attempt("remove_remote_agent", lambda: self._live().remove_remote_agent(agent_name))

    def prepare(self, agent_name: str | None, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> Handle:
        """Prepare strided rows; for a NIXL before 1.5, expand them to one descriptor per line."""
        owner = "NIXL_INIT_AGENT" if agent_name is None else agent_name
        if self._strided is not False:
            try:
                handle = self._live().prep_xfer_dlist(owner, rows, kind)
            except Exception as error:  # noqa: BLE001 - coded by _reraise
                # An old NIXL takes only (n, 3) arrays: it logs, gets None and fails on the type. Try this only once.
                if self._strided or not isinstance(error, (TypeError, AttributeError)):
                    _reraise("prep_xfer_dlist", error)
                self._strided = False
            else:
                self._strided = True
                return self._hold(handle)
        return self._hold(
            attempt("prep_xfer_dlist", lambda: self._live().prep_xfer_dlist(owner, expand_rows(rows), kind))
        )

    def release_prepared(self, prepared: Handle) -> None:
        """Release a prepared list."""
        attempt("release_dlist_handle", lambda: self._live().release_dlist_handle(_inner(prepared)))
        self._let_go(prepared)

    def make(
        self,
        local: Handle,
        local_indices: npt.NDArray[np.int32],
        peer: Handle,
        peer_indices: npt.NDArray[np.int32],
        notification: bytes,
    ) -> Handle:
        """Make a read from prepared lists."""
        return self._hold(
            attempt(
                "make_prepped_xfer",
                lambda: self._live().make_prepped_xfer(
                    "READ", _inner(local), local_indices, _inner(peer), peer_indices, notification
                ),
            )
        )

    def post(self, transfer: Handle) -> Progress:
        """Start a transfer."""
        return _progress("transfer", attempt("transfer", lambda: self._live().transfer(_inner(transfer))))

    def check(self, transfer: Handle) -> Progress:
        """Query a posted transfer."""
        state = attempt("check_xfer_state", lambda: self._live().check_xfer_state(_inner(transfer)))
        return _progress("check_xfer_state", state)

    def release(self, transfer: Handle) -> None:
        """Release a transfer."""
        attempt("release_xfer_handle", lambda: self._live().release_xfer_handle(_inner(transfer)))
        self._let_go(transfer)

    def telemetry(self, transfer: Handle) -> WireTelemetry | None:
        """Return NIXL's telemetry of a finished transfer; missing telemetry is not a failure of the transfer."""
        try:
            record = self._live().get_xfer_telemetry(_inner(transfer))
            return WireTelemetry(
                post_us=float(record.postDuration),
                transfer_us=float(record.xferDuration),
                total_bytes=int(record.totalBytes),
                descriptor_count=int(record.descCount),
                backend=_backend_of(self._live(), _inner(transfer)),
            )
        except Exception:  # noqa: BLE001 - telemetry never spoils a good transfer
            return None

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return new notifications, and let the worker threads take the turn that is due."""
        if self._turns is not None:
            self._turns.take_due()
        arrived = attempt("get_new_notifs", lambda: self._live().get_new_notifs())
        if not arrived:
            return ()
        return [(name, bytes(payload)) for name, payloads in arrived.items() for payload in payloads]

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        """Send a notification without a transfer."""
        attempt("send_notif", lambda: self._live().send_notif(agent_name, payload))

    def close(self) -> None:
        """Destroy the agent: no other reference to it exists, and its destructor closes the backends."""
        for held in self._held:
            held.inner = None
        self._held.clear()
        if self._turns is not None:
            self._turns.end()
        self._agent = None

    def _hold(self, inner: object) -> _Held:
        held = _Held(inner)
        self._held.add(held)
        return held

    def _let_go(self, handle: Handle) -> None:
        held = cast("_Held", handle)
        held.inner = None
        self._held.discard(held)

    def _live(self) -> NixlAgent:
        if self._agent is None:
            raise AgentError("agent-closed", "the NIXL agent was closed")
        return self._agent


def _inner(handle: Handle) -> object:
    inner = cast("_Held", handle).inner
    if inner is None:
        raise AgentError("nixl-invalid-param", "a handle was used after its release")
    return inner


def _backend_of(agent: NixlAgent, transfer: Handle) -> str:
    if len(agent.backends) == 1:  # querying costs as much as posting, and no other backend can have carried it
        return next(iter(agent.backends))
    try:
        name = agent.query_xfer_backend(transfer)
    except Exception:  # noqa: BLE001 - as with the rest of the account: what NIXL does not tell spoils nothing
        return ""
    return name if isinstance(name, str) else ""


def _reraise(what: str, error: Exception) -> None:
    def call() -> None:
        raise error

    attempt(what, call)
