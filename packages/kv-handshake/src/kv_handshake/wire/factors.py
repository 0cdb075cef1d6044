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
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, final

import msgspec

from kv_handshake.errors import ConfigurationError, require, shortened
from kv_handshake.wire.dialects import NEWEST_DIALECT, OLDEST_DIALECT, dialect_of_vllm
from kv_handshake.wire.limits import MAX_DEPTH, MAX_FACTORS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kv_handshake.wire.dialects import Dialect

__all__ = [
    "Difference",
    "check_factors",
    "compatibility_hash",
    "differing_factors",
    "explain_hash",
    "hash_with_declared",
    "hashed_factors",
    "suspected_factors",
    "wire_hash",
]

Group = Literal["must-match", "may-differ", "informative"]

FACTOR_GROUPS: Mapping[str, Group] = {
    # In vLLM's hash.
    "vllm_version": "must-match",  # major and minor; see _difference_group
    "nixl_connector_version": "must-match",
    "model": "must-match",  # informative where both sides have the same content; see _difference_group
    "dtype": "must-match",
    "num_kv_heads": "must-match",
    "head_size": "must-match",
    "num_hidden_layers": "must-match",
    "attn_backend_name": "may-differ",
    "cache_dtype": "must-match",  # unless the caller casts elements, and says that it may differ
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
"""Group by factor name. A name that is not here must match, unless the caller says that it may differ."""

_RELEASE = frozenset({"vllm_version", "nixl_connector_version"})
"""Factors with a group that a caller may declare, both together: every minor release of vLLM has its own connector version."""

_CONTENT = ("model_config", "model_weights")
"""Factors of vllm-adapter that together say what `model` stands for."""

_IF_BOTH = frozenset((*_CONTENT, "draft_config", "draft_weights"))
"""Factors of vllm-adapter that count where both sides send them: an engine that cannot read its files sends none."""

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
    require(Mapping, factors=factors)
    return hashlib.sha256(_canonical(dict(factors)).encode()).hexdigest()


def wire_hash(factors: Mapping[str, object], dialect: Dialect) -> str:
    """Return the compatibility hash that an engine with these factors sends in a dialect."""
    return compatibility_hash(hashed_factors(factors, dialect))


def hash_with_declared(
    local: Mapping[str, object], peer: Mapping[str, object], may_differ: Collection[str], dialect: Dialect
) -> str:
    """Return the hash that an engine with these factors would send if it had the peer's values of those that may differ."""
    kept = {name: value for name, value in local.items() if name not in may_differ}
    return wire_hash({**kept, **{name: peer[name] for name in may_differ if name in peer}}, dialect)


def hashed_factors(factors: Mapping[str, object], dialect: Dialect) -> dict[str, object]:
    """Return the factors that enter the hash on the wire.

    With all of the dialect's names present these are exactly vLLM's inputs, so the hash equals vLLM's. An engine that
    lacks some of them is not vLLM: all its factors are hashed then, so that an empty hash never matches everybody's.
    """
    if all(name in factors for name in dialect.hash_factors):
        return {name: factors[name] for name in dialect.hash_factors}
    return dict(factors)


def differing_factors(
    local: Mapping[str, object], peer: Mapping[str, object], may_differ: Collection[str] = ()
) -> tuple[Difference, ...]:
    """Return every factor whose two values differ as JSON, must-match first, then by name.

    Args:
        local: This engine's factors.
        peer: The peer's.
        may_differ: As in `LocalOffer`.
    """
    differences = [
        Difference(name, *_unlike(local.get(name), peer.get(name)), _difference_group(name, local, peer, may_differ))
        for name in {*local, *peer}
        if not _is_same(local.get(name), peer.get(name))
    ]
    rank: dict[Group, int] = {"must-match": 0, "may-differ": 1, "informative": 2}
    return tuple(sorted(differences, key=lambda each: (rank[each.group], each.name)))


def check_factors(factors: Mapping[str, object]) -> None:
    """Raise ``invalid-factors`` unless the factors are few, flat and JSON, so that they can be hashed and sent."""
    require(Mapping, factors=factors)
    for name in factors:
        require(str, name=name)
    if len(factors) > MAX_FACTORS:
        raise ConfigurationError("invalid-factors", f"{len(factors)} factors; at most {MAX_FACTORS} are read")
    if any(_is_deep(each, MAX_DEPTH) for each in factors.values()):
        raise ConfigurationError("invalid-factors", f"a factor nests more than {MAX_DEPTH} lists and maps")
    _canonical(dict(factors))


def _is_deep(value: object, levels: int) -> bool:
    """Return whether lists and maps nest deeper than so many levels."""
    if isinstance(value, dict):
        inner: Iterable[object] = cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return False
    return levels == 0 or any(_is_deep(each, levels - 1) for each in inner)


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


def _difference_group(
    name: str, local: Mapping[str, object], peer: Mapping[str, object], may_differ: Collection[str]
) -> Group:
    if name == "vllm_version" and _major_minor(local.get(name)) == _major_minor(peer.get(name)):
        return "may-differ"
    if (name in _RELEASE and {*may_differ} >= _RELEASE) or (name == "cache_dtype" and name in may_differ):
        return "may-differ"
    if name == "kv_cache_groups" and stage_groups_agree(local, peer):
        return "may-differ"
    if name == "model":  # the same content under another name
        is_identified = local.get("model_identity") is not None and peer.get("model_identity") is not None
        if is_identified or all(
            local.get(each) is not None and _is_same(local[each], peer.get(each)) for each in _CONTENT
        ):
            return "informative"
    if name in _IF_BOTH and not (name in local and name in peer):
        return "informative"
    return FACTOR_GROUPS.get(name, "may-differ" if name in may_differ else "must-match")


def _major_minor(release: object) -> object:
    return ".".join(release.partition("+")[0].split(".")[:2]) if isinstance(release, str) else release


def _canonical(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            "invalid-factors", f"factors must be JSON values (text, numbers, lists, maps): {error}"
        ) from error


class _Groups(NamedTuple):
    """Properties of each group as JSON, and the number of each layer's group."""

    properties: list[str]
    group_of: dict[str, int]


def stage_groups_agree(local: Mapping[str, object], peer: Mapping[str, object]) -> bool:
    """Return whether two ranks' groups agree on every layer that both hold, where at least one engine has several stages.

    Groups with the same number must have the same properties, a layer must be in the same group on both sides, and a stage holds
    no layer that an engine with one stage lacks. Whether all stages together hold every layer is for the transfer plan to check.
    """
    is_staged, is_peer_staged = _has_stages(local), _has_stages(peer)
    if not (is_staged or is_peer_staged):
        return False
    ours, theirs = _groups_in(local.get("kv_cache_groups")), _groups_in(peer.get("kv_cache_groups"))
    if ours is None or theirs is None or ours.properties != theirs.properties:
        return False
    if not is_staged and not theirs.group_of.keys() <= ours.group_of.keys():
        return False
    if not is_peer_staged and not ours.group_of.keys() <= theirs.group_of.keys():
        return False
    common = ours.group_of.keys() & theirs.group_of.keys()
    return all(ours.group_of[layer] == theirs.group_of[layer] for layer in common)


def _has_stages(factors: Mapping[str, object]) -> bool:
    size = factors.get("pp_size")
    return type(size) is int and size > 1


def _groups_in(value: object) -> _Groups | None:
    """Read the factor, which a peer may have sent; None unless every group ends with its layers and no layer is named twice."""
    found = _Groups([], {})
    try:
        for number, (*properties, layers) in enumerate(msgspec.convert(value, list[list[Any]])):
            found.properties.append(json.dumps(properties, sort_keys=True))
            names = msgspec.convert(layers, list[str])
            if found.group_of.keys() & names or len(set(names)) != len(names):
                return None
            found.group_of.update(dict.fromkeys(names, number))
    except ValueError:  # also msgspec's ValidationError, and a group without entries
        return None
    return found


_VALUES: Mapping[str, tuple[object, ...]] = {
    "dtype": ("torch.float16", "torch.bfloat16", "torch.float32"),
    "cache_dtype": (
        *("auto", "float16", "bfloat16", "float32"),
        *("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"),
    ),
    "attn_backend_name": (
        *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN", "FLEX_ATTENTION"),
        *("FLASHMLA", "FLASHMLA_SPARSE", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "CUTLASS_MLA", "TRITON_MLA"),
        *("ROCM_ATTN", "ROCM_AITER_FA", "TORCH_SDPA", "MAMBA2_ATTN", "GDN_ATTN"),
    ),
    "cross_layers_blocks": (False, True),
    "is_hma_enabled": (False, True),
    "transfer_mode": ("pull", "push"),
    "speculative_config": (None,),
    "nixl_connector_version": tuple(range(OLDEST_DIALECT, NEWEST_DIALECT + 1)),
    "num_kv_heads": (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128),
    "head_size": (16, 32, 40, 64, 80, 96, 112, 120, 128, 160, 192, 256, 512, 576),
    "num_hidden_layers": tuple(range(1, 129)),
}
_RELEASES = tuple(f"0.{minor}.{patch}" for minor in range(20, 34) for patch in range(4))
_HARD_TO_GUESS = ("model", "speculative_config")


def explain_hash(
    factors: Mapping[str, object],
    peer_hash: str,
    dialect: Dialect,
    *,
    supposed: Mapping[str, Sequence[object]] | None = None,
) -> tuple[Difference, ...]:
    """Return the differences that turn this engine's hash into the peer's; empty if none is found.

    Args:
        factors: This engine's factors.
        peer_hash: The hash that the peer sent.
        dialect: The dialect that names the hashed factors.
        supposed: Values that the peer may have, by factor name, such as other names of the model. All combinations are
            tried, each with at most one further factor changed.
    """
    hashed = hashed_factors(factors, dialect)
    choices = {name: (hashed[name], *values) for name, values in (supposed or {}).items() if name in hashed}
    for values in itertools.product(*choices.values()):
        base = {**hashed, **dict(zip(choices, values, strict=True))}
        change = _single_changes(json.dumps(base)).get(peer_hash)
        if change is not None:
            return differing_factors(hashed, {**base, **change})
    return ()


def suspected_factors(factors: Mapping[str, object], dialect: Dialect) -> tuple[str, ...]:
    """Return the hashed factors that cannot be enumerated, so that one of them probably differs."""
    hashed = hashed_factors(factors, dialect)
    return tuple(name for name in _HARD_TO_GUESS if name in hashed)


# A stranger can send a new hash with every reply. So the hashes are computed once, some milliseconds for a whole vLLM engine,
# and looked up from then on. 32 dialects' factors are kept: one engine speaks 14.
@lru_cache(maxsize=32)
def _single_changes(base: str) -> Mapping[str, Mapping[str, object]]:
    """Return the peer's changes by the hash that they give, for no change and every single change of these factors (JSON)."""
    factors: dict[str, object] = json.loads(base)
    table: dict[str, Mapping[str, object]] = {compatibility_hash(factors): {}}
    for change in _changes(factors):
        table.setdefault(compatibility_hash({**factors, **change}), change)
    return table


def _changes(base: Mapping[str, object]) -> Iterator[dict[str, object]]:
    for name, value in base.items():
        for other in _VALUES.get(name, ()):
            if other != value or type(other) is not type(value):
                yield {name: other}
    release = base.get("vllm_version")
    if isinstance(release, str):
        _, plus, build = release.partition("+")
        for other in {*_RELEASES, *(f"{each}{plus}{build}" for each in _RELEASES)} - {release}:
            yield {"vllm_version": other}
            if "nixl_connector_version" in base:
                yield {"vllm_version": other, "nixl_connector_version": dialect_of_vllm(other).version}
