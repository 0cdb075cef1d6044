"""A hand-over through NIXL's LIBFABRIC plugin with its TCP provider, where libfabric is (docs/operate/tune.md)."""

from __future__ import annotations

import os
from functools import partial

import pytest
from fleets import COMPUTED, FAILED, TRANSFERS, ours, prompt, started_pair

pytestmark = pytest.mark.skipif(
    "FI_PROVIDER" not in os.environ, reason="needs FI_PROVIDER=tcp, and what NIXL's LIBFABRIC plugin loads"
)


@pytest.mark.proves("NIXL's LIBFABRIC: proof")
def test_prompts_are_handed_over_by_libfabric_and_nothing_is_recomputed() -> None:
    with started_pair("dense", configure=partial(ours, backends=["LIBFABRIC"]), is_forked=False) as pair:
        pair.assert_same_as_alone([prompt(0, 30)])
        before = {name: pair.count("decode", name) for name in (TRANSFERS, FAILED)}
        computed = pair.count("decode", COMPUTED, source="local_compute")
        texts = [prompt(n, 30 + 40 * n) for n in range(1, 4)]
        pair.assert_same_as_alone(texts)
        assert pair.count("decode", TRANSFERS) - before[TRANSFERS] == len(texts)
        assert pair.count("decode", FAILED) == before[FAILED] == 0
        assert pair.count("decode", COMPUTED, source="local_compute") <= computed + len(texts)
        assert "backends=LIBFABRIC" in pair.log("decode")
        pair.assert_all_blocks_free()
