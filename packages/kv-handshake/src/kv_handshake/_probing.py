"""Work of `kv-handshake probe`: ask, compare, print."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from kv_handshake._compare import Snapshot, compare
from kv_handshake._dialect import dialect_of, dialect_of_vllm
from kv_handshake._endpoint import parse_endpoint
from kv_handshake._errors import ConfigurationError
from kv_handshake._probe import probe
from kv_handshake._recording import Recording
from kv_handshake._render import comparison_text, comparison_values, probe_text, probe_values
from kv_handshake._zmq import ClientSecurity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake._queries import Rank

__all__ = ["DEFAULT_DIALECT", "ProbeOptions", "run_probe"]

_OK = 0
_DIFFERENT = 1

DEFAULT_DIALECT = 5
"""Oldest dialect whose queries have three fields. vLLM's own listeners die on a query of another shape: from 0.26 on they take
three fields, before that two. So 5 is safe for all since 0.26, `run_probe` warns of older ones, and ours answer either shape.
"""


@final
@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Options of `kv-handshake probe`, as they were given."""

    peer: str
    ranks: Sequence[str]
    dialect: int | None
    vllm: str | None
    against: str | None
    against_dialect: int | None
    supposed: Sequence[str]
    save: str | None
    timeout_s: float
    key_files: tuple[str | None, str | None]
    as_json: bool


def run_probe(options: ProbeOptions) -> int:
    """Ask, compare if so told, print, and return the exit code; raises coded errors."""
    endpoint = parse_endpoint(options.peer)
    host, port = endpoint.host, endpoint.port
    asked = DEFAULT_DIALECT if options.dialect is None else options.dialect
    version = dialect_of_vllm(options.vllm) if options.vllm else dialect_of(asked)
    security = _security(options.key_files)
    ranks = _ranks(options.ranks)
    _warn(options, ranks)
    result = probe(host, port, ranks=ranks, dialect=version.version, timeout_s=options.timeout_s, security=security)
    if options.save:
        result.recording.write(options.save)
    document = probe_values(options.peer, result)
    text = probe_text(options.peer, result)
    code = _OK
    if options.against:
        other = _snapshot_against(options, options.against, ranks[:1], version.version, security)
        comparison = compare(Snapshot.of(options.peer, result.recording), other, supposed=_supposed(options.supposed))
        document["against"] = {"peer": options.against, **comparison_values(comparison)}
        text += "\n" + comparison_text(comparison, options.peer, options.against)
        code = _OK if comparison.is_compatible else _DIFFERENT
    print(json.dumps(document, default=str) if options.as_json else text)
    return code


def _warn(options: ProbeOptions, ranks: Sequence[Rank]) -> None:
    """Warn, before anything is sent, of a query on which vLLM's own listener would die."""
    if not options.vllm and options.dialect is None:
        print(
            "kv-handshake: the query has the shape of vLLM 0.26 and later; a listener of an older vLLM would end on it "
            "(give --vllm or --dialect)",
            file=sys.stderr,
        )
    if any(rank != (0, 0) for rank in ranks):
        print(
            f"kv-handshake: a listener of vLLM itself ends if it is asked for a rank that it does not serve; {len(ranks)} ranks "
            "are asked for",
            file=sys.stderr,
        )


def _snapshot_against(
    options: ProbeOptions, against: str, ranks: Sequence[Rank], version: int, security: ClientSecurity | None
) -> Snapshot:
    if Path(against).exists():
        return Snapshot.of(against, Recording.read(against))
    endpoint = parse_endpoint(against)
    dialect = options.against_dialect or version
    result = probe(
        endpoint.host, endpoint.port, ranks=ranks, dialect=dialect, timeout_s=options.timeout_s, security=security
    )
    return Snapshot.of(against, result.recording)


def _ranks(texts: Sequence[str]) -> list[Rank]:
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


def _supposed(texts: Sequence[str]) -> dict[str, list[object]]:
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


def _security(key_files: tuple[str | None, str | None]) -> ClientSecurity | None:
    secret, server = key_files
    if secret is None and server is None:
        return None
    if secret is None or server is None:
        raise ConfigurationError("invalid-argument", "give --secret-key and --server-key together")
    return ClientSecurity.read(secret, server)
