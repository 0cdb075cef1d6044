import copy
import pickle

import msgspec
import pytest
from handshake_helpers import mutate
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import Codec, ConfigurationError, HandshakeError, WireError
from kv_handshake.errors import CODES
from kv_handshake.testing import sample_envelopes, sample_metadata
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.limits import MAX_DEPTH, MAX_REGIONS
from kv_handshake.wire.messages import METADATA_FIELDS, AgentMetadata, Envelope
from kv_handshake.wire.queries import encode_query, parse_query
from kv_handshake.wire.replies import decode_clock, decode_envelope, decode_metadata, encode_clock, encode_metadata

FACTORS = {"model": "m"}


def through_the_wire(values, dialect=15):
    """Return the metadata that a peer reads of these values."""
    return decode_metadata(decode_envelope(Codec().encode_envelope(values, {}, dialect=dialect)))


@pytest.mark.parametrize("streams", [None, (2**64 - 16, 0, 1, 1), (8, 1, 64, 8192)])
def test_stream_memory_survives_the_way(streams):
    values = {**sample_metadata(), "streams": streams}
    frame = Codec().encode_envelope(values, FACTORS, dialect=14)
    assert decode_metadata(decode_envelope(frame)).streams == streams
    written = msgspec.msgpack.decode(decode_envelope(frame).agent_metadata_bytes)
    assert ("kvh_streams" in written) is (streams is not None)


def test_defaults_of_optional_fields():
    least = {name: value for name, value in sample_metadata().items() if name in dialect_of(2).metadata_fields}
    metadata = through_the_wire(least)
    assert metadata.block_strides == metadata.block_lens
    assert (metadata.region_names, metadata.dcp_size, metadata.physical_blocks_per_logical_kv_block) == (None, 1, 1)
    assert (metadata.generation, metadata.fence, metadata.geometry) == (None, None, None)
    assert through_the_wire({**least, "block_strides": None}).block_strides == metadata.block_lens


@pytest.mark.parametrize(
    ("sizes", "blocks", "ratio"),
    [((36_864, 2_097_152), [8192], 261), ((9216, 524_288), [4096], 131), ((0, 0), [4096], 1), ((1, 1), [], 1)],
)
def test_blocks_ratio_of_version_2(sizes, blocks, ratio):
    values = {**sample_metadata(regions=len(blocks)), "ssm_sizes": sizes, "block_lens": blocks}
    assert through_the_wire(values, 2).physical_blocks_per_logical_kv_block == ratio


INVALID: dict[str, list[object]] = {
    "num_blocks": [0],
    "device_id": [-1],
    "ssm_sizes": [(-1, 0)],
    "engine_id": ["x" * 600],
    "block_lens": [[1]],
    "region_num_blocks": [[-1, 0]],
    "region_members": [[["a"]]],
    "ple_block_len": [0],
    "packed_member_layouts": [{"a": (-1, 4)}, {"a": (0, 0)}],
    "fence": [(8, 0, 0), (-8, 0, 1), (4, 0, 1), (2**64 - 8, 0, 2)],
    "streams": [(8, 0, 0, 1), (8, 0, 1, 0), (4, 0, 1, 1), (8, -1, 1, 1), (2**64 - 16, 0, 1, 2)],
}


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        *[("invalid-metadata", {name: value}) for name, values in INVALID.items() for value in values],
        ("malformed-metadata", {"streams": (8, 0, 1)}),
        ("malformed-metadata", {"kv_cache_layout": 5}),
        ("invalid-argument", {"kv_caches_base_addr": [2**64, 0]}),
        ("invalid-argument", {"device_id": object()}),
    ],
)
def test_metadata_that_peers_would_refuse_is_not_written(code, changes):
    with pytest.raises(HandshakeError) as caught:
        encode_metadata({**sample_metadata(), **changes}, dialect_of(15))
    assert caught.value.code == code


@pytest.mark.parametrize("address", [0, 2**62, 2**63, 2**64 - 65_536])
def test_memory_up_to_the_end_of_the_address_space(address):
    values = {**sample_metadata(regions=1), "kv_caches_base_addr": [address]}
    assert through_the_wire(values).kv_caches_base_addr == (address,)


@pytest.mark.parametrize(
    ("address", "length"),
    [(2**64 - 65_535, 65_536), (2**64 - 1, 65_536), (65_536, 2**64 - 65_535), (-1, 65_536), (0, 0)],
)
def test_memory_beyond_the_address_space(address, length):
    with pytest.raises(WireError) as caught:
        encode_metadata(
            {**sample_metadata(regions=1), "kv_caches_base_addr": [address], "block_lens": [length]}, dialect_of(14)
        )
    assert caught.value.code == "invalid-metadata"


def test_packed_members_are_read():
    values = {**sample_metadata(), "packed_member_layouts": {"a": (0, 64)}, "region_members": [["a"], ["b", "c"]]}
    metadata = through_the_wire(values)
    assert metadata.packed_member_layouts == {"a": (0, 64)}
    assert metadata.region_members == (("a",), ("b", "c"))


def test_missing_field_is_named():
    values = sample_metadata()
    del values["block_size"]
    with pytest.raises(ConfigurationError, match="block_size") as caught:
        Codec().encode_envelope(values, {}, dialect=14)
    assert caught.value.context["field"] == "block_size"


