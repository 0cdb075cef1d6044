"""Comparison of cache groups between engines of which one has several pipeline stages.

A rank sends the factor `kv_cache_groups`: for each group its properties, and last the names of the layers that the rank holds.
Without pipeline stages these are all layers of the model, so two such engines must send the same value. A stage sends the
groups of the whole model with its own layers only: number, order and properties of the groups stay, and a group may be empty.

Example: an engine with one stage sends `[["attention", 0, ["a", "c"]], ["sliding-window", 64, ["b", "d"]]]`. The second of two
stages, which holds layer d, sends `[["attention", 0, []], ["sliding-window", 64, ["d"]]]`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["stage_groups_agree"]


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
    if not isinstance(value, list | tuple):
        return None
    found = _Groups([], {})
    for number, group in enumerate(cast("list[object]", value)):
        if not isinstance(group, list | tuple) or not group:
            return None
        *properties, layers = cast("list[object]", group)
        if not isinstance(layers, list | tuple):
            return None
        found.properties.append(json.dumps(properties, sort_keys=True))
        for layer in cast("list[object]", layers):
            if not isinstance(layer, str) or layer in found.group_of:
                return None
            found.group_of[layer] = number
    return found
