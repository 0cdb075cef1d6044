"""Unix socket on which an engine process reports its state to the operator.

Theory of operation. A separate thread sleeps in `accept`, so a process that is not asked pays nothing. A client must send one
short line; the answer is one JSON object, and the connection is closed. One connection is served at a time, for a second at
most, with a pause after each, so that asking in a loop cannot take the process's time. Only the user may access the folder
(0700) and the socket (0600). The socket appears under its name only once it listens, so a socket that refuses connections
belongs to a dead process, and any process that finds it may remove it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["REQUEST", "REVOKE_REQUEST", "TRACE_REQUEST", "StatusSocket", "own_sockets", "status_folders"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")
REQUEST = b"status\n"
"""Request line of a client that asks for the status."""
TRACE_REQUEST = b"trace\n"
"""Request line for the latest hand-overs, with the process's monotonic clock at both ends of its answer."""
REVOKE_REQUEST = b"revoke\n"
"""Request line of an operator who takes all unread leases back; a scheduler's process answers with what they keep."""
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


@final
class StatusSocket:
    """Answers requests on its own socket; a socket that cannot be opened causes one line in the log.

    Args:
        part: The process's part of its engine, for the file name: `scheduler`, or a rank as `0.1`.
        answers: Functions that return plain values, by request line; called on the socket's thread, at any time.
        about: What all answers contain beside the process's own description.
    """

    def __init__(
        self,
        part: str,
        answers: Mapping[bytes, Callable[[], Mapping[str, object]]],
        about: Mapping[str, object] | None = None,
    ) -> None:
        self._name = f"{os.getpid()}-{part}-{secrets.token_hex(2)}"
        self._answers = answers
        self._about = {"schema": _SCHEMA, "pid": os.getpid(), "ucx_tls": os.environ.get("UCX_TLS", ""), **(about or {})}
        self._began_s = time.monotonic()
        self._folder = status_folders()[0]
        self._listening: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="kv-status", daemon=True)

    @property
    def path(self) -> Path:
        """File of the socket."""
        return self._folder / (self._name + _SUFFIX)

    def open(self) -> bool:
        """Start answering; return False if that is not possible here, with a log line."""
        try:
            # An existing folder must already be private.
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _remove_stale(self._folder)
            self._listening = self._listen()
            self._thread.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            _logger.info("vllm-adapter status cannot ask this process: no socket in %s: %s", self._folder, error)
            self.close()
            return False
        return True

    def _listen(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unfinished = self._folder / (self._name + ".new")
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
        if request == TRACE_REQUEST:
            # Read the clock last, so that the time that the description takes does not blur it.
            clock = {"heard_s": heard_s, "answered_s": time.monotonic()}
            text = f"{text[:-1]}, {json.dumps(clock)[1:]}"
        connection.sendall(text.encode())


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of processes that no longer exist."""
    for file in own_sockets(folder):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_CLIENT_S)
            try:
                client.connect(str(file))
            except ConnectionRefusedError:
                file.unlink(missing_ok=True)
            except OSError:
                continue


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
