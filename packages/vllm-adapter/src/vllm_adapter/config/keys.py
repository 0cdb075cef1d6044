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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, final

import msgspec
from msgspec import Meta

from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "GROUPS",
    "OLD_KEYS",
    "PERMUTE_GB_S",
    "RELEASE_FACTORS",
    "declared_factors",
    "RENEWED_PART",
    "Keys",
    "Settings",
    "VARIABLE_PREFIX",
    "check_whole",
    "describe_keys",
    "describe_limits",
    "describe_schema",
    "load_keys",
    "load_settings",
    "nearest",
    "old_key",
    "unknown_key",
]

OLD_KEYS: Mapping[str, tuple[bool, str]] = {
    # vLLM's own.
    "num_threads": (True, 'backends, as {"UCX": {"num_threads": "4"}}'),
    "enforce_handshake_compat": (True, "compatibility_policy, off for false"),
    "engine_ttl": (False, "an unused engine is forgotten after an hour"),
    "enable_cross_layers_blocks": (False, "the layout is taken from the tensors that the engine allocates"),
    "push_registration_timeout": (False, "this connector pulls"),
    # Those of this connector before 0.3.
    "advertised_port": (True, "advertised_host, as HOST:PORT"),
    "ticket_secret_files": (True, "ticket_secrets"),
    "ticket_secret_variable": (True, "ticket_secrets, as env:NAME"),
    "side_channel_server_key": (True, "the certificates of listeners into the folder of side_channel_key"),
    "side_channel_clients": (True, "the certificates of clients into a folder `clients` beside side_channel_key"),
    "ticket_policy": (True, "ticket_secrets, by which all peers must seal, except those in unsigned_hosts"),
    "max_leases": (True, "max_leased_blocks, which limits what unread prompts keep"),
    "handshake_timeout_s": (False, "an attempt lasts a twelfth of read_timeout_s, 2 to 60 s"),
    "handshake_attempts": (False, "two are made"),
    "read_retries": (False, "a read whose peer was lost is made again once"),
    "fence_slots": (False, "4096 hand-overs can be fenced at once"),
    "stream_slots": (False, "64 prompts can be streamed at once"),
    "stream_reserve_fraction": (
        False,
        "streams may hold half of the cache, also where it was 0; streaming false has none",
    ),
    "ask_wait_s": (False, "half of read_timeout_s, 30 s at most"),
    "max_inflight_bytes": (False, "4 GiB per rank"),
    "receive_conversion": (False, "pages are converted on arrival where that is cheaper"),
    "progress_thread": (False, "on where this process may use more than 8 cores"),
    "ticket_dialect": (False, "the connector version of this vLLM"),
}
"""Former keys: whether the value still counts, and what stands in its place. They are accepted with a warning."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Addresses": ("advertised_host", "remote_hosts", "peer_ports"),
    "Leases": ("kv_lease_duration", "max_leased_blocks"),
    "Handshakes": ("compatibility_policy", "may_differ"),
    "Reads": ("read_timeout_s",),
    "Later turns": ("bidirectional_kv_xfer", "decoder_kv_blocks_ttl", "kv_recompute_threshold"),
    "Streaming": ("streaming",),
    "Security": ("ticket_secrets", "unsigned_hosts", "side_channel_key"),
    "NIXL": ("backends",),
}
"""The keys as operators look for them."""

RELEASE_FACTORS: Mapping[str, tuple[str, ...]] = {
    "patch": ("vllm_version",),
    "minor": ("vllm_version", "nixl_connector_version"),
}
"""Factors that may differ, by the values of `may_differ`."""


def declared_factors(policy: str, may_differ: str) -> tuple[str, ...]:
    """Return the factors that may differ by these keys: factor by factor, elements of another type are left to the plan."""
    return *RELEASE_FACTORS.get(may_differ, ()), *(("cache_dtype",) if policy == "negotiated" else ())


RENEWED_PART: Final = 2 / 3
"""A heartbeat renews a lease to this part of its length from then. Source: vLLM's lease renewal."""

_SECTION = "kv_connector_extra_config"
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
_WORDS = {"true": True, "false": False}
"""vLLM's own connector takes some booleans as words."""
_SCHEMA_TEXT = "The connector's configuration. A misspelt key or a wrong value stops the engine at start."
PERMUTE_GB_S: Final = {"DRAM": 1.2, "VRAM": 10.0}
"""Speed of permuting pages, by which `receive_conversion` "auto" decides. DRAM: as measured with torch on one core, 134 MB of 32
layers."""

