"""Facts about this engine as plain frozen values; no vLLM object passes beyond `host/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vllm_adapter.cache.names import channel_text, engine_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEYS_BY_CHANNEL", "PAIRS_IN_TILES", "CacheGroup", "EngineFacts", "GroupKind", "LayerCache", "decides"]

KEYS_BY_CHANNEL = "keys-by-channel"
"""Order of a page that holds, head by head, the keys channel by channel and then the values token by token."""
PAIRS_IN_TILES = "pairs-in-tiles"
"""Order of a page that holds, head by head, the keys in tiles of 16 tokens, then the values in columns of 16 channels."""

GroupKind = Literal["attention", "sliding-window", "latent", "state"]


_NOT_DECIDING = frozenset(
    {
        *("transformers_version", "id2label", "label2id"),
        *("max_model_len", "target_layer_count", "draft_vocab_size"),
        "tie_word_embeddings",
        *("initializer_range", "return_dict", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
"""Settings of the resolved configuration that may differ. By line: names; notes that some models add on some ranks; a finding
of vLLM about the last layer, which it makes only where it sees the checkpoint's files; and what only training and outputs of
transformers read, whose defaults its releases add and remove (`output_router_logits` of DeepSeek V3 came with 5.19)."""


def decides(name: str) -> bool:
    """Return whether a model's setting may change its KV: no path or note (`_name_or_path`), no token of special meaning."""
    parts = name.split(".")
    return not (_NOT_DECIDING & set(parts) or parts[-1].startswith("_") or parts[-1].endswith("token_id"))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A transferable KV-cache group of the scheduler.

    Attributes:
        kind: Content of its pages.
        block_tokens: Tokens per logical block.
        window_tokens: Attention window; 0 for none.
        chunk_tokens: Chunked local attention: a token sees the tokens from the last multiple of this on; 0 for none.
        scratch_blocks: Trailing blocks per request that hold no state (speculative slots of state groups).
        layers: Names of its layers.
        is_dealt: Whether context parallelism deals out its tokens; otherwise every rank of the context group has all of them.
        block_bytes: Bytes of one block in all its layers on a rank; 0 if not known.
    """

    kind: GroupKind
    block_tokens: int
    window_tokens: int
    scratch_blocks: int
    layers: tuple[str, ...]
    is_dealt: bool = True
    block_bytes: int = field(default=0, compare=False)
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's cache as the engine gave it to this rank.

    Attributes:
        layer: Name of the layer.
        group: Index of its transferable group.
        address: First byte of the tensor's block 0.
        shape: Elements per dimension; the first is the kernel block unless `state_shapes` is set.
        stride_bytes: Bytes per step of each dimension.
        element_bytes: Size of an element.
        memory_kind: `"DRAM"` or `"VRAM"`.
        device: Device number, 0 for DRAM.
        page_bytes: Bytes of one logical block of this layer (from the engine's cache spec, padding included).
        state_shapes: Shapes of the state tensors in a page, for state layers.
        state_element_bytes: Their element sizes.
        state_kind: The host's name for the kind of state layer, e.g. `"MAMBA2"`.
        is_latent: Whether a token has one vector that all ranks hold.
        is_indexer: Whether pages belong to a sparse indexer: values of all tokens, then scales, perhaps tiled.
        is_replicated: Whether all ranks hold the same state.
        backend: The host's name of this layer's own attention back end.
        kernel_order: Order inside an attention page: empty for a key and then a value per head and token, `KEYS_BY_CHANNEL`,
            `PAIRS_IN_TILES`, or the name of a kernel with an order of its own.
        is_opaque: Whether only its back end knows the order inside a page: it keeps planes of keys and of values, or it is not
            among those whose order is known.
        key_size: Elements of a head's key in this layer; 0 for the model's.
        value_size: Elements of a head's value; 0 for what the key leaves.
        elements: What an 8-bit element stands for beyond its dtype, if anything: the layer's scales, or AMD's own format.
        head_slots: Head slots of the whole tensor where this is the part of one of them, else 0.
        head_slot: Number of that slot.
        element_types: The host's names of the types of its elements or states; those of one byte only where they are numbers
            without a scale.
    """

    layer: str
    group: int
    address: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    element_bytes: int
    memory_kind: Literal["DRAM", "VRAM"]
    device: int
    page_bytes: int
    state_shapes: tuple[tuple[int, ...], ...] = ()
    state_element_bytes: tuple[int, ...] = ()
    state_kind: str = ""
    is_latent: bool = False
    is_indexer: bool = False
    is_replicated: bool = False
    backend: str = ""
    kernel_order: str = ""
    is_opaque: bool = False
    key_size: int = 0
    value_size: int = 0
    elements: str = ""
    head_slots: int = 0
    head_slot: int = 0
    element_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """This engine and this rank.

    Attributes:
        host: Address at which peers reach this engine's side channel.
        port: Its port.
        listens_on: Host and port on which it listens if they are others, as behind NAT.
        factors: Inputs of vLLM's compatibility hash, by vLLM's names.
        extra_factors: Further facts that two engines must share, by our names; they travel beside the hash.
        generation: Generation of this engine's memory registration, equal on all ranks; peers set us up again if it changes.
        attention_backend: The host's name of its first layer's back end, for its hash and for its own connector; pages are
            described by their own layer's.
        groups: Transferable groups in the scheduler's order.
        group_ids: Their numbers among all of the scheduler's groups.
        backoff_tokens: Trailing prompt tokens that a producer leaves to the consumer; None for what the groups demand.
        interleave_tokens: Tokens that one rank receives per turn under context parallelism, as the host decided.
        state_groups: Groups of B and C in the model's Mamba-2 layers, 0 if not known; ranks beyond them hold copies.
        whole_reason: Why no prompt of this engine can be read while it is computed; empty where prompts can be.
        is_lock_stepped: Whether other engines wait in each step for this one.
        is_mirrored: Whether the workers mirror their caches in host memory, which peers then read.
        read_hold_steps: Further steps for which a read waits after its blocks were given.
        load_failure_policy: The host's policy for a request whose load failed, `"fail"` or `"recompute"`.
        kv_role: `"kv_producer"`, `"kv_consumer"` or `"kv_both"`.
        outer_role: Role of a MultiConnector around this connector; `kv_role` without one, or where it cannot be seen.
        pcp: Prefill context-parallel size.
        has_sleep_mode: Whether the host may release the cache's memory.
        sleep_obstacle: Why that memory could not be released; empty where it can be.
        computes_scales: Whether the host derives the cache's scales from the first prompt.
        is_speculative: Whether the host drafts tokens.
        has_v2_runner: Whether its model runner has version 2.
        ucx_tls: `UCX_TLS` of the environment; empty for UCX's own choice.
        is_elastic: Whether data-parallel ranks may join and leave a running engine.
        has_host_blocks: Whether the host keeps a part of the cache in its own memory and swaps pages in (HiSparse).
        has_encoder: Whether each layer of the decoder has pages of an encoder's output, too.
        returns_experts: Whether answers tell which experts computed each token.
        model: Name by which clients request the model.
    """

    engine_id: str
    host: str
    port: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dcp: int
    total_kv_heads: int
    head_size: int
    block_count: int
    generation: int
    layout: str
    attention_backend: str
    connector_version: int
    groups: tuple[CacheGroup, ...]
    group_ids: tuple[int, ...]
    factors: Mapping[str, object] = field(default_factory=dict[str, object])
    extra_factors: Mapping[str, object] = field(default_factory=dict[str, object])
    backoff_tokens: int | None = None
    interleave_tokens: int = 1
    state_groups: int = 0
    whole_reason: str = ""
    is_lock_stepped: bool = False
    listens_on: tuple[str, int] | None = None
    is_mirrored: bool = False
    read_hold_steps: int = 0
    load_failure_policy: str = "fail"
    kv_role: str = "kv_both"
    outer_role: str = "kv_both"
    pcp: int = 1
    has_sleep_mode: bool = False
    sleep_obstacle: str = ""
    computes_scales: bool = False
    is_speculative: bool = False
    has_v2_runner: bool = False
    ucx_tls: str = ""
    is_elastic: bool = False
    has_host_blocks: bool = False
    has_encoder: bool = False
    returns_experts: bool = False
    model: str = ""

    @property
    def name(self) -> str:
        """Name for operators, see `engine_name`."""
        return engine_name(self.engine_id, self.kv_role, channel_text(self.host, self.port))

    @property
    def identity(self) -> dict[str, str]:
        """Fields that identify this engine in the start line and in `vllm-adapter status`; the same on all ranks."""
        return {
            "name": self.name,
            "engine_id": self.engine_id,
            "kv_role": self.kv_role,
            "side_channel": channel_text(self.host, self.port),
            "model": self.model,
        }

    @property
    def has_state(self) -> bool:
        """Whether some layers keep a recurrent state instead of a cache of tokens."""
        return any(group.kind == "state" for group in self.groups)

    @property
    def after_failure(self) -> str:
        """Consequence of a failed read for its request, in words."""
        is_computed = self.load_failure_policy == "recompute"
        return "policy recompute: the prompt is computed here" if is_computed else "policy fail: the request fails"

    def completes_uneven_hits(self, all_groups: int) -> bool:
        """Return whether a read restores every group whose local prefix hit is shorter than that of full attention.

        A read fills the tokens from the hit of full attention on, and a state whole. So only states may lag behind. Nothing would
        fill the blocks of a window, or of a second full group, between its own hit and that of full attention, nor any block of
        a group that is not transferred. Example: blocks of 16; full attention hits 64 tokens, a window 16. A read begins with
        token 64, and the window's block of tokens 48 to 63 would stay empty.

        Args:
            all_groups: Groups of the scheduler, transferable or not.
        """
        whole = [group for group in self.groups if group.kind != "state"]
        return (
            len(self.groups) == all_groups
            and len(whole) == 1
            and whole[0].kind != "sliding-window"
            and not whole[0].chunk_tokens
        )

    def reads_ahead(self, all_groups: int) -> bool:
        """Return whether a short prompt can be read into free blocks before its request gets them, see `scheduler/ahead.py`.

        Args:
            all_groups: Groups of the scheduler, transferable or not.
        """
        if len(self.groups) != 1 or all_groups != 1 or self.groups[0].kind not in {"attention", "latent"}:
            return False
        keeps_all = not (self.groups[0].window_tokens or self.groups[0].chunk_tokens)
        waits = (
            self.is_lock_stepped or self.is_mirrored or self.has_host_blocks or self.has_encoder or self.read_hold_steps
        )
        return keeps_all and not waits and self.kv_role != "kv_producer"

    def deal_of(self, group: CacheGroup) -> tuple[int, int, int]:
        """Return how a group's tokens are dealt out: (context-parallel size, this rank's place, tokens per turn)."""
        if group.kind == "state" or not group.is_dealt or self.dcp == 1:
            return 1, 0, 1
        return self.dcp, self.tp_rank % self.dcp, self.interleave_tokens

    @property
    def splits_blocks(self) -> bool:
        """Whether context parallelism deals out parts of blocks instead of whole ones, in any group."""
        deals = [(group.block_tokens, self.deal_of(group)) for group in self.groups]
        return any(size > 1 and turn != block_tokens for block_tokens, (size, _, turn) in deals)

    @property
    def dealt_groups(self) -> tuple[bool, ...]:
        """Whether context parallelism deals out the tokens of each group; the same on every engine of this model."""
        return tuple(group.kind != "state" and group.is_dealt for group in self.groups)

    @property
    def context_sizes(self) -> tuple[int, ...]:
        """Context-parallel size of each group: 1 where every rank holds all tokens."""
        return tuple(self.deal_of(group)[0] for group in self.groups)
