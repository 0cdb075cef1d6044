"""Local prefix hits of different lengths: a read makes up for them only where states alone lag behind."""

from __future__ import annotations

import itertools

import pytest
from factories import facts

from vllm_adapter.cache.facts import CacheGroup

FULL = CacheGroup("attention", 16, 0, 0, ("full",))
LATENT = CacheGroup("latent", 16, 0, 0, ("latent",))
WINDOW = CacheGroup("sliding-window", 16, 32, 0, ("window",))
CHUNKS = CacheGroup("attention", 16, 0, 0, ("chunks",), chunk_tokens=48)
STATE = CacheGroup("state", 16, 0, 0, ("state",))
READ_FROM_THE_HIT_ON = {FULL, LATENT}


@pytest.mark.never_wrong("A10")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_only_states_may_lag_behind_the_hit_of_full_attention(count: int) -> None:
    """A read fills states whole, and of the other groups the blocks from the first token behind the hit on."""
    for groups in itertools.product((FULL, LATENT, WINDOW, CHUNKS, STATE), repeat=count):
        others = [group for group in groups if group is not STATE]
        is_safe = len(others) == 1 and others[0] in READ_FROM_THE_HIT_ON
        engine = facts(groups=groups, group_ids=tuple(range(count)))
        assert engine.completes_uneven_hits(count) is is_safe
        assert not engine.completes_uneven_hits(count + 1), "a group that is not transferred is filled by nobody"
