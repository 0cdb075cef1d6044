"""Which factor differs, when the peer sends nothing but a digest.

vLLM's own connector sends the hash of its factors and not the factors. But most factors can take few values, so they
can be tried: if this engine's factors with another dtype give exactly the peer's hash, then the dtype is what
differs, as surely as two hashes do not collide. What cannot be enumerated (the model's name, the speculation
settings) remains a suspicion.
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
            "auto",
            "float16",
            "bfloat16",
            "float32",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8_inc",
            "fp8_ds_mla",
        ),
        "attn_backend_name": (
            "FLASH_ATTN",
            "FLASHINFER",
            "TRITON_ATTN",
            "CPU_ATTN",
            "FLEX_ATTENTION",
            "FLASHMLA",
            "FLASHMLA_SPARSE",
            "FLASHINFER_MLA",
            "FLASH_ATTN_MLA",
            "CUTLASS_MLA",
            "TRITON_MLA",
            "ROCM_ATTN",
            "ROCM_AITER_FA",
            "TORCH_SDPA",
            "MAMBA2_ATTN",
            "GDN_ATTN",
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
    depth: int = 1,
) -> tuple[Difference, ...]:
    """Return the differences that turn this engine's hash into the peer's; nothing if none is found.

    Args:
        factors: This engine's factors.
        peer_hash: The hash that the peer sent.
        dialect: The dialect that names the hashed factors.
        supposed: Further values to try, by factor name, such as other names of the model.
        depth: How many factors may differ at once; 2 takes a few seconds.
    """
    hashed = hashed_factors(factors, dialect)
    if supposed is None and depth == 1:
        return _explain_memoized(json.dumps(hashed, sort_keys=True), peer_hash)
    return _explain(hashed, peer_hash, supposed or {}, depth)


@lru_cache(maxsize=64)
def _explain_memoized(hashed: str, peer_hash: str) -> tuple[Difference, ...]:
    """Every rank of a peer, and every retry, brings the same question."""
    return _explain(json.loads(hashed), peer_hash, {}, 1)


def _explain(
    hashed: Mapping[str, object], peer_hash: str, supposed: Mapping[str, Sequence[object]], depth: int
) -> tuple[Difference, ...]:
    changes = list(_changes(hashed, supposed))
    for count in range(1, depth + 1):
        for chosen in itertools.combinations(changes, count):
            guess = {**hashed}
            for change in chosen:
                guess.update(change)
            if compatibility_hash(guess) == peer_hash:
                return differing_factors(hashed, guess)
    return ()


def suspected_factors(factors: Mapping[str, object], dialect: Dialect) -> tuple[str, ...]:
    """Return the hashed factors that cannot be enumerated, so that one of them probably differs."""
    hashed = hashed_factors(factors, dialect)
    return tuple(name for name in _HARD_TO_GUESS if name in hashed)


def _changes(hashed: Mapping[str, object], supposed: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    """Yield every single change to try; a change of the release may bring the connector version with it."""
    for name, value in hashed.items():
        for other in (*supposed.get(name, ()), *_VALUES.get(name, ())):
            if other != value or type(other) is not type(value):
                yield {name: other}
    release = hashed.get("vllm_version")
    if not isinstance(release, str):
        return
    suffix = release[release.index("+") :] if "+" in release else ""
    for other in (*_RELEASES, *(f"{each}{suffix}" for each in _RELEASES if suffix)):
        if other != release:
            yield {"vllm_version": other}
            if "nixl_connector_version" in hashed:
                yield {"vllm_version": other, "nixl_connector_version": dialect_of_vllm(other).version}
