"""Rows, ordering and the checksum of metadata, by property."""

import numpy as np
import pytest
from helpers import code_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_nixl_agent import AgentError, AgentOptions, BackendOptions, ThreadOptions
from kv_nixl_agent.errors import ERROR_CODES
from kv_nixl_agent.memory.peers import add_checksum, open_metadata, peek_agent_name
from kv_nixl_agent.memory.rows import RowTable, check_rows
from kv_nixl_agent.nixl.binding import expand_rows
from kv_nixl_agent.transfers.queue import order_for_merging, spread_runs
from kv_nixl_agent.values import MemoryRegion

row = st.tuples(
    st.integers(1, 2**40), st.integers(1, 4096), st.integers(0, 3), st.integers(0, 4096), st.integers(1, 9)
).map(lambda one: (one[0], one[1], one[2], one[1] + one[3], one[4]))


@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=1, max_size=8), st.data())
def test_descriptors_are_numbered_through_all_rows(rows, data):
    table = np.array(rows, dtype=np.uint64)
    kinds = data.draw(st.lists(st.sampled_from(["DRAM", "VRAM"]), min_size=len(rows), max_size=len(rows)))
    checked = RowTable(table, kinds)
    lines = expand_rows(table)
    assert checked.count == len(lines)
    ids = np.arange(checked.count, dtype=np.int32)
    assert checked.lengths(ids).tolist() == lines[:, 1].tolist()
    for kind, group in checked.groups.items():
        members = ids[checked.has_kind(ids, kind)]
        assert np.array_equal(expand_rows(group)[checked.in_group(members)], lines[members])
    assert sum(checked.has_kind(ids, kind).sum() for kind in checked.groups) == checked.count


def pairs_of(local, peer):
    return sorted(zip(local.tolist(), peer.tolist(), strict=True))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40),
    st.sampled_from([0, 1, 63, 64, 65, 200]),
    st.booleans(),
)
def test_ordering_keeps_pairs_and_ascends_by_peer(pairs, run, is_reversed):
    """Also behind a run in order that is longer than what is looked at first."""
    pairs = [(1000 + number, (1 << 31) - 1001 + number) for number in range(run)] + pairs
    if is_reversed:
        pairs.reverse()
    local = np.array([one for one, _ in pairs], dtype=np.int32)
    peer = np.array([other for _, other in pairs], dtype=np.int32)
    mine, theirs = order_for_merging(local, peer)
    assert pairs_of(mine, theirs) == sorted(pairs)
    assert theirs.tolist() == sorted(peer.tolist())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=0, max_size=7), max_size=6)
    | st.text()
    | st.none()
    | st.floats()
)
def test_rows_are_checked_or_refused(rows):
    try:
        table = check_rows(rows)
    except AgentError as error:
        assert error.code == "bad-rows"
    except ValueError as error:
        assert "inhomogeneous" in str(error)  # ragged nested lists are no array at all
    else:
        assert table.shape[1] == 5
        assert not table.flags.writeable


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_metadata_or_damaged(blob):
    try:
        opened = open_metadata(blob)
    except AgentError as error:
        assert error.code == "metadata-damaged"
    else:
        assert opened.startswith(b"nixlSerDes|")
    assert peek_agent_name(blob) is None or isinstance(peek_agent_name(blob), str)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.data())
def test_metadata_with_a_checksum_opens_and_no_flip_or_cut_of_it_does(body, data):
    blob = b"nixlSerDes|" + body + b"|"
    whole = add_checksum(blob)
    assert open_metadata(whole) == blob
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(damaged), whole[: data.draw(st.integers(len(blob) + 1, len(whole) - 1))]):
        with pytest.raises(AgentError) as caught:
            open_metadata(wrong)
        assert caught.value.code == "metadata-damaged"


def test_metadata_without_a_checksum_is_taken():
    blob = b"nixlSerDes|Agent" + (3).to_bytes(8, "little") + b"abc|"
    assert (open_metadata(blob), peek_agent_name(blob)) == (blob, "abc")


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_cut_trailer_is_no_absent_one_although_it_ends_like_nixls_blob(cut):
    blobs = (b"nixlSerDes|" + number.to_bytes(4, "little") + b"|" for number in range(100_000))
    whole = next(whole for whole in map(add_checksum, blobs) if whole[-cut - 1 : len(whole) - cut] == b"|")
    with pytest.raises(AgentError) as refused:
        open_metadata(whole[:-cut])
    assert refused.value.code == "metadata-damaged"


