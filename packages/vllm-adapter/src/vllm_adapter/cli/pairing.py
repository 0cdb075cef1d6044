"""Whether two engines that answered can hand over: factors, plan, and the terms that both must share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from vllm_adapter.cache.documents import PeerSizes, with_names
from vllm_adapter.cache.vllm_peer import PeerGeometry
from vllm_adapter.config import RENEWED_PART
from vllm_adapter.errors import code_of
from vllm_adapter.wiring import PairPlan, reshard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cli.findings import Findings
    from vllm_adapter.cli.looking import Seen
    from vllm_adapter.cli.terms import Terms
    from vllm_adapter.ports import Comparison, Difference, Estimate, PeerPlan

__all__ = ["check_clocks", "check_factors", "check_plan", "check_terms"]

_SHOWN_CHARACTERS = 80
_PROMPT_TOKENS = 1024


# ------------------------------------------------------------------------------------------------------------ factors


def check_factors(prefill: Seen, decode: Seen, policy: str, findings: Findings) -> None:
    """Compare the engines as the decode engine does when it meets the prefill engine."""
    if prefill.engine_id == decode.engine_id:
        findings.refuse(
            "factors",
            "same-engine",
            f"both addresses are engine {prefill.engine_id}",
            "name two engines; two that really share an id need engine_id in one --kv-transfer-config",
        )
        return
    comparison = decode.probed.differences_to(prefill.probed)
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


# --------------------------------------------------------------------------------------------------------------- plan


def check_plan(prefill: Seen, decode: Seen, gigabytes_per_s: float | None, findings: Findings) -> None:
    """Plan the reads of each decode rank, and tell what a prompt costs."""
    if not decode.is_ours:
        findings.note("plan", "plan-not-known", "the decode engine sends no geometry: it plans by its own rules")
        return
    if not (prefill.has_all_ranks and decode.has_all_ranks):
        findings.note("plan", "plan-not-known", "no plan was made: it needs all ranks, and some do not answer")
        return
    costs: list[Estimate] = []
    for rank in sorted(decode.probed.peers):
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
    prefill: Seen, decode: Seen, rank: tuple[int, int], gigabytes_per_s: float | None
) -> tuple[PeerPlan, Estimate]:
    local = with_names(decode.document(rank))
    kind = PeerGeometry.memory_kind(decode.probed.peers[rank])
    pair = PairPlan(kind, gigabytes_per_s)
    dcp = max([group["context"][0] for group in local["groups"]], default=1)
    sizes = PeerSizes(prefill.tp, prefill.pp, dcp if not prefill.is_ours else _context_size(prefill))
    geometry = PeerGeometry(reshard, tuple(group["kind"] != "state" for group in local["groups"]))
    documents: dict[tuple[int, int], Mapping[str, object]] = {
        number: geometry.document(local, metadata, number, sizes) for number, metadata in prefill.probed.peers.items()
    }
    wanted = pair.planner.target_ranks(local, peer_tp=sizes.tp, peer_pp=sizes.pp, peer_dcp=sizes.dcp)
    return pair.plan(local, {number: documents[number] for number in wanted}, peer_tp=sizes.tp)


def _context_size(seen: Seen) -> int:
    document = cast("GeometryDocument", seen.document((0, 0)))
    return max([group["context"][0] for group in document["groups"]], default=1)


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


# -------------------------------------------------------------------------------------------------------------- terms


def check_clocks(prefill: Seen, decode: Seen, findings: Findings) -> None:
    """Tell how far the clocks are apart, which forbids nothing."""
    offsets = [seen.probed.clock_offset_s for seen in (prefill, decode)]
    if offsets[0] is None or offsets[1] is None:
        return
    apart_s = abs(offsets[0] - offsets[1])
    findings.ok(
        "clock", f"the engines' clocks are {apart_s:.1f} s apart, which is no matter: each keeps time by its own"
    )


def check_terms(prefill: Terms | None, decode: Terms | None, findings: Findings, *, allows_tcp: bool) -> None:
    """Check lease, keys, seals and transports, as far as the engines' terms are known."""
    for name, terms in (("prefill", prefill), ("decode", decode)):
        if terms is not None:
            _check_transport(name, terms, findings, allows_tcp=allows_tcp)
    if prefill is None or decode is None:
        silent = " and ".join(name for name, terms in (("prefill", prefill), ("decode", decode)) if terms is None)
        findings.note(
            "lease",
            "terms-not-known",
            f"lease, keys and seals were not compared: the terms of the {silent} engine are not known here",
            "give --prefill-config and --decode-config, or run this beside the engines",
        )
        return
    _check_lease(prefill, decode, findings)
    _check_keys(prefill, decode, findings)
    _check_seals(prefill, decode, findings)


