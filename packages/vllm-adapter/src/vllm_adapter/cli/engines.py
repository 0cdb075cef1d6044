"""The live processes of this machine's engines, and their answers over their Unix sockets."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vllm_adapter.cli.values import parse_json
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import Answer, own_sockets, status_folders

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NO_ENGINE", "ask", "ask_all", "engine_names", "engine_text", "http_ports", "of_engine"]

NO_ENGINE = (
    "An engine answers to its own user, on its own machine and in its own container: run this command there. Its log says so if "
    "it could open no socket"
)
_MOST_BYTES = 4 << 20
_AT_ONCE = 16


def ask_all(folder: Path | None = None, *, timeout_s: float = 3.0, request: str = "status") -> list[Answer]:
    """Ask every process that has a socket; return the answers, ordered by engine and part.

    An answer that cannot be read is replaced by its `socket` and an `error`.

    Args:
        folder: Where the sockets are; None for where this user's engines put them.
        timeout_s: Longest wait for all of them.
        request: What to ask for, see `StatusSocket`.
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
    part, engine = str(answer.get("part", "")), f"{answer.get('engine_id', '')} {answer.get('side_channel', '')}"
    return engine, part != "scheduler", part


def ask(files: Sequence[Path], request: str, *, timeout_s: float) -> list[Answer]:
    """Ask the processes with these sockets at once; those that are gone are left out."""
    until_s = time.monotonic() + timeout_s
    # The threads exchange bytes only: msgspec crashes where two threads are the first to use a type.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        replies = list(pool.map(_exchange, files, repeat(until_s), repeat(request)))
    answers = (_answer(file, reply, timeout_s, request) for file, reply in zip(files, replies, strict=True))
    return [answer for answer in answers if answer is not None]


def _answer(file: Path, reply: tuple[bytes, float, float] | OSError, timeout_s: float, request: str) -> Answer | None:
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
        return {**own, "error": f"an engine of an older version does not know {request!r}"}
    own |= {"asked_s": asked_s, "received_s": received_s}
    try:
        answer = cast("Answer", parse_json(text, f"its answer of {len(text)} bytes", Answer))
    except AdapterError as error:
        return {**own, "error": f"{error.message} (unreadable)"}
    return {**answer, **own}


def _exchange(file: Path, until_s: float, request: str) -> tuple[bytes, float, float] | OSError:
    """Return a process's reply with the times of request and reply by the clock of this process, or why none came."""
    text = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_left(until_s))
            client.connect(str(file))
            asked_s = received_s = time.monotonic()
            client.sendall(f"{request}\n".encode())
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
    """Return the answers of the engine that a word means; an empty list if it means none.

    It is the name, id, side channel or a process id of an engine, or the beginning of one name or id. A process that gave no
    answer does not say whose it is, so it stands among those of any engine that is found.

    Raises:
        AdapterError: `ambiguous-engine`, with the engines that the word may mean.
    """
    exact, begun = list[Answer](), list[Answer]()
    for answer in answers:
        name, engine_id, *others = (str(answer.get(part, "")) for part in ("name", "engine_id", "side_channel", "pid"))
        exact += [answer] * (word in {name, engine_id, *others, engine_text(answer)})
        begun += [answer] * (name.startswith(word) or engine_id.startswith(word))
    names = engine_names(exact or begun)
    if len(names) > 1:
        raise AdapterError(f"{word!r} may mean {' or '.join(names)}", code="ambiguous-engine")
    return [each for each in answers if names and ("engine_id" not in each or engine_text(each) in names)]


def engine_text(answer: Answer) -> str:
    """Return the engine of an answer, which no other engine of this machine has: `prefill-0 at 10.0.0.1:5600`."""
    name, side_channel = str(answer.get("name", "")), str(answer.get("side_channel"))
    # Processes of an older version do not have names, nor all of them the side channel.
    return str(answer.get("engine_id")) if not name else name if side_channel in name else f"{name} at {side_channel}"


def engine_names(answers: Iterable[Answer]) -> list[str]:
    """Return the engines of answers, each once."""
    return sorted({engine_text(answer) for answer in answers if "engine_id" in answer})


def http_ports(answer: Answer) -> list[int]:
    """Return the TCP ports on which the API server listens that is the parent of a scheduler's process of this machine."""
    server, stat = Path(f"/proc/{answer.get('parent_pid')}"), Path(f"/proc/{answer.get('pid')}/stat")
    with suppress(OSError, IndexError):  # it has ended, or belongs to another container
        if stat.read_text().rpartition(")")[2].split()[1] == server.name:
            own = {descriptor.resolve().name for descriptor in (server / "fd").iterdir()}
            rows = [
                row.split() for table in ("tcp", "tcp6") for row in (server / "net" / table).read_text().splitlines()
            ]
            # 0A: listens.
            listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
            return sorted({int(address.rpartition(":")[2], 16) for address in listening})
    return []
