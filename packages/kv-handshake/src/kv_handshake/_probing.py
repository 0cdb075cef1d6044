"""Options of `kv-handshake probe`, as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kv_handshake._endpoint import parse_endpoint
from kv_handshake._errors import ConfigurationError
from kv_handshake._probe import probe
from kv_handshake._recording import Recording
from kv_handshake._zmq import ClientSecurity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake._queries import Rank

__all__ = ["DEFAULT_DIALECT", "ranks_of", "recording_of", "security_of", "supposed_of"]

DEFAULT_DIALECT = 5
"""Oldest dialect whose queries have three fields. vLLM's own listeners crash on a query of another shape: from 0.26 on they take
three fields, before that two. So 5 is safe for all since 0.26, and ours answer either shape.
"""


def recording_of(
    source: str, ranks: Sequence[Rank], *, dialect: int, timeout_s: float, security: ClientSecurity | None
) -> Recording:
    """Return the recording in a file, or of the live engine at HOST:PORT."""
    if Path(source).exists():
        return Recording.read(source)
    endpoint = parse_endpoint(source)
    return probe(
        endpoint.host, endpoint.port, ranks=ranks, dialect=dialect, timeout_s=timeout_s, security=security
    ).recording


def ranks_of(texts: Sequence[str]) -> list[Rank]:
    """Return the ranks that `--rank` names: TP, PP:TP or TP-TP each; rank (0, 0) without any."""
    ranks: dict[Rank, None] = {}
    for text in texts or ["0"]:
        ranks |= dict.fromkeys(_rank_range(text))
    if not ranks:
        raise ConfigurationError("invalid-argument", "--rank names no rank")
    return list(ranks)


def _rank_range(text: str) -> list[Rank]:
    """Return the ranks of one word. Example: `1:0-2` is ranks 0 to 2 of stage 1."""
    pp, colon, tp = text.rpartition(":")
    first, _, last = tp.partition("-")
    numbers = (pp or "0", first, last or first)
    if not all(each.isascii() and each.isdigit() for each in numbers) or (colon and not pp):
        raise ConfigurationError("invalid-argument", f"--rank {text!r} is not TP, PP:TP or TP-TP")
    return [(int(numbers[0]), each) for each in range(int(first), min(int(numbers[2]), 65_535) + 1)]


def supposed_of(texts: Sequence[str]) -> dict[str, list[object]]:
    """Return the values that `--suppose` gives by factor name: FACTOR=VALUE, JSON or else plain text."""
    supposed: dict[str, list[object]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError("invalid-argument", f"--suppose {text!r} is not FACTOR=VALUE")
        try:
            parsed: object = json.loads(value)
        except ValueError:
            parsed = value
        supposed.setdefault(name, []).append(parsed)
    return supposed


def security_of(secret: str | None, server: str | None) -> ClientSecurity | None:
    """Return the keys in the files of `--secret-key` and `--server-key`, None without both."""
    if secret is None and server is None:
        return None
    if secret is None or server is None:
        raise ConfigurationError("invalid-argument", "give --secret-key and --server-key together")
    return ClientSecurity.read(secret, server)
