"""The families of cache layouts that are recorded: back end, layout and the specs of the layers.

Imported by `record_layouts.py` in the host's environment. The specs are those that vLLM's layers give
(`get_kv_cache_spec`), made smaller; shapes of states come from the host's own calculators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as StateShapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaKind
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

ONE_LATENT: dict[str, Any] = {"num_kv_heads": 1} | (
    {"max_tp_shards": 1} if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__ else {}  # since vLLM 0.31
)
TRANSCRIBED = "vLLM's own allocation code; back end transcribed from v1/attention/backends"
HOST_CODE = "vLLM's own allocation code with the back end's class"


class _Transcribed:
    """A back end that cannot be imported without its GPU package."""

    sizes: tuple[int, ...]
    name: str

    @staticmethod
    def customize_spec(spec: AttentionSpec) -> AttentionSpec:
        return spec

    @classmethod
    def get_supported_kernel_block_sizes(cls, _spec: object = None) -> list[int]:
        return [*cls.sizes]

    @classmethod
    def get_name(cls) -> str:
        return cls.name


class FlashInfer(_Transcribed):
    """Transcribed from `vllm/v1/attention/backends/flashinfer.py`, which needs the package flashinfer."""

    sizes, name = (16, 32, 64), "FLASHINFER"

    @staticmethod
    def customize_spec(spec: AttentionSpec) -> AttentionSpec:
        if not spec.kv_quant_mode.is_nvfp4:
            return spec
        content = spec.head_size // 2 + spec.head_size // 16
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)


class CutlassMla(_Transcribed):
    """Transcribed from `vllm/v1/attention/backends/mla/cutlass_mla.py`, which needs a CUDA build of torch."""

    sizes, name = (128,), "CUTLASS_MLA"


def find_backend(path: str) -> tuple[Any, str]:
    """Return a back end by `module:class` below `vllm.v1.attention.backends`, and where its facts come from."""
    if path == "flashinfer":
        return FlashInfer, f"{TRANSCRIBED}/flashinfer.py"
    if path == "cutlass":
        return CutlassMla, f"{TRANSCRIBED}/mla/cutlass_mla.py"
    module, name = path.split(":")
    found = getattr(__import__(f"vllm.v1.attention.backends.{module}", fromlist=[name]), name)
    return found, f"{HOST_CODE} {path}"


# ------------------------------------------------------------------------------------------------- specs of layers


def _heads(total: int, tp: int) -> int:
    return max(1, total // tp)


def full(tp: int, *, heads: int = 4, size: int = 32, tokens: int = 16, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=_heads(heads, tp), head_size=size, dtype=dtype, **more)


def window(tp: int, *, heads: int = 4, size: int = 32, tokens: int = 16, reach: int = 32, **more: Any) -> Any:
    more.setdefault("dtype", torch.bfloat16)
    return SlidingWindowSpec(
        block_size=tokens, num_kv_heads=_heads(heads, tp), head_size=size, sliding_window=reach, **more
    )  # fmt: skip


def latent(*, tokens: int = 64, size: int = 576, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    return MLAAttentionSpec(block_size=tokens, head_size=size, dtype=dtype, **ONE_LATENT, **more)


def fp8_latent(*, tokens: int = 64) -> Any:
    """656 bytes a token: 512 of fp8, 16 of scales, 128 of bfloat16."""
    return latent(
        tokens=tokens,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        state_content_bytes=656,
    )


def indexer(*, tokens: int = 64) -> Any:
    """Keys of the sparse-attention indexer: 128 of fp8 and a scale of 4 bytes."""
    return latent(tokens=tokens, size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)


def state(kind: MambaKind, shapes: Any) -> Any:
    dtypes = (torch.bfloat16, torch.float32)[: len(shapes)]
    return MambaSpec(block_size=2048, shapes=shapes, dtypes=dtypes, mamba_type=kind)


def mamba2(tp: int, groups: int = 2) -> Any:
    shapes = StateShapes.mamba2_state_shape(
        tp, intermediate_size=8 * 16, n_groups=groups, num_heads=8, head_dim=16, state_size=16, conv_kernel=4
    )
    return state(MambaKind.MAMBA2, shapes)


def mamba1(tp: int) -> Any:
    return state(MambaKind.MAMBA1, StateShapes.mamba1_state_shape(tp, 128, 16, 4))


def gated_delta(tp: int) -> Any:
    shapes = StateShapes.gated_delta_net_state_shape(tp, 4, 8, 16, 16, 4)
    return state(MambaKind.GDN_ATTN, shapes)


def kimi_delta(tp: int) -> Any:
    return state(MambaKind.GDN_ATTN, StateShapes.kda_state_shape(tp, 8, 16))


def short_conv(tp: int) -> Any:
    return state(MambaKind.SHORT_CONV, StateShapes.short_conv_state_shape(tp, 128, 4))


def replay_ring(tp: int) -> Any:
    """Mamba-2 with the inputs of the last few tokens behind its state: a page of five tensors."""
    base = mamba2(tp)
    shapes = StateShapes.append_replayssm_ring(base.shapes, 2, tp, 4, MambaBackendEnum.TRITON)
    return replace(base, shapes=shapes, dtypes=(*base.dtypes, *(torch.bfloat16 for _ in shapes[2:])))


def linear(tp: int) -> Any:
    shapes = StateShapes.linear_attention_state_shape(8, tp, 16)
    return replace(state(MambaKind.LINEAR, shapes), dtypes=(torch.float32,))


def _padded_to_attention(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Grow attention blocks and pad state pages until all are equal, as the host's platform code does."""
    largest = max(spec.page_size_bytes for spec in specs.values() if isinstance(spec, MambaSpec))
    grown: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        if isinstance(spec, AttentionSpec):
            block = -(-largest // (spec.page_size_bytes // spec.block_size * 16)) * 16
            grown[name] = replace(spec, block_size=block)
    page = max(spec.page_size_bytes for spec in grown.values())
    for name, spec in specs.items():
        if isinstance(spec, MambaSpec):
            grown[name] = replace(spec, page_size_padded=page)
    return {name: grown[name] for name in specs}


def hybrid(attention: KVCacheSpec, mixer: KVCacheSpec) -> dict[str, KVCacheSpec]:
    """Return two state layers and two attention layers of equal pages."""
    return _padded_to_attention(
        {f"layers.{n}.{'attn' if n % 2 else 'mixer'}": attention if n % 2 else mixer for n in range(4)}
    )


def same(spec: KVCacheSpec, count: int = 2) -> dict[str, KVCacheSpec]:
    return {f"layers.{n}": spec for n in range(count)}


# ---------------------------------------------------------------------------------------------------- the families

FLASH = "flash_attn:FlashAttentionBackend"
TRITON = "triton_attn:TritonAttentionBackend"
ROCM = "rocm_attn:RocmAttentionBackend"
FLASHMLA = "mla.flashmla:FlashMLABackend"
SPARSE = "mla.flashmla_sparse:FlashMLASparseBackend"
INDEXER = "mla.indexer:DeepseekV32IndexerBackend"
E4M3 = torch.float8_e4m3fn
INT8_HEADS = {"dtype": torch.int8, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}
INT4_HEADS = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD}
NVFP4 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.NVFP4}
V4 = {"model_version": "deepseek_v4", "cache_dtype_str": "fp8_ds_mla", "dtype": torch.uint8, "alignment": 576}


