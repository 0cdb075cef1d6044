"""The live processes of this machine's engines, and their answers over their Unix sockets."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vllm_adapter.cli.values import misfit, parse_json
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import Answer
from vllm_adapter.observe.status_socket import REQUEST, own_sockets, status_folders

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NO_ENGINE", "ask_all", "ask_one", "folders_of", "of_engine"]

NO_ENGINE = (
    "An engine answers to its own user, on its own machine and in its own container: run this command there. Its log says so if "
    "it could open no socket"
)
_MOST_BYTES = 4 << 20
_AT_ONCE = 16
_Reply = tuple[bytes, float, float] | OSError
"""Reply of a process with the times of request and reply by the clock of this process; or the reason why none came."""


def folders_of(folder: str | None) -> tuple[Path, ...]:
    """Return where sockets are: in the folder that an option names, or where this user's engines put them."""
    return (Path(folder),) if folder else status_folders()


def ask_all(folders: Sequence[Path] = (), *, timeout_s: float = 3.0, request: bytes = REQUEST) -> list[Answer]:
    """Ask every process that has a socket; return the answers, ordered by engine and part.

    An answer that cannot be read is replaced by its `socket` and an `error`.

    Args:
        folders: Where to look; where engines of this user put their sockets, if none is named.
        timeout_s: Longest wait for all of them.
        request: The line to ask with.
    """
    answers: list[Answer] = []
    files: list[Path] = []
    for folder in folders or status_folders():
        try:
            files += own_sockets(folder)
        except PermissionError as error:
            answers.append({"socket": str(folder), "error": str(error)})
        except (OSError, ValueError):  # no such folder, or a name that none can have
            continue
    until_s = time.monotonic() + timeout_s
    # The threads exchange bytes only: msgspec crashes where two threads are the first to use a type.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        replies = list(pool.map(_try_exchange, files, repeat(until_s), repeat(request)))
    read = (_answer(file, reply, timeout_s, request) for file, reply in zip(files, replies, strict=True))
    answers += [answer for answer in read if answer is not None]
    return sorted(answers, key=_order)


def ask_one(file: Path, request: bytes, *, timeout_s: float) -> Answer | None:
    """Ask the process with this socket; None if it is gone."""
    return _answer(file, _try_exchange(file, time.monotonic() + timeout_s, request), timeout_s, request)


def _order(answer: Answer) -> tuple[str, bool, str]:
    part = str(answer.get("part", ""))
    return str(answer.get("engine_id", "")), part != "scheduler", part


def _answer(file: Path, reply: _Reply, timeout_s: float, request: bytes) -> Answer | None:
    """Return one process's answer with the times of the exchange; None if the process is gone, whose socket is removed."""
    if isinstance(reply, ConnectionRefusedError):
        with suppress(OSError):
            file.unlink()
        return None
    if isinstance(reply, FileNotFoundError):
        return None
    if isinstance(reply, OSError):
        return {"socket": str(file), "error": f"no answer within {timeout_s:g} s: {reply}"}
    text, asked_s, received_s = reply
    if not text:
        return {
            "socket": str(file),
            "error": f"an engine of an older version does not know {request.decode().strip()!r}",
        }
    own: Answer = {"socket": str(file), "asked_s": asked_s, "received_s": received_s}
    return {**own, **_read(text), **own}


def _read(text: bytes) -> Answer:
    """Return an answer; why it cannot be read, if that is so."""
    try:
        answer = parse_json(text, f"its answer of {len(text)} bytes")
    except AdapterError as error:
        return {"error": f"{error} ({error.code})"}
    if wrong := misfit(answer, Answer):
        return {
            "error": f"its answer cannot be read here, maybe it is an engine of another version: {wrong} (unreadable)"
        }
    return cast("Answer", answer)


def _try_exchange(file: Path, until_s: float, request: bytes) -> _Reply:
    try:
        return _exchange(file, until_s, request)
    except OSError as error:
        return error


def _exchange(file: Path, until_s: float, request: bytes) -> tuple[bytes, float, float]:
    chunks: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_left(until_s))
        client.connect(str(file))
        asked_s = received_s = time.monotonic()
        client.sendall(request)
        while chunk := _receive(client, until_s):
            received_s = received_s if chunks else time.monotonic()
            chunks.append(chunk)
            if sum(map(len, chunks)) > _MOST_BYTES:
                raise OSError(f"more than {_MOST_BYTES} bytes")
    return b"".join(chunks), asked_s, received_s


def _receive(client: socket.socket, until_s: float) -> bytes:
    client.settimeout(_left(until_s))
    return client.recv(1 << 16)


def _left(until_s: float) -> float:
    return max(0.01, until_s - time.monotonic())


def of_engine(answers: Iterable[Answer], engine: str) -> list[Answer]:
    """Return the answers of one engine: by its id, by a beginning of it that no other engine shares, or by a process id.

    A process that gave no answer does not say whose it is, so it stands among those of any engine that is found.
    """
    answers = list(answers)
    wanted = _meant(engine, answers)
    return [answer for answer in answers if wanted and answer.get("engine_id", wanted) == wanted]


def _meant(word: str, answers: Iterable[Answer]) -> str:
    """Return the id of the engine that a word means; empty if there is none, or more than one."""
    known = [(str(answer["engine_id"]), str(answer.get("pid", ""))) for answer in answers if "engine_id" in answer]
    word = {pid: name for name, pid in reversed(known)}.get(word, word)
    names = {name for name, _ in known}
    if word in names:
        return word
    found = [name for name in names if name.startswith(word)]
    return found[0] if len(found) == 1 else ""
