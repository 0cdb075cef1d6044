"""Every order of events for up to three requests and two readers.

Worlds that are too large to be walked to the end are walked to a depth, and completely so. With the exploration of streams the
full depths cost two minutes of a core, which the daily run cannot spare: it walks three steps less. `KVDEV_LONG=1` walks to the
full depths.
"""

from __future__ import annotations

import os

import pytest
from model.explore import decode_world, explore, pair_world, prefill_world

from kv_scheduler_state import LeaseTable

IS_LONG = os.environ.get("KVDEV_LONG") == "1"

# Each with the depth to which every order of events is walked; None walks to the end.
WORLDS = {
    "prefill, 1 request, host buffer": (lambda: prefill_world(requests=1), None),
    "prefill, 1 request, device memory": (lambda: prefill_world(requests=1, is_plain=True), None),
    "prefill, 1 request, 2 workers": (lambda: prefill_world(requests=1, workers=2), 12),
    "prefill, 2 requests": (lambda: prefill_world(requests=2), 9),
    "prefill, 3 requests": (lambda: prefill_world(requests=3), 9),
    "decode, 1 request": (lambda: decode_world(requests=1), None),
    "decode, 1 request, failures are final": (lambda: decode_world(requests=1, fails_requests=True), None),
    "decode, 2 requests": (lambda: decode_world(requests=2), 9),
    "decode, 3 requests": (lambda: decode_world(requests=3), 9),
    "decode, 2 requests of one ticket": (lambda: decode_world(requests=2, readers=1, is_shared=True), 11),
    "decode, 3 requests of one ticket": (lambda: decode_world(requests=3, is_shared=True), 7),
    "pair, 1 request": (lambda: pair_world(requests=1), None),
    "pair, 1 request, faults": (lambda: pair_world(requests=1, adversity=1), 11),
    "pair, 2 requests": (lambda: pair_world(requests=2), 11),
    "pair, 3 requests, faults": (lambda: pair_world(requests=3, adversity=1), 8),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORLDS)
def test_no_order_of_events_breaks_a_promise(name, capsys):
    make_world, max_depth = WORLDS[name]
    if max_depth is not None and not IS_LONG:
        max_depth = max(max_depth - 3, 5)
    result = explore(make_world, max_depth=max_depth)
    with capsys.disabled():
        print(f"\n  {name}: {result}", end="")
    assert not result.violation
    assert result.is_complete or max_depth is not None
    assert result.is_complete or result.depth == max_depth
    assert result.states > 100


def test_grants_that_the_lease_table_does_not_apply_are_noticed(monkeypatch):
    apply = LeaseTable.apply

    def without_grants(table, plan, **values):
        return apply(table, plan._replace(grants=()), **values)

    monkeypatch.setattr(LeaseTable, "apply", without_grants)
    result = explore(lambda: prefill_world(requests=1))
    assert "its lease is over, unnoticed" in str(result)
    assert result.path[0] == ("p-arrive", "p0")
