"""Check of a whole `--kv-transfer-config` without an engine and without vLLM: reports all problems with their corrections.

vLLM checks this object only half a minute into its start, and cannot know which module or which of our keys was meant.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.config.keys import check_whole, describe_keys, load_keys
from vllm_adapter.config.start_checks import streaming_warnings
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
_MODULES = ("vllm_adapter", "vllm_adapter.host.connector")
_OWN_NAME, _HOSTS_NAMES, _SEVERAL = "KVTransferConnector", ("NixlConnector", "NixlPullConnector"), "MultiConnector"


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a configuration.

    Attributes:
        code: Stable, kebab-case.
        key: Location, e.g. `kv_role` or `kv_connector_extra_config.num_threads`.
        message: The mistake and its correction.
    """

    code: str
    key: str
    message: str


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings about a configuration; it is good if there are no problems."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def check_transfer_config(config: object) -> Verdict:
    """Check the value of `--kv-transfer-config`, given as the parsed JSON."""
    return _Check().run(config, "")


@final
class _Check:
    """Checks one configuration, or one child of a MultiConnector."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._at = ""

    def run(self, config: object, at: str) -> Verdict:
        self._at = at
        if isinstance(config, dict):
            table = cast("dict[str, object]", config)
            typed = self._check_keys(table)
            self._check_words(typed)
            if typed.get("kv_connector") == _SEVERAL:
                self._check_children(typed)
            else:
                self._check_connector(typed)
                self._check_extra(typed)
        else:
            self._add("not-an-object", "", f"a configuration is a JSON object, got {config!r}")
        return Verdict(tuple(self._problems), tuple(self._notes))

    def _add(self, code: str, key: str, message: str) -> None:
        where = ".".join(part for part in (self._at, key) if part)
        self._problems.append(Problem(code, where, message))

    # ---------------------------------------------------------------------------------------------- vLLM's keys

    def _check_keys(self, config: dict[str, object]) -> dict[str, object]:
        """Check names and types; return the usable values. `null` stands for a missing key, as in vLLM."""
        usable: dict[str, object] = {}
        for key, value in config.items():
            kind = HOST_KEYS.get(key)
            if kind is None:
                self._add("unknown-key", key, f"there is no key '{key}'{_unknown_hint(key)}")
            elif value is None:
                continue
            elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                self._add("wrong-type", key, f"'{key}' must be {_JSON_NAMES[kind]}, got {value!r}")
            else:
                usable[key] = value
        for key in ("kv_connector", "kv_role"):
            if config.get(key) is None:
                self._add("missing-key", key, f"'{key}' is missing")
        return usable

    def _check_words(self, config: Mapping[str, object]) -> None:
        for key, known, code in (
            ("kv_role", ROLES, "unknown-role"),
            ("kv_load_failure_policy", _POLICIES, "out-of-range"),
        ):
            value = config.get(key)
            if value is not None and value not in known:
                self._add(code, key, f"'{key}' must be one of {', '.join(known)}, got {value!r}{_near(value, known)}")
        if config.get("engine_id") == "":
            self._add("out-of-range", "engine_id", "'engine_id' must not be empty; leave it out to get one")

    # ---------------------------------------------------------------------------------------------- the connector

    def _check_connector(self, config: Mapping[str, object]) -> None:
        name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
        known = (_OWN_NAME, *_HOSTS_NAMES, _SEVERAL)
        if name is not None and name not in known:
            hint = _near(name, known)
            self._add("unknown-connector", "kv_connector", f"this package has no connector {name!r}{hint}")
        if module is None:
            if name in _HOSTS_NAMES:
                message = f"without it '{name}' is vLLM's own connector: set it to '{_MODULES[0]}'"
                self._add("hosts-own-connector", "kv_connector_module_path", message)
        elif module not in _MODULES:
            message = f"the connector is in module '{_MODULES[0]}', not in {module!r}"
            self._add("wrong-module-path", "kv_connector_module_path", message)

    def _check_extra(self, config: Mapping[str, object]) -> None:
        """Check our own keys one by one, so that each wrong one is reported, then their combination."""
        good: dict[str, object] = {}
        extra = cast("dict[str, object]", config.get("kv_connector_extra_config", {}))
        for key, value in extra.items():
            try:
                _, notes = load_keys({key: value})
            except ConfigurationError as error:
                self._add(error.code, f"kv_connector_extra_config.{key}", str(error))
            else:
                self._notes += notes
                good[key] = value
        settings = load_keys(good)[0]
        if len(good) == len(extra):  # otherwise a key that is wrong by itself would also be reported as missing
            try:
                check_whole(settings)
            except ConfigurationError as error:
                self._add(error.code, "kv_connector_extra_config", str(error))
            self._notes += streaming_warnings(settings, cast("str | None", config.get("kv_role")))
        if config.get("kv_buffer_device") == "cpu" and not settings.fence_slots:
            self._notes.append("an engine whose device is not a CPU refuses kv_buffer_device 'cpu' without fence_slots")

    def _check_children(self, config: Mapping[str, object]) -> None:
        """Check our children of vLLM's MultiConnector; other connectors are not known here."""
        extra = cast("dict[str, object]", config.get("kv_connector_extra_config", {}))
        children = extra.get("connectors")
        if not isinstance(children, list) or not children:
            self._add("missing-key", "kv_connector_extra_config.connectors", "a list of connectors is missing")
            return
        policy = config.get("kv_load_failure_policy", "fail")
        ours = 0
        for number, child in enumerate(cast("list[object]", children)):
            table = _table(child)
            if not _is_others(table):
                ours += 1
                at = f"kv_connector_extra_config.connectors[{number}]"
                verdict = _Check().run(child, at)
                self._problems += verdict.problems
                self._notes += verdict.notes
                if "engine_id" in table:
                    message = (
                        "vLLM gives its children the outer engine_id and fails on one of their own: set it outside"
                    )
                    self._add("out-of-range", f"{at}.engine_id", message)
                if config.get("kv_role") == "kv_producer" and table.get("kv_role") in {"kv_consumer", "kv_both"}:
                    message = "vLLM obeys the outer kv_role, 'kv_producer', under which nothing is read safely: set both alike"
                    self._add("outer-role-differs", f"{at}.kv_role", message)
                if table.get("kv_load_failure_policy", "fail") != policy:
                    self._notes.append(
                        f"{at}: kv_load_failure_policy differs from the outer one, '{policy}', which is the one that vLLM obeys"
                    )
        if not ours:
            self._notes.append("no child of this MultiConnector is ours: nothing of it was checked")