VARIABLE_PREFIX: Final = "env:"
"""Begins a source of secrets that is an environment variable."""


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of the configuration, checked. Operators read the texts below.

    Attributes:
        backends: NIXL back ends to create, in order: names, or an object of the parameters of each, such as {"UCX":
            {"num_threads": "4"}}. Parameters are those of the plugin, as strings.
        compatibility_policy: How peers are compared: by vLLM's exact hash, factor by factor (negotiated), or not at all
            (off). Negotiated, a prefill engine's e4m3 cache whose scales are 1 is read into bfloat16 or float32.
        may_differ: Difference between the vLLM releases of two engines of this connector across which this one reads.
            patch: such as 0.32.0 and 0.32.1; minor: among 0.31, 0.32 and 0.33, too, for a rolling upgrade. Pages whose
            bytes the geometry documents do not describe in full are refused all the same (release-differs).
        kv_lease_duration: Seconds that a producer keeps a finished prompt's blocks without a heartbeat.
        kv_recompute_threshold: Fewer external tokens than this are recomputed on a later turn's prefill.
        bidirectional_kv_xfer: Let a later turn's prefill read from the decode engine.
        decoder_kv_blocks_ttl: Seconds that a decode engine keeps blocks for a later turn.
        read_timeout_s: Seconds after which a read in progress is given up and its pages quarantined. A twelfth of it, 2
            to 60 s, is the time for each of the two attempts of a handshake. Half of it, 30 s at most, is the time that
            a streamed prompt waits for an answer, for free blocks or for word that it is on its way, before it is
            computed here; ten times as long in all.
        max_leased_blocks: Cache blocks that finished prompts may keep for their readers, over all groups, so that
            clients that never read leave prefill the rest of its cache; beyond them prefill answers without a ticket.
            A streamed prompt counts from its offer on. 0 for no limit.
        streaming: Hand prompts over while they are computed, behind a router that starts both engines at once
            (kv_stream); all others as ever. Set it on both engines: behind such a router a decode engine computes each
            prompt that one side does not stream. Both take early tickets only from peers that a fleet secret or
            remote_hosts covers.
        remote_hosts: Networks (CIDR) that a ticket's remote_host may name; empty for any. Hosts given by name are then
            refused.
        peer_ports: First and last side-channel port that a ticket may name, such as 5600-5663; those below 1024 belong
            to the machines' own services.
        advertised_host: Address in this engine's tickets, HOST or HOST:PORT, where peers reach its side channel by
            another one than that on which it listens (VLLM_NIXL_SIDE_CHANNEL_HOST), as behind NAT or a Kubernetes
            Service of this engine alone. The data-parallel index is added to the port.
        ticket_secrets: Sources of the fleet's secrets: files with one per line of 16 bytes or more, and environment
            variables, written env:NAME, with some separated by white space. The first one of all seals this engine's
            tickets, all verify those of peers. Files are read again when they change; others than owner and group must
            have no right on them.
        unsigned_hosts: Networks (CIDR) of engines of vLLM's own connector, which cannot seal: their tickets need no
            seal, those of all others do.
        side_channel_key: Certificate file (.key_secret) of this engine for an encrypted side channel, as listener and
            as client. The public certificates (.key) in its folder are those of the listeners that it connects to and of
            the clients that it admits; of listeners alone if there is a folder `clients` beside them for the latter.
            Engines of vLLM's own connector cannot connect to it.
    """

    backends: tuple[str, ...] | dict[str, dict[str, str]] = ("UCX",)
    compatibility_policy: Literal["exact", "negotiated", "off"] = "exact"
    may_differ: Literal["patch", "minor"] = "patch"
    kv_lease_duration: Annotated[float, Meta(ge=1, le=86400)] = 30.0
    kv_recompute_threshold: Annotated[int, Meta(ge=0, le=10**9)] = 64
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Annotated[float, Meta(ge=1, le=86400)] = 480.0
    read_timeout_s: Annotated[float, Meta(ge=0.1, le=3600)] = 60.0
    max_leased_blocks: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    streaming: bool = False
    remote_hosts: tuple[str, ...] = ()
    peer_ports: str = "1024-65535"
    advertised_host: str = ""
    ticket_secrets: tuple[str, ...] = ()
    unsigned_hosts: tuple[str, ...] = ()
    side_channel_key: str = ""


@final
class Settings(Keys, frozen=True, kw_only=True):
    """The keys, values of former keys that still count, and what is not for an operator to set."""

    num_threads: Annotated[int, Meta(ge=0, le=64)] = 4
    enforce_handshake_compat: bool = True
    advertised_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    ticket_secret_files: tuple[str, ...] = ()
    ticket_secret_variable: str = ""
    side_channel_server_key: str = ""
    side_channel_clients: str = ""
    ticket_policy: Literal["", "require", "accept-unsigned"] = ""
    max_leases: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    # Derived from `read_timeout_s`.
    handshake_timeout_s: float = 5.0
    ask_wait_s: float = 30.0
    # Fixed.
    engine_ttl: float = 3600.0
    handshake_attempts: int = 2
    read_retries: int = 1
    fence_slots: int = 4096
    stream_slots: int = 64
    stream_reserve_fraction: float = 0.5
    max_inflight_bytes: int = 4 << 30
    receive_conversion: Literal["auto", "never", "always"] = "auto"
    progress_thread: Literal["auto", "on", "off"] = "auto"

    @property
    def backend_parameters(self) -> Mapping[str, Mapping[str, str]]:
        """The parameters of each NIXL back end, by name."""
        return self.backends if isinstance(self.backends, dict) else {name: {} for name in self.backends}

    @property
    def secret_sources(self) -> tuple[str, ...]:
        """The sources of the fleet's secrets, in order."""
        variables = (f"{VARIABLE_PREFIX}{self.ticket_secret_variable}",) if self.ticket_secret_variable else ()
        return (*self.ticket_secrets, *self.ticket_secret_files, *variables)

    @property
    def server_keys(self) -> str:
        """File or folder of the public certificates of listeners."""
        return self.side_channel_server_key or str(Path(self.side_channel_key).parent)

    @property
    def client_keys(self) -> str:
        """Folder of the public certificates of clients."""
        folder = Path(self.side_channel_key).parent
        clients = folder / "clients"
        return self.side_channel_clients or str(clients if clients.is_dir() else folder)

    @property
    def has_secrets(self) -> bool:
        """Whether tickets are sealed."""
        return bool(self.secret_sources)

    @property
    def requires_seals(self) -> bool:
        """Whether every ticket must be sealed, so that every peer is of our own kind."""
        return self.has_secrets and not self.unsigned_hosts

    @property
    def requires_nonces(self) -> bool:
        """Whether a notification counts only with its grant's nonce; vLLM's own engines, which send none, reach no keyed one."""
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
        # An IPv6 address stands in brackets if a port follows.
        found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]*)):([0-9]{1,5})", self.advertised_host)
        own_host = (found[1] or found[2]) if found else self.advertised_host
        own_port = int(found[3]) if found else self.advertised_port
        last_port = own_port + data_parallel_index
        if not _is_host(own_host) or last_port > 65_535 or (found and not own_port):
            text = self.advertised_host
            reason = f"is {text!r}: it must be HOST, HOST:PORT or [IPv6]:PORT of an IP address or a host name"
            raise _refused("advertised_host", text, reason)
        return own_host or host, last_port if own_port else port

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
            "may_differ": self.may_differ,
            "requires_seals": self.requires_seals,
            "is_encrypted": bool(self.side_channel_key),
        }

    @property
    def policy(self) -> Literal["exact", "negotiated", "off"]:
        """How peers are compared."""
        return self.compatibility_policy if self.enforce_handshake_compat else "off"


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}


