"""Every key of `kv_connector_extra_config`, with its default, range and meaning, and the check that is made at start.

A wrong key or value stops the engine at start with a message that names the nearest right one: a misspelt key that is
silently ignored is found weeks later.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vllm_adapter.config_values import check_networks, check_value
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OBSOLETE_KEYS", "Settings", "check_whole", "describe_keys", "load_keys", "load_settings"]

OBSOLETE_KEYS: Mapping[str, str] = {
    "enable_cross_layers_blocks": "the layout is taken from the tensors that the engine allocates",
    "push_registration_timeout": "this connector pulls",
}
"""Keys of older connectors that are accepted with a note, and why they are not needed."""


_CHANNEL_KEYS = ("side_channel_key", "side_channel_server_key", "side_channel_clients")


def _key(
    default: object, doc: str, *, least: float | None = None, most: float | None = None, choices: tuple[str, ...] = ()
) -> Any:  # noqa: ANN401  (dataclass field)
    return field(default=default, metadata={"doc": doc, "least": least, "most": most, "choices": choices})


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's configuration, checked. Field names are the configuration's keys."""

    backends: tuple[str, ...] = _key(("UCX",), "NIXL back ends to create, in order.")
    num_threads: int = _key(4, "Worker threads of the UCX back end.", least=0, most=64)
    progress_thread: str = _key(
        "auto",
        "NIXL's own progress thread, beside the transfer thread, which makes progress without it. "
        "auto: where this process may use more than 8 cores.",
        choices=("auto", "on", "off"),
    )
    enforce_handshake_compat: bool = _key(True, "Refuse a peer whose compatibility hash differs from ours.")
    compatibility_policy: str = _key(
        "exact",
        "How peers are compared: by vLLM's exact hash, or factor by factor.",
        choices=("exact", "negotiated"),
    )
    kv_lease_duration: float = _key(
        30.0, "Seconds that a producer keeps a finished prompt's blocks without a heartbeat.", least=1, most=86400
    )
    engine_ttl: float = _key(
        3600.0,
        "Seconds after which an unused peer engine is forgotten (never while a read runs); 0 for never. A dead one is let go "
        "within seconds whatever this says.",
        least=0,
        most=1e7,
    )
    kv_recompute_threshold: int = _key(
        64, "Fewer external tokens than this are recomputed on a later turn's prefill.", least=0, most=1e9
    )
    bidirectional_kv_xfer: bool = _key(False, "Let a later turn's prefill read from the decode engine.")
    decoder_kv_blocks_ttl: float = _key(
        480.0, "Seconds that a decode engine keeps blocks for a later turn.", least=1, most=86400
    )
    handshake_timeout_s: float = _key(5.0, "Seconds for one handshake attempt.", least=0.05, most=600)
    handshake_attempts: int = _key(2, "Attempts per handshake before its requests fail.", least=1, most=10)
    read_timeout_s: float = _key(
        60.0, "Seconds after which a read in progress is given up and its pages quarantined.", least=0.1, most=3600
    )
    read_retries: int = _key(
        1,
        "How often a read whose peer was lost is made again, after the peer was met anew, within read_timeout_s and the "
        "lease; then kv_load_failure_policy decides.",
        least=0,
        most=1,
    )
    fence_slots: int = _key(
        4096, "Words of the fence array: hand-offs that can be fenced at once.", least=0, most=1 << 20
    )
    max_leases: int = _key(
        0,
        "Finished prompts that may wait for their readers at once; beyond them prefill answers without a ticket. 0 for no limit.",
        least=0,
        most=1 << 20,
    )
    max_leased_blocks: int = _key(
        0,
        "Cache blocks that these may keep together, over all groups, so that clients that never read leave prefill the rest "
        "of its cache; beyond them likewise. 0 for no limit.",
        least=0,
        most=1 << 31,
    )
    max_inflight_bytes: int = _key(
        4 << 30,
        "Bytes of reads in flight per rank before further ones wait; 0 for no limit. A single larger read goes alone.",
        least=0,
        most=1 << 50,
    )
    receive_conversion: str = _key(
        "auto",
        "Whether pages of another layout or block size are read whole and put in order here, instead of piece by piece. "
        "auto: where that is cheaper; never: piece by piece; always: even where nothing needs it, and a peer whose pages "
        "cannot be read whole is refused.",
        choices=("auto", "never", "always"),
    )
    remote_hosts: tuple[str, ...] = _key(
        (), "Networks (CIDR) that a ticket's remote_host may name; empty for any. Hosts given by name are then refused."
    )
    peer_ports: str = _key(
        "1024-65535",
        "First and last side-channel port that a ticket may name, such as 5600-5663; those below 1024 belong to the machines' "
        "own services.",
    )
    ticket_secret_files: tuple[str, ...] = _key(
        (),
        "Files with the fleet's secrets, one per line of 16 bytes or more: the first one of all seals this engine's tickets, all "
        "verify those of peers. Read again when they change. Others than owner and group must have no right on them.",
    )
    ticket_secret_variable: str = _key(
        "", "Environment variable with such secrets, separated by white space, after those of the files; read at start."
    )
    ticket_policy: str = _key(
        "",
        "Whether each ticket must be sealed. require: yes, the default once there is a fleet secret. accept-unsigned: except "
        "for tickets that point into unsigned_hosts, where engines of vLLM's own connector live, which cannot seal.",
        choices=("", "require", "accept-unsigned"),
    )
    unsigned_hosts: tuple[str, ...] = _key(
        (), "Networks (CIDR) of engines that cannot seal; only with ticket_policy accept-unsigned."
    )
    side_channel_key: str = _key(
        "",
        "Certificate file (.key_secret) of this engine for an encrypted side channel, as listener and as client; needs "
        "side_channel_server_key and side_channel_clients. Engines of vLLM's own connector can then not be met.",
    )
    side_channel_server_key: str = _key(
        "", "Public certificate (.key) of the listeners that this engine connects to, or a folder of several."
    )
    side_channel_clients: str = _key(
        "", "Folder with the public certificates (.key) of all clients that this engine's listener admits."
    )
    ticket_dialect: int = _key(
        0, "Connector version assumed of peers whose tickets do not say; 0 for that of this vLLM.", least=0, most=15
    )

    @property
    def has_secrets(self) -> bool:
        """Whether tickets are sealed."""
        return bool(self.ticket_secret_files or self.ticket_secret_variable)

    @property
    def requires_seals(self) -> bool:
        """Whether every ticket must be sealed, so that every peer is of our own kind."""
        return self.has_secrets and self.ticket_policy != "accept-unsigned"

    @property
    def requires_nonces(self) -> bool:
        """Whether a notification counts only with its grant's nonce; vLLM's own engines, which send none, meet no keyed one."""
        return self.requires_seals or bool(self.side_channel_key)

    @property
    def staging(self) -> Literal["auto", "never", "always"]:
        """`receive_conversion`, checked."""
        choice = self.receive_conversion
        return "never" if choice == "never" else "always" if choice == "always" else "auto"

    @property
    def peer_port_range(self) -> tuple[int, int]:
        """`peer_ports` as numbers."""
        return _port_range(self.peer_ports)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats to one engine. Source: vLLM's own connector sends six per lease."""
        return self.kv_lease_duration / 6

    @property
    def policy(self) -> Literal["exact", "negotiated", "off"]:
        """How peers are compared, from the two keys that say so."""
        if not self.enforce_handshake_compat:
            return "off"
        return "negotiated" if self.compatibility_policy == "negotiated" else "exact"


