"""`kvh_geometry` as docs/wire/geometry.md describes it: Go finds every element where our layouts put it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from gopher import Gopher

from kv_topology import to_document
from kv_topology.tools import EngineSpec, ModelSpec, build_engine

LAYOUTS = {"HND": "packed-HND", "NHD": "packed-NHD", "halves": "halves-HND"}


def document(name: str) -> dict[str, Any]:
    engine = EngineSpec(2, block_tokens=4, layout=LAYOUTS[name], block_count=16, base_address=1 << 46)
    return dict(to_document(build_engine(ModelSpec(("attention",) * 2, 4, 8), engine)[0, 1]))


def ask(gopher: Gopher, made: dict[str, Any], **place: Any) -> dict[str, Any]:
    return gopher.ask(do="geometry", hex=json.dumps(made).encode().hex(), **place)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_a_page_is_one_element_once(gopher: Gopher, name: str) -> None:
    made = document(name)
    found: list[int] = []
    for field, token, head, channel in product(("key", "value"), range(4), (2, 3), range(8)):
        indices = {"token": token, "head": head, "channel": channel}
        answer = ask(gopher, made, layer="layers.1", field=field, page=7, indices=indices)
        found.append(answer["ok"])
    region = made["regions"][1]
    begin = region["base_address"] + 7 * region["page_bytes"]
    assert sorted(found) == list(range(begin, begin + region["page_bytes"], 2))


def test_the_worked_example_of_the_page(gopher: Gopher) -> None:
    engine = EngineSpec(2, block_tokens=32, kernel_block_tokens=16, block_count=50, base_address=65536)
    made = dict(to_document(build_engine(ModelSpec(("attention",), 4, 64), engine)[0, 1]))
    indices = {"token": 4, "head": 3, "channel": 5}
    assert ask(gopher, made, layer="layers.0", field="value", page=7, indices=indices)["ok"] == 128138


def test_what_a_rank_does_not_hold_and_what_is_no_document(gopher: Gopher) -> None:
    made = document("HND")

    def answer(head: int, **changes: Any) -> dict[str, Any]:
        indices = {"token": 0, "head": head, "channel": 0}
        return ask(gopher, {**made, **changes}, layer="layers.0", field="key", page=0, indices=indices)

    assert answer(1)["code"] == "not-held"
    assert answer(1, version=2)["code"] == "document-version"
    broken = {**made["regions"][0], "members": [["layers.0", 9, 0, 0]]}
    assert answer(1, regions=[broken])["code"] == "document-malformed"
    assert answer(2, unknown=1)["ok"] == 1 << 46
