"""Every key of `kv_connector_extra_config`, with its default, range and meaning, and the check that is made at start.

A wrong key or value stops the engine at start with a message that names the nearest right one: a misspelt key that is
silently ignored is found weeks later.
"""

from __future__ import annotations

import difflib
import inspect
import ipaddress
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, final

import msgspec
from msgspec import Meta

from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "OBSOLETE_KEYS",
    "PERMUTE_GB_S",
    "RENEWED_PART",
    "Settings",
    "check_whole",
    "describe_keys",
    "describe_schema",
    "load_keys",
    "load_settings",
    "nearest",
]

OBSOLETE_KEYS: Mapping[str, str] = {
    "enable_cross_layers_blocks": "the layout is taken from the tensors that the engine allocates",
    "push_registration_timeout": "this connector pulls",
}
"""Keys of older connectors that are accepted with a note, and why they are not needed."""

RENEWED_PART: Final = 2 / 3
"""A heartbeat renews a lease to this part of its length from then. Source: vLLM's lease renewal."""

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
_WORDS = {"true": True, "false": False}
"""vLLM's own connector takes some booleans as words."""
_SCHEMA_TEXT = "The connector's configuration. A misspelt key or a wrong value stops the engine at start."
PERMUTE_GB_S: Final = {"DRAM": 1.2, "VRAM": 10.0}
"""Speed of permuting pages, by which `receive_conversion` "auto" decides. DRAM: as measured with torch on one core, 134 MB of 32
layers."""

_CHANNEL_KEYS = ("side_channel_key", "side_channel_server_key", "side_channel_clients")


