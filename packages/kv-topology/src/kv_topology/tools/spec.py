"""Dry-run specifications: a model and two engines, as in `example.toml`, or a Hugging Face `config.json`.

Any content of a file becomes a value or `spec-malformed`, and no other error.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast, final

from kv_topology.errors import InvalidGeometry, shown
from kv_topology.plan.staged import CostModel
from kv_topology.tools.engine import EngineSpec, ModelSpec, StateSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kv_topology.tools.engine import LayerKind

__all__ = ["DryRun", "load_spec", "model_from_config", "parse_spec"]

Table = dict[str, Any]
_SECTIONS = ("model", "consumer", "producer", "link")
KINDS = ("attention", "sliding", "latent", "mamba2", "mamba1", "gated-delta")
_CONV_ORDERS = ("DS", "SD")
_MOST_LAYERS = 4096
_LEAST, _MOST = 1e-9, 1e15
"""Prices, rates, sizes and addresses lie between: what is computed from them is finite."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@final
@dataclass(frozen=True, slots=True)
class DryRun:
    """A model, the two engines, the prices of the link, and the producer's model, which may be another."""

    model: ModelSpec
    consumer: EngineSpec
    producer: EngineSpec
    cost: CostModel
    producer_model: ModelSpec


def _table(value: object, what: str) -> Table:
    if not isinstance(value, dict):
        raise _malformed(f"{what} must be a table, not {shown(value)}.")
    return cast("Table", value)


def _construct(kind: type[Any], values: Mapping[str, Any], what: str) -> Any:  # noqa: ANN401 - one of four dataclasses
    """Return a dataclass from a table, refusing unknown names and wrong types."""
    known = {field.name: field for field in fields(kind)}
    for name, value in values.items():
        if name not in known:
            also = ", layers" if kind is ModelSpec else ""
            raise _malformed(f"{what} has no setting {shown(name)}; known: {', '.join(known)}{also}.")
        _check_value(f"{what}.{name}", str(known[name].type), value)
    try:
        return kind(**values)
    except TypeError as error:
        raise _malformed(f"{what} is incomplete: {error}.") from None


