"""Naming the factor that differs when the peer sends only a digest.

vLLM's own connector sends the hash of its factors and not the factors. But most factors can take few values, so they
can be tried: if this engine's factors with another dtype give exactly the peer's hash, then the dtype is what
differs, as surely as two hashes do not collide. Factors that cannot be enumerated (the model's name, the
speculation settings) remain suspects.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from kv_handshake._dialect import NEWEST_DIALECT, OLDEST_DIALECT, Dialect, dialect_of_vllm
from kv_handshake._factors import Difference, differing_factors, hashed_factors

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
    shown: Mapping[str, object] | None = None,
    depth: int = 1,
) -> tuple[Difference, ...]:
    """Return the differences that turn this engine's hash into the peer's; nothing if none is found.

    Args:
        factors: This engine's factors.
        peer_hash: The hash that the peer sent.
        dialect: The dialect that names the hashed factors.
        supposed: Values that the peer may have, by factor name, such as other names of the model. All combinations are
            tried.
        shown: Values that the peer is known to have, by factor name.
        depth: How many further factors may differ at once; 2 takes a second or so for each combination.
    """
    hashed = hashed_factors(factors, dialect)
    if not supposed and not shown and depth == 1:
        return _explain_single(json.dumps(hashed, sort_keys=True), peer_hash)
    return _explain(hashed, peer_hash, list(_bases(hashed, supposed or {}, shown or {})), depth)


@lru_cache(maxsize=32)
def _single_changes(hashed: str) -> Mapping[str, Mapping[str, object]]:
    """Return the peer's factors by their hash, for every single change of these factors (JSON).

    A stranger can send a new hash with every reply. So the hashes are computed once, 30 ms for a whole vLLM engine, and looked up
    from then on. 32 dialects' factors are kept: one engine speaks 14.
    """
    factors: dict[str, object] = json.loads(hashed)
    written = _written(factors)
    table: dict[str, Mapping[str, object]] = {_hash_of(written): {}}
    for change, change_written in itertools.chain.from_iterable(_changes(factors)):
        table.setdefault(_hash_of({**written, **change_written}), change)
    return table


def _explain_single(hashed: str, peer_hash: str) -> tuple[Difference, ...]:
    change = _single_changes(hashed).get(peer_hash)
    if change is None:
        return ()
    factors = json.loads(hashed)
    return differing_factors(factors, {**factors, **change})


def _bases(
    hashed: Mapping[str, object], supposed: Mapping[str, Sequence[object]], shown: Mapping[str, object]
) -> Iterator[Mapping[str, object]]:
    """Yield candidate factors of the peer: each factor as this engine's, shown, or supposed."""
    choices: list[list[object]] = []
    for name, value in hashed.items():
        others = [*supposed.get(name, ()), *([shown[name]] if name in shown else [])]
        choices.append([value, *(other for other in others if other != value)])
    for values in itertools.product(*choices):
        yield dict(zip(hashed, values, strict=True))


def _explain(
    hashed: Mapping[str, object], peer_hash: str, bases: Sequence[Mapping[str, object]], depth: int
) -> tuple[Difference, ...]:
    for count in range(depth + 1):
        for base in bases:
            written = _written(base)
            for changes in itertools.combinations(_changes(base), count):
                for chosen in itertools.product(*changes):
                    trial = {**written}
                    for _, change_written in chosen:
                        trial.update(change_written)
                    if _hash_of(trial) == peer_hash:
                        guess = {**base}
                        for change, _ in chosen:
                            guess.update(change)
                        return differing_factors(hashed, guess)
    return ()


def _written(factors: Mapping[str, object]) -> dict[str, str]:
    """Return names and values as JSON, once for all trials, in order of the names."""
    return {json.dumps(name): json.dumps(value, sort_keys=True) for name, value in sorted(factors.items())}


def _hash_of(written: Mapping[str, str]) -> str:
    """Return `compatibility_hash` of factors whose names and values are JSON already, in order of their names."""
    text = ", ".join([f"{name}: {value}" for name, value in written.items()])
    return hashlib.sha256(f"{{{text}}}".encode()).hexdigest()


def suspected_factors(factors: Mapping[str, object], dialect: Dialect) -> tuple[str, ...]:
    """Return the hashed factors that cannot be enumerated, so that one of them probably differs."""
    hashed = hashed_factors(factors, dialect)
    return tuple(name for name in _HARD_TO_GUESS if name in hashed)


def _changes(base: Mapping[str, object]) -> list[list[tuple[Mapping[str, object], Mapping[str, str]]]]:
    """Return candidate changes, grouped by factor, as values and as JSON; a trial applies at most one change per group."""
    groups: list[list[dict[str, object]]] = [
        [{name: other} for other in _VALUES.get(name, ()) if other != value or type(other) is not type(value)]
        for name, value in base.items()
    ]
    groups.append(list(_changes_of_release(base)))
    return [[(change, _written(change)) for change in group] for group in groups]


def _changes_of_release(base: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield other releases; one may bring its connector version with it."""
    release = base.get("vllm_version")
    if not isinstance(release, str):
        return
    suffix = release[release.index("+") :] if "+" in release else ""
    for other in (*_RELEASES, *(f"{each}{suffix}" for each in _RELEASES if suffix)):
        if other != release:
            yield {"vllm_version": other}
            if "nixl_connector_version" in base:
                yield {"vllm_version": other, "nixl_connector_version": dialect_of_vllm(other).version}
