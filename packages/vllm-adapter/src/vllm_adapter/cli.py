"""`vllm-adapter`: print the configuration that the connector takes, and check one without starting an engine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm_adapter.config import describe_keys, load_settings
from vllm_adapter.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_JSON_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "tuple[str, ...]": "array"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 1 for a wrong configuration, or 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="vllm-adapter", description="Tools for operators of the vLLM adapter.")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="explain or check kv_connector_extra_config")
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--explain", action="store_true", help="every key with default, range and meaning")
    what.add_argument("--schema", action="store_true", help="the same as a JSON schema")
    what.add_argument(
        "--check", metavar="FILE", help="check a --kv-transfer-config (JSON file, or - for standard input)"
    )
    options = parser.parse_args(arguments)
    if options.explain:
        print(_explanation())
    elif options.schema:
        print(json.dumps(_schema(), indent=2))
    else:
        return _check(options.check)
    return 0


def _explanation() -> str:
    lines: list[str] = []
    for key in describe_keys():
        limits = f"one of {', '.join(cast('tuple[str, ...]', key['choices']))}" if key["choices"] else ""
        if key["least"] is not None:
            limits = f"{key['least']:g} to {key['most']:g}"
        lines.append(f"{key['key']} ({key['type']}, default {_plain(key['default'])}{', ' + limits if limits else ''})")
        lines.append(f"    {key['doc']}")
    return "\n".join(lines)


def _schema() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key in describe_keys():
        entry: dict[str, Any] = {
            "type": _JSON_TYPES[str(key["type"])],
            "default": _plain(key["default"]),
            "description": key["doc"],
        }
        if entry["type"] == "array":
            entry["items"] = {"type": "string"}
        if key["least"] is not None:
            entry |= {"minimum": key["least"], "maximum": key["most"]}
        if key["choices"]:
            entry["enum"] = list(cast("tuple[str, ...]", key["choices"]))
        properties[str(key["key"])] = entry
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kv_connector_extra_config",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _check(file: str) -> int:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        config: object = json.loads(text)
    except (OSError, ValueError) as error:
        print(f"vllm-adapter config: {file}: {error}", file=sys.stderr)
        return 1
    if not isinstance(config, dict):
        print(f"vllm-adapter config: {file}: not a JSON object", file=sys.stderr)
        return 1
    table = cast("dict[str, object]", config)
    extra = table.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        print("vllm-adapter config: kv_connector_extra_config must be an object", file=sys.stderr)
        return 1
    try:
        _, notes = load_settings(cast("dict[str, object]", extra))
    except ConfigurationError as error:
        print(f"vllm-adapter config: {error}", file=sys.stderr)
        return 1
    print("\n".join([*notes, "good"]))
    return 0


def _plain(value: object) -> object:
    return list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