def _gemma(tp: int) -> dict[str, KVCacheSpec]:
    """Two full layers and four sliding ones: three groups whose layers lie in the same memory."""
    return {f"layers.{n}": full(tp) if n % 3 == 2 else window(tp) for n in range(6)}


def _two_head_sizes(tp: int) -> dict[str, KVCacheSpec]:
    """Sliding layers of 4 heads of 32, full layers of 2 heads of 64: equal pages, different heads."""
    return {f"layers.{n}": full(tp, heads=2, size=64) if n % 3 == 2 else window(tp) for n in range(6)}


def _with_draft(tp: int) -> dict[str, KVCacheSpec]:
    return {**same(full(tp)), "draft.layers.0": full(tp, heads=8, size=32)}


def _v32(tp: int) -> dict[str, KVCacheSpec]:
    del tp
    return {
        f"layers.{n}.{part}": spec for n in range(2) for part, spec in (("attn", fp8_latent()), ("index", indexer()))
    }


def _v4(tp: int, *, blocks: int = 1) -> dict[str, KVCacheSpec]:
    """DeepSeek-V4: sliding latent pages, latent pages with one state for four tokens, and their indexer."""
    del tp
    swa = SlidingWindowMLASpec(
        block_size=64 * blocks, head_size=512, sliding_window=128, state_content_bytes=584, **ONE_LATENT, **V4
    )
    squeezed = latent(tokens=256 * blocks, size=512, tokens_per_state=4, state_content_bytes=584, **V4)
    keys = latent(tokens=256 * blocks, size=132, dtype=torch.uint8, tokens_per_state=4, alignment=576)
    return {"layers.0.swa": swa, "layers.0.attn": squeezed, "layers.0.index": keys, "layers.1.swa": swa}


