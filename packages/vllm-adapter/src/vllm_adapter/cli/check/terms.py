"""Terms of an engine that its side channel does not send: lease, heartbeats, policy, keys, seals and transports.

They are read from the engine's `--kv-transfer-config`, or, for an engine of this machine, from its answer to `status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.cli.values import parse_json, read_text, source_name
from vllm_adapter.config import RENEWED_PART, load_settings
from vllm_adapter.config.secrets import FleetSecrets, secrets_in_variable
from vllm_adapter.config.whole import check_transfer_config
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.cli.check.findings import Findings
    from vllm_adapter.config import Settings
    from vllm_adapter.observe.answers import Answer

__all__ = ["Terms", "check_terms", "terms_of_answer", "terms_of_config"]

_OURS = ("KVTransferConnector", "NixlConnector", "NixlPullConnector")


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of one engine.

    Attributes:
        source: Where they come from, for messages.
        lease_s: Seconds that it keeps a finished prompt as a producer.
        heartbeat_s: Seconds between its heartbeats as a consumer.
        policy: How it compares peers: `exact`, `negotiated` or `off`.
        seals: Fingerprints of the fleet's secrets that it knows; the first one seals its tickets.
        requires_seals: Whether it refuses tickets without a seal.
        is_encrypted: Whether its side channel has keys.
        key_files: Its secret certificate and that of the listeners it connects to, where they can be read here.
        ucx_tls: UCX's choice of transports in its environment; None if not known.
    """

    source: str
    lease_s: float
    heartbeat_s: float
    policy: str
    seals: tuple[str, ...]
    requires_seals: bool
    is_encrypted: bool
    key_files: tuple[str, str] | None = None
    ucx_tls: str | None = None


def terms_of_config(source: str) -> Terms:
    """Return the terms in a `--kv-transfer-config`: its JSON text, a file with it, or `-`.

    Raises:
        AdapterError: `unreadable`.
        ConfigurationError: The configuration is wrong; all its problems are named.
    """
    config: Any = parse_json(read_text(source), source_name(source))
    problems = check_transfer_config(config).problems
    if problems:
        said = "; ".join(f"{problem.key}: {problem.message} ({problem.code})" for problem in problems)
        raise ConfigurationError(said, code=problems[0].code)
    settings, _ = load_settings(_extra(config))
    keys = (settings.side_channel_key, settings.side_channel_server_key) if settings.side_channel_key else None
    return Terms(
        "its configuration",
        settings.kv_lease_duration,
        settings.heartbeat_s,
        settings.policy,
        _fingerprints(settings),
        settings.requires_seals,
        is_encrypted=keys is not None,
        key_files=keys,
    )


def _extra(config: Mapping[str, Any]) -> Mapping[str, object]:
    """Return our connector's keys, also where it is one of several."""
    extra: Mapping[str, Any] = config.get("kv_connector_extra_config") or {}
    children: list[Mapping[str, Any]] = extra.get("connectors") or []
    ours = next((child for child in children if child.get("kv_connector") in _OURS), None)
    return _extra(ours) if ours is not None else extra


def _fingerprints(settings: Settings) -> tuple[str, ...]:
    if not settings.has_secrets:
        return ()
    words = secrets_in_variable(settings.ticket_secret_variable)
    return FleetSecrets(settings.ticket_secret_files, words).fingerprints


def terms_of_answer(answer: Answer) -> Terms | None:
    """Return the terms that the scheduler's process of a live engine tells; None if it is of another version."""
    lease_s, heartbeat_s = answer.get("lease_s"), answer.get("heartbeat_s")
    policy, seals = answer.get("compatibility_policy"), answer.get("seals")
    if lease_s is None or heartbeat_s is None or policy is None or seals is None:
        return None
    return Terms(
        "its process",
        lease_s,
        heartbeat_s,
        policy,
        tuple(seals),
        bool(answer.get("requires_seals")),
        is_encrypted=bool(answer.get("is_encrypted")),
        ucx_tls=answer.get("ucx_tls"),
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