def _check_value(setting: str, wanted: str, value: object) -> None:
    """Raise unless a value has the type of its setting; numbers must be 0 or within the limits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_ok = {"int": type(value) is int, "float": is_number}.get(wanted, isinstance(value, (str, tuple, StateSpec)))
    if not is_ok:
        raise _malformed(f"{setting} must be of type {wanted}, not {shown(value)}.")
    if isinstance(value, (int, float)) and value and not _LEAST <= value <= _MOST:
        raise _malformed(f"{setting} must be 0 or a finite number from {_LEAST:g} to {_MOST:g}, not {shown(value)}.")


def load_spec(path: Path) -> DryRun:
    """Return the dry run that a TOML or JSON file describes.

    Raises:
        InvalidGeometry: `spec-malformed`, with the setting and what is wrong with it; also where the file, or the model
            configuration that it names, cannot be read.
    """
    parse = json.loads if path.suffix == ".json" else tomllib.loads
    return parse_spec(_table(_read(path, parse, "the file"), "the file"), path.parent)


def parse_spec(data: Table, folder: Path) -> DryRun:
    """Return the dry run of a parsed specification; model paths are relative to `folder`.

    Raises:
        InvalidGeometry: `spec-malformed`.
    """
    unknown = set(data) - set(_SECTIONS)
    if unknown:
        raise _malformed(f"The specification has no section {shown(min(unknown))}; known: {', '.join(_SECTIONS)}.")
    model, consumer = _model_of(data.get("model"), folder), _engine(data, "consumer")
    side = dict(_table(data.get("producer"), "producer"))
    theirs = side.pop("model", None)
    producer = _engine({"producer": side}, "producer")
    cost: CostModel = _construct(CostModel, _table(data.get("link", {}), "link"), "link")
    return DryRun(model, consumer, producer, cost, model if theirs is None else _model_of(theirs, folder))


def _model_of(given: object, folder: Path) -> ModelSpec:
    if isinstance(given, str):
        return model_from_config(_table(_read(folder / given, json.loads, str(folder / given)), given))
    return _model(_table(given, "model"))


def _engine(data: Table, side: str) -> EngineSpec:
    spec: EngineSpec = _construct(EngineSpec, _table(data.get(side), side), side)
    for name in ("tp", "pp", "dcp", "block_tokens", "block_count"):
        if not 1 <= getattr(spec, name) <= 1 << 20:
            raise _malformed(f"{side}.{name} is {getattr(spec, name)}; it must lie in 1..{1 << 20}.")
    if spec.tp > 1024 or spec.pp > 1024:
        raise _malformed(f"{side} has {spec.tp} x {spec.pp} ranks; the limit is 1024 of each.")
    if spec.conv_order not in _CONV_ORDERS:
        raise _malformed(f"{side}.conv_order must be one of {', '.join(_CONV_ORDERS)}, not {shown(spec.conv_order)}.")
    if spec.block_tokens % spec.page_tokens:
        raise _malformed(
            f"{side}.kernel_block_tokens {spec.page_tokens} does not divide its blocks of {spec.block_tokens}."
        )
    return spec


def _model(table: Table) -> ModelSpec:
    values = dict(table)
    layers: object = values.pop("layers", 0)
    given: object = values.pop("kinds", None)
    if given is None:
        count = layers if type(layers) is int and 0 < layers <= _MOST_LAYERS else 0
        given = ["latent" if values.get("latent_dim") else "attention"] * count
    kinds = cast("list[object]", given) if isinstance(given, list) else []
    if not 0 < len(kinds) <= _MOST_LAYERS or any(kind not in KINDS for kind in kinds):
        raise _malformed(
            f"model needs layers (1 to {_MOST_LAYERS}) or kinds (a list of so many of {', '.join(KINDS)})."
        )
    if "state" in values:
        state: StateSpec = _construct(StateSpec, _table(values["state"], "model.state"), "model.state")
        if not state.conv_element_bytes or not state.state_element_bytes:
            sizes = f"{state.conv_element_bytes} and {state.state_element_bytes}"
            raise _malformed(
                f"model.state's conv_element_bytes and state_element_bytes are {sizes}; both must be positive."
            )
        values["state"] = state
    model: ModelSpec = _construct(ModelSpec, {**values, "kinds": tuple(cast("list[LayerKind]", kinds))}, "model")
    return model


_OTHER_CACHES = (
    *("is_encoder_decoder", "num_kv_shared_layers", "mamba_d_ssm", "compress_ratios", "block_configs"),
    *("multi_query", "multi_query_group_num", "num_kv_heads", "attn_config"),
)
"""Keys of models with caches of other kinds, or that name the number of KV heads otherwise."""
_OTHER_LAYERS = (
    *("sliding_window", "sliding_window_pattern", "attention_chunk_size", "attn_type_list", "linear_attn_config"),
    *(
        "attn_layer_period",
        "attn_layer_indices",
        "hybrid_override_pattern",
        "full_attention_interval",
        "full_attn_idxs",
    ),
)
"""Keys by which models mix kinds of layers without a list."""


def model_from_config(config: Table) -> ModelSpec:
    """Return the cache's numbers from a Hugging Face `config.json`.

    Knows dense and sliding-window attention, latent attention (DeepSeek's keys), and hybrids of Mamba-2 or gated delta
    nets that list their layers in `layer_types` or `layers_block_type`.

    Raises:
        InvalidGeometry: `spec-malformed` when a needed key is missing, or one decides the cache in a way not known here.
    """
    config = _table(config.get("text_config", config), "text_config")
    is_listed = bool(config.get("layer_types") or config.get("layers_block_type"))
    for key in (*_OTHER_CACHES, *(() if is_listed else _OTHER_LAYERS)):
        if config.get(key) and not (key == "sliding_window" and config.get("use_sliding_window") is False):
            advice = "" if key in _OTHER_CACHES else "; list the layers in layer_types"
            raise _malformed(f"config.json has {key!r}, whose effect on the cache is not known here{advice}.")
    layers = _number(config, "num_hidden_layers", most=_MOST_LAYERS)
    element = _DTYPE_BYTES.get(str(config.get("torch_dtype", config.get("dtype", "bfloat16"))), 2)
    if config.get("kv_lora_rank"):
        latent = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        index = _optional(config, "index_head_dim")
        all_latent: tuple[LayerKind, ...] = ("latent",)
        return ModelSpec(all_latent * layers, element_bytes=element, latent_dim=latent, index_dim=index)
    heads = _number(config, "num_attention_heads")
    head_dim = _optional(config, "head_dim") or _number(config, "hidden_size") // heads
    kv_heads = _optional(config, "num_key_value_heads") or heads
    kinds = _layer_kinds(config, layers)
    window = _optional(config, "sliding_window") if "sliding" in kinds else 0
    states = [_state(config, kind, element) for kind in _STATE_KEYS if kind in kinds]
    return ModelSpec(kinds, kv_heads, head_dim, element, window, state=states[-1] if states else None)


def _layer_kinds(config: Table, layers: int) -> tuple[LayerKind, ...]:
    listed: object = config.get("layer_types") or config.get("layers_block_type") or ["full_attention"] * layers
    names = [str(name) for name in cast("list[object]", listed)] if isinstance(listed, list) else []
    known: dict[str, LayerKind] = {
        "full_attention": "attention",
        "attention": "attention",
        "sliding_attention": "sliding",
        "mamba": "mamba2",
        "mamba2": "mamba2",
        # Newer releases of transformers call Mamba layers so, too.
        "linear_attention": "mamba2" if "mamba_d_state" in config else "gated-delta",
    }
    unknown = [name for name in names if name not in known]
    if unknown or len(names) != layers:
        few = ", ".join(map(shown, unknown[:3])) or "none"
        raise _malformed(f"config.json lists {len(names)} layer types for {layers} layers; unknown: {few}.")
    return tuple(known[name] for name in names)


_STATE_KEYS = {
    "mamba2": ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    "gated-delta": (
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_conv_kernel_dim",
    ),
}
"""Keys of a configuration for the heads, their channels, the states, the groups and the convolution of a kind of layer."""


def _state(config: Table, kind: str, element: int) -> StateSpec:
    heads, head_dim, state_dim, groups, conv = (_number(config, key) for key in _STATE_KEYS[kind])
    return StateSpec(heads, head_dim, state_dim, groups, conv - 1, element, element)


def _number(config: Table, key: str, *, most: int = (1 << 31) - 1) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= most:
        raise _malformed(f"config.json has no usable {key!r}: {shown(value)}, must be 1 to {most}.")
    return value


def _optional(config: Table, key: str) -> int:
    """Return a number that may be missing, null or 0."""
    value: object = config.get(key)
    return 0 if value is None or value == 0 else _number(config, key)


def _malformed(message: str) -> InvalidGeometry:
    return InvalidGeometry("spec-malformed", message)


def _read(path: Path, parse: Callable[[str], object], name: str) -> object:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _malformed(f"{name} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise _malformed(f"{name} is nested too deeply.") from None
    except ValueError as error:  # not UTF-8, neither JSON nor TOML, or a file name with a NUL byte
        raise _malformed(f"{name} does not parse: {error}.") from None
