"""`NixlBinding`: the port over a real NIXL agent. Finds NIXL's package, opens agents, normalises answers, codes errors.

The only module that loads NIXL.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.side_effects import POOL, WorkerTurns, set_library_defaults, sleeping_progress_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.nixl.port import Handle, MemoryKind, Progress

__all__ = [
    "IMPORT_NAMES",
    "NixlBinding",
    "descriptors_left",
    "expand_rows",
    "find_nixl",
    "loaded_build",
    "open_nixl",
    "try_backends",
]

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
    """Run a NIXL call and translate its exceptions."""
    try:
        return call()
    except Exception as error:
        raise _translated(what, error) from error


def _translated(what: str, error: Exception) -> AgentError:
    """Return the coded error for one of NIXL's.

    NIXL's own frames hold its agent, and an error may outlive the agent: without that traceback the agent is freed when it is
    closed, not at some later garbage collection.
    """
    error.__traceback__ = None
    code = _CODES.get(type(error).__name__, "nixl-unknown")
    return AgentError(code, f"NIXL failed in {what}: {type(error).__name__}: {error}", call=what)


def _progress(what: str, state: str) -> Progress:
    if state == "DONE":
        return "done"
    if state == "PROC":
        return "in-progress"
    raise AgentError("nixl-backend", f"NIXL answered {what} with the state {state}", call=what)


@final
class _Held:
    """Wraps a NIXL handle, which keeps the C++ agent alive. Emptied on release, so that stray references keep nothing alive."""

    def __init__(self, inner: object) -> None:
        self.inner: object | None = inner


@final
class NixlBinding:
    """`NixlPort` over a real `nixl_agent`."""

    def __init__(self, agent: Any, implementation: str, turns: WorkerTurns | None = None) -> None:  # noqa: ANN401 - a `nixl_agent`
        self._agent: Any = agent
        self._turns = turns
        self.implementation = implementation
        """Import name and version of NIXL's package."""
        self._strided: bool | None = None
        self._held: set[_Held] = set()

    def register(self, kind: MemoryKind, ranges: npt.NDArray[np.uint64]) -> Handle:
        """Register memory with every backend that supports its kind."""
        descriptors: Handle | None = self._call("register_memory", ranges, kind)
        if descriptors is None:
            raise AgentError("nixl-invalid-param", f"register_memory refused {len(ranges)} ranges")
        return descriptors

    def deregister(self, registration: Handle) -> None:
        """Undo a registration."""
        self._call("deregister_memory", registration)

    def agent_metadata(self) -> bytes:
        """Describe this agent to peers."""
        return bytes(self._call("get_agent_metadata"))

    def add_peer(self, agent_metadata: bytes) -> str:
        """Load a peer's metadata, if there are descriptors for it; NIXL returns bytes although it is annotated str."""
        refuse_without_descriptors()
        name = self._call("add_remote_agent", agent_metadata)
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        if not text:
            raise AgentError("nixl-mismatch", "add_remote_agent returned no agent name")
        if self._turns is not None:
            self._turns.added_peer()
        return text

    def remove_peer(self, agent_name: str) -> None:
        """Forget a peer."""
        self._call("remove_remote_agent", agent_name)

    def prepare(self, agent_name: str | None, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> Handle:
        """Prepare strided rows; for a NIXL before 1.5, expand them to one descriptor per line."""
        owner = "NIXL_INIT_AGENT" if agent_name is None else agent_name
        if self._strided is not False:
            try:
                handle = self._hold(self._call("prep_xfer_dlist", owner, rows, kind))
            except AgentError as error:
                # An old NIXL takes only (n, 3) arrays: it logs, gets None and fails on the type. Try this only once.
                if self._strided or not isinstance(error.__cause__, (TypeError, AttributeError)):
                    raise
                self._strided = False
            else:
                self._strided = True
                return handle
        return self._hold(self._call("prep_xfer_dlist", owner, expand_rows(rows), kind))

    def release_prepared(self, prepared: Handle) -> None:
        """Release a prepared list."""
        self._call("release_dlist_handle", prepared)
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
            self._call("make_prepped_xfer", "READ", local, local_indices, peer, peer_indices, notification)
        )

    def post(self, transfer: Handle) -> Progress:
        """Start a transfer."""
        return _progress("transfer", self._call("transfer", transfer))

    def check(self, transfer: Handle) -> Progress:
        """Query a posted transfer."""
        return _progress("check_xfer_state", self._call("check_xfer_state", transfer))

    def release(self, transfer: Handle) -> None:
        """Release a transfer."""
        self._call("release_xfer_handle", transfer)
        self._let_go(transfer)

    def backend(self, transfer: Handle) -> str:
        """Return the name of the back end that carried a transfer, empty if NIXL reports none."""
        try:
            known = self._agent.backends
            if len(known) == 1:  # querying costs as much as posting, and no other can have carried it
                return str(next(iter(known)))
            name = self._agent.query_xfer_backend(_inner(transfer))
        except Exception:  # noqa: BLE001 - a missing name never spoils a good transfer
            return ""
        return name if isinstance(name, str) else ""

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return new notifications, and let the worker threads take the turn that is due."""
        if self._turns is not None:
            self._turns.take_due()
        arrived = self._call("get_new_notifs")
        if not arrived:
            return ()
        return [(name, bytes(payload)) for name, payloads in arrived.items() for payload in payloads]

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        """Send a notification without a transfer."""
        self._call("send_notif", agent_name, payload)

    def plugins(self) -> Mapping[str, Sequence[str]]:
        """Return the memory kinds of every NIXL plugin, none of one that cannot be loaded here."""
        return {
            str(name): [str(kind).removesuffix("_SEG") for kind in self._call("get_plugin_mem_types", name)]
            for name in self._call("get_plugin_list")
        }

    def close(self) -> None:
        """Destroy the agent: no other reference to it exists, and its destructor closes the backends."""
        for held in self._held:
            held.inner = None
        self._held.clear()
        if self._turns is not None:
            self._turns.end()
        self._agent = None

    def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401
        if self._agent is None:
            raise AgentError("agent-closed", "the NIXL agent was closed")
        try:
            # The error of a call keeps this frame, so the agent and NIXL's handles are reached only within the call.
            return getattr(self._agent, method)(*map(_inner, arguments))
        except AgentError:
            raise
        except Exception as error:
            raise _translated(method, error) from error

    def _hold(self, inner: object) -> _Held:
        held = _Held(inner)
        self._held.add(held)
        return held

    def _let_go(self, handle: Handle) -> None:
        held = cast("_Held", handle)
        held.inner = None
        self._held.discard(held)


def _inner(argument: object) -> object:
    """Return NIXL's own handle of a `_Held`, and other arguments as they are."""
    if not isinstance(argument, _Held):
        return argument
    if argument.inner is None:
        raise AgentError("nixl-invalid-param", "a handle was used after its release")
    return argument.inner


