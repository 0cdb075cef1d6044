"""Dry-run specifications: a model and two engines, from TOML or JSON or a Hugging Face `config.json`.

model = "path/to/config.json"        # relative to the file, or a table:
[model]
layers = 32                          # or kinds = ["attention", "sliding", ...]
kv_heads = 8
head_dim = 128

[consumer]                           # and [producer]
tp = 4
block_tokens = 16
layout = "LBHNC"

[link]                               # optional prices, see CostModel
bandwidth_gb_s = 40.0

[hand_over]                          # optional: hand-overs on paper, see HandOverModel
prefill_tokens_s = 12000
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast, final

from kv_topology._errors import InvalidGeometry
from kv_topology._estimate import CostModel
from kv_topology._tools._engine_values import EngineSpec, ModelSpec, StateSpec
from kv_topology._tools._hand_over import HandOverModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kv_topology._tools._engine_values import LayerKind

__all__ = ["DryRun", "load_spec", "model_from_config", "parse_spec"]

Table = dict[str, Any]
_SECTIONS = ("model", "consumer", "producer", "link", "hand_over")
KINDS = ("attention", "sliding", "latent", "mamba2", "mamba1", "gated-delta")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@final
@dataclass(frozen=True, slots=True)
class DryRun:
    """A model, the two engines, the prices of the link, and of a hand-over around it, None without that section."""

    model: ModelSpec
    consumer: EngineSpec
    producer: EngineSpec
    cost: CostModel
    hand_over: HandOverModel | None = None


def _bad(message: str) -> InvalidGeometry:
    return InvalidGeometry(message, code="spec-malformed")


def _table(value: object, what: str) -> Table:
    if not isinstance(value, dict):
        raise _bad(f"{what} must be a table, not {value!r}.")
    return cast("Table", value)


def _construct(kind: type[Any], values: Mapping[str, Any], what: str) -> Any:  # noqa: ANN401 - one of four dataclasses
    """Return a dataclass from a table, refusing unknown names and wrong types."""
    known = {field.name: field for field in fields(kind)}
    for name, value in values.items():
        if name not in known:
            also = ", layers" if kind is ModelSpec else ""
            raise _bad(f"{what} has no setting {name!r}; known: {', '.join(known)}{also}.")
        _check_value(f"{what}.{name}", str(known[name].type), value)
    try:
        return kind(**values)
    except TypeError as error:
        raise _bad(f"{what} is incomplete: {error}.") from None


def _check_value(setting: str, wanted: str, value: object) -> None:
    """Raise unless a value has the type of its setting; numbers must be finite and not negative."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_ok = {"int": type(value) is int, "float": is_number}.get(wanted, isinstance(value, (str, tuple, StateSpec)))
    if not is_ok:
        raise _bad(f"{setting} must be of type {wanted}, not {value!r}.")
    if isinstance(value, (int, float)) and not math.isfinite(value):
        raise _bad(f"{setting} must be a finite number, not {value!r}.")
    if isinstance(value, (int, float)) and value < 0:
        raise _bad(f"{setting} must not be negative, not {value!r}.")


