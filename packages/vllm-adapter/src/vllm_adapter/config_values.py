"""Checks of one value of `kv_connector_extra_config`: its type, its range, its choices."""

from __future__ import annotations

import difflib
import ipaddress
import math
from typing import TYPE_CHECKING, Any

from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from dataclasses import Field

__all__ = ["check_networks", "check_value"]


def check_value(key: Field[Any], value: object) -> object:
    """Return the value of a key in the type of its default.

    Raises:
        ConfigurationError: `wrong-type` or `out-of-range`, with the key, the value and what is right.
    """
    default: object = key.default
    converted = _converted(value, type(default))
    if converted is None:
        raise ConfigurationError(
            f"kv_connector_extra_config: '{key.name}' must be {key.type}, got {value!r}. {key.metadata['doc']}",
            code="wrong-type",
            context={"key": key.name, "value": repr(value)},
        )
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        _check_range(key, converted)
    else:
        _check_choice(key, converted)
    return converted


def _converted(value: object, wanted: type) -> object | None:
    """Return a value in another type, None if it does not stand for one of that type."""
    if wanted is bool:
        return _as_bool(value)
    if wanted is tuple:
        return _as_words(value)
    if wanted is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if wanted is float:
        return float(value)
    return value if isinstance(value, int) else None


def _check_range(key: Field[Any], value: float) -> None:
    least, most = key.metadata["least"], key.metadata["most"]
    is_too_small = least is not None and value < least
    is_too_large = most is not None and value > most
    if is_too_small or is_too_large or math.isnan(value):
        raise ConfigurationError(
            f"kv_connector_extra_config: '{key.name}' must be between {least} and {most}, got {value}. "
            f"{key.metadata['doc']}",
            code="out-of-range",
            context={"key": key.name, "value": value},
        )


def _check_choice(key: Field[Any], value: object) -> None:
    choices: tuple[str, ...] = key.metadata["choices"]
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        raise ConfigurationError(
            f"kv_connector_extra_config: '{key.name}' must be one of {', '.join(choices)}, got {value!r}"
            + (f"; did you mean '{near[0]}'?" if near else ""),
            code="out-of-range",
            context={"key": key.name, "value": repr(value)},
        )


def _as_bool(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    # vLLM's own connector takes some booleans as words.
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    return None


def _as_words(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list | tuple):
        return None
    words = [item for item in value if isinstance(item, str)]  # pyright: ignore[reportUnknownVariableType]
    return tuple(words) if len(words) == len(value) else None  # pyright: ignore[reportUnknownArgumentType]


def check_networks(key: str, networks: tuple[str, ...]) -> None:
    """Raise `ConfigurationError` (`out-of-range`) unless each text is a network (CIDR), as the request machines take it."""
    for text in networks:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise _no_network(key, text, error) from error


def _no_network(key: str, text: str, error: ValueError) -> ConfigurationError:
    """Return the refusal of a text. Example: `10.0.0.1/8` could mean `10.0.0.0/8` as well as `10.0.0.1/32`."""
    context = {"key": key, "value": text}
    try:
        meant = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return ConfigurationError(
            f"kv_connector_extra_config: '{key}' holds {text!r}, which is no network: {error}",
            code="out-of-range",
            context=context,
        )
    alone = f"{text.split('/', maxsplit=1)[0]}/{meant.max_prefixlen}"
    return ConfigurationError(
        f"kv_connector_extra_config: '{key}' holds {text!r}, which names an address, not a network: write {meant} or {alone}",
        code="out-of-range",
        context=context,
    )