def _kimi(tp: int) -> dict[str, KVCacheSpec]:
    specs = hybrid(latent(tokens=64), kimi_delta(tp))
    return {
        name: replace(spec, block_size=-(-spec.block_size // 64) * 64) if isinstance(spec, AttentionSpec) else spec
        for name, spec in specs.items()
    }


def _chunked_local(tp: int) -> dict[str, KVCacheSpec]:
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=_heads(4, tp), head_size=32, dtype=torch.bfloat16, attention_chunk_size=32
    )
    return {f"layers.{n}": full(tp) if n % 2 else chunked for n in range(4)}


def _ring_beside_latent(tp: int) -> dict[str, KVCacheSpec]:
    del tp
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, head_size_v=0, dtype=torch.float32)
    return {**same(latent()), "layers.0.ring": ring}


def _compressed_hybrid(tp: int) -> dict[str, KVCacheSpec]:
    """Attention beside keys compressed to one state for two tokens, the compressor's ring, states, and a convolution for all."""
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.bfloat16)
    squeezed, attention = latent(tokens=64, size=128, tokens_per_state=2), full(tp, tokens=64)
    mixers = {"layers.2": gated_delta(tp), "layers.2.conv": replace(short_conv(1), tp_replicated=True)}
    padded = {name: replace(spec, page_size_padded=attention.page_size_bytes) for name, spec in mixers.items()}
    parts = {"": attention, ".compressed": squeezed, ".ring": ring}
    return {**{f"layers.{n}{part}": spec for part, spec in parts.items() for n in range(2)}, **padded}


def _family(specs: Any = lambda tp: same(full(tp)), backend: str = FLASH, **more: Any) -> dict[str, Any]:
    return {"backend": backend, "specs": specs, **more}


def _mla(specs: Any, backend: str = FLASHMLA, **more: Any) -> dict[str, Any]:
    return _family(specs, backend, mla=True, **more)


def _mixed(mixer: Any, **more: Any) -> dict[str, Any]:
    return _family(lambda tp: hybrid(full(tp), mixer(tp)), **more)


