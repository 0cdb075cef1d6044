"""Answers of an engine's processes to `status`, `trace` and `revoke`: their shape, and the Unix socket that gives them.

A process reports the fields of its part. An engine of another version may answer otherwise, so a command reads each field as one
that may be missing or null, and shows fields that are not declared here as they are.

Theory of operation. A separate thread sleeps in `accept`, so a process that is not asked pays nothing. A client must send one
short line; the answer is one JSON object, and the connection is closed. One connection is served at a time, for a second at
most, with a pause after each, so that asking in a loop cannot take the process's time. Only the user may access the folder
(0700) and the socket (0600). The socket appears under its name only once it listens, so a socket that refuses connections
belongs to a dead process, and the next command that asks removes it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import secrets
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Required, TypedDict, final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Answer", "Entry", "HandOverEntry", "StatusSocket", "own_sockets", "status_folders"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")
_SCHEMA = 1
"""Version of the answers; adding keys does not change it."""
_SUFFIX = ".sock"
_NAME = "vllm-adapter"
_TEMPORARY = Path("/tmp")  # noqa: S108  (the folder in it is this user's alone, or is not used)
_OTHERS_RIGHTS = 0o077
_MOST_REQUEST_BYTES = 64
_BACKLOG = 4
_CLIENT_S = 1.0
_PAUSE_S = 0.1

Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""Bytes, counts, seconds. What is computed from numbers within these bounds stays a finite float."""

Entry = dict[str, object]
"""A request, a lease, a read, a streamed read or a peer engine, without the values that could end a lease; shown as it is."""


class HandOverEntry(TypedDict, total=False):
    """A hand-over that a process remembers: seconds of its monotonic clock by stage, and facts."""

    request_id: str | None
    role: str | None
    peer_engine_id: str | None
    peer_request_id: str | None
    frontend_s: Number | None
    tokens: Number | None
    bytes: Number | None
    early_bytes: Number | None
    is_early: bool | None
    is_streamed: bool | None
    code: str | None
    moments: Required[dict[str, Number | None]]


class HealthEntry(TypedDict, total=False):
    """Health of a rank's transfer thread."""

    state: str | None
    calls_waiting: Number | None
    errors: Number | None
    last_error: str | None
    ucx_requests: str | None


class Answer(TypedDict, total=False):
    """The answer of one process."""

    # Of every process. The socket, the command that asked (`desk`) and its clock are added where the answer arrives.
    name: str | None
    engine_id: str | None
    kv_role: str | None
    side_channel: str | None
    model: str | None
    part: str | None
    pid: Number | None
    parent_pid: Number | None
    ucx_tls: str | None
    error: str | None
    socket: str | None
    desk: str | None
    asked_s: Number | None
    heard_s: Number | None
    answered_s: Number | None
    received_s: Number | None
    hand_overs: list[HandOverEntry] | None
    leases: Number | None
    # Of the scheduler's. The command that asked adds the ports.
    http_ports: list[int] | None
    compatibility_policy: str | None
    may_differ: str | None
    lease_s: Number | None
    heartbeat_s: Number | None
    requires_seals: bool | None
    is_encrypted: bool | None
    seals: list[str] | None
    served_ranks: Number | None
    is_draining: bool | None
    leased_blocks: Number | None
    leased_bytes: Number | None
    fence_slots_used: Number | None
    stream_slots_used: Number | None
    stream_blocks_held: Number | None
    requests_by_state: dict[str, int] | None
    oldest_requests: list[Entry] | None
    # Of a rank's.
    is_asleep: bool | None
    is_registered: bool | None
    is_silent: bool | None
    thread: HealthEntry | None
    figures: dict[str, Number | None] | None
    quarantined_transfers: Number | None
    quarantined_bytes: Number | None
    stalled_transfers: Number | None
    stalled_bytes: Number | None
    oldest_leases: list[Entry] | None
    reads: Number | None
    reads_waiting_for_a_peer: Number | None
    oldest_reads: list[Entry] | None
    streams: Number | None
    oldest_streams: list[Entry] | None
    peers: Number | None
    peer_engines: list[Entry] | None


