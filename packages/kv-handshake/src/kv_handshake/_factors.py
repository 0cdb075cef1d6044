"""Compatibility factors: their digest, their differences, and the meaning of a difference.

A *factor* is a named JSON value. vLLM's own connector hashes about a dozen of them (which ones depends on the
dialect) and sends only the digest. We send the factors too, and some more that its hash leaves out, so that a
mismatch can be named.

Groups give a difference its meaning under the negotiated policy:

- ``must-match``: the bytes of one engine's cache would mean something else in the other.
- ``may-differ``: the transfer plan deals with it, or refuses it with a better reason.
- ``informative``: names an origin, not a property of the cache.

A factor that one side does not send counts as None, which is also the value for "the model has none of it". So an
engine that knows nothing of sliding windows still matches a model without one, and never one with.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast, final

from kv_handshake._errors import ConfigurationError
from kv_handshake._limits import MAX_FACTORS
from kv_handshake._stage_groups import stage_groups_agree
from kv_handshake._text import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._dialect import Dialect

__all__ = [
    "FACTOR_GROUPS",
    "Difference",
    "Group",
    "check_factors",
    "compatibility_hash",
    "differing_factors",
    "group_of",
    "hashed_factors",
]

Group = Literal["must-match", "may-differ", "informative"]

FACTOR_GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        # In vLLM's hash.
        "vllm_version": "must-match",  # major and minor; see _version_group
        "nixl_connector_version": "must-match",
        "model": "must-match",  # informative where both sides have the same content; see group_of and _difference_group
        "dtype": "must-match",
        "num_kv_heads": "must-match",
        "head_size": "must-match",
        "num_hidden_layers": "must-match",
        "attn_backend_name": "may-differ",
        "cache_dtype": "must-match",
        "cross_layers_blocks": "may-differ",
        "is_hma_enabled": "may-differ",
        "speculative_config": "must-match",
        "transfer_mode": "must-match",
        # Not in vLLM's hash.
        "model_identity": "must-match",
        "model_revision": "must-match",
        "quantization": "must-match",
        "sliding_window": "must-match",
        "kv_cache_groups": "must-match",  # except between pipeline stages; see _difference_group
        "mamba_conv_dtype": "must-match",
        "mamba_ssm_dtype": "must-match",
        "mamba_layout": "must-match",
        "draft_model": "must-match",
        "lora": "informative",
        "block_size": "may-differ",
        "kv_cache_layout": "may-differ",
        "tp_size": "may-differ",
        "pp_size": "may-differ",
        "dcp_size": "may-differ",
        "pcp_size": "may-differ",
        "engine_name": "informative",
        "engine_version": "informative",
        "model_path": "informative",
    }
)
"""Group by factor name. A name that is not here must match where both sides send it, and is informative otherwise."""

_CONTENT = ("model_config", "model_weights")
"""Factors of vllm-adapter that together say what `model` stands for. They count where both sides send them."""

_PLAIN = frozenset({str, int, bool, type(None)})


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """A factor with two values.

    Attributes:
        name: The factor.
        local: This engine's value; None if it has none. Of two maps, the entries that differ.
        peer: The peer's value, alike; None if it has none or is not known.
        group: Meaning of the difference under the negotiated policy.
    """

    name: str
    local: object
    peer: object
    group: Group

    def __str__(self) -> str:
        local, peer = shortened(_canonical(self.local)), shortened(_canonical(self.peer))
        return f"{shortened(self.name)}: local {local}, peer {peer}"


def compatibility_hash(factors: Mapping[str, object]) -> str:
    """Return the SHA-256 hex digest of the factors as JSON with sorted keys.

    Source: equal to vLLM's ``hash_factors`` for the same mapping.

    Raises:
        ConfigurationError: ``invalid-factors`` for values that JSON cannot write.
    """
    return hashlib.sha256(_canonical(dict(factors)).encode()).hexdigest()


def hashed_factors(factors: Mapping[str, object], dialect: Dialect) -> dict[str, object]:
    """Return the factors that enter the hash on the wire.

    With all of the dialect's names present these are exactly vLLM's inputs, so the hash equals vLLM's. An engine that
    lacks some of them is not vLLM: all its factors are hashed then, so that an empty hash never matches everybody's.
    """
    if all(name in factors for name in dialect.hash_factors):
        return {name: factors[name] for name in dialect.hash_factors}
    return dict(factors)


def differing_factors(local: Mapping[str, object], peer: Mapping[str, object]) -> tuple[Difference, ...]:
    """Return every factor whose two values differ as JSON, must-match first, then by name."""
    differences = [
        Difference(name, *_unlike(local.get(name), peer.get(name)), _difference_group(name, local, peer))
        for name in {*local, *peer}
        if not _is_same(local.get(name), peer.get(name))
    ]
    rank: dict[Group, int] = {"must-match": 0, "may-differ": 1, "informative": 2}
    return tuple(sorted(differences, key=lambda each: (rank[each.group], each.name)))


def group_of(name: str, local: Mapping[str, object], peer: Mapping[str, object]) -> Group:
    """Return the group of a factor between these two engines."""
    if name == "model" and local.get("model_identity") is not None and peer.get("model_identity") is not None:
        return "informative"
    group = FACTOR_GROUPS.get(name)
    if group is None:
        return "must-match" if name in local and name in peer else "informative"
    return group


def check_factors(factors: Mapping[str, object]) -> None:
    """Raise ``invalid-factors`` unless the factors can be hashed and sent."""
    if len(factors) > MAX_FACTORS:
        raise ConfigurationError("invalid-factors", f"{len(factors)} factors; at most {MAX_FACTORS} are sent")
    _canonical(dict(factors))


def _is_same(one: object, other: object) -> bool:
    """Whether two values are the same JSON; most of them are equal texts or numbers, which needs no JSON to be seen."""
    if type(one) is type(other) and one.__class__ in _PLAIN:
        return one == other
    return _canonical(one) == _canonical(other)


def _unlike(local: object, peer: object) -> tuple[object, object]:
    """Return two values, of two maps only the entries that differ: a whole configuration would hide them in a message."""
    maps = [cast("dict[str, object]", each) for each in (local, peer) if isinstance(each, dict)]
    if len(maps) < 2:
        return local, peer
    ours, theirs = maps
    names = [name for name in {**ours, **theirs} if not _is_same(ours.get(name), theirs.get(name))]
    return {name: ours.get(name) for name in names}, {name: theirs.get(name) for name in names}


def _difference_group(name: str, local: Mapping[str, object], peer: Mapping[str, object]) -> Group:
    if name == "vllm_version" and _major_minor(local.get(name)) == _major_minor(peer.get(name)):
        return "may-differ"
    if name == "kv_cache_groups" and stage_groups_agree(local, peer):
        return "may-differ"
    if name == "model" and all(
        local.get(each) is not None and _is_same(local[each], peer.get(each)) for each in _CONTENT
    ):
        return "informative"  # the same content under another name
    return group_of(name, local, peer)


def _major_minor(release: object) -> object:
    return ".".join(release.split(".")[:2]) if isinstance(release, str) else release


def _canonical(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            "invalid-factors", f"factors must be JSON values (text, numbers, lists, maps): {error}"
        ) from error
