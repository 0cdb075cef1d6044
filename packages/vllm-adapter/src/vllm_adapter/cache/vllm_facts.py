"""Numbers that a peer of vLLM's own connector sends, read with a coded error for each that is missing or malformed.

Source: the metadata of vLLM's own connector, versions 3 to 15 (block lengths and strides in bytes, block size in kernel
tokens, one region per layer from vLLM 0.27 on).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cache.documents import HeadOrder

__all__ = ["PeerFacts", "read_facts"]

_MAX_REGIONS = 1 << 15
_ORDERS: dict[str, HeadOrder] = {
    "HND": "HN",
    "LBHNC": "HN",
    "BLHNC": "HN",
    "NHD": "NH",
    "LBNHC": "NH",
    "BLNHC": "NH",
}


@final
@dataclass(frozen=True, slots=True)
class PeerFacts:
    """The peer's numbers, by region where they are lists.

    Attributes:
        addresses: First byte of each region.
        page_bytes: Bytes of a kernel block.
        strides: Bytes from one kernel block to the next.
        page_counts: Kernel blocks.
        page_tokens: Tokens of a kernel block.
        pages_per_block: Kernel blocks of a scheduler block.
        device: Device number.
        state_bytes: Bytes of (convolution, recurrent state); empty if it has no state.
        names: Name of the layer of each region; empty if not sent.
        memory_kinds: Kind of memory of each region; empty if not sent.
        order: Order of heads and tokens; None if the layout has no such name.
    """

    addresses: tuple[int, ...]
    page_bytes: tuple[int, ...]
    strides: tuple[int, ...]
    page_counts: tuple[int, ...]
    page_tokens: int
    pages_per_block: int
    device: int
    state_bytes: tuple[int, ...]
    names: tuple[str, ...]
    memory_kinds: tuple[str, ...]
    order: HeadOrder | None


def read_facts(facts: Mapping[str, object]) -> PeerFacts:
    """Return the numbers of a peer's metadata by its own names; raises `AdapterError` (`peer-facts-malformed`)."""
    addresses = _numbers(facts, "kv_caches_base_addr")
    regions = len(addresses)
    page_bytes = _numbers(facts, "block_lens", regions)
    return PeerFacts(
        addresses=addresses,
        page_bytes=page_bytes,
        strides=_optional(facts, "block_strides", regions) or page_bytes,
        page_counts=_optional(facts, "region_num_blocks", regions) or (_number(facts, "num_blocks"),) * regions,
        page_tokens=_number(facts, "block_size"),
        pages_per_block=_number(facts, "physical_blocks_per_logical_kv_block", 1),
        device=_number(facts, "device_id", 0),
        state_bytes=_optional(facts, "ssm_sizes", None),
        names=_texts(facts, "region_names", regions),
        memory_kinds=_texts(facts, "region_mem_types", regions),
        order=_ORDERS.get(str(facts.get("kv_cache_layout", ""))),
    )


def _bad(facts: Mapping[str, object], name: str, expected: str) -> AdapterError:
    value = facts.get(name)
    shown = (
        f"a list of {len(cast('Sequence[object]', value))}" if isinstance(value, (list, tuple)) else repr(value)[:80]
    )
    return AdapterError(
        f"the peer's {name} must be {expected}, not {shown}",
        code="peer-facts-malformed",
        fault="peer",
        context={"name": name},
    )


def _number(facts: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = facts.get(name, default)
    if type(value) is not int or value < 0 or (value == 0 and name != "device_id"):
        raise _bad(facts, name, "a positive integer")
    return value


def _numbers(facts: Mapping[str, object], name: str, count: int | None = None) -> tuple[int, ...]:
    value = facts.get(name)
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else None
    if items is None or not _has_length(items, count):
        raise _bad(facts, name, f"a list of {count if count is not None else f'at most {_MAX_REGIONS}'} integers")
    numbers = tuple(item for item in items if type(item) is int and item >= 0)
    if len(numbers) != len(items):
        raise _bad(facts, name, "a list of non-negative integers")
    return numbers


def _has_length(items: Sequence[object], count: int | None) -> bool:
    return len(items) <= _MAX_REGIONS and count in {None, len(items)}


def _optional(facts: Mapping[str, object], name: str, count: int | None) -> tuple[int, ...]:
    return _numbers(facts, name, count) if facts.get(name) else ()


def _texts(facts: Mapping[str, object], name: str, count: int) -> tuple[str, ...]:
    value = facts.get(name)
    if not value:
        return ()
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else ()
    texts = tuple(item for item in items if isinstance(item, str))
    if len(texts) != count:
        raise _bad(facts, name, f"a list of {count} strings")
    return texts
