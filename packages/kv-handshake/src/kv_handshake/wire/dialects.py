"""The wire family, version by version: the messages that a peer of each connector version sends and expects.

A *dialect* is the version number of vLLM's NIXL connector (2 to 15). It decides how many fields a query has, whether
a reply carries a clock frame, which keys the agent metadata holds and which factors enter the compatibility hash. It
must be known before the first byte is sent: vLLM's own listener crashes on a query with the wrong number of
fields.

Source: the connector's metadata module and listener in the vLLM releases named in `_RELEASES`, read one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

from kv_handshake.errors import ConfigurationError, require
from kv_handshake.wire.messages import METADATA_FIELDS, OURS

__all__ = ["DEFAULT_DIALECT", "NEWEST_DIALECT", "OLDEST_DIALECT", "Dialect", "dialect_of", "dialect_of_vllm"]

OLDEST_DIALECT = 2
NEWEST_DIALECT = 15
DEFAULT_DIALECT = 15
"""Dialect of engines that are not vLLM. Later releases keep it, so that engines of two releases agree."""

_FIRST_WITH_PP_QUERY = 5
"""Version 5 (vLLM 0.26) added the pp rank to the query and the clock frame to the reply, in one release."""

_HASH_FACTORS: tuple[tuple[str, int, int], ...] = (
    # (name, first version, last version). No release shipped version 6, 8, 10 or 12.
    ("vllm_version", 1, NEWEST_DIALECT),
    ("nixl_connector_version", 1, NEWEST_DIALECT),
    ("model", 1, NEWEST_DIALECT),
    ("dtype", 1, NEWEST_DIALECT),
    ("num_kv_heads", 1, NEWEST_DIALECT),
    ("head_size", 1, NEWEST_DIALECT),
    ("num_hidden_layers", 1, NEWEST_DIALECT),
    ("attn_backend_name", 1, NEWEST_DIALECT),
    ("cache_dtype", 1, NEWEST_DIALECT),
    ("cross_layers_blocks", 1, 8),
    ("is_hma_enabled", 1, NEWEST_DIALECT),
    ("speculative_config", 6, NEWEST_DIALECT),
    ("transfer_mode", 7, NEWEST_DIALECT),
)

_RELEASES: tuple[tuple[tuple[int, int], int], ...] = (
    # (first vLLM release, connector version)
    ((0, 20), 2),
    ((0, 21), 3),
    ((0, 22), 4),
    ((0, 26), 5),
    ((0, 28), 7),
    ((0, 29), 9),
    ((0, 30), 11),
    ((0, 31), 13),
    ((0, 32), 14),
    ((0, 33), 15),
)


@final
@dataclass(frozen=True, slots=True)
class Dialect:
    """A version of the wire.

    Attributes:
        version: vLLM's connector version.
        has_clock_frame: Whether a query names the pp rank, ``[command, pp, tp]`` instead of ``[command, tp]``, and a reply's
            second frame carries the listener's clock.
        metadata_fields: Names of vLLM's keys in the agent metadata, in writing order.
        hash_factors: Names of the factors that vLLM hashes in this version.
    """

    version: int
    has_clock_frame: bool
    metadata_fields: tuple[str, ...]
    hash_factors: tuple[str, ...]


def dialect_of(version: int) -> Dialect:
    """Return the dialect of a connector version.

    Raises:
        ConfigurationError: ``unknown-dialect`` outside 2 to 15.
    """
    if type(version) is not int or not OLDEST_DIALECT <= version <= NEWEST_DIALECT:
        raise ConfigurationError(
            "unknown-dialect",
            f"connector version {version!r} is outside {OLDEST_DIALECT} to {NEWEST_DIALECT}; "
            "take it from the ticket or from the peer's vLLM release",
            version=version,
        )
    return _dialect(version)


@cache
def _dialect(version: int) -> Dialect:
    return Dialect(
        version=version,
        has_clock_frame=version >= _FIRST_WITH_PP_QUERY,
        metadata_fields=tuple(each.name for each in METADATA_FIELDS if OURS < each.wire.since <= version),
        hash_factors=tuple(name for name, first, last in _HASH_FACTORS if first <= version <= last),
    )


def dialect_of_vllm(release: str) -> Dialect:
    """Return the dialect that a vLLM release speaks, such as ``"0.32.0"``.

    A release newer than the newest known one gets the newest dialect.

    Raises:
        ConfigurationError: ``unknown-dialect`` for text that names no release, or one older than 0.20.
    """
    require(str, release=release)
    parts = release.strip().lstrip("v").split(".")
    try:
        wanted = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        wanted = (-1, -1)
    versions = [version for first, version in _RELEASES if first <= wanted]
    if not versions:
        raise ConfigurationError(
            "unknown-dialect",
            f"{release!r} is not a vLLM release from 0.20 on; give a text such as '0.32.0'",
            release=release,
        )
    return dialect_of(versions[-1])
