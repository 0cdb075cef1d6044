"""Engines that do not run yet: from a model's `config.json` and options of `vllm serve`, by vLLM's names, as a JSON object.

Theory of operation. kv-topology derives every rank's geometry from the model's numbers. Factors and facts follow from the
options by vLLM's rules. Both become the metadata that the engine would send, so that all else is the check of live engines.
Options decide neither addresses nor the attention back end, which is taken to be the same on both engines and one whose pages
are known.

Worked example. `{"model": "llama", "tensor-parallel-size": 2}` with 8 heads of 128 in bfloat16: each of two ranks holds 4 heads,
so a layer takes 2 x 4 x 128 x 2 = 2048 bytes a token there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, final

from msgspec import Meta

from kv_handshake import Codec
from kv_handshake.inspect import Recording
from kv_topology import to_document
from kv_topology.tools import EngineSpec, build_engine, model_from_config
from vllm_adapter.cache.facts import CacheGroup, EngineFacts, decides
from vllm_adapter.cache.vllm_peer import ELEMENT_BYTES, pack_document
from vllm_adapter.cli.check.engine import Channel, Engine
from vllm_adapter.cli.check.pair import dialect_of
from vllm_adapter.cli.values import json_text, parse_json, read_json
from vllm_adapter.config.keys import load_settings, nearest
from vllm_adapter.config.start_checks import WITHOUT_HOOKS, host_refusals, kept_memory
from vllm_adapter.config.whole import own_keys
from vllm_adapter.errors import ConfigurationError, code_of, message_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_topology.tools import ModelSpec
    from vllm_adapter.cli.check.findings import Findings

__all__ = ["PlannedEngine", "is_planned", "plan_pair"]

_CACHE_TYPES = {
    "auto": "",
    "float32": "torch.float32",
    "float16": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "fp8": "torch.float8_e4m3fn",
    "fp8_e4m3": "torch.float8_e4m3fn",
    "fp8_e5m2": "fp8_e5m2",  # vLLM's Triton kernels write e4m3 under this name
    "fp8_inc": "fp8_inc",
}
"""Type of the elements by `kv-cache-dtype`, empty for the model's; others keep scales in their pages."""
_QUANTIZATIONS = ("quantization_config", "compression_config")
_WITHOUT_CACHE_SCALES = ("awq", "bitsandbytes", "gptq")
"""Methods of quantization whose checkpoints have no scales of the cache."""
_RELEASE = "0.32"
"""Release of the engines unless it is given."""
_SLEEPING = (0, 33)
"""First release that has connectors release a sleeping engine's memory."""
_MOST_RANKS = 1024
_Size = Annotated[int, Meta(ge=1, le=_MOST_RANKS)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 20)]
_DTYPES = {"half": "float16", "float": "float32"}
_KINDS: dict[str, Any] = {"attention": "attention", "sliding": "sliding-window", "latent": "latent"}


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of `vllm serve` that decide whether engines fit; the names are vLLM's, with underscores."""

    model: str
    tensor_parallel_size: _Size = 1
    pipeline_parallel_size: _Size = 1
    decode_context_parallel_size: _Size = 1
    prefill_context_parallel_size: _Size = 1
    cp_kv_cache_interleave_size: _Tokens | None = None
    block_size: _Tokens = 16
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    kv_cache_dtype: str = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    speculative_config: dict[str, Any] | None = None
    disable_hybrid_kv_cache_manager: bool = False
    enable_sleep_mode: bool = False
    calculate_kv_scales: bool = False
    enable_elastic_ep: bool = False
    enable_return_routed_experts: bool = False
    kv_transfer_config: dict[str, Any] = field(default_factory=dict[str, Any])


