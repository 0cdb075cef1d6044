"""Checksums that agree across layouts and tensor-parallel sizes."""

import numpy as np
import pytest
from helpers import make_pair, order
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_nixl_agent import AgentError, PeerSpec, TransferAgent
from kv_nixl_agent.integrity import ChecksumTable, PageLayout, page_check

TOKENS, DIM_BYTES = 4, 16


def layout_of(order_name, heads):
    """Return a layout with a cell per head; a cell's canonical order is by token."""
    offsets, cells = [], []
    for head in range(heads):
        for token in range(TOKENS):
            index = token * heads + head if order_name == "NHD" else head * TOKENS + token
            offsets.append(index * DIM_BYTES)
            cells.append(head)
    return PageLayout(TOKENS * heads * DIM_BYTES, offsets, [DIM_BYTES] * len(offsets), cells)


def content_of(tensor, order_name, heads):
    """Pages of a rank that holds `heads` of the global (page, head, token, byte) tensor."""
    part = tensor[:, heads]
    part = part.transpose(0, 2, 1, 3) if order_name == "NHD" else part
    return np.ascontiguousarray(part).reshape(len(tensor), -1)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(["NHD", "HND"]),
    st.integers(0, 2**32),
)
def test_ranks_of_any_layout_and_size_agree(producer_tp, consumer_tp, producer_order, consumer_order, seed):
    heads = 8
    tensor = np.random.default_rng(seed).integers(0, 256, (3, heads, TOKENS, DIM_BYTES), dtype=np.uint8)

    def sums(tp, order_name):
        share = heads // tp
        layout = layout_of(order_name, share)
        parts = [
            layout.checksums(content_of(tensor, order_name, slice(rank * share, (rank + 1) * share)), range(3))
            for rank in range(tp)
        ]
        return np.concatenate(parts, axis=1)

    assert np.array_equal(sums(producer_tp, producer_order), sums(consumer_tp, consumer_order))


def test_every_flipped_bit_and_every_swap_of_words_is_seen():
    layout = layout_of("HND", 2)
    pages = np.random.default_rng(0).integers(0, 256, (1, layout.page_bytes), dtype=np.uint8)
    good = layout.checksums(pages, [0])
    for position in range(layout.page_bytes):
        for bit in range(8):
            pages[0, position] ^= 1 << bit
            assert (layout.checksums(pages, [0]) != good).any()
            pages[0, position] ^= 1 << bit
    words = pages.view(np.uint64)
    for first in range(words.shape[1]):
        for second in range(first):
            words[0, [first, second]] = words[0, [second, first]]
            assert (layout.checksums(pages, [0]) != good).any()
            words[0, [first, second]] = words[0, [second, first]]
    assert np.array_equal(layout.checksums(pages, [0]), good)


def test_golden_checksum():
    # Append-only: both sides of a transfer may run different versions.
    layout = PageLayout(32, [0, 16], [16, 16], [0, 1])
    pages = np.arange(32, dtype=np.uint8)[None, :]
    assert [hex(value) for value in layout.checksums(pages, [0])[0].tolist()] == GOLDEN


GOLDEN = ["0x9dda5efbdb1e7ba8", "0xa2d5c5f8960bf5e8"]


@pytest.mark.parametrize(
    ("page_bytes", "offsets", "lengths", "cells"),
    [
        (32, [0, 8], [16, 16], [0, 0]),
        (32, [4], [8], [0]),
        (32, [0], [40], [0]),
        (30, [0], [8], [0]),
        (32, [0], [0], [0]),
        (32, [], [], []),
        (32, [0], [8], [-1]),
    ],
)
def test_malformed_segments_are_refused(page_bytes, offsets, lengths, cells):
    with pytest.raises(AgentError) as error:
        PageLayout(page_bytes, offsets, lengths, cells)
    assert error.value.code == "bad-rows"


def read_with_integrity(corrupt):
    pair = make_pair(pages=16, page_bytes=128)
    layout = PageLayout(128, [0, 64], [64, 64], [0, 1])
    theirs, mine = ChecksumTable(16, 2), ChecksumTable(16, 2)
    pair.producer.register([theirs.region])
    pair.consumer.register([mine.region])
    remote = pair.remote.memory.reshape(16, 128)
    theirs.update(layout, remote, range(16))
    pair.consumer.add_peer(
        PeerSpec(
            "p",
            pair.producer.agent_metadata(),
            local_rows=np.concatenate([pair.local.rows, ChecksumTable.rows(mine.location, 0, 2)]),
            peer_rows=np.concatenate([pair.remote.rows, ChecksumTable.rows(theirs.location, 0, 2)]),
        )
    )
    if corrupt:
        remote[5, 100] ^= 1
    local = pair.local.memory.reshape(16, 128)
    pages, peers = [2, 3, 4], [4, 5, 6]
    indices = np.array(pages + [16 + page for page in pages]), np.array(peers + [16 + page for page in peers])
    check = page_check(
        layout, local, pages, mine, describe=lambda page, cell: f"request r, layer 0, block {page}, head {cell}, rank 1"
    )
    pair.consumer.post(order("r", *indices, notification=b"done", page_check=check))
    return pair, pair.run()["r"]


def test_pages_and_checksums_travel_in_one_read():
    pair, result = read_with_integrity(corrupt=False)
    assert result.outcome == "done"
    assert result.check_s >= 0
    assert list(pair.producer.take_notifications()) == [("consumer", b"done")]


def test_a_corrupt_page_fails_the_transfer_and_is_named():
    pair, result = read_with_integrity(corrupt=True)
    assert (result.outcome, result.code) == ("failed", "checksum-mismatch")
    assert "request r, layer 0, block 3, head 1, rank 1" in result.message
    assert list(pair.producer.take_notifications()) == []
    assert isinstance(pair.consumer, TransferAgent)


def test_a_raising_check_fails_the_transfer():
    pair = make_pair()
    pair.connect()
    pair.consumer.post(order("r", [0], [0], page_check=lambda: 1 // 0))
    result = pair.run()["r"]
    assert (result.outcome, result.code) == ("failed", "checksum-mismatch")
    assert "ZeroDivisionError" in result.message