def nested(levels):
    return [nested(levels - 1)] if levels else 0


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (dict.fromkeys(map(str, range(300)), 0), "300 factors"),
        ({"a": nested(MAX_DEPTH + 1)}, "nests more than 8"),
        ({"a": "x" * 300_000}, "besides its metadata"),
        *[
            ({"a": value}, "JSON|does not decode")
            for value in (b"bytes", {1: 0, "a": 0}, msgspec.msgpack.Ext(5, b""), {"a": {"b": b""}})
        ],
    ],
)
def test_an_envelope_has_few_plain_factors(factors, said):
    frame = msgspec.msgpack.encode(
        {"compatibility_hash": "", "agent_metadata_bytes": b"", "kvh_factors": factors, "from the future": [1]}
    )
    with pytest.raises(WireError, match=said) as caught:
        decode_envelope(frame)
    assert caught.value.code == "malformed-envelope"


def test_an_envelope_beyond_its_size_is_not_opened():
    with pytest.raises(WireError) as caught:
        decode_envelope(bytes(17 * 1024 * 1024))
    assert caught.value.code == "oversized-reply"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_clock_survives_the_way(clock_s):
    assert decode_clock(encode_clock(clock_s)) == clock_s
    assert len(encode_clock(clock_s)) == 9


@given(st.integers(2, 15), st.integers(0, 65_535), st.integers(0, 65_535))
def test_query_survives_the_way(version, pp, tp):
    dialect = dialect_of(version)
    rank = (pp if dialect.has_clock_frame else 0, tp)
    query = parse_query(encode_query(rank, dialect))
    assert (query.rank, query.wants_clock) == (rank, dialect.has_clock_frame)


@pytest.mark.parametrize(("rank", "version"), [((1, 0), 4), ((0, -1), 14), ((0, 65_536), 14), ((70_000, 0), 14)])
def test_rank_that_cannot_be_asked(rank, version):
    with pytest.raises(ConfigurationError) as caught:
        encode_query(rank, dialect_of(version))
    assert caught.value.code == "invalid-argument"


@given(st.randoms(use_true_random=False))
def test_damaged_envelope_is_refused_or_whole(rng):
    """A damaged frame is refused with a code, or the damage hit nothing that is read."""
    frame = mutate(rng, sample_envelopes()[0, 0])
    try:
        metadata = decode_metadata(decode_envelope(frame))
    except WireError as refusal:
        metadata, code = None, refusal.code
    else:
        code = ""
    assert metadata is not None or code in CODES


def test_field_table_is_the_wire():
    """The rows of the table are exactly vLLM's keys in its order, then ours; every other attribute is the envelope's."""
    names = [each.name for each in METADATA_FIELDS]
    assert names[:-3] == list(dialect_of(15).metadata_fields)
    assert [each.key for each in METADATA_FIELDS][-3:] == ["kvh_fence", "kvh_geometry", "kvh_streams"]
    assert set(AgentMetadata.__struct_fields__) - set(names) == {"generation", "factors", "capabilities"}


def test_metadata_under_an_unknown_name_is_refused():
    with pytest.raises(ConfigurationError, match="block_sise") as caught:
        Codec().encode_envelope({**sample_metadata(), "block_sise": 16}, {}, dialect=14)
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_lens": list(range(1, MAX_REGIONS + 2))}, "length <= 16384"),
        ({"packed_member_layouts": {str(number): (0, 1) for number in range(MAX_REGIONS + 1)}}, "length <= 16384"),
        ({"region_names": ["x" * 100] * 8000}, "at most 524288 are read"),
        ({"region_members": [[""] * 600_000]}, "at most 524288 are read"),
    ],
)
def test_a_list_beyond_its_budget_is_refused(changes, said):
    document = msgspec.msgpack.decode(decode_envelope(sample_envelopes()[0, 0]).agent_metadata_bytes)
    envelope = Envelope(compatibility_hash="", agent_metadata_bytes=msgspec.msgpack.encode(document | changes))
    with pytest.raises(WireError, match=said) as caught:
        decode_metadata(envelope)
    assert caught.value.code == "malformed-metadata"


def test_a_list_of_the_largest_size_is_read():
    values = {**sample_metadata(regions=MAX_REGIONS), "region_names": ["layer"] * MAX_REGIONS}
    assert len(through_the_wire(values).block_lens) == MAX_REGIONS


def subclasses(kind):
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


def test_every_error_survives_a_pickle_and_a_copy():
    for kind in subclasses(HandshakeError):
        error = kind("timed-out", "no reply", host="h", missing_ranks=((0, 1),))
        assert (str(error), error.message) == ("no reply (timed-out)", "no reply")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(again), str(again), again.code, again.context) == (kind, str(error), error.code, error.context)
            assert (again.fault, again.is_retry_safe, repr(again)) == (error.fault, error.is_retry_safe, repr(error))


@pytest.mark.never_wrong("B3")
@pytest.mark.parametrize("generation", [2**53, 2**60, -1])
def test_a_generation_that_a_float_rounds_is_not_written(generation):
    with pytest.raises(ConfigurationError, match="generation") as caught:
        Codec().encode_envelope({**sample_metadata(), "generation": generation}, {}, dialect=14)
    assert caught.value.code == "invalid-argument"


@pytest.mark.never_wrong("B11")
def test_a_large_generation_of_release_0_1_is_read():
    values = msgspec.msgpack.decode(sample_envelopes()[0, 0]) | {"kvh_generation": 2**60}
    assert decode_metadata(decode_envelope(msgspec.msgpack.encode(values))).generation == 2**60