@final
@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine by its options.

    Attributes:
        role: `prefill` or `decode`.
        options: The options.
        settings: The model's configuration, overrides applied, element type resolved.
        unread: Options that were given and are not looked at.
    """

    role: str
    options: _Options
    settings: Mapping[str, Any]
    unread: tuple[str, ...]

    @property
    def transfer_config(self) -> str | None:
        """The engine's `--kv-transfer-config` as text, None if it is not given."""
        given = self.options.kv_transfer_config
        return json_text(given) if given else None

    def _may_have_cache_scales(self) -> bool:
        """Return whether the checkpoint is quantized by a method that may store scales of the cache, wherever it says so."""
        places = [settings.get(name) for settings in (self.settings, _text(self.settings)) for name in _QUANTIZATIONS]
        methods = [_method(place) for place in places if place]
        beside = Path(self.options.model) / "hf_quant_config.json"
        return any(method not in _WITHOUT_CACHE_SCALES for method in methods) or beside.is_file()

    def engine(self, other: PlannedEngine, vllm: str | None, findings: Findings) -> Engine | None:
        """Return what this engine would answer; None if it would not start, and the findings say why."""
        options = self.options
        try:
            model = model_from_config(dict(self.settings))
            elements = _CACHE_TYPES[options.kv_cache_dtype] or f"torch.{self.settings['dtype']}"
            model = replace(model, element_bytes=ELEMENT_BYTES.get(elements, 1))
            tp, pp, dcp, turn = (
                options.tensor_parallel_size,
                options.pipeline_parallel_size,
                options.decode_context_parallel_size,
                options.cp_kv_cache_interleave_size or options.block_size,
            )
            _check_sizes(int(_text(self.settings).get("num_attention_heads") or tp), model, options)
            # Turns that do not divide blocks are refused below, as at a start.
            turn = math.gcd(turn, options.block_size)
            made = build_engine(model, EngineSpec(tp, pp, dcp, options.block_size, interleave_tokens=turn))
        except Exception as error:  # noqa: BLE001  (whatever forbids the engine is the finding)
            findings.add("start", code_of(error), f"{self.role}: {message_of(error)}")
            return None
        dialect = dialect_of(vllm)
        major, minor, *_ = (vllm or _RELEASE).strip().lstrip("v").split(".")
        release = int(major), int(minor)
        settings, _ = load_settings(own_keys(options.kv_transfer_config) if options.kv_transfer_config else {})
        obstacle = (
            WITHOUT_HOOKS.format(f"{major}.{minor}")
            if release < _SLEEPING
            else kept_memory(settings.backend_parameters, {})
        )
        facts = self._facts(model, release, obstacle)
        for refusal in host_refusals(facts, settings):
            findings.add("start", refusal.code, f"{self.role}: {message_of(refusal)}", "")
        # Compare what both configurations set, and what an option overrides: only vLLM knows the other defaults.
        compared = {*self.settings} & {*other.settings} | {*options.hf_overrides} | {*other.options.hf_overrides}
        deciding = {name: self.settings.get(name) for name in compared if decides(name)}
        factors = {**facts.factors, **facts.extra_factors, "model_config": deciding}
        codec, payloads = Codec(), dict[tuple[int, int], bytes]()
        size = ELEMENT_BYTES.get(elements, 0)
        types = [[elements]] if size > 1 or (size and not self._may_have_cache_scales()) else []
        for rank, geometry in made.items():
            document: Any = to_document(geometry)
            document["groups"] = [
                {**group, "element_types": types} if group["kind"] != "state" else group for group in document["groups"]
            ]
            metadata = {**_NO_REGIONS, "engine_id": self.role, "geometry": pack_document(document)}
            payloads[rank] = codec.encode_envelope(metadata, factors, dialect=dialect, rank=rank)
        peers = {rank: codec.decode_metadata(codec.decode_envelope(payload)) for rank, payload in payloads.items()}
        channel = Channel(self.role, "planned", 0, dialect, 0.0)
        findings.ok(
            "start", f"{self.role}: tp {tp}, pp {pp}, {len(model.kinds)} layers ({', '.join(model.group_kinds)})"
        )
        if factors["speculative_config"]:
            findings.add("start", "plan-not-known", f"{self.role}: the drafter's cache is not in the plan")
        if self.unread:
            findings.ok("start", f"{self.role}: not looked at: {', '.join(self.unread)}")
        return Engine(channel, peers, Recording(dialect, payloads), None, tp, pp)

    def _facts(self, model: ModelSpec, release: tuple[int, int], sleep_obstacle: str) -> EngineFacts:
        """Return the facts as `host/vllm.py` has them, as far as the options decide them."""
        it, transfer = self.options, self.options.kv_transfer_config
        layers = {
            kind: [f"layers.{n}" for n, each in enumerate(model.kinds) if each == kind] for kind in model.group_kinds
        }
        windows = {"sliding": model.window_tokens}
        groups = tuple(
            CacheGroup(_KINDS.get(kind, "state"), it.block_size, windows.get(kind, 0), 0, tuple(names))
            for kind, names in layers.items()
        )
        role, drafts = str(transfer.get("kv_role", "kv_both")), it.speculative_config
        heads, size = (1, model.latent_dim) if model.latent_dim else (model.kv_heads, model.head_dim)
        stages = {"pp_size": it.pipeline_parallel_size} if it.pipeline_parallel_size > 1 else {}
        return EngineFacts(
            engine_id=self.role,
            host="127.0.0.1",
            port=5600,
            tp=it.tensor_parallel_size,
            tp_rank=0,
            pp=it.pipeline_parallel_size,
            pp_rank=0,
            dcp=it.decode_context_parallel_size,
            interleave_tokens=it.cp_kv_cache_interleave_size or it.block_size,
            total_kv_heads=heads,
            head_size=size,
            block_count=0,
            generation=1,
            layout="LBHNC",
            attention_backend="",
            connector_version=0,
            groups=groups,
            group_ids=tuple(range(len(groups))),
            factors={
                "vllm_version": ".".join(map(str, release)),
                "nixl_connector_version": 0,
                "model": it.model,
                "dtype": f"torch.{self.settings['dtype']}",
                "num_kv_heads": heads,
                "head_size": size,
                "num_hidden_layers": len(model.kinds),
                "attn_backend_name": "",
                "cache_dtype": it.kv_cache_dtype,
                "is_hma_enabled": not it.disable_hybrid_kv_cache_manager,
                "speculative_config": drafts if drafts and drafts.get("method") != "ngram" else None,
                "transfer_mode": "pull",
            },
            extra_factors={
                "kv_cache_groups": [[group.kind, group.window_tokens, sorted(group.layers)] for group in groups],
                "block_size": [group.block_tokens for group in groups],
                "tp_size": it.tensor_parallel_size,
                **stages,
            },
            kv_role=role,
            outer_role=role,
            pcp=it.prefill_context_parallel_size,
            has_sleep_mode=it.enable_sleep_mode,
            sleep_obstacle=sleep_obstacle,
            computes_scales=it.calculate_kv_scales,
            is_speculative=drafts is not None,
            is_elastic=it.enable_elastic_ep,
            returns_experts=it.enable_return_routed_experts,
        )


