"""Streams of engines that reset, drain or close, between two scheduler sides."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_engine import Prompt
from stream_pair import HAND_OVER, TEXT, make_pairs, streaming  # noqa: F401  (a fixture)
from stream_wires import InMemory, OverZeroMq


def test_a_reset_of_the_prefill_cache_takes_the_offer_back(make: Any) -> None:
    pair = make()
    streaming(pair, 2)
    assert pair.prefill.side.reset_cache()
    assert [void.ends for void in pair.prefill.step().streams.voids] == [False]
    assert not pair.chunk().streams.chunks
    assert pair.finish() == (True, None)
    pair.prefill.step()
    pair.prefill.report(sent=("p",))
    assert not pair.prefill.state.live_count


def test_a_reset_of_the_decode_cache_ends_the_read(make: Any) -> None:
    pair = make()
    streaming(pair, 2)
    assert pair.decode.side.reset_cache()
    assert pair.decode.step().streams.stops == ("d",)
    pair.decode.report(received=("d",), failed=("d",))
    assert pair.matched() == 0


def test_an_engine_that_drains_hands_over_what_a_peer_reads_already(make: Any) -> None:
    pair = make()
    streaming(pair, 2)
    pair.prefill.state.drain()
    pair.chunk()
    keeps_blocks, ticket = pair.finish()
    assert (keeps_blocks, ticket is not None) == (True, True)
    plan = pair.prefill.step()
    assert (len(plan.grants), plan.streams.voids) == (1, ())
    pair.told(is_done=True)
    assert pair.states()[1] == ["consumer-local"], "it was read, and not refused"


@pytest.mark.parametrize("wire", [InMemory, OverZeroMq])
def test_closing_either_side_in_mid_stream_is_quiet(make: Any, wire: Any) -> None:
    pair = make(wire())
    streaming(pair, 1)
    pair.admit("asking", text="y" * len(TEXT))
    pair.decode.step()
    pair.prefill.side.close()
    pair.decode.step()
    pair.decode.side.close()
    pair.decode.side.close()
    pair.decode.step()
    pair.prefill.step()


def test_an_engine_that_closes_asks_for_nothing_any_more(make: Any) -> None:
    pair = make()
    stream = pair.park()
    pair.decode.side.close()
    pair.prefill.step()
    assert not stream.parked


def test_prompts_of_another_length_do_not_meet(make: Any) -> None:
    pair = make()
    pair.run()
    pair.decode.admit("d", pair.early(serves=False), TEXT + "x")
    pair.until(lambda: pair.matched() == 0)
    assert Prompt(TEXT).digest(len(TEXT)) != Prompt(TEXT + "x").digest(len(TEXT) + 1)
