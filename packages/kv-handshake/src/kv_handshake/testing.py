"""For tests of code that uses this package: sample metadata and envelopes, and the conformance vectors.

The file of the vectors only ever grows: a vector that was published stays as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, final

from kv_handshake.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake.wire.queries import Rank

__all__ = ["load_vectors", "sample_envelopes", "sample_metadata"]


@final
@dataclass(frozen=True, slots=True)
class Vector:
    """A conformance vector.

    Attributes:
        name: Unique, stable name.
        kind: ``query``, ``refused-query``, ``envelope``, ``refused-envelope``, ``refusal``, ``clock``,
            ``refused-clock``, ``hash``, ``notification``, ``ask``, ``refused-ask``, ``answer`` or ``refused-answer``; the kinds
            ``advertisement`` and ``stream`` belong to features that release 0.3 removed.
        data: The bytes.
        meaning: The meaning of the bytes, in a sentence.
        expect: Values that a correct implementation reads from them, by name.
    """

    name: str
    kind: str
    data: bytes
    meaning: str
    expect: dict[str, Any]


def load_vectors() -> tuple[Vector, ...]:
    """Return all vectors in the order of their publication."""
    return tuple(
        Vector(each["name"], each["kind"], bytes.fromhex(each["hex"]), each["meaning"], each["expect"])
        for each in json.loads(files("kv_handshake").joinpath("vectors.json").read_bytes())["vectors"]
    )


_FACTORS: Mapping[str, object] = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}


def sample_metadata(engine_id: str = "engine-a", *, regions: int = 2) -> dict[str, object]:
    """Return valid agent metadata by name, with the extension keys, for every dialect."""
    return {
        "engine_id": engine_id,
        "agent_metadata": bytes(range(256)),
        "kv_caches_base_addr": [0x7F00_0000_0000 + (index << 28) for index in range(regions)],
        "device_id": 0,
        "num_blocks": 4096,
        "block_lens": [65_536] * regions,
        "block_strides": [65_536] * regions,
        "kv_cache_layout": "HND",
        "block_size": 16,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": [4096] * regions,
        "region_group_ids": [0] * regions,
        "region_names": [f"model.layers.{index}.self_attn.attn" for index in range(regions)],
        "region_mem_types": ["VRAM"] * regions,
        "generation": 1,
        "fence": (0x7E00_0000_0000, 0, 1024),
        "geometry": b"geometry",
    }


def sample_envelopes(
    ranks: Sequence[Rank] = ((0, 0),), *, dialect: int = 14, regions: int = 2, factors: Mapping[str, object] = _FACTORS
) -> dict[Rank, bytes]:
    """Return valid envelopes of engine ``engine-a`` by rank; device ids are the tp ranks, and addresses differ."""
    codec = Codec()
    envelopes: dict[Rank, bytes] = {}
    for rank in ranks:
        metadata = sample_metadata(regions=regions)
        first = 0x7F00_0000_0000 + (rank[1] << 36)
        metadata["kv_caches_base_addr"] = [first + (index << 28) for index in range(regions)]
        metadata["device_id"] = rank[1]
        envelopes[rank] = codec.encode_envelope(metadata, factors, dialect=dialect, rank=rank)
    return envelopes
