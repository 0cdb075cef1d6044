"""Check of a whole `--kv-transfer-config` without an engine and without vLLM: reports all problems with their corrections.

vLLM checks this object only half a minute into its start, and cannot know which module or which of our keys was meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from vllm_adapter.config.keys import check_whole, describe_keys, load_keys, nearest
from vllm_adapter.config.start_checks import streaming_warnings
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["HOST_KEYS", "ROLES", "Problem", "Verdict", "check_transfer_config", "own_keys"]

HOST_KEYS: Mapping[str, type] = {
    "kv_connector": str,
    "engine_id": str,
    "kv_buffer_device": str,
    "kv_role": str,
    "kv_port": int,
    "kv_connector_extra_config": dict,
    "kv_connector_module_path": str,
    "enable_permute_local_kv": bool,
    "kv_load_failure_policy": str,
}
"""Keys and types of vLLM's `KVTransferConfig` (0.30 to 0.32; a test compares them with the installed one)."""
ROLES = ("kv_producer", "kv_consumer", "kv_both")
_POLICIES = ("recompute", "fail")
_DEFAULT_POLICY = (
    "kv_load_failure_policy is not set, and vLLM's default is 'fail': a prompt whose KV cannot be read ends with HTTP 500; "
    "'recompute' computes it on this engine"
)
_MODULES = ("vllm_adapter", "vllm_adapter.host.connector")
_OWN_NAME, _HOSTS_NAMES, _SEVERAL = "KVTransferConnector", ("NixlConnector", "NixlPullConnector"), "MultiConnector"


class Problem(NamedTuple):
    """Something wrong in a configuration.

    Attributes:
        code: Stable, kebab-case.
        key: Location, e.g. `kv_role` or `kv_connector_extra_config.kv_lease_duration`.
        message: The mistake and its correction.
    """

    code: str
    key: str
    message: str