def load_settings(extra: Mapping[str, object]) -> tuple[Settings, tuple[str, ...]]:
    """Check the configuration and return (settings, notes to log).

    Raises:
        ConfigurationError: `unknown-key`, `wrong-type`, `out-of-range` or `incomplete-keys`, naming the key, the value and what
            is right.
    """
    settings, notes = load_keys(extra)
    check_whole(settings)
    return settings, notes


def load_keys(extra: Mapping[str, object]) -> tuple[Settings, tuple[str, ...]]:
    """Check each key for itself, not what the keys mean together; otherwise as `load_settings`."""
    known = {f.name: f for f in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in extra.items():
        if key in OBSOLETE_KEYS:
            notes.append(f"kv_connector_extra_config: '{key}' is no longer needed ({OBSOLETE_KEYS[key]})")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else f"; the keys are {', '.join(sorted(known))}"
            raise ConfigurationError(
                f"kv_connector_extra_config has no key '{key}'{hint}", code="unknown-key", context={"key": key}
            )
        else:
            values[key] = check_value(known[key], value)
    settings = Settings(**values)
    check_networks("remote_hosts", settings.remote_hosts)
    check_networks("unsigned_hosts", settings.unsigned_hosts)
    _ = settings.peer_port_range
    return settings, tuple(notes)


def describe_keys() -> list[dict[str, object]]:
    """Return one mapping per key: name, type, default, range or choices, doc."""
    return [
        {
            "key": f.name,
            "type": str(f.type),
            "default": f.default,
            "least": f.metadata["least"],
            "most": f.metadata["most"],
            "choices": f.metadata["choices"],
            "doc": f.metadata["doc"],
        }
        for f in dataclasses.fields(Settings)
    ]


def check_whole(settings: Settings) -> None:
    """Refuse a protection that is configured by half: it would protect nothing, or everything would be refused.

    Raises:
        ConfigurationError: `incomplete-keys`.
    """
    channel = {name: getattr(settings, name) for name in _CHANNEL_KEYS}
    missing = [name for name, value in channel.items() if not value]
    if 0 < len(missing) < len(channel):
        raise _incomplete(
            f"an encrypted side channel needs {', '.join(_CHANNEL_KEYS)}; there is no {', '.join(missing)}"
        )
    accepts = settings.ticket_policy == "accept-unsigned"
    if settings.ticket_policy and not settings.has_secrets:
        raise _incomplete(
            f"ticket_policy '{settings.ticket_policy}' needs ticket_secret_files or ticket_secret_variable: without a secret "
            "nothing is verified"
        )
    if accepts != bool(settings.unsigned_hosts):
        raise _incomplete(
            "ticket_policy 'accept-unsigned' and unsigned_hosts go together: the place of a peer decides whether it must seal, "
            "never its ticket"
        )


def _incomplete(reason: str) -> ConfigurationError:
    return ConfigurationError(f"kv_connector_extra_config: {reason}", code="incomplete-keys")


def _port_range(text: str) -> tuple[int, int]:
    """Return the two ports of a text such as ``5600-5663``; a single port is a range of one.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    first, dash, last = text.partition("-")
    ports = [
        int(each) for each in (first, last if dash else first) if each.isascii() and each.isdigit() and len(each) <= 5
    ]
    if len(ports) != 2 or not 1 <= ports[0] <= ports[1] <= 65_535:
        raise ConfigurationError(
            f"kv_connector_extra_config: 'peer_ports' must be FIRST-LAST within 1 to 65535, got {text!r}",
            code="out-of-range",
            context={"key": "peer_ports", "value": text},
        )
    return ports[0], ports[1]