IMPORT_NAMES: Final = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
"""Modules to try, in this order; `nixl` itself loads one of the others."""

_UNLISTED: Final[Mapping[str, frozenset[str]]] = {
    "UCX": frozenset({"num_threads", "split_batch_size", "engine_config"}),
    "LIBFABRIC": frozenset({"striping_threshold", "max_bw_per_dram_seg"}),
}
"""Parameters that a plugin takes without listing them."""


def find_nixl() -> Any:  # noqa: ANN401 - the library is dynamic behind this seam
    """Return the first NIXL Python package that imports.

    Raises:
        AgentError: `nixl-missing`, naming what was tried and why each failed.
    """
    set_library_defaults()
    reasons: list[str] = []
    for name in IMPORT_NAMES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise AgentError(
        "nixl-missing",
        f"no NIXL package can be imported ({'; '.join(reasons)}); install the build for torch's CUDA, nixl-cu12 or "
        "nixl-cu13: pip install 'kv-nixl-agent[cu13]'",
    )


def loaded_build() -> str | None:
    """Return the module that NIXL is loaded from, for example `nixl_cu13`; None where none can be loaded."""
    try:
        return _build_of(find_nixl())
    except AgentError:
        return None


def _build_of(module: Any) -> str:  # noqa: ANN401
    return str(module.nixl_agent.__module__).split(".")[0]


def _version_of(module: Any) -> str:  # noqa: ANN401
    name = _build_of(module)
    for candidate in (name, name.replace("_", "-"), "nixl"):
        try:
            return f"{name} {importlib.metadata.version(candidate)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{name} (version unknown)"