@final
class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's configuration, checked. Field names are the configuration's keys; operators read the texts below.

    Attributes:
        backends: NIXL back ends to create, in order.
        num_threads: Worker threads of the UCX back end.
        progress_thread: NIXL's own progress thread, beside the transfer thread, which makes progress without it. auto:
            where this process may use more than 8 cores.
        enforce_handshake_compat: Refuse a peer whose compatibility hash differs from ours.
        compatibility_policy: How peers are compared: by vLLM's exact hash, or factor by factor.
        kv_lease_duration: Seconds that a producer keeps a finished prompt's blocks without a heartbeat.
        engine_ttl: Seconds after which an unused peer engine is forgotten (never while a read runs); 0 for never. A
            dead one is let go within seconds whatever this says.
        kv_recompute_threshold: Fewer external tokens than this are recomputed on a later turn's prefill.
        bidirectional_kv_xfer: Let a later turn's prefill read from the decode engine.
        decoder_kv_blocks_ttl: Seconds that a decode engine keeps blocks for a later turn.
        handshake_timeout_s: Seconds for one handshake attempt.
        handshake_attempts: Attempts per handshake before its requests fail.
        read_timeout_s: Seconds after which a read in progress is given up and its pages quarantined.
        read_retries: How often a read whose peer was lost is made again, after a new handshake, within
            read_timeout_s and the lease; then kv_load_failure_policy decides.
        fence_slots: Words of the fence array: hand-overs that can be fenced at once.
        max_leases: Finished prompts that may wait for their readers at once; beyond them prefill answers without a
            ticket. A streamed prompt counts from its offer on. 0 for no limit.
        max_leased_blocks: Cache blocks that these may keep together, over all groups, so that clients that never read
            leave prefill the rest of its cache; beyond them likewise. 0 for no limit.
        streaming: Hand prompts over while they are computed, behind a router that starts both engines at once
            (kv_stream); all others as ever. Set it on both engines: behind such a router a decode engine computes each
            prompt that one side does not stream. Both take early tickets only from peers that a fleet secret or
            remote_hosts covers.
        stream_slots: Prompts that may be streamed from this engine at once, until their lease ends; others are handed
            over whole. Each slot takes 64 KiB of host memory per rank.
        stream_reserve_fraction: Share of this engine's cache blocks that streams may hold before their data is whole,
            so that two engines which prefill for each other never wait for each other; a prompt that needs more is read
            whole. 0 refuses early tickets.
        ask_wait_s: Prefill engine: seconds that it keeps a peer's question open. Decode engine: seconds that a request
            waits for an answer, for free blocks or for word that the prompt is on its way, before the prompt is
            computed here; ten times as long in all.
        max_inflight_bytes: Bytes of reads in flight per rank before further ones wait; 0 for no limit. An engine with
            no read in flight is always read from, so a stopped one holds up no other.
        receive_conversion: Whether pages of another layout or block size are read whole and put in order here, instead
            of piece by piece. auto: where that is cheaper; never: piece by piece; always: even where nothing needs it,
            and a peer whose pages cannot be read whole is refused.
        remote_hosts: Networks (CIDR) that a ticket's remote_host may name; empty for any. Hosts given by name are then
            refused.
        peer_ports: First and last side-channel port that a ticket may name, such as 5600-5663; those below 1024 belong
            to the machines' own services.
        advertised_host: Address in this engine's tickets, where peers reach its side channel by another one than that
            on which it listens (VLLM_NIXL_SIDE_CHANNEL_HOST), as behind NAT or a Kubernetes Service of this engine
            alone.
        advertised_port: Port in this engine's tickets, likewise; the data-parallel index is added. 0: that on which it
            listens.
        ticket_secret_files: Files with the fleet's secrets, one per line of 16 bytes or more: the first one of all
            seals this engine's tickets, all verify those of peers. Read again when they change. Others than owner and
            group must have no right on them.
        ticket_secret_variable: Environment variable with such secrets, separated by white space, after those of the
            files; read at start.
        ticket_policy: Whether each ticket must be sealed. require: yes, the default once there is a fleet secret.
            accept-unsigned: except for tickets that point into unsigned_hosts, where engines of vLLM's own connector
            live, which cannot seal.
        unsigned_hosts: Networks (CIDR) of engines that cannot seal; only with ticket_policy accept-unsigned.
        side_channel_key: Certificate file (.key_secret) of this engine for an encrypted side channel, as listener and
            as client; needs side_channel_server_key and side_channel_clients. Engines of vLLM's own connector cannot
            connect to it.
        side_channel_server_key: Public certificate (.key) of the listeners that this engine connects to, or a folder of
            several.
        side_channel_clients: Folder with the public certificates (.key) of all clients that this engine's listener
            admits.
        ticket_dialect: Connector version assumed of peers whose tickets do not say; 0 for that of this vLLM.
    """

    backends: Annotated[tuple[str, ...], Meta(extra_json_schema={"minItems": 1, "uniqueItems": True})] = ("UCX",)
    num_threads: Annotated[int, Meta(ge=0, le=64)] = 4
    progress_thread: Literal["auto", "on", "off"] = "auto"
    enforce_handshake_compat: bool = True
    compatibility_policy: Literal["exact", "negotiated"] = "exact"
    kv_lease_duration: Annotated[float, Meta(ge=1, le=86400)] = 30.0
    engine_ttl: Annotated[float, Meta(ge=0, le=1e7)] = 3600.0
    kv_recompute_threshold: Annotated[int, Meta(ge=0, le=10**9)] = 64
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Annotated[float, Meta(ge=1, le=86400)] = 480.0
    handshake_timeout_s: Annotated[float, Meta(ge=0.05, le=600)] = 5.0
    handshake_attempts: Annotated[int, Meta(ge=1, le=10)] = 2
    read_timeout_s: Annotated[float, Meta(ge=0.1, le=3600)] = 60.0
    read_retries: Annotated[int, Meta(ge=0, le=1)] = 1
    fence_slots: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    max_leases: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    max_leased_blocks: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    streaming: bool = False
    stream_slots: Annotated[int, Meta(ge=1, le=1024)] = 64
    stream_reserve_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.5
    ask_wait_s: Annotated[float, Meta(ge=0.1, le=30)] = 30.0
    max_inflight_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 4 << 30
    receive_conversion: Literal["auto", "never", "always"] = "auto"
    remote_hosts: tuple[str, ...] = ()
    peer_ports: str = "1024-65535"
    advertised_host: str = ""
    advertised_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    ticket_secret_files: tuple[str, ...] = ()
    ticket_secret_variable: str = ""
    ticket_policy: Literal["", "require", "accept-unsigned"] = ""
    unsigned_hosts: tuple[str, ...] = ()
    side_channel_key: str = ""
    side_channel_server_key: str = ""
    side_channel_clients: str = ""
    ticket_dialect: Annotated[int, Meta(ge=0, le=15)] = 0

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
        """`peer_ports` as numbers; a single port is a range of one."""
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", self.peer_ports)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65_535:
            reason = f"must be FIRST-LAST within 1 to 65535, got {self.peer_ports!r}"
            raise _refused("peer_ports", self.peer_ports, reason)
        return first, last

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
    def terms(self) -> dict[str, object]:
        """Terms on which peers depend, as an answer to `status` has them."""
        return {
            "lease_s": self.kv_lease_duration,
            "heartbeat_s": self.heartbeat_s,
            "compatibility_policy": self.policy,
            "requires_seals": self.requires_seals,
            "is_encrypted": bool(self.side_channel_key),
        }

    @property
    def policy(self) -> Literal["exact", "negotiated", "off"]:
        """How peers are compared, from the two keys that say so."""
        return self.compatibility_policy if self.enforce_handshake_compat else "off"


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}


@cache
def describe_keys() -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON schema of each key's value, with its default and meaning, by key in order."""
    components = msgspec.json.schema_components([Settings])[1]
    schema = msgspec.json.decode(msgspec.json.encode(components["Settings"]["properties"]))
    attributes = (inspect.getdoc(Settings) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: {"type": "string", **schema[name], "description": " ".join(text.split())} for name, text in entries}