FAMILIES: dict[str, dict[str, Any]] = {
    "flash-attn": _family(),
    "flash-attn-tokens-first": _family(layout="LBNHC"),
    "flash-attn-cross-layer": _family(layout="BLHNC"),
    "flash-attn-cross-layer-tokens-first": _family(layout="BLNHC"),
    "flash-attn-heads-across-layers": _family(layout="BHLNC"),
    "flash-attn-heads-outermost": _family(layout="LHBNC"),
    "flash-attn-fp8": _family(lambda tp: same(full(tp, dtype=E4M3))),
    "flash-attn-fp8-big-blocks": _family(lambda tp: same(full(tp, tokens=64, dtype=E4M3))),
    "flash-attn-big-blocks": _family(lambda tp: same(full(tp, tokens=64))),
    "flash-attn-few-heads": _family(lambda tp: same(full(tp, heads=2)), heads=2, tp=(1, 2, 4)),
    "flash-attn-one-head": _family(lambda tp: same(full(tp, heads=1)), heads=1),
    "flash-attn-two-value-sizes": _family(lambda tp: same(full(tp, size=48, head_size_v=32)), size=48),
    "flash-attn-chunked-local": _family(_chunked_local),
    "flash-attn-sliding-groups": _family(_gemma),
    "flash-attn-sliding-groups-cross-layer": _family(_gemma, layout="BLHNC"),
    "flash-attn-two-head-sizes": _family(_two_head_sizes),
    "flash-attn-uniform-type": _family(
        lambda tp: {"layers.0": full(tp), "layers.1": full(tp, heads=8), "layers.2": full(tp, size=64)}
    ),
    "flash-attn-draft-model": _family(_with_draft),
    "flash-attn-draft-model-same-shape": _family(lambda tp: {**same(full(tp)), "draft.layers.0": full(tp)}),
    "flash-attn-shared-cache": _family(shares={"layers.2": "layers.1"}),
    "triton": _family(lambda tp: same(full(tp, dtype=torch.float16)), TRITON),
    "triton-int8-per-token-head": _family(lambda tp: same(full(tp, **INT8_HEADS)), TRITON),
    "triton-int8-one-head": _family(lambda tp: same(full(tp, heads=1, **INT8_HEADS)), TRITON, heads=1),
    "triton-int8-big-blocks": _family(lambda tp: same(full(tp, tokens=64, **INT8_HEADS)), TRITON),
    "triton-int4-per-token-head": _family(lambda tp: same(full(tp, **INT4_HEADS)), TRITON),
    "flashinfer-split-blocks": _family(lambda tp: same(full(tp, tokens=128)), "flashinfer"),
    "flashinfer-fp8": _family(lambda tp: same(full(tp, dtype=E4M3)), "flashinfer"),
    "flashinfer-nvfp4": _family(lambda tp: same(full(tp, **NVFP4)), "flashinfer"),
    "rocm-planes": _family(backend=ROCM),
    "rocm-planes-outermost": _family(backend=ROCM, layout="LHBNC"),
    "rocm-planes-of-two-heads": _family(lambda tp: same(full(tp, heads=2)), ROCM, heads=2),
    "turboquant": _family(
        lambda tp: same(full(tp, size=128, dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC)),
        "turboquant_attn:TurboQuantAttentionBackend", layout="LBNHC", size=128,
    ),
    "flashmla": _mla(lambda _tp: same(latent())),
    "flashmla-split-blocks": _mla(lambda _tp: same(latent(tokens=128))),
    "flashmla-fp8": _mla(lambda _tp: same(latent(dtype=E4M3))),
    "cutlass-mla": _mla(lambda _tp: same(latent(tokens=128)), "cutlass"),
    "triton-mla": _mla(lambda _tp: same(latent(tokens=16)), "mla.triton_mla:TritonMLABackend"),
    "flashmla-sparse-fp8-with-indexer": _mla(_v32, SPARSE, indexer=INDEXER),
    "flashmla-sparse-fp8-with-indexer-cross-layer": _mla(_v32, SPARSE, layout="BLHNC", indexer=INDEXER),
    "flashmla-sparse-split-blocks": _mla(lambda _tp: same(fp8_latent(tokens=128)), SPARSE),
    "deepseek-v4": _mla(_v4, SPARSE, layout="BLHNC", indexer="mla.indexer:DeepseekV4IndexerBackend"),
    "deepseek-v4-big-blocks": _mla(
        lambda tp: _v4(tp, blocks=2), SPARSE, layout="BLHNC", indexer="mla.indexer:DeepseekV4IndexerBackend"
    ),
    "ring-beside-latent": _mla(_ring_beside_latent, layout="BLHNC"),
    "mla-with-dense-draft": _mla(
        lambda tp: {**same(latent()), "draft.layers.0": full(tp, tokens=64)}, layout="BLHNC", draft=FLASH
    ),
    "mamba-2": _mixed(mamba2),
    "mamba-2-rows-first": _mixed(mamba2, conv="SD"),
    "mamba-2-one-group": _mixed(lambda tp: mamba2(tp, groups=1)),
    "mamba-1": _mixed(mamba1),
    "gated-delta": _mixed(gated_delta),
    "gated-delta-split-blocks": _mixed(gated_delta, backend="flashinfer"),
    "kimi-delta-with-mla": _mla(_kimi),
    "short-convolution": _mixed(short_conv),
    "replicated-convolution": _mixed(lambda _tp: replace(short_conv(1), tp_replicated=True)),
    "compressed-hybrid": _family(_compressed_hybrid, layout="BLHNC", conv="DS"),
    "replay-ring": _mixed(replay_ring),
    "linear-attention": _mixed(linear),
    "cpu": _family(lambda tp: same(full(tp, tokens=32, dtype=torch.float32)), "cpu_attn:CPUAttentionBackend"),
}  # fmt: skip
