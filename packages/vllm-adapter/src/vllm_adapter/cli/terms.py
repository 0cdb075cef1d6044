"""Terms of an engine that its side channel does not tell: lease, heartbeats, policy, keys and seals.

They are read from the engine's `--kv-transfer-config`, or, for an engine of this machine, from its answer to `status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final

from vllm_adapter.cli.json_values import parse_json, read_text, source_name
from vllm_adapter.config import load_settings
from vllm_adapter.errors import ConfigurationError
from vllm_adapter.fleet_secrets import FleetSecrets, secrets_in_variable
from vllm_adapter.host.transfer_config import check_transfer_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.cli.asking import Answer
    from vllm_adapter.config import Settings

__all__ = ["Terms", "terms_of_answer", "terms_of_config"]

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
    try:
        return Terms(
            "its process",
            float(answer["lease_s"]),
            float(answer["heartbeat_s"]),
            str(answer["compatibility_policy"]),
            tuple(map(str, cast("list[object]", answer["seals"]))),
            bool(answer["requires_seals"]),
            is_encrypted=bool(answer["is_encrypted"]),
            ucx_tls=str(answer["ucx_tls"]) if "ucx_tls" in answer else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
