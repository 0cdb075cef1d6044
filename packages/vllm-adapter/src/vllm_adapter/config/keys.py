"""Every key of `kv_connector_extra_config`, with its default, range and meaning, and the check that is made at start.

A wrong key or value stops the engine at start with a message that names the nearest right one: a misspelt key that is
silently ignored is found weeks later.
"""

from __future__ import annotations

import difflib
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, final

import msgspec
from msgspec import Meta

from vllm_adapter.config.values import Key, check_host, check_networks, port_range, read_value, refusal
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OBSOLETE_KEYS",
    "PERMUTE_GB_S",
    "RENEWED_PART",
    "Settings",
    "check_mirror",
    "check_whole",
    "describe_keys",
    "describe_schema",
    "load_keys",
    "load_settings",
]

OBSOLETE_KEYS: Mapping[str, str] = {
    "enable_cross_layers_blocks": "the layout is taken from the tensors that the engine allocates",
    "push_registration_timeout": "this connector pulls",
}
"""Keys of older connectors that are accepted with a note, and why they are not needed."""

RENEWED_PART: Final = 2 / 3
"""A heartbeat renews a lease to this part of its length from then. Source: vLLM's lease renewal."""

PERMUTE_GB_S: Final = {"DRAM": 1.2, "VRAM": 10.0}
"""Speed of permuting pages, by which `receive_conversion` "auto" decides. DRAM: as measured with torch on one core, 134 MB of 32
layers."""

_CHANNEL_KEYS = ("side_channel_key", "side_channel_server_key", "side_channel_clients")


