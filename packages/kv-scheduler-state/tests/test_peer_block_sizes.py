"""Window lists of vLLM's own connector, whose tickets do not tell how large the peer's blocks are.

Truth: vLLM's arithmetic. With blocks of P tokens, a request of T tokens has a table of ceil(T / P) blocks; a window of W has null
for the max(0, T - W + 1) // P blocks in front that no later token sees; the ticket has the last ceil(W / P) + 1 entries.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import config, consumer_params

from kv_scheduler_state import GroupConfig, TicketReader
from kv_scheduler_state.errors import TicketError

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 128, 144, 256)
WINDOWS = (1, 2, 16, 17, 32, 33, 64, 66, 100, 128, 129, 1024)


def window_table(block_tokens: int, window: int, tokens: int) -> tuple[list[int], list[int]]:
    """Return a peer's whole list and the window list of its ticket: block 1000 + i holds tokens i * P and on."""
    count = -(-tokens // block_tokens)
    nulls = max(0, tokens - window + 1) // block_tokens
    table = [0] * min(nulls, count) + list(range(1000 + nulls, 1000 + count))
    return list(range(1, count + 1)), table[-(-(-window // block_tokens) + 1) :]


def first_token_of(
    groups: tuple[GroupConfig, ...], ids: list[list[int]], tokens: int | None, dcp: int = 1
) -> int | str:
    """Return where our reader takes the window list to begin, or the code of its refusal."""
    params = consumer_params(remote_block_ids=ids, remote_num_tokens=tokens, dcp_size=dcp)
    try:
        ticket = TicketReader(config(groups=groups, null_block=0)).read(params, "handoff")
    except TicketError as error:
        return error.code
    return ticket.peer_blocks[-1].first_token


@pytest.mark.never_wrong("A3")
@given(
    peer=st.sampled_from(SIZES),
    ours=st.sampled_from(SIZES),
    window=st.sampled_from(WINDOWS),
    tokens=st.integers(1, 5000) | st.integers(1, 300),
    dcp=st.sampled_from((1, 1, 2)),
    has_whole=st.sampled_from((True, True, False)),
)
def test_a_window_list_is_placed_where_its_writer_put_it_or_refused_here_or_by_the_worker(
    peer: int, ours: int, window: int, tokens: int, dcp: int, has_whole: bool
) -> None:
    whole, listed = window_table(peer * dcp, window, tokens)
    groups = (GroupConfig("full", ours), GroupConfig("window", ours, window_tokens=window))
    ids = [whole, listed]
    reported = first_token_of(groups[not has_whole :], ids[not has_whole :], tokens, dcp)
    if reported == "ticket-first-token":
        return
    # By the worker, which knows the peer's true block size.
    is_refused_later = peer != ours and (reported or 0 in listed)
    assert is_refused_later or reported == (len(whole) - len(listed)) * peer * dcp


@pytest.mark.never_wrong("A3")
@pytest.mark.parametrize("chunk", [16, 48, 64])
@pytest.mark.parametrize("peer", SIZES)
def test_null_blocks_of_a_chunked_list_begin_with_the_prompt_or_are_refused(peer: int, chunk: int) -> None:
    groups = (GroupConfig("full", 16, chunk_tokens=chunk),)
    for tokens in range(1, 400):
        nulls = tokens // chunk * chunk // peer
        count = -(-tokens // peer)
        ids = [[0] * min(nulls, count) + list(range(1000 + nulls, 1000 + count))]
        assert first_token_of(groups, ids, tokens) in {"ticket-first-token", 0}


@pytest.mark.parametrize(("block", "window"), [(16, 32), (16, 128), (16, 1024), (64, 128), (128, 128), (32, 66)])
def test_prompts_of_a_peer_with_our_blocks_are_read_whatever_their_length(block: int, window: int) -> None:
    groups = (GroupConfig("full", block), GroupConfig("window", block, window_tokens=window))
    for tokens in range(1, 2100):
        reported = first_token_of(groups, list(window_table(block, window, tokens)), tokens)
        assert isinstance(reported, int), f"{tokens} tokens: {reported}"


@pytest.mark.parametrize("tokens", [None, 0, 319, 337])
def test_a_cut_list_whose_tokens_do_not_fit_the_whole_list_is_refused(tokens: int | None) -> None:
    groups = (GroupConfig("full", 16), GroupConfig("window", 16, window_tokens=64))
    ids = list(window_table(16, 64, 336))
    assert first_token_of(groups, ids, 336) == 16 * 16
    assert first_token_of(groups, ids, tokens) == "ticket-first-token"