@final
class StatusSocket:
    """Answers requests on its own socket; a socket that cannot be opened causes one line in the log.

    Args:
        part: The process's part of its engine, for the file name: `scheduler`, or a rank as `0.1`.
        answers: Functions that return plain values, by request; called on the socket's thread, at any time. `status`; `trace`
            for the latest hand-overs, with the process's monotonic clock at both ends of its answer; in a scheduler's process
            `revoke`, by which an operator takes all unread leases back, for what they keep.
        about: What all answers contain beside the process's own description.

    Attributes:
        path: File of the socket.
    """

    def __init__(
        self,
        part: str,
        answers: Mapping[str, Callable[[], Mapping[str, object]]],
        about: Mapping[str, object] | None = None,
    ) -> None:
        self.path = status_folders()[0] / f"{os.getpid()}-{part}-{secrets.token_hex(2)}{_SUFFIX}"
        self._answers = {f"{request}\n".encode(): describe for request, describe in answers.items()}
        # None for an engine in the process of its caller, or of Ray: its parent is not vLLM's API server.
        parent = multiprocessing.parent_process()
        own = {"schema": _SCHEMA, "part": part, "pid": os.getpid(), "parent_pid": parent.pid if parent else None}
        self._about = {**own, "ucx_tls": os.environ.get("UCX_TLS", ""), **(about or {})}
        self._began_s = time.monotonic()
        self._listening: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="kv-status", daemon=True)

    def open(self) -> bool:
        """Start answering; return False if that is not possible here, with a log line."""
        folder = self.path.parent
        try:
            # An existing folder must already be private.
            folder.mkdir(mode=0o700, exist_ok=True)
            own_sockets(folder)
            self._listening = self._listen()
            self._thread.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            _logger.info("vllm-adapter status cannot ask this process: no socket in %s: %s", folder, error)
            self.close()
            return False
        return True

    def _listen(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unfinished = self.path.with_suffix(".new")
        try:
            listening.bind(str(unfinished))
            unfinished.chmod(0o600)
            listening.listen(_BACKLOG)
            unfinished.rename(self.path)
        except BaseException:
            listening.close()
            unfinished.unlink(missing_ok=True)
            raise
        return listening

    def close(self) -> None:
        """Stop answering and remove the socket; idempotent."""
        listening, self._listening = self._listening, None
        if listening is None:
            return
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone does not
        if self._thread.is_alive():
            self._thread.join(2 * _CLIENT_S)
        listening.close()

    # Everything below runs on the socket's thread.

    def _serve(self) -> None:
        listening = self._listening
        while listening is not None and self._listening is listening:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._listening is listening:
                    time.sleep(_PAUSE_S)  # no file descriptor is free now; later there may be one
                continue
            with suppress(OSError), connection:
                self._answer(connection)
            time.sleep(_PAUSE_S)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_CLIENT_S)
        request = connection.recv(_MOST_REQUEST_BYTES)
        heard_s = time.monotonic()
        describe = self._answers.get(request)
        if describe is None:
            return
        try:
            text = json.dumps({**self._about, "up_s": heard_s - self._began_s, **describe()}, default=str)
        except Exception as error:  # noqa: BLE001  (whatever a look at live state provokes, the thread goes on)
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        if request == b"trace\n":
            # Read the clock last, so that the time that the description takes does not blur it.
            clock = {"heard_s": heard_s, "answered_s": time.monotonic()}
            text = f"{text[:-1]}, {json.dumps(clock)[1:]}"
        connection.sendall(text.encode())


def status_folders() -> tuple[Path, ...]:
    """Return every folder that an engine of this user may use: a service may lack the variables of a login session."""
    shared = _TEMPORARY / f"{_NAME}-{os.getuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # `os.path.isdir` is false where a variable of another user or of any length makes `Path.is_dir` raise.
    return (Path(runtime) / _NAME, shared) if runtime and os.path.isdir(runtime) else (shared,)  # noqa: PTH112


def own_sockets(folder: Path) -> list[Path]:
    """Return the sockets in a folder that belongs to this user alone, sorted; links and other files are left out.

    Raises:
        OSError: There is no such folder, or it is a link, another user's, or open to others, who could put sockets there.
        ValueError: No folder can have this name.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_RIGHTS:
        raise PermissionError(f"{folder} is not a folder of user {os.getuid()} alone (0700); remove it")
    return [file for file in sorted(folder.glob("*" + _SUFFIX)) if file.is_socket() and not file.is_symlink()]