_NO_REGIONS: dict[str, object] = {
    "agent_metadata": b"",
    "kv_caches_base_addr": [],
    "device_id": 0,
    "num_blocks": 1,
    "block_lens": [],
    "block_strides": [],
    "kv_cache_layout": "LBHNC",
    "block_size": 1,
    "physical_blocks_per_logical_kv_block": 1,
    "generation": 1,
}
"""Metadata of a rank whose regions stand in its geometry alone."""


_ALIASES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dcp_kv_cache_interleave_size": "cp_kv_cache_interleave_size",
}


def _text(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a configuration, which other models wrap in more."""
    inner = settings.get("text_config", settings)
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}


def _method(quantization: object) -> object:
    """Return the method that a configuration of a quantized checkpoint names; None for none."""
    return cast("dict[str, object]", quantization).get("quant_method") if isinstance(quantization, dict) else None


def _check_sizes(heads: int, model: ModelSpec, options: _Options) -> None:
    """Raise `size-out-of-range` for sizes that vLLM refuses at start, and for engines of too many ranks to plan."""
    tp, pp, dcp = options.tensor_parallel_size, options.pipeline_parallel_size, options.decode_context_parallel_size
    keys = 0 if model.latent_dim else model.kv_heads
    reason = ""
    if tp * pp > _MOST_RANKS:
        reason = f"{tp} x {pp} ranks are too many to plan: {_MOST_RANKS} at most"
    elif heads % tp:
        reason = f"vLLM cannot distribute {heads} attention heads to {tp} ranks"
    elif keys and max(keys, tp) % min(keys, tp):
        reason = f"vLLM cannot distribute {keys} KV heads to {tp} ranks"
    elif keys and dcp > 1 and (dcp > tp // keys or heads // keys % dcp):
        reason = f"vLLM allows no decode-context-parallel-size {dcp} with {tp} ranks, {heads} heads and {keys} KV heads"
    elif keys and options.block_size % 16:
        reason = f"no attention back end of vLLM takes blocks of {options.block_size} tokens: they are multiples of 16"
    if reason:
        raise ConfigurationError(reason, code="size-out-of-range")


def is_planned(text: str) -> bool:
    """Return whether a word gives an engine by its options: JSON text, or a file of it."""
    return text.lstrip().startswith("{") or text.endswith(".json")


def plan_pair(
    prefill: str, decode: str, vllm: str | None, findings: Findings
) -> tuple[Engine | None, Engine | None, tuple[str | None, str | None]]:
    """Return both engines, None for one that would not start, and the `--kv-transfer-config` of each.

    Raises:
        AdapterError: `invalid-endpoint`, or as `_plan_engine`.
    """
    for word in (prefill, decode):
        if not is_planned(word):
            message = f"{word!r} is not JSON, or a file of it: one engine runs, the other is given by its options"
            raise ConfigurationError(message, code="invalid-endpoint")
    source, reader = _plan_engine("prefill", prefill), _plan_engine("decode", decode)
    engines = source.engine(reader, vllm, findings), reader.engine(source, vllm, findings)
    return *engines, (source.transfer_config, reader.transfer_config)


def _plan_engine(role: str, source: str) -> PlannedEngine:
    """Return an engine from its options, as text or file.

    Raises:
        AdapterError: `unreadable`, `not-json`, `unknown-key` or `out-of-range`, for the options or the model's configuration.
    """
    given = cast("dict[str, Any]", read_json(source, dict[str, Any]))
    spelled: dict[str, Any] = {}
    for word, value in given.items():
        name = word.lstrip("-").replace("-", "_")
        name = _ALIASES.get(name, name)
        if name in spelled:
            raise ConfigurationError(f"{role}: {name} is given twice", code="unreadable")
        spelled[name] = value
    parse_json(json_text(spelled), f"{role}: {source}", _Options)
    known = {each.name for each in fields(_Options)}
    for name in spelled.keys() - known:
        if hint := nearest(name, known, 0.9):
            raise ConfigurationError(f"{role}: vLLM has no option {name}{hint}", code="unknown-key")
    options = _Options(**{name: value for name, value in spelled.items() if name in known})
    if options.kv_cache_dtype not in _CACHE_TYPES:
        others = ", ".join(_CACHE_TYPES)
        message = (
            f"{role}: the pages of kv-cache-dtype {options.kv_cache_dtype!r} are not known before a start; {others} are"
        )
        raise ConfigurationError(message, code="out-of-range")
    place = Path(options.model)
    config: Any = read_json(str(place / "config.json" if place.suffix != ".json" else place), dict[str, Any])
    settings = {**config, **options.hf_overrides}
    inner, changes = config.get("text_config"), options.hf_overrides.get("text_config")
    if isinstance(inner, dict) and isinstance(changes, dict):  # vLLM merges overrides into it
        settings["text_config"] = {**inner, **changes}
    text = _text(settings)
    stored = str(text.pop("torch_dtype", None) or text.get("dtype") or "float32")
    chosen = _DTYPES.get(options.dtype, options.dtype)
    # vLLM treats a float32 checkpoint as bfloat16 unless the option is given.
    dtype = chosen if chosen != "auto" else stored.replace("float32", "bfloat16")
    if dtype not in {"float16", "bfloat16", "float32"}:
        raise ConfigurationError(f"{role}: the element type {dtype!r} of config.json is not known", code="out-of-range")
    text["dtype"] = settings["dtype"] = dtype
    return PlannedEngine(role, options, settings, tuple(sorted(spelled.keys() - known)))