class Verdict(NamedTuple):
    """All findings about a configuration; it is good if there are no problems."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def check_transfer_config(config: object) -> Verdict:
    """Check the value of `--kv-transfer-config`, given as the parsed JSON."""
    found = list(_findings(config))
    table = _table(config)
    if table.get("kv_role") in ROLES[1:] and table.get("kv_load_failure_policy") is None:
        found.append(_DEFAULT_POLICY)
    problems = tuple(each for each in found if isinstance(each, Problem))
    return Verdict(problems, tuple(each for each in found if isinstance(each, str)))


def _findings(config: object) -> Iterator[Problem | str]:
    """Yield the problems and notes of a configuration, or of one child of a MultiConnector."""
    if not isinstance(config, dict):
        yield Problem("not-an-object", "", f"a configuration is a JSON object, got {config!r}")
        return
    table = cast("dict[str, object]", config)
    usable = {key: value for key, value in table.items() if key in HOST_KEYS and _fits(value, HOST_KEYS[key])}
    yield from _key_problems(table, usable)
    if usable.get("kv_connector") == _SEVERAL:
        yield from _of_children(usable)
    else:
        yield from _connector_problems(usable)
        yield from _of_own_keys(usable)


# ------------------------------------------------------------------------------------------------------------ vLLM's keys


def _fits(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _key_problems(config: Mapping[str, object], usable: Mapping[str, object]) -> Iterator[Problem]:
    """Check names, types and words. `null` stands for a missing key, as in vLLM."""
    for key, value in config.items():
        if key not in HOST_KEYS:
            yield Problem("unknown-key", key, f"no such key{_unknown_hint(key)}")
        elif value is not None and key not in usable:
            yield Problem("wrong-type", key, f"must be {_JSON_NAMES[HOST_KEYS[key]]}, got {value!r}")
    for key in ("kv_connector", "kv_role"):
        if config.get(key) is None:
            yield Problem("missing-key", key, "is missing")
    for key, known, code in (("kv_role", ROLES, "unknown-role"), ("kv_load_failure_policy", _POLICIES, "out-of-range")):
        value = usable.get(key)
        if value is not None and value not in known:
            yield Problem(code, key, f"must be one of {', '.join(known)}, got {value!r}{nearest(value, known)}")
    if usable.get("engine_id") == "":
        yield Problem("out-of-range", "engine_id", "must not be empty; leave it out to get one")


# ---------------------------------------------------------------------------------------------------------- the connector


def _connector_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    known = (_OWN_NAME, *_HOSTS_NAMES, _SEVERAL)
    if name is not None and name not in known:
        message = f"this package has no connector {name!r}{nearest(name, known)}"
        yield Problem("unknown-connector", "kv_connector", message)
    if module is None and name in _HOSTS_NAMES:
        message = f"without it '{name}' is vLLM's own connector: set it to '{_MODULES[0]}'"
        yield Problem("hosts-own-connector", "kv_connector_module_path", message)
    elif module not in (None, *_MODULES):
        message = f"the connector is in module '{_MODULES[0]}', not in {module!r}"
        yield Problem("wrong-module-path", "kv_connector_module_path", message)


def _of_own_keys(config: Mapping[str, object]) -> Iterator[Problem | str]:
    """Check our own keys one by one, so that each wrong one is reported, then their combination."""
    good: dict[str, object] = {}
    extra = _table(config.get("kv_connector_extra_config"))
    for key, value in extra.items():
        try:
            yield from load_keys({key: value})[1]
            good[key] = value
        except ConfigurationError as error:
            at = f"kv_connector_extra_config.{key}"
            yield Problem(error.code, at, error.message.removeprefix(f"{at}: "))
    settings = load_keys(good)[0]
    if len(good) == len(extra):  # otherwise a key that is wrong by itself would also be reported as missing
        try:
            check_whole(settings)
        except ConfigurationError as error:
            reason = error.message.removeprefix("kv_connector_extra_config: ")
            yield Problem(error.code, "kv_connector_extra_config", reason)
        yield from streaming_warnings(settings)


def _of_children(config: Mapping[str, object]) -> Iterator[Problem | str]:
    """Check our children of vLLM's MultiConnector; other connectors are not known here."""
    children = _children(config)
    if not children:
        yield Problem("missing-key", "kv_connector_extra_config.connectors", "the list is missing")
        return
    policy = config.get("kv_load_failure_policy", "fail")
    ours = [(number, child) for number, child in enumerate(children) if not _is_others(_table(child))]
    for number, child in ours:
        table, at = _table(child), f"kv_connector_extra_config.connectors[{number}]"
        for each in _findings(child):
            yield each._replace(key=f"{at}.{each.key}".rstrip(".")) if isinstance(each, Problem) else each
        if "engine_id" in table:
            message = "vLLM gives its children the outer one and fails on one of their own: set it outside"
            yield Problem("out-of-range", f"{at}.engine_id", message)
        if config.get("kv_role") == "kv_producer" and table.get("kv_role") in {"kv_consumer", "kv_both"}:
            message = "vLLM obeys the outer kv_role, 'kv_producer', under which nothing is read safely: set both alike"
            yield Problem("outer-role-differs", f"{at}.kv_role", message)
        if table.get("kv_load_failure_policy", "fail") != policy:
            yield f"{at}: kv_load_failure_policy differs from the outer one, '{policy}', which is the one that vLLM obeys"
    if not ours:
        yield "no child of this MultiConnector is ours: nothing of it was checked"


def _children(config: Mapping[str, object]) -> list[object]:
    children = _table(config.get("kv_connector_extra_config")).get("connectors")
    return cast("list[object]", children) if isinstance(children, list) else []


def own_keys(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return our connector's keys in a configuration without problems, also where it is one of several; {} if it is not."""
    if config.get("kv_connector") != _SEVERAL:
        return _table(config.get("kv_connector_extra_config"))
    ours = (child for child in map(_table, _children(config)) if not _is_others(child))
    return own_keys(next(ours, dict[str, object]()))


_JSON_NAMES: Mapping[type, str] = {str: "a string", int: "a number", bool: "true or false", dict: "an object"}


def _table(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _is_others(child: Mapping[str, object]) -> bool:
    """Return whether a child is clearly another package's connector, e.g. OffloadingConnector, and not ours misspelt."""
    name = child.get("kv_connector")
    is_near = isinstance(name, str) and bool(nearest(name, (_OWN_NAME, *_HOSTS_NAMES), 0.8))
    return isinstance(name, str) and not is_near and child.get("kv_connector_module_path") not in _MODULES


def _unknown_hint(key: str) -> str:
    own = list(describe_keys())
    if key in own:
        return "; it belongs into 'kv_connector_extra_config'"
    if near := nearest(key, HOST_KEYS):
        return near
    if inside := nearest(key, own, 0.8):
        return f"{inside.removesuffix('?')} in 'kv_connector_extra_config'?"
    return f"; the keys are {', '.join(HOST_KEYS)}"
