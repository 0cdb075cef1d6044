"""Read one value of `kv_connector_extra_config` by the annotation of its field: its type, its range, its choices.

msgspec's own errors carry a text alone, so the coded ones are made here, from the same annotation.
"""

from __future__ import annotations

import difflib
import inspect
import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Literal, final, get_args, get_origin

import msgspec

from vllm_adapter.errors import ConfigurationError

__all__ = ["Key", "check_host", "check_networks", "port_range", "read_value", "refusal"]

_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
_WORDS = {"true": True, "false": False}
"""vLLM's own connector takes some booleans as words."""


@final
@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration, as the annotation of its field describes it.

    Attributes:
        name: The key.
        annotation: All that its value must be, as msgspec takes it.
        type: Name of the type alone, e.g. `float` or `tuple[str, ...]`.
        default: The value if none is given.
        choices: The words that are taken, in order; empty for any.
        limits: The least and the greatest number; empty for a key that holds none.
        doc: The meaning.
    """

    name: str
    annotation: Any
    type: str
    default: bool | float | str | tuple[str, ...]
    choices: tuple[str, ...]
    limits: tuple[float, ...]
    doc: str

    @classmethod
    def of(cls, field: msgspec.structs.FieldInfo) -> Key:
        """Return the key that a field stands for."""
        plain, meta = get_args(field.type)
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        limits = () if meta.ge is None else (meta.ge, meta.le)
        name = inspect.formatannotation(str if choices else plain)
        return cls(field.name, field.type, name, field.default, choices, limits, meta.description)


def read_value(key: Key, value: object) -> object:
    """Return the value of a key in its type.

    Raises:
        ConfigurationError: `wrong-type` or `out-of-range`, with the key, the value and what is right.
    """
    if key.type == "bool" and isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    try:
        # msgspec takes a set for a list, and the order of our lists counts.
        return msgspec.convert(None if type(value) in {set, frozenset} else value, key.annotation)
    except (msgspec.ValidationError, UnicodeError):
        raise _explain(key, value) from None


def _explain(key: Key, value: object) -> ConfigurationError:
    """Return the error for a value that msgspec does not take."""
    name, shown = key.name, repr(value)
    if key.choices and isinstance(value, str):
        choices = ", ".join(key.choices)
        near = difflib.get_close_matches(value, key.choices, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return refusal("out-of-range", f"'{name}' must be one of {choices}, got {shown}{hint}", name, shown)
    if key.limits and type(value).__name__ in {"int", key.type}:
        least, most = key.limits
        return refusal(
            "out-of-range", f"'{name}' must be between {least} and {most}, got {value}. {key.doc}", name, value
        )
    return refusal("wrong-type", f"'{name}' must be {key.type}, got {shown}. {key.doc}", name, shown)


def refusal(code: str, reason: str, *about: object) -> ConfigurationError:
    """Return a coded error; `about` is the key and the value, if a single one is wrong."""
    context: dict[str, object] = dict(zip(("key", "value"), about, strict=False))
    return ConfigurationError(f"kv_connector_extra_config: {reason}", code=code, context=context)


def check_host(key: str, host: str) -> None:
    """Refuse a host that is neither an IP address nor a name, such as one with its port; readers would refuse every ticket.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        if host and not _NAME.fullmatch(host):
            hint = "it must be an IP address or a host name, without a port"
            raise refusal("out-of-range", f"'{key}' is {host!r}: {hint}", key, host) from error


def check_networks(key: str, networks: tuple[str, ...]) -> None:
    """Refuse what is no network (CIDR), as the request machines do. `10.0.0.1/8` could mean `10.0.0.0/8` or `10.0.0.1/32`.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    for text in networks:
        try:
            meant = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise refusal("out-of-range", f"'{key}' holds {text!r}, which is no network: {error}", key, text) from error
        address = text.split("/", maxsplit=1)[0]
        if int(ipaddress.ip_address(address)) != int(meant.network_address):
            hint = f"write {meant} or {address}/{meant.max_prefixlen}"
            raise refusal(
                "out-of-range", f"'{key}' holds {text!r}, which names an address, not a network: {hint}", key, text
            )


def port_range(text: str) -> tuple[int, int]:
    """Return the two ports of a text such as ``5600-5663``; a single port is a range of one.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    first, dash, last = text.partition("-")
    ports = [
        int(each) for each in (first, last if dash else first) if each.isascii() and each.isdigit() and len(each) <= 5
    ]
    if len(ports) != 2 or not 1 <= ports[0] <= ports[1] <= 65_535:
        raise refusal(
            "out-of-range", f"'peer_ports' must be FIRST-LAST within 1 to 65535, got {text!r}", "peer_ports", text
        )
    return ports[0], ports[1]