def load_spec(path: Path) -> DryRun:
    """Return the dry run that a TOML or JSON file describes.

    Raises:
        InvalidGeometry: `spec-malformed`, with the setting and what is wrong with it.
        OSError: The file, or the model configuration that it names, cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        data: object = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise _bad(f"{path} does not parse: {error}.") from None
    return parse_spec(_table(data, "the specification"), path.parent)


def parse_spec(data: Table, folder: Path) -> DryRun:
    """Return the dry run of a parsed specification; model paths are relative to `folder`."""
    unknown = set(data) - set(_SECTIONS)
    if unknown:
        raise _bad(f"The specification has no section {min(unknown)!r}; known: {', '.join(_SECTIONS)}.")
    given = data.get("model")
    if isinstance(given, str):
        config: object = json.loads((folder / given).read_text(encoding="utf-8"))
        model = model_from_config(_table(config, given))
    else:
        model = _model(_table(given, "model"))
    consumer = _engine(data, "consumer")
    producer = _engine(data, "producer")
    cost: CostModel = _construct(CostModel, _table(data.get("link", {}), "link"), "link")
    if cost.bandwidth_gb_s == 0 or cost.permute_gb_s == 0:
        speeds = f"{cost.bandwidth_gb_s:g} and {cost.permute_gb_s:g}"
        raise _bad(f"link.bandwidth_gb_s and link.permute_gb_s are {speeds}; both must be positive.")
    return DryRun(model, consumer, producer, cost, _hand_over(data))


def _hand_over(data: Table) -> HandOverModel | None:
    if "hand_over" not in data:
        return None
    model: HandOverModel = _construct(HandOverModel, _table(data["hand_over"], "hand_over"), "hand_over")
    for name in ("prefill_tokens_s", "chunk_tokens", "poll_ms", "at_once"):
        if not getattr(model, name):
            raise _bad(f"hand_over.{name} is 0; it must be positive.")
    return model


def _engine(data: Table, side: str) -> EngineSpec:
    spec: EngineSpec = _construct(EngineSpec, _table(data.get(side), side), side)
    for name in ("tp", "pp", "dcp", "block_tokens", "block_count"):
        if not 1 <= getattr(spec, name) <= 1 << 20:
            raise _bad(f"{side}.{name} is {getattr(spec, name)}; it must lie in 1..{1 << 20}.")
    if spec.tp > 1024 or spec.pp > 1024:
        raise _bad(f"{side} has {spec.tp} x {spec.pp} ranks; the limit is 1024 of each.")
    if spec.block_tokens % spec.page_tokens:
        raise _bad(f"{side}.kernel_block_tokens {spec.page_tokens} does not divide its blocks of {spec.block_tokens}.")
    return spec


def _model(table: Table) -> ModelSpec:
    values = dict(table)
    layers: object = values.pop("layers", 0)
    given: object = values.pop("kinds", None)
    if given is None:
        given = ["latent" if values.get("latent_dim") else "attention"] * (layers if type(layers) is int else 0)
    kinds = cast("list[object]", given) if isinstance(given, list) else []
    if not 0 < len(kinds) <= 4096 or any(kind not in KINDS for kind in kinds):
        raise _bad(f"model needs layers (a positive number) or kinds (a list of {', '.join(KINDS)}).")
    if "state" in values:
        values["state"] = _construct(StateSpec, _table(values["state"], "model.state"), "model.state")
    model: ModelSpec = _construct(ModelSpec, {**values, "kinds": tuple(cast("list[LayerKind]", kinds))}, "model")
    return model


def model_from_config(config: Table) -> ModelSpec:
    """Return the cache's numbers from a Hugging Face `config.json`.

    Knows dense and sliding-window attention, latent attention (DeepSeek's keys), and hybrids of Mamba-2 or gated delta
    nets that list their layers in `layer_types` or `layers_block_type`.

    Raises:
        InvalidGeometry: `spec-malformed` when a needed key is missing.
    """
    config = _table(config.get("text_config", config), "text_config")
    layers = _number(config, "num_hidden_layers")
    element = _DTYPE_BYTES.get(str(config.get("torch_dtype", config.get("dtype", "bfloat16"))), 2)
    if config.get("kv_lora_rank"):
        latent = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        index = int(config.get("index_head_dim") or 0)
        all_latent: tuple[LayerKind, ...] = ("latent",)
        return ModelSpec(all_latent * layers, element_bytes=element, latent_dim=latent, index_dim=index)
    heads = _number(config, "num_attention_heads")
    head_dim = int(config.get("head_dim") or 0) or _number(config, "hidden_size") // heads
    kv_heads = int(config.get("num_key_value_heads") or heads)
    kinds = _layer_kinds(config, layers)
    window = int(config.get("sliding_window") or 0) if "sliding" in kinds else 0
    state = _mamba2_state(config, element) if "mamba2" in kinds else None
    if "gated-delta" in kinds:
        state = _gated_delta_state(config, element)
    return ModelSpec(kinds, kv_heads, head_dim, element, window, state=state)


def _layer_kinds(config: Table, layers: int) -> tuple[LayerKind, ...]:
    names = config.get("layer_types") or config.get("layers_block_type") or ["full_attention"] * layers
    known: dict[str, LayerKind] = {
        "full_attention": "attention",
        "attention": "attention",
        "sliding_attention": "sliding",
        "mamba": "mamba2",
        "mamba2": "mamba2",
        "linear_attention": "gated-delta",
    }
    unknown = [name for name in names if name not in known]
    if unknown or len(names) != layers:
        raise _bad(f"config.json lists {len(names)} layer types for {layers} layers; unknown: {unknown[:3]}.")
    return tuple(known[name] for name in names)


def _mamba2_state(config: Table, element: int) -> StateSpec:
    return StateSpec(
        heads=_number(config, "mamba_n_heads"),
        head_dim=_number(config, "mamba_d_head"),
        state_dim=_number(config, "mamba_d_state"),
        groups=_number(config, "mamba_n_groups"),
        conv_rows=_number(config, "mamba_d_conv") - 1,
        conv_element_bytes=element,
        state_element_bytes=element,
    )


def _gated_delta_state(config: Table, element: int) -> StateSpec:
    return StateSpec(
        heads=_number(config, "linear_num_value_heads"),
        head_dim=_number(config, "linear_value_head_dim"),
        state_dim=_number(config, "linear_key_head_dim"),
        groups=_number(config, "linear_num_key_heads"),
        conv_rows=_number(config, "linear_conv_kernel_dim") - 1,
        conv_element_bytes=element,
        state_element_bytes=element,
    )


def _number(config: Table, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _bad(f"config.json has no usable {key!r}: {value!r}.")
    return value