def describe_schema() -> dict[str, Any]:
    """Return the JSON schema of `kv_connector_extra_config`."""
    title = "kv_connector_extra_config"
    dialect = "https://json-schema.org/draft/2020-12/schema"
    head = {"$schema": dialect, "type": "object", "title": title, "description": _SCHEMA_TEXT}
    return {**head, "properties": describe_keys(), "required": [], "additionalProperties": False}


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
    known = describe_keys()
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in extra.items():
        if key in OBSOLETE_KEYS:
            notes.append(f"kv_connector_extra_config: '{key}' is no longer needed ({OBSOLETE_KEYS[key]})")
        elif key not in known:
            hint = nearest(key, known, 0.5) or f"; the keys are {', '.join(sorted(known))}"
            raise ConfigurationError(
                f"kv_connector_extra_config has no key '{key}'{hint}", code="unknown-key", context={"key": key}
            )
        else:
            values[key] = _read_value(key, value)
            _check_texts(key, values[key])
    settings = Settings(**values)
    # NIXL could create nothing from an empty list, or one back end twice.
    if not settings.backends or len(set(settings.backends)) < len(settings.backends):
        names = list(settings.backends)
        reason = f"must name one NIXL back end or more, each once, such as UCX, got {names}"
        raise _refused("backends", names, reason)
    _check_host("advertised_host", settings.advertised_host)
    _check_networks("remote_hosts", settings.remote_hosts)
    _check_networks("unsigned_hosts", settings.unsigned_hosts)
    _ = settings.peer_port_range
    return settings, tuple(notes)


def _read_value(key: str, value: object) -> object:
    """Return the value of a key in its type, or raise what is right."""
    about, shown = describe_keys()[key], repr(value)
    if about["type"] == "boolean" and isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    try:
        # msgspec takes a set for a list, and the order of our lists counts.
        return msgspec.convert(None if type(value) in {set, frozenset} else value, _TYPES[key])
    except (msgspec.ValidationError, UnicodeError):
        pass
    if "enum" in about and isinstance(value, str):
        choices: list[str] = about["enum"]
        raise _refused(key, shown, f"must be one of {', '.join(choices)}, got {shown}{nearest(value, choices)}")
    is_number = type(value) is int or (type(value) is float and about["type"] == "number")
    if is_number and "maximum" in about:
        bounds = f"between {about['minimum']} and {about['maximum']}"
        raise _refused(key, value, f"must be {bounds}, got {value}. {about['description']}")
    kind = "array of strings" if about["type"] == "array" else about["type"]
    raise _refused(key, shown, f"must be of type {kind}, got {shown}. {about['description']}", code="wrong-type")


