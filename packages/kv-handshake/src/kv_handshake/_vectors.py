"""The conformance vectors: frames with their meaning, for checking an implementation in any language.

The data file only ever grows: a vector that was published stays as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, final

__all__ = ["Vector", "load_vectors", "vectors_text"]


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
        for each in json.loads(_text())["vectors"]
    )


def vectors_text() -> str:
    """Return the data file itself."""
    return _text().rstrip("\n")


def _text() -> str:
    return files("kv_handshake").joinpath("vectors.json").read_text(encoding="utf-8")