@cache
def describe_keys() -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON schema of each key's value, with its default and meaning, by key in order."""
    return {name: _schemas()[name] for name in Keys.__struct_fields__}


@cache
def _schemas() -> Mapping[str, Mapping[str, Any]]:
    """Return the same with values of former keys that still count."""
    components = msgspec.json.schema_components([Settings])[1]
    schemas: dict[str, dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(components["Settings"]["properties"]))
    attributes = (inspect.getdoc(Keys) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    for name, about in schemas.items():
        types = [each["type"] for each in about.get("anyOf", ())]
        schemas[name] = {"type": types or "string", **about, "description": texts.get(name) or old_key(name)}
    return schemas


def describe_limits(name: str) -> str:
    """Return type, default and range of a key's value in words, such as "number, default 30, 1 to 86400"."""
    about = describe_keys()[name]
    default = about["default"]
    if isinstance(default, list):
        default = ", ".join(cast("list[str]", default))
    elif not isinstance(default, str):
        default = str(default).lower().removesuffix(".0")
    limits = [_types_of(about), "no default" if default == "" else f"default {default}"]
    if "enum" in about:
        limits.append(f"one of {', '.join(about['enum'])}")
    if "maximum" in about:
        limits.append(f"{about['minimum']} to {about['maximum']}")
    return ", ".join(limits)


def _types_of(about: Mapping[str, Any], array: str = "array") -> str:
    types = cast("list[str]", about["type"] if isinstance(about["type"], list) else [about["type"]])
    return " or ".join(types).replace("array", array)


def describe_schema() -> dict[str, Any]:
    """Return the JSON schema of `kv_connector_extra_config`."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    head = {"$schema": dialect, "type": "object", "title": _SECTION, "description": _SCHEMA_TEXT}
    former = {name: {"deprecated": True, "description": old_key(name)} for name in OLD_KEYS}
    return {**head, "properties": {**describe_keys(), **former}, "required": [], "additionalProperties": False}


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
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in extra.items():
        counts, _ = OLD_KEYS.get(key, (key in describe_keys(), ""))
        if key in OLD_KEYS:
            notes.append(f"{_SECTION}.{key} {old_key(key)}")
        elif not counts:
            raise unknown_key(key)
        if counts:
            values[key] = _read_value(key, value)
            _check_texts(key, values[key])
    patience_s = values.get("read_timeout_s", 60.0)
    values["handshake_timeout_s"] = min(max(patience_s / 12, 2.0), 60.0)
    values["ask_wait_s"] = min(patience_s / 2, 30.0)
    settings = Settings(**values)
    # NIXL could create nothing from an empty list, or one back end twice.
    names = list(settings.backends)
    if not names or len(set(names)) < len(names) or not all(map(str.strip, names)):
        reason = f"must name one NIXL back end or more, each once, such as UCX, got {names}"
        raise _refused("backends", names, reason)
    _check_networks("remote_hosts", settings.remote_hosts)
    _check_networks("unsigned_hosts", settings.unsigned_hosts)
    _ = settings.peer_port_range, settings.advertised("", 0, 0)
    return settings, tuple(notes)


def _read_value(key: str, value: object) -> object:
    """Return the value of a key in its type, or raise what is right."""
    about, shown = _schemas()[key], repr(value)
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
    kind = _types_of(about, "array of strings")
    raise _refused(key, shown, f"must be of type {kind}, got {shown}. {about['description']}", code="wrong-type")


def nearest(value: object, known: Iterable[str], cutoff: float = 0.6, *, most: int = 1) -> str:
    """Return a hint at the known words that are nearest to a value; empty if none is near."""
    found = difflib.get_close_matches(str(value), list(known), n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def old_key(key: str) -> str:
    """Return what became of a former key; empty for others."""
    counts, words = OLD_KEYS.get(key, (False, ""))
    return f"{'counts still; write' if counts else 'is not read any more:'} {words}" if words else ""


def unknown_key(key: str) -> ConfigurationError:
    """Return the error of a key that does not exist: it names near ones, or how to list all."""
    hint = nearest(key, [*describe_keys(), *OLD_KEYS], 0.5) or "; list all with `vllm-adapter config --explain`"
    return ConfigurationError(f"{_SECTION}.{key}: no such key{hint}", code="unknown-key", context={"key": key})


def _refused(key: str, value: object, reason: str, *, code: str = "out-of-range") -> ConfigurationError:
    return ConfigurationError(f"{_SECTION}.{key}: {reason}", code=code, context={"key": key, "value": value})


def _check_texts(key: str, value: object) -> None:
    """Refuse texts that name nothing: blank ones in a list, and those that no file, variable or back end can be called by."""
    for text in _texts_in(value):
        if isinstance(value, tuple) and not text.strip():
            raise _refused(key, text, f"holds {text!r}, which names nothing: leave it out")
        # Halves of a surrogate pair, without those by which Python reads bytes of a file name that are not UTF-8.
        if re.search("[\0\ud800-\udc7f\udd00-\udfff]", text):
            raise _refused(key, text, f"holds {text!r}: no name may have a zero byte, or half of a surrogate pair")


def _texts_in(value: object) -> Iterator[str]:
    """Yield a text, or those in a list or an object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in((*cast("dict[str, object]", value), *cast("dict[str, object]", value).values()))
    elif isinstance(value, tuple):
        for each in cast("tuple[object, ...]", value):
            yield from _texts_in(each)


def _is_host(host: str) -> bool:
    """Return whether a text is an IP address, a host name or empty."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return not host or bool(_HOST_NAME.fullmatch(host))
    return True


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


def check_whole(settings: Settings) -> None:
    """Refuse a protection that is configured by half: it would protect nothing, or everything would be refused.

    Raises:
        ConfigurationError: `incomplete-keys`.
    """
    if not settings.side_channel_key and (settings.side_channel_server_key or settings.side_channel_clients):
        raise _incomplete("an encrypted side channel needs side_channel_key")
    if settings.ticket_policy and not settings.has_secrets:
        raise _incomplete("ticket_policy needs ticket_secrets: without a secret nothing is verified")
    if settings.ticket_policy and (settings.ticket_policy == "accept-unsigned") != bool(settings.unsigned_hosts):
        raise _incomplete("ticket_policy 'accept-unsigned' and unsigned_hosts go together: leave ticket_policy out")
    if settings.unsigned_hosts and not settings.has_secrets:
        raise _incomplete("unsigned_hosts needs ticket_secrets: without a secret nothing is verified")


def _incomplete(reason: str) -> ConfigurationError:
    return ConfigurationError(f"{_SECTION}: {reason}", code="incomplete-keys")
