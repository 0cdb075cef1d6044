"""The price of seals and keys, beside the same without them in one run: the targets of tools/bench/seals.py, held."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONTACTS = 4
MOST_ROUNDS = 5


@pytest.fixture(scope="module")
def seals() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
    return importlib.import_module("seals")


@pytest.mark.full
def test_seals_cost_little_beside_the_prompts_own_digest_and_admission(
    seals: Any, figure: Callable[[str], None]
) -> None:
    """CPU time of one thread, medians taken by turns; packing a list of tokens into bytes stands apart.

    Measured again while other programs disturb: the least disturbed of the measurements is compared.
    """
    targets = {"digest-and-seal-131072-tokens": 1.5, "admission-1000-tokens-sealed": 1.3}
    best: dict[str, dict[str, Any]] = {}
    for _ in range(MOST_ROUNDS):
        for row in (*seals._digest_rows(11), *seals._admission_rows(11)):
            if row["ratio"] <= best.get(row["name"], row)["ratio"]:
                best[row["name"]] = row
        if all(best[name]["ratio"] <= most for name, most in targets.items()):
            break
    figure(", ".join(f"{name} {row['ours']} us, {row['ratio']}x" for name, row in best.items()))
    assert {name: best[name]["ratio"] for name in targets if best[name]["ratio"] > targets[name]} == {}


@pytest.mark.full
def test_keys_cost_little_at_first_contact(seals: Any, figure: Callable[[str], None]) -> None:
    """The shortest contacts are compared, since they were disturbed least; more are made while other programs disturb them."""
    keyed, plain = [], []
    for _ in range(MOST_ROUNDS):
        _, shortest = seals._contact_rows(CONTACTS)
        keyed.append(shortest["ours"])
        plain.append(shortest["baseline"])
        if min(keyed) <= 1.3 * min(plain):
            break
    figure(f"{min(keyed) / 1e3:.1f} ms with keys, {min(plain) / 1e3:.1f} ms without: {min(keyed) / min(plain):.2f}x")
    assert min(keyed) <= 1.3 * min(plain)