def _check_lease(prefill: Terms, decode: Terms, findings: Findings) -> None:
    """Compare the decode engine's heartbeats with what they renew.

    Worked example. Prefill leases 6 s, so a heartbeat renews to 4 s from then. A decode engine that leases 30 s sends one every
    5 s: each lease ends 1 s before its second heartbeat.
    """
    renewed_s = prefill.lease_s * RENEWED_PART
    told = (
        f"prefill keeps a prompt for {prefill.lease_s:g} s, a heartbeat renews that to {renewed_s:g} s, and decode sends one "
        f"every {decode.heartbeat_s:g} s"
    )
    if decode.heartbeat_s >= renewed_s:
        findings.refuse(
            "lease",
            "lease-shorter-than-heartbeat",
            f"{told}: every lease ends before it is renewed",
            "give both engines the same kv_lease_duration; heartbeats come six times in it",
        )
    elif 2 * decode.heartbeat_s >= renewed_s:
        findings.note("lease", "one-heartbeat-to-spare", f"{told}: one that is late ends the lease")
    else:
        findings.ok("lease", told)


def _check_keys(prefill: Terms, decode: Terms, findings: Findings) -> None:
    if prefill.is_encrypted == decode.is_encrypted:
        findings.ok("keys", "both side channels have keys" if decode.is_encrypted else "neither side channel has keys")
        return
    locked, plain = ("prefill", "decode") if prefill.is_encrypted else ("decode", "prefill")
    findings.refuse(
        "keys",
        "keys-on-one-side",
        f"the {locked} engine encrypts its side channel, the {plain} engine does not: they cannot meet",
        f"give the {plain} engine side_channel_key, side_channel_server_key and side_channel_clients",
    )


def _check_seals(prefill: Terms, decode: Terms, findings: Findings) -> None:
    if not decode.seals:
        if prefill.seals:
            findings.note("seals", "seals-not-verified", "prefill seals its tickets, and decode verifies none")
        else:
            findings.ok("seals", "tickets are not sealed")
        return
    if not prefill.seals:
        if decode.requires_seals:
            findings.refuse(
                "seals",
                "seal-missing",
                "decode takes sealed tickets alone, and prefill seals none",
                "give the prefill engine the fleet's secret (ticket_secret_files)",
            )
        else:
            findings.note(
                "seals", "unsealed-tickets", "prefill seals no tickets; decode takes some from unsigned_hosts"
            )
    elif prefill.seals[0] in decode.seals:
        findings.ok("seals", "decode knows the secret by which prefill seals its tickets")
    else:
        findings.refuse(
            "seals",
            "seal-not-known",
            f"prefill seals by secret {prefill.seals[0]} (fingerprint), decode knows {', '.join(decode.seals)}",
            "give both the same secret; in a rotation, first let every engine verify the new one",
        )


def _check_transport(name: str, terms: Terms, findings: Findings, *, allows_tcp: bool) -> None:
    words = set((terms.ucx_tls or "").split(",")) - {"", "self", "sm", "shm", "posix", "sysv", "cma"}
    if words and words <= {"tcp"}:
        findings.refuse(
            "transport",
            "tcp-only",
            f"UCX_TLS={terms.ucx_tls} lets the {name} engine use no network but TCP",
            "unset UCX_TLS; without RDMA, --allow-tcp accepts this. kv-nixl doctor says which transports work",
            is_allowed=allows_tcp,
        )