def own_keys(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return our connector's keys in a configuration without problems, also where it is one of several."""
    extra = _table(config.get("kv_connector_extra_config"))
    children = cast("list[object]", extra.get("connectors") or []) if config.get("kv_connector") == _SEVERAL else []
    ours = next((child for child in map(_table, children) if not _is_others(child)), None)
    return own_keys(ours) if ours is not None else extra


_JSON_NAMES: Mapping[type, str] = {str: "a string", int: "a number", bool: "true or false", dict: "an object"}


def _table(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _is_others(child: Mapping[str, object]) -> bool:
    """Return whether a child is clearly another package's connector, e.g. OffloadingConnector, and not ours misspelt."""
    name = child.get("kv_connector")
    is_near = isinstance(name, str) and bool(_near(name, (_OWN_NAME, *_HOSTS_NAMES), 0.8))
    return isinstance(name, str) and not is_near and child.get("kv_connector_module_path") not in _MODULES


def _unknown_hint(key: str) -> str:
    own = [key.name for key in describe_keys()]
    if key in own:
        return "; it belongs into 'kv_connector_extra_config'"
    near = _near(key, HOST_KEYS)
    if near:
        return near
    inside = difflib.get_close_matches(key, own, n=1, cutoff=0.8)
    return (
        f"; did you mean '{inside[0]}' in 'kv_connector_extra_config'?"
        if inside
        else f"; the keys are {', '.join(HOST_KEYS)}"
    )


def _near(value: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    found = difflib.get_close_matches(str(value), list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{found[0]}'?" if found else ""
