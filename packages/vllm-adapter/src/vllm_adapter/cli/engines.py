"""The live processes of this machine's engines, and their answers over their Unix sockets."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, cast

from vllm_adapter.cli.values import misfit, parse_json
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import Answer
from vllm_adapter.observe.status_socket import REQUEST, own_sockets, status_folders

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["NO_ENGINE", "ask", "ask_all", "of_engine"]

NO_ENGINE = (
    "An engine answers to its own user, on its own machine and in its own container: run this command there. Its log says so if "
    "it could open no socket"
)
_MOST_BYTES = 4 << 20
_AT_ONCE = 16


def ask_all(folder: Path | None = None, *, timeout_s: float = 3.0, request: bytes = REQUEST) -> list[Answer]:
    """Ask every process that has a socket; return the answers, ordered by engine and part.

    An answer that cannot be read is replaced by its `socket` and an `error`.

    Args:
        folder: Where the sockets are; None for where this user's engines put them.
        timeout_s: Longest wait for all of them.
        request: The line to ask with.
    """
    answers: list[Answer] = []
    files: list[Path] = []
    for each in (folder,) if folder else status_folders():
        try:
            files += own_sockets(each)
        except PermissionError as error:
            answers.append({"socket": str(each), "error": str(error)})
        except (OSError, ValueError):  # no such folder, or a name that none can have
            continue
    return sorted(answers + ask(files, request, timeout_s=timeout_s), key=_order)


def _order(answer: Answer) -> tuple[str, bool, str]:
    part = str(answer.get("part", ""))
    return str(answer.get("engine_id", "")), part != "scheduler", part


def ask(files: Sequence[Path], request: bytes, *, timeout_s: float) -> list[Answer]:
    """Ask the processes with these sockets at once; those that are gone are left out."""
    until_s = time.monotonic() + timeout_s
    # The threads exchange bytes only: msgspec crashes where two threads are the first to use a type.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        replies = list(pool.map(_exchange, files, repeat(until_s), repeat(request)))
    answers = (_answer(file, reply, timeout_s, request) for file, reply in zip(files, replies, strict=True))
    return [answer for answer in answers if answer is not None]


def _answer(file: Path, reply: tuple[bytes, float, float] | OSError, timeout_s: float, request: bytes) -> Answer | None:
    """Return one process's answer with the times of the exchange; None if the process is gone, whose socket is removed."""
    own: Answer = {"socket": str(file)}
    if isinstance(reply, ConnectionRefusedError | FileNotFoundError):
        with suppress(OSError):
            file.unlink()
        return None
    if isinstance(reply, OSError):
        return {**own, "error": f"no answer within {timeout_s:g} s: {reply}"}
    text, asked_s, received_s = reply
    if not text:
        return {**own, "error": f"an engine of an older version does not know {request.decode().strip()!r}"}
    own |= {"asked_s": asked_s, "received_s": received_s}
    try:
        answer = parse_json(text, f"its answer of {len(text)} bytes")
    except AdapterError as error:
        return {**own, "error": f"{error} (unreadable)"}
    if wrong := misfit(answer, Answer):
        reason = f"its answer cannot be read here, maybe it is an engine of another version: {wrong} (unreadable)"
        return {**own, "error": reason}
    return {**cast("Answer", answer), **own}


def _exchange(file: Path, until_s: float, request: bytes) -> tuple[bytes, float, float] | OSError:
    """Return a process's reply with the times of request and reply by the clock of this process, or why none came."""
    text = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_left(until_s))
            client.connect(str(file))
            asked_s = received_s = time.monotonic()
            client.sendall(request)
            while chunk := client.recv(1 << 16):
                received_s = received_s if text else time.monotonic()
                text += chunk
                if len(text) > _MOST_BYTES:
                    return OSError(f"more than {_MOST_BYTES} bytes")
                client.settimeout(_left(until_s))
    except OSError as error:
        return error
    return text, asked_s, received_s


def _left(until_s: float) -> float:
    return max(0.01, until_s - time.monotonic())


def of_engine(answers: Sequence[Answer], word: str) -> list[Answer]:
    """Return the answers of one engine: by its id, by a beginning of it that no other engine shares, or by a process id.

    A process that gave no answer does not say whose it is, so it stands among those of any engine that is found.
    """
    known = [(str(answer.get("pid", "")), str(answer["engine_id"])) for answer in answers if "engine_id" in answer]
    word = dict(reversed(known)).get(word, word)
    names = {name for _, name in known}
    found = [name for name in names if name.startswith(word)]
    meant = word if word in names else found[0] if len(found) == 1 else ""
    return [answer for answer in answers if meant and answer.get("engine_id", meant) == meant]