@pytest.mark.parametrize(
    "make",
    [
        lambda: BackendOptions(name=""),
        lambda: BackendOptions(num_threads=65),
        lambda: BackendOptions(split_batch_size=0),
        lambda: AgentOptions(backends=()),
        lambda: AgentOptions(backends=(BackendOptions(), BackendOptions())),
        lambda: AgentOptions(fence_words=0),
        lambda: AgentOptions(max_inflight_bytes=0),
        lambda: AgentOptions(stall_after_s=0.0),
        lambda: AgentOptions(stream_slots=1025),
        lambda: AgentOptions(stream_slots=9, fence_words=8),
        lambda: AgentOptions(stream_poll_s=0.0),
        lambda: AgentOptions(stream_poll_s=0.1, stream_slow_poll_s=0.01),
        lambda: ThreadOptions(spin_s=-1.0),
        lambda: ThreadOptions(idle_poll_s=0.0),
    ],
)
def test_options_are_checked_when_made(make):
    assert code_of(make) == "bad-options"


def test_backend_parameters_in_nixl_spelling():
    settings = {"TLS": "tcp", "TCP_TX_SEG_SIZE": "128k"}
    options = BackendOptions(num_threads=4, split_batch_size=16, engine_config=settings)
    reported = {"num_threads": "4", "split_batch_size": "16", "engine_config": "TLS=tcp,TCP_TX_SEG_SIZE=128k"}
    assert dict(options.as_parameters()) == reported


@pytest.mark.parametrize("name", ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"])
def test_given_sizes_of_segments_are_left_alone(name, monkeypatch):
    sizes = {"engine_config": "TCP_TX_SEG_SIZE=64k"}
    assert dict(BackendOptions(num_threads=0).as_parameters()) == sizes
    assert dict(BackendOptions("GDS", num_threads=0).as_parameters()) == {}
    given = BackendOptions(num_threads=0, engine_config={name: "32k"})
    assert dict(given.as_parameters()) == {"engine_config": f"{name}=32k"}
    monkeypatch.setenv(f"UCX_{name}", "32k")
    assert dict(BackendOptions(num_threads=0).as_parameters()) == {}


def test_host_memory_alone_has_a_threshold_of_its_own():
    host: MemoryRegion = (4096, 64, 0, "DRAM")
    device: MemoryRegion = (8192, 64, 0, "VRAM")
    options = AgentOptions(backends=(BackendOptions(), BackendOptions("GDS")))
    resolved = options.for_regions([host])
    assert [backend.split_batch_size for backend in resolved.backends] == [128, None]
    assert (resolved.shared_from, options.shared_from) == (128, 0)
    assert options.for_regions([host, device]) == options
    chosen = AgentOptions(backends=(BackendOptions(split_batch_size=16),))
    assert chosen.for_regions([host]).shared_from == 16
    assert AgentOptions(backends=(BackendOptions(num_threads=0),)).for_regions([host]).shared_from == 0


@given(
    runs=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 400)), min_size=1, max_size=6),
    pieces=st.integers(1, 64),
)
def test_spreading_keeps_the_pairs(runs, pieces):
    local = np.concatenate([np.arange(start, start + length) for start, _, length in runs]).astype(np.int32)
    peer = np.concatenate([np.arange(start, start + length) for _, start, length in runs]).astype(np.int32)
    spread_local, spread_peer = spread_runs(local, peer, pieces)
    assert pairs_of(spread_local, spread_peer) == pairs_of(local, peer)
    assert spread_local.dtype == spread_peer.dtype == np.int32


def test_a_long_run_becomes_as_many_pieces_as_asked():
    ids = np.arange(4096, dtype=np.int32)
    local, peer = spread_runs(ids, ids + 7, 128)
    assert np.count_nonzero(np.diff(local) != 1) == 127
    assert np.array_equal(local + 7, peer)


def test_errors_carry_their_facts_and_survive_pickling():
    import pickle

    for code, facts in ERROR_CODES.items():
        error = pickle.loads(pickle.dumps(AgentError(code, "text", number=3)))
        assert (error.code, error.fault, error.is_retry_safe) == (code, facts.fault, facts.is_retry_safe)
        assert (str(error), dict(error.context)) == (f"text ({code})", {"number": 3})


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64, ">i4", np.int8])
def test_indices_are_checked_whatever_their_type(dtype):
    table = RowTable(np.array([[4096, 8, 0, 8, 100]], dtype=np.uint64), "DRAM")
    good = np.array([0, 1, 99, 7], dtype=dtype)
    for indices in (good, good[::2], good[::-1], good[:0]):
        checked = table.check_indices(indices, "local")
        assert checked.dtype == np.int32
        assert checked.flags.c_contiguous
        assert checked.tolist() == indices.tolist()
    wrong = [100, 127] + ([-1, -100] if np.dtype(dtype).kind == "i" else [])
    wrong += [1 << 32, (1 << 32) + 5] if np.dtype(dtype).itemsize == 8 else []
    for value in wrong:
        with pytest.raises(AgentError, match=rf"{value}\b.*100 descriptors") as error:
            table.check_indices(np.array([5, value, 6]).astype(dtype), "local")
        assert error.value.code == "bad-indices"
