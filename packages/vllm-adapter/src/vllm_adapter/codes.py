"""Codes of all packages, as `codes.toml` describes them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["advice_on", "code_table", "codes_of", "reason_of"]


@cache
def code_table() -> Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return each code with its own facts and those of its group; a code that several packages use is there for each meaning.

    The file is read by the first call: an engine's own processes make none.
    """
    groups = tomllib.loads(resources.files("vllm_adapter").joinpath("codes.toml").read_text(encoding="utf-8"))["group"]
    return [
        (code, {"meaning": facts} if isinstance(facts, str) else facts, group)
        for group in groups
        for code, facts in group["codes"].items()
    ]


def codes_of(counter: str) -> list[str]:
    """Return the codes that a counter may have as its label."""
    return [code for code, own, group in code_table() if counter in {**group, **own}.get("counters", ())]


def advice_on(code: str) -> str:
    """Return the next step of a code; empty if it has none of its own."""
    return next((own["next"] for each, own, _ in code_table() if each == code and "next" in own), "")


def reason_of(code: str, found: str = "") -> str:
    """Return what a code means, with the values that were found, and what to do, as an error says it."""
    about = next({**group, **own} for each, own, group in code_table() if each == code)
    meaning, after = about["meaning"].removesuffix("."), about["next"].removesuffix(".")
    return f"{meaning[0].lower()}{meaning[1:]}{f' ({found})' if found else ''}. {after}"