def open_nixl(
    agent_name: str,
    backends: Sequence[tuple[str, Mapping[str, str]]],
    *,
    progress_thread: bool = True,
) -> NixlBinding:
    """Create a NIXL agent with its backends; the default `PortFactory`.

    Raises:
        AgentError: `nixl-missing`, `backend-unavailable`.
    """
    module = find_nixl()
    POOL.watch()

    arguments: dict[str, object] = {"backends": [], "enable_prog_thread": progress_thread}
    modes = getattr(module, "nixl_thread_sync_t", None)
    if modes is not None:  # the WorkerTurns of this thread and NIXL's own threads
        arguments["sync_mode"] = modes["NIXL_THREAD_SYNC_RW"]

    def create() -> Any:  # noqa: ANN401
        with sleeping_progress_thread(module.nixl_agent):
            return module.nixl_agent(agent_name, module.nixl_agent_config(**arguments))

    agent = attempt("create agent", create)
    plugins = list(agent.get_plugin_list())
    for name, parameters in backends:
        if name not in plugins:
            raise AgentError(
                "backend-unavailable", f"NIXL has no plugin {name!r} here; it has {', '.join(plugins)}", backend=name
            )
        known = agent.get_plugin_params(name)
        POOL.zero()
        unknown = sorted(set(parameters) - set(known) - _UNLISTED.get(name, frozenset()))
        if known and unknown:
            raise AgentError(
                "backend-unavailable",
                f"plugin {name} has no parameters {unknown}; it has {', '.join(sorted(known))}",
                backend=name,
            )
        try:
            attempt("create_backend", partial(agent.create_backend, name, dict(parameters)))
        except AgentError as error:
            raise AgentError(
                "backend-unavailable",
                f"plugin {name} did not start with {dict(parameters)}: {error.message}; NIXL_LOG_LEVEL=INFO prints the reason",
                backend=name,
            ) from error
    turns = [WorkerTurns(agent, agent_name, parameters) for name, parameters in backends if name == "UCX"]
    return NixlBinding(agent, _version_of(module), next(iter(turns), None))


_TRY_WITHIN_S: Final = 30.0
_REFUSED: Final = 9
_TRIED: Final = f"""
import json, os, sys
from kv_nixl_agent import AgentError, open_nixl
try:
    open_nixl("try", json.loads(sys.argv[1])).close()
except AgentError as error:
    print("\\n", json.dumps([error.code, error.message]), file=sys.stderr, flush=True)
    os._exit({_REFUSED})  # before libraries log their end
"""


def try_backends(backends: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Create an agent with these backends in a process of its own, which leaves this one without NIXL's libraries and threads.

    A process that ends otherwise, or not within 30 s, says nothing of the backends.

    Raises:
        AgentError: As `open_nixl`.
    """
    words = [sys.executable, "-c", _TRIED, json.dumps([(name, dict(given)) for name, given in backends])]
    with suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(words, capture_output=True, timeout=_TRY_WITHIN_S, check=False)
        if ended.returncode == _REFUSED:
            code, message = json.loads(ended.stderr.splitlines()[-1])
            raise AgentError(code, message)


_PEER_NEEDS: Final = 32
"""More than UCX opens for a peer with four worker threads: 5 stay open on one host, 10 over TCP."""


def descriptors_left() -> int | None:
    """Return how many more descriptors this process may open; None where there is no limit or it is unknown."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        # The list includes the descriptor of the directory itself, which is closed again.
        return max(0, most - len(os.listdir("/proc/self/fd")) + 1)  # noqa: PTH208 - half the time, and each peer asks
    except FileNotFoundError:
        return None
    except OSError:
        return 0


def refuse_without_descriptors() -> None:
    """Do nothing if descriptors for a peer remain.

    Raises:
        AgentError: `no-descriptors`.
    """
    # With too few, UCX keeps half a connection: it cannot accept the connections that the peer opens in return, and a peer whose
    # connection is refused in that state may be aborted by its own UCX.
    left = descriptors_left()
    if left is not None and left < _PEER_NEEDS:
        raise AgentError(
            "no-descriptors",
            f"only {left} more descriptors may be opened by this process, and connecting to a peer needs up to {_PEER_NEEDS}: "
            "raise its limit (`ulimit -n`, or LimitNOFILE of its service)",
            left=left,
        )


def expand_rows(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return one (address, length_bytes, device) line per descriptor, uint64 (descriptors, 3), for an older NIXL."""
    counts = rows[:, 4].astype(np.int64)
    row = np.repeat(np.arange(len(rows)), counts)
    ordinal = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    result = np.empty((len(row), 3), dtype=np.uint64)
    result[:, 0] = rows[row, 0] + ordinal.astype(np.uint64) * rows[row, 3]
    result[:, 1] = rows[row, 1]
    result[:, 2] = rows[row, 2]
    return result
