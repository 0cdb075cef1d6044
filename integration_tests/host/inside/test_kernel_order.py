"""The order that vLLM's CPU kernels really write pages in, against the geometry that we derive from the host's own layers."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from facts import facts
from full_engine import Layer
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kv_topology import BlockList, GeometryMismatch, Planner, reshard
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.cache.vllm_peer import PeerPlanner, PeerRank
from vllm_adapter.errors import UnsupportedHost
from vllm_adapter.host import cache_config
from vllm_adapter.host.cache_config import cache_groups, layer_caches
from vllm_adapter.host.torch_pages import TorchPages
from vllm_adapter.worker.pages import conversion_steps, page_ranges

HEADS, BLOCKS = 2, 5
ONE_RANK: Any = SimpleNamespace(tp=1)
NAN = 0xFF
"""Byte of which every floating-point format makes a NaN."""
NEEDS_8_BITS = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's kernel for 8-bit pages needs AVX-512 or AMX",
)
STATE = MambaSpec(block_size=2048, shapes=((64, 3), (4, 16, 16)), dtypes=(torch.float32, torch.float32))


class Page:
    """A hybrid's CPU cache whose attention pages the host's own kernel writes; a state layer comes first, as in Granite.

    `layers` are as the host keeps them: the metadata builder has put its choice of a kernel on each attention layer.
    """

    def __init__(
        self,
        tokens: int,
        head_size: int,
        dtype: torch.dtype,
        isa: str = "",
        kind: str = "auto",
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        stored = dtype if kind == "auto" else torch.uint8
        spec = FullAttentionSpec(block_size=tokens, num_kv_heads=HEADS, head_size=head_size, dtype=stored)
        groups = [KVCacheGroupSpec(["mixer"], STATE), KVCacheGroupSpec(["attention"], spec)]
        self.config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.tensor = torch.zeros((BLOCKS, HEADS, tokens, 2 * head_size), dtype=stored)
        _bytes(self.tensor).fill_(NAN)
        self.states = torch.zeros(BLOCKS * STATE.page_size_bytes, dtype=torch.uint8)
        self.isa = isa or _get_attn_isa(dtype, tokens, head_size, kind)
        self.layers = {"mixer": Layer(Mamba2AttentionBackend), "attention": Layer(CPUAttentionBackend, self.isa)}
        self.scales = {"k_scale": scales[0], "v_scale": scales[1], "kv_cache_dtype": kind}
        attention: Any = self.layers["attention"]
        attention.kv_cache_dtype = kind
        attention._k_scale, attention._v_scale = (torch.tensor(scale) for scale in scales)

    def write(self, blocks: list[int], contents: torch.Tensor) -> None:
        """Let the kernel write keys and values, which are their keys' negatives, of (token, head, channel)."""
        _, _, tokens, content = self.tensor.shape
        keys, values = self.tensor.view(BLOCKS, HEADS, 2 * tokens, content // 2).chunk(2, dim=2)
        places = [block * tokens + token for block, token in product(blocks, range(tokens))][: len(contents)]
        slots = torch.tensor(places, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(contents, -contents, keys, values, slots, self.isa, **self.scales)

    def document(self) -> Any:
        """Return what a peer learns of this memory."""
        sizes = {"total_kv_heads": HEADS, "head_size": self.tensor.shape[3] // 2, "block_count": BLOCKS}
        engine = facts("e", attention_backend="MAMBA2_ATTN", groups=cache_groups(self.config), **sizes)
        caches = {"mixer": self.states, "attention": self.tensor}
        return local_document(engine, layer_caches(caches, self.config, self.layers))


def hand_over(producer: Page, consumer: Page, peer: list[int], mine: list[int], tokens: int) -> None:
    """Move the bytes of a read's attention pages, row by row, as NIXL does, and convert the pages."""
    document, theirs = consumer.document(), producer.document()
    planner = PeerPlanner(document, (), reshard, Planner(), "DRAM")
    plan = planner.plan(ONE_RANK, [PeerRank((0, 0), theirs, theirs["groups"])])
    lists = [[BlockList([1]), BlockList(ids)] for ids in (mine, peer)]
    indices = plan.indices((0, 0), *lists, tokens=tokens)
    rows = (plan.local_rows((0, 0)), plan.peer_rows((0, 0)))
    (to, size), (source, _) = (_places(table, found) for table, found in zip(rows, indices, strict=True))
    memory = [_bytes(page.tensor) for page in (consumer, producer)]
    starts = [page.tensor.data_ptr() for page in (consumer, producer)]
    for here, there, length in zip(to, source, size, strict=True):
        at, off = here - starts[0], there - starts[1]
        if 0 <= at < len(memory[0]):
            memory[0][at : at + length] = memory[1][off : off + length]
    staged = plan.route(*lists, tokens=tokens).staged
    TorchPages([consumer.tensor]).convert(conversion_steps(staged, page_ranges(document)))


def assert_refused(producer: Page, consumer: Page, peer: list[int], mine: list[int], tokens: int, code: str) -> None:
    with pytest.raises(GeometryMismatch) as caught:
        hand_over(producer, consumer, peer, mine, tokens)
    assert caught.value.code == code


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).reshape(-1)


def _places(rows: Any, indices: Any) -> tuple[list[int], list[int]]:
    """Return addresses and lengths of numbered descriptors of strided rows (address, length, device, stride, count)."""
    flat = [(row[0] + n * row[3], row[1]) for row in rows.tolist() for n in range(row[4])]
    return [flat[i][0] for i in indices.tolist()], [flat[i][1] for i in indices.tolist()]


def _contents(tokens: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randn(tokens, HEADS, head_size).to(dtype)


PAIRS = [(160, 480, 100), (480, 160, 250), (32, 64, 60), (96, 96, 100), (64, 32, 128)]


@pytest.mark.proves("bfloat16 and float16 pages: proof")
@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((dtype, "auto") for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        *(pytest.param(torch.bfloat16, kind, marks=NEEDS_8_BITS) for kind in ("fp8_e4m3", "fp8_e5m2")),
    ],
)
def test_a_hybrids_pages_arrive_as_the_hosts_kernel_writes_them(dtype: torch.dtype, kind: str) -> None:
    """The truth is a page of the consumer's size that the host's own kernel wrote."""
    for number, (theirs, ours, prompt) in enumerate(PAIRS if kind == "auto" else PAIRS[1:3]):
        head_size = (64, 80 if kind == "auto" else 96)[number % 2]  # the kernel of 80 keeps no 8-bit pages
        assert_arrives(dtype, head_size, theirs, ours, prompt, kind=kind, scales=(0.25, 0.5))


def assert_arrives(dtype: torch.dtype, head_size: int, theirs: int, ours: int, prompt: int, **kind: Any) -> None:
    contents = _contents(prompt, head_size, dtype)
    producer, consumer, truth = (Page(tokens, head_size, dtype, **kind) for tokens in (theirs, ours, ours))
    producer.tensor.zero_()
    peer, mine = ([4, 1, 3, 2][: -(-prompt // tokens)] for tokens in (theirs, ours))
    producer.write(peer, contents)
    truth.write(mine, contents)
    hand_over(producer, consumer, peer, mine, prompt)
    is_known = truth.tensor != NAN if truth.tensor.dtype == torch.uint8 else ~torch.isnan(truth.tensor)
    assert int(is_known.sum()) == 2 * contents.numel()
    assert torch.equal(consumer.tensor[is_known], truth.tensor[is_known])


HAS_8_BITS = not NEEDS_8_BITS.args[0]
TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@pytest.mark.proves("fp8 with scale 1 to bfloat16 or float32: proof")
@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_8_bit_pages_become_what_the_hosts_kernel_writes_with_more_bits(kind: str, dtype: torch.dtype) -> None:
    """Of numbers that 8 bits hold. Without a kernel for 8 bits the page is written here, in the order of the vector kernels."""
    for theirs, ours, prompt in PAIRS[2:]:
        draw = torch.Generator().manual_seed(prompt)
        codes = torch.randint(8, 100, (prompt, HEADS, 64), generator=draw, dtype=torch.uint8)
        contents = codes.view(TYPES[kind]).to(dtype)
        isa = "" if HAS_8_BITS else "vec"
        consumer, truth = (Page(ours, 64, dtype, isa) for _ in range(2))
        producer = Page(theirs, 64, dtype, isa, kind=kind)
        peer, mine = ([4, 1, 3, 2][: -(-prompt // tokens)] for tokens in (theirs, ours))
        producer.tensor.zero_()
        if HAS_8_BITS:
            producer.write(peer, contents)
        else:
            keys, values = producer.tensor.flatten(2).chunk(2, dim=2)
            for token, (block, place) in zip(range(prompt), product(peer, range(theirs)), strict=False):
                keys[block].view(HEADS, 64, theirs)[:, :, place] = codes[token]
                values[block].view(HEADS, theirs, 64)[:, place] = codes[token] + 128  # negative
        truth.write(mine, contents)
        hand_over(producer, consumer, peer, mine, prompt)
        is_known = ~torch.isnan(truth.tensor)
        assert int(is_known.sum()) == 2 * contents.numel()
        assert torch.equal(consumer.tensor[is_known], truth.tensor[is_known])
        assert not torch.isnan(consumer.tensor[mine]).any(), "a block is filled whole"
        with pytest.raises(GeometryMismatch) as refused:
            hand_over(truth, producer, mine, peer, prompt)
        assert refused.value.code == "element-bytes-differ"


@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize(
    ("kind", "change", "types"),
    [
        *((kind, {}, [[str(dtype)]]) for kind, dtype in TYPES.items()),
        ("fp8", {"kv_cache_dtype": "fp8_e5m2"}, []),  # vLLM's Triton kernels write e4m3 under this name
        ("fp8", {"_k_scale": torch.tensor(0.5)}, []),
        ("fp8", {"_v_scale": torch.tensor([1.0, 2.0])}, []),
        ("fp8", {"_v_scale": torch.tensor([1.0, 1.0])}, [["torch.float8_e4m3fn"]]),
        ("fp8", {"_k_scale": None}, []),
        ("fp8", {"kv_cache_dtype": "fp8_inc"}, []),
        ("fp8", {"kv_cache_dtype": "fp8_per_token_head"}, []),
        ("fp8", {"kv_cache_dtype": "int8_per_token_head"}, []),
        ("fp8", {"kv_cache_dtype": "fp8_ds_mla"}, []),
    ],
)
def test_peers_learn_the_type_of_8_bits_where_their_scales_are_known_to_be_1(
    kind: str, change: dict[str, Any], types: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(64, 64, torch.bfloat16, "vec", kind=kind)
    page.layers["attention"].__dict__.update(change)
    assert page.document()["groups"][1]["element_types"] == types
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    assert page.document()["groups"][1]["element_types"] == []


@NEEDS_8_BITS
@pytest.mark.proves("fp8 with other scales: proof = field-missing")
@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 1.0), (0.5, 0.25), (0.25, 0.25)])
def test_eight_bit_pages_with_other_scales_are_refused(scales: tuple[float, float]) -> None:
    """Equal keys and values are other bytes in them, which nothing in the pages shows."""
    options: dict[str, Any] = {"tokens": 64, "head_size": 64, "dtype": torch.bfloat16, "kind": "fp8_e4m3"}
    one, other = Page(**options, scales=(0.25, 0.5)), Page(**options, scales=scales)
    for page in (one, other):
        page.write([1], _contents(40, 64, torch.bfloat16))
    assert not torch.equal(one.tensor[1], other.tensor[1])
    for producer, consumer in ((one, other), (other, one)):
        assert_refused(producer, consumer, [1], [1], 40, "field-missing")


@NEEDS_8_BITS
@pytest.mark.never_wrong("A12")
def test_eight_bit_pages_of_amds_own_format_are_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """MI300 halves what a byte of `fp8_e4m3` stands for, under the same name."""
    amd, other = (Page(64, 64, torch.bfloat16, kind="fp8_e4m3") for _ in range(2))
    document = other.document()
    monkeypatch.setattr(other, "document", lambda: document)
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    for producer, consumer in ((amd, other), (other, amd)):
        assert_refused(producer, consumer, [1], [1], 40, "field-missing")
    hand_over(amd, amd, [1], [2], 40)


@pytest.mark.never_wrong("A12")
def test_engines_with_two_kernels_refuse_each_other() -> None:
    """A processor with the matrix kernel keeps bfloat16 pages of the same size otherwise than one without."""
    amx, vec = (Page(64, 64, torch.bfloat16, isa) for isa in ("amx", "vec"))
    for producer, consumer in ((amx, vec), (vec, amx)):
        assert_refused(producer, consumer, [1], [1], 40, "field-missing")


@pytest.mark.never_wrong("A12", "B11")
def test_a_hybrids_pages_as_the_release_before_describes_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the model's first layer, a state layer, for the order: keys that lie channel by channel become strided tokens."""
    older, newer = (Page(64, 64, torch.float32) for _ in range(2))
    document = older.document

    def as_before() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(cache_config, "_order_facts", lambda *_: {"backend": "MAMBA2_ATTN"})
            return document()

    monkeypatch.setattr(older, "document", as_before)
    for producer, consumer in ((older, newer), (newer, older)):
        assert_refused(producer, consumer, [1], [1], 40, "field-missing")


@pytest.mark.never_wrong("A12")
def test_a_page_whose_order_is_unknown_moves_between_equal_pages_alone() -> None:
    """A back end of a plugin may keep anything in its pages."""

    def page(tokens: int, name: str) -> Page:
        made = Page(tokens, 64, torch.float32)
        made.layers["attention"] = Layer(SimpleNamespace(get_name=lambda: name))
        return made

    producer, equal = page(64, "SOMEBODYS"), page(64, "SOMEBODYS")
    torch.nn.init.uniform_(producer.tensor)
    hand_over(producer, equal, [2, 3], [1, 4], 70)
    assert torch.equal(equal.tensor[[1, 4]], producer.tensor[[2, 3]])
    for other in (page(32, "SOMEBODYS"), page(64, "ANOTHERS")):
        assert_refused(producer, other, [2, 3], [1, 4], 64, "packing-differs")


@pytest.mark.never_wrong("A12")
def test_a_layer_that_the_host_does_not_tell_of_is_refused() -> None:
    page = Page(64, 64, torch.float32)
    del page.layers["attention"]
    with pytest.raises(UnsupportedHost) as caught:
        page.document()
    assert caught.value.code == "unknown-cache-layer"
