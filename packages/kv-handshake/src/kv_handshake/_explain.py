"""Naming the factor that differs when the peer sends only a digest.

vLLM's own connector sends the hash of its factors and not the factors. But most factors can take few values, so they
can be tried: if this engine's factors with another dtype give exactly the peer's hash, then the dtype is what
differs, as surely as two hashes do not collide. Factors that cannot be enumerated (the model's name, the
speculation settings) remain suspects.
"""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from kv_handshake._dialect import NEWEST_DIALECT, OLDEST_DIALECT, Dialect, dialect_of_vllm
from kv_handshake._factors import Difference, compatibility_hash, differing_factors, hashed_factors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["explain_hash", "suspected_factors"]

_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
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
)
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
