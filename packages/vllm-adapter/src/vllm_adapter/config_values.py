"""Read one value of `kv_connector_extra_config` by the annotation of its field: its type, its range, its choices.

msgspec's own errors carry a text alone, so the coded ones are made here, from the same annotation.
"""

from __future__ import annotations

import difflib
import inspect
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final, get_args, get_origin

import msgspec

from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from msgspec.structs import FieldInfo

__all__ = ["Key", "check_networks", "port_range", "read_value"]

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
    def of(cls, field: FieldInfo) -> Key:
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
    if key.choices and isinstance(value, str):
        near = difflib.get_close_matches(value, key.choices, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        reason = f"must be one of {', '.join(key.choices)}, got {value!r}{hint}"
        return _refusal("out-of-range", key.name, reason, repr(value))
    if key.limits and type(value).__name__ in {"int", key.type}:
        least, most = key.limits
        return _refusal("out-of-range", key.name, f"must be between {least} and {most}, got {value}. {key.doc}", value)
    return _refusal("wrong-type", key.name, f"must be {key.type}, got {value!r}. {key.doc}", repr(value))


def _refusal(code: str, key: str, reason: str, value: object) -> ConfigurationError:
    """Return a coded error that names the key and says why its value is refused."""
    context = {"key": key, "value": value}
    return ConfigurationError(f"kv_connector_extra_config: '{key}' {reason}", code=code, context=context)


def check_networks(key: str, networks: tuple[str, ...]) -> None:
    """Raise `ConfigurationError` (`out-of-range`) unless each text is a network (CIDR), as the request machines take it."""
    for text in networks:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise _refusal("out-of-range", key, f"holds {text!r}, which {_fault_of(text, error)}", text) from error


def _fault_of(text: str, error: ValueError) -> str:
    """Return the reason why a text is no network. Example: `10.0.0.1/8` could mean `10.0.0.0/8` as well as `10.0.0.1/32`."""
    try:
        meant = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return f"is no network: {error}"
    alone = f"{text.split('/', maxsplit=1)[0]}/{meant.max_prefixlen}"
    return f"names an address, not a network: write {meant} or {alone}"


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
        raise _refusal("out-of-range", "peer_ports", f"must be FIRST-LAST within 1 to 65535, got {text!r}", text)
    return ports[0], ports[1]