@final
class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's configuration, checked. Field names are the configuration's keys."""

    backends: Annotated[
        tuple[str, ...],
        Meta(
            description="NIXL back ends to create, in order.",
            extra_json_schema={"minItems": 1, "uniqueItems": True},
        ),
    ] = ("UCX",)
    num_threads: Annotated[int, Meta(ge=0, le=64, description="Worker threads of the UCX back end.")] = 4
    progress_thread: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="NIXL's own progress thread, beside the transfer thread, which makes progress without it. auto: where "
            "this process may use more than 8 cores."
        ),
    ] = "auto"
    enforce_handshake_compat: Annotated[
        bool, Meta(description="Refuse a peer whose compatibility hash differs from ours.")
    ] = True
    compatibility_policy: Annotated[
        Literal["exact", "negotiated"],
        Meta(description="How peers are compared: by vLLM's exact hash, or factor by factor."),
    ] = "exact"
    kv_lease_duration: Annotated[
        float,
        Meta(
            ge=1, le=86400, description="Seconds that a producer keeps a finished prompt's blocks without a heartbeat."
        ),
    ] = 30.0
    engine_ttl: Annotated[
        float,
        Meta(
            ge=0,
            le=1e7,
            description="Seconds after which an unused peer engine is forgotten (never while a read runs); 0 for never. A dead "
            "one is let go within seconds whatever this says.",
        ),
    ] = 3600.0
    kv_recompute_threshold: Annotated[
        int,
        Meta(ge=0, le=10**9, description="Fewer external tokens than this are recomputed on a later turn's prefill."),
    ] = 64
    bidirectional_kv_xfer: Annotated[
        bool, Meta(description="Let a later turn's prefill read from the decode engine.")
    ] = False
    decoder_kv_blocks_ttl: Annotated[
        float, Meta(ge=1, le=86400, description="Seconds that a decode engine keeps blocks for a later turn.")
    ] = 480.0
    handshake_timeout_s: Annotated[float, Meta(ge=0.05, le=600, description="Seconds for one handshake attempt.")] = 5.0
    handshake_attempts: Annotated[
        int, Meta(ge=1, le=10, description="Attempts per handshake before its requests fail.")
    ] = 2
    read_timeout_s: Annotated[
        float,
        Meta(
            ge=0.1, le=3600, description="Seconds after which a read in progress is given up and its pages quarantined."
        ),
    ] = 60.0
    read_retries: Annotated[
        int,
        Meta(
            ge=0,
            le=1,
            description="How often a read whose peer was lost is made again, after the peer was met anew, within "
            "read_timeout_s and the lease; then kv_load_failure_policy decides.",
        ),
    ] = 1
    fence_slots: Annotated[
        int, Meta(ge=0, le=1 << 20, description="Words of the fence array: hand-overs that can be fenced at once.")
    ] = 4096
    max_leases: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Finished prompts that may wait for their readers at once; beyond them prefill answers without a "
            "ticket. A streamed prompt counts from its offer on. 0 for no limit.",
        ),
    ] = 0
    max_leased_blocks: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 31,
            description="Cache blocks that these may keep together, over all groups, so that clients that never read leave "
            "prefill the rest of its cache; beyond them likewise. 0 for no limit.",
        ),
    ] = 0
    streaming: Annotated[
        bool,
        Meta(
            description="Hand prompts over while they are computed, behind a router that starts both engines at once "
            "(kv_stream); all others as ever. Set it on both engines: behind such a router a decode engine computes each prompt "
            "that one side does not stream. Both take early tickets only from peers that a fleet secret or remote_hosts covers."
        ),
    ] = False
    stream_slots: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Prompts that may be streamed from this engine at once, until their lease ends; others are handed over "
            "whole. Each slot takes 64 KiB of host memory per rank.",
        ),
    ] = 64
    stream_reserve_fraction: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of this engine's cache blocks that streams may hold before their data is whole, so that two "
            "engines which prefill for each other never wait for each other; a prompt that needs more is read whole. 0 refuses "
            "early tickets.",
        ),
    ] = 0.5
    ask_wait_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=30,
            description="Prefill engine: seconds that it keeps a peer's question open. Decode engine: seconds that a request "
            "waits for an answer, for free blocks or for word that the prompt is on its way, before the prompt is computed here; "
            "ten times as long in all.",
        ),
    ] = 30.0
    max_inflight_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 50,
            description="Bytes of reads in flight per rank before further ones wait; 0 for no limit. An engine with no read in "
            "flight is always read from, so a stopped one holds up no other.",
        ),
    ] = 4 << 30
    receive_conversion: Annotated[
        Literal["auto", "never", "always"],
        Meta(
            description="Whether pages of another layout or block size are read whole and put in order here, instead of piece "
            "by piece. auto: where that is cheaper; never: piece by piece; always: even where nothing needs it, and a peer "
            "whose pages cannot be read whole is refused."
        ),
    ] = "auto"
    remote_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Networks (CIDR) that a ticket's remote_host may name; empty for any. Hosts given by name are then "
            "refused."
        ),
    ] = ()
    peer_ports: Annotated[
        str,
        Meta(
            description="First and last side-channel port that a ticket may name, such as 5600-5663; those below 1024 belong "
            "to the machines' own services."
        ),
    ] = "1024-65535"
    advertised_host: Annotated[
        str,
        Meta(
            description="Address in this engine's tickets, where peers reach its side channel by another one than that on which "
            "it listens (VLLM_NIXL_SIDE_CHANNEL_HOST), as behind NAT or a Kubernetes Service of this engine alone."
        ),
    ] = ""
    advertised_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="Port in this engine's tickets, likewise; the data-parallel index is added. 0: that on which it listens.",
        ),
    ] = 0
    ticket_secret_files: Annotated[
        tuple[str, ...],
        Meta(
            description="Files with the fleet's secrets, one per line of 16 bytes or more: the first one of all seals this "
            "engine's tickets, all verify those of peers. Read again when they change. Others than owner and group must have "
            "no right on them."
        ),
    ] = ()
    ticket_secret_variable: Annotated[
        str,
        Meta(
            description="Environment variable with such secrets, separated by white space, after those of the files; read at "
            "start."
        ),
    ] = ""
    ticket_policy: Annotated[
        Literal["", "require", "accept-unsigned"],
        Meta(
            description="Whether each ticket must be sealed. require: yes, the default once there is a fleet secret. "
            "accept-unsigned: except for tickets that point into unsigned_hosts, where engines of vLLM's own connector live, "
            "which cannot seal."
        ),
    ] = ""
    unsigned_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Networks (CIDR) of engines that cannot seal; only with ticket_policy accept-unsigned."),
    ] = ()
    side_channel_key: Annotated[
        str,
        Meta(
            description="Certificate file (.key_secret) of this engine for an encrypted side channel, as listener and as "
            "client; needs side_channel_server_key and side_channel_clients. Engines of vLLM's own connector can then not be "
            "met."
        ),
    ] = ""
    side_channel_server_key: Annotated[
        str,
        Meta(
            description="Public certificate (.key) of the listeners that this engine connects to, or a folder of several."
        ),
    ] = ""
    side_channel_clients: Annotated[
        str,
        Meta(
            description="Folder with the public certificates (.key) of all clients that this engine's listener admits."
        ),
    ] = ""
    ticket_dialect: Annotated[
        int,
        Meta(
            ge=0,
            le=15,
            description="Connector version assumed of peers whose tickets do not say; 0 for that of this vLLM.",
        ),
    ] = 0

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
    def peer_port_range(self) -> tuple[int, int]:
        """`peer_ports` as numbers."""
        return port_range(self.peer_ports)

    def advertised(self, host: str, port: int, data_parallel_index: int) -> tuple[str, int]:
        """Return the address in the tickets of an engine that listens on this host and port."""
        advertised_port = self.advertised_port + data_parallel_index
        return self.advertised_host or host, advertised_port if self.advertised_port else port

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats to one engine. Source: vLLM's own connector sends six per lease."""
        return self.kv_lease_duration / 6

    @property
    def renewed_s(self) -> float:
        """Seconds that a lease lasts from a heartbeat on, at least."""
        return self.kv_lease_duration * RENEWED_PART

    @property
    def policy(self) -> Literal["exact", "negotiated", "off"]:
        """How peers are compared, from the two keys that say so."""
        return self.compatibility_policy if self.enforce_handshake_compat else "off"


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
    known = {key.name: key for key in describe_keys()}
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
            values[key] = read_value(known[key], value)
            _check_texts(key, values[key])
    settings = Settings(**values)
    _check_backends(settings.backends)
    check_host("advertised_host", settings.advertised_host)
    check_networks("remote_hosts", settings.remote_hosts)
    check_networks("unsigned_hosts", settings.unsigned_hosts)
    _ = settings.peer_port_range
    return settings, tuple(notes)