def nearest(value: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint at the known word that is nearest to a value; empty if none is near."""
    found = difflib.get_close_matches(str(value), list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{found[0]}'?" if found else ""


def _refused(key: str, value: object, reason: str, *, code: str = "out-of-range") -> ConfigurationError:
    return ConfigurationError(
        f"kv_connector_extra_config: '{key}' {reason}", code=code, context={"key": key, "value": value}
    )


def _check_texts(key: str, value: object) -> None:
    """Refuse texts that name nothing: blank ones in a list, and those that no file, variable or back end can be called by."""
    texts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    for text in texts:
        if not isinstance(text, str):
            continue
        if isinstance(value, tuple) and not text.strip():
            raise _refused(key, text, f"holds {text!r}, which names nothing: leave it out")
        # Halves of a surrogate pair, without those by which Python reads bytes of a file name that are not UTF-8.
        if re.search("[\0\ud800-\udc7f\udd00-\udfff]", text):
            raise _refused(key, text, f"holds {text!r}: no name may have a zero byte, or half of a surrogate pair")


def _check_host(key: str, host: str) -> None:
    """Refuse a host that is neither an IP address nor a name, such as one with its port; readers would refuse every ticket."""
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        if host and not _HOST_NAME.fullmatch(host):
            raise _refused(
                key, host, f"is {host!r}: it must be an IP address or a host name, without a port"
            ) from error


def _check_networks(key: str, networks: tuple[str, ...]) -> None:
    """Refuse text that is not a network, as the request machines do: `10.0.0.1/8` could mean `10.0.0.0/8` or `10.0.0.1/32`."""
    for text in networks:
        try:
            meant = ipaddress.ip_interface(text)
        except ValueError as error:
            raise _refused(key, text, f"holds {text!r}, which is not a network: {error}") from error
        if int(meant.ip) != int(meant.network.network_address):
            hint = f"write {meant.network} or {meant.ip}/{meant.max_prefixlen}"
            raise _refused(key, text, f"holds {text!r}, which names an address, not a network: {hint}")


def check_whole(settings: Settings, *, is_mirrored: bool = False) -> None:
    """Refuse a protection that is configured by half: it would protect nothing, or everything would be refused.

    Args:
        settings: The configuration.
        is_mirrored: Whether peers read a mirror in host memory: a copy that fails can only be reported through its fence.

    Raises:
        ConfigurationError: `incomplete-keys`.
    """
    missing = [name for name in _CHANNEL_KEYS if not getattr(settings, name)]
    if 0 < len(missing) < len(_CHANNEL_KEYS):
        needed = ", ".join(_CHANNEL_KEYS)
        raise _incomplete(f"an encrypted side channel needs {needed}; there is no {', '.join(missing)}")
    if is_mirrored and not settings.fence_slots:
        raise _incomplete(
            "a mirror in host memory needs fence_slots: readers learn of a copy that failed by its fence alone"
        )
    if settings.streaming and not settings.fence_slots:
        raise _incomplete("streaming needs fence_slots: what was read early counts only by the fence")
    if settings.ticket_policy and not settings.has_secrets:
        raise _incomplete(
            f"ticket_policy '{settings.ticket_policy}' needs ticket_secret_files or ticket_secret_variable: without a secret "
            "nothing is verified"
        )
    if (settings.ticket_policy == "accept-unsigned") != bool(settings.unsigned_hosts):
        raise _incomplete(
            "ticket_policy 'accept-unsigned' and unsigned_hosts go together: the place of a peer decides whether it must seal, "
            "never its ticket"
        )


def _incomplete(reason: str) -> ConfigurationError:
    return ConfigurationError(f"kv_connector_extra_config: {reason}", code="incomplete-keys")