def _check_texts(key: str, value: object) -> None:
    """Refuse texts that name nothing: blank ones in a list, and those that no file, variable or back end can be called by.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    texts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    for text in texts:
        if not isinstance(text, str):
            continue
        if isinstance(value, tuple) and not text.strip():
            raise refusal("out-of-range", f"'{key}' holds {text!r}, which names nothing: leave it out", key, text)
        if "\0" in text or _is_half(text):
            reason = f"'{key}' holds {text!r}: no name may have a zero byte, or half of a surrogate pair"
            raise refusal("out-of-range", reason, key, text)


def _is_half(text: str) -> bool:
    """Return whether a text cannot be written; bytes of a file name that are no UTF-8 can, as Python reads them."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return True
    return False


def _check_backends(names: tuple[str, ...]) -> None:
    """Refuse a list of which NIXL could make nothing, or one back end twice.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    if not names or len(set(names)) < len(names):
        raise refusal(
            "out-of-range",
            f"'backends' must name one NIXL back end or more, each once, such as UCX, got {list(names)}",
            "backends",
            list(names),
        )


@cache
def describe_keys() -> tuple[Key, ...]:
    """Return all keys, in order."""
    return tuple(map(Key.of, msgspec.structs.fields(Settings)))


def describe_schema() -> dict[str, Any]:
    """Return the JSON schema of `kv_connector_extra_config`."""
    schema = msgspec.json.schema_components([Settings])[1]["Settings"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "kv_connector_extra_config"}


def check_mirror(settings: Settings) -> None:
    """Refuse a mirror in host memory without fences: a copy that fails can only be told to readers through its fence.

    Raises:
        ConfigurationError: `incomplete-keys`.
    """
    if not settings.fence_slots:
        raise refusal(
            "incomplete-keys",
            "a mirror in host memory needs fence_slots: readers learn of a copy that failed by its fence alone",
        )


def check_whole(settings: Settings) -> None:
    """Refuse a protection that is configured by half: it would protect nothing, or everything would be refused.

    Raises:
        ConfigurationError: `incomplete-keys`.
    """
    channel = {name: getattr(settings, name) for name in _CHANNEL_KEYS}
    missing = [name for name, value in channel.items() if not value]
    if 0 < len(missing) < len(channel):
        raise refusal(
            "incomplete-keys",
            f"an encrypted side channel needs {', '.join(_CHANNEL_KEYS)}; there is no {', '.join(missing)}",
        )
    if settings.streaming and not settings.fence_slots:
        raise refusal("incomplete-keys", "streaming needs fence_slots: what was read early counts only by the fence")
    accepts = settings.ticket_policy == "accept-unsigned"
    if settings.ticket_policy and not settings.has_secrets:
        raise refusal(
            "incomplete-keys",
            f"ticket_policy '{settings.ticket_policy}' needs ticket_secret_files or ticket_secret_variable: without a secret "
            "nothing is verified",
        )
    if accepts != bool(settings.unsigned_hosts):
        raise refusal(
            "incomplete-keys",
            "ticket_policy 'accept-unsigned' and unsigned_hosts go together: the place of a peer decides whether it must seal, "
            "never its ticket",
        )
