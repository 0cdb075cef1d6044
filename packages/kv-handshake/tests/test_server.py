import time

import pytest

from kv_handshake import ConfigurationError
from kv_handshake.core.server import ServerCore
from kv_handshake.testing import sample_envelopes
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_clock, decode_envelope

ENVELOPES = sample_envelopes([(0, 0), (0, 1), (1, 0)])
GOOD = encode_query((0, 1), dialect_of(14))


def code_of(frames):
    return decode_envelope(frames[0]).refusal.code


def test_time_is_bounded_for_the_worst_queries():
    core = ServerCore(ENVELOPES)
    began = time.thread_time()
    for query in (b"\x91" * 256, b"\xdd\xff\xff\xff\xff", b"\x81\x01" * 128, b"\xdf\xff\xff\xff\xff" * 51):
        core.respond(query, clock_s=0.0)
    assert time.thread_time() - began < 0.5


def test_unusual_encoding_of_a_good_query():
    wide = b"\xdc\x00\x03\xc5\x00\x0cget_meta_msg\xcd\x00\x00\xcd\x00\x01"
    payload, clock = ServerCore(ENVELOPES).respond(wide, clock_s=7.0)
    assert (payload, decode_clock(clock)) == (ENVELOPES[0, 1], 7.0)
    narrow = b"\xdc\x00\x02\xc5\x00\x0cget_meta_msg\xcd\x00\x01"
    assert ServerCore(ENVELOPES).respond(narrow, clock_s=7.0) == (ENVELOPES[0, 1],)


def test_unknown_rank_and_not_ready_keep_the_dialects_frames():
    core = ServerCore(ENVELOPES)
    frames = core.respond(encode_query((0, 7), dialect_of(14)), clock_s=7.0)
    assert (code_of(frames), decode_clock(frames[1])) == ("unknown-rank", 7.0)
    assert "3 ranks are served" in decode_envelope(frames[0]).refusal.message
    empty = ServerCore().respond(encode_query((0, 0), dialect_of(2)), clock_s=7.0)
    assert (code_of(empty), len(empty)) == ("not-ready", 1)


def test_replace_swaps_everything():
    core = ServerCore(ENVELOPES)
    core.replace({(0, 0): b"other"})
    assert core.respond(encode_query((0, 0), dialect_of(2)), clock_s=0.0) == (b"other",)
    assert code_of(core.respond(GOOD, clock_s=0.0)) == "unknown-rank"
    with pytest.raises(ConfigurationError):
        core.replace({(0, -1): b""})


def test_deferred_queries_get_the_frames_they_expect():
    core = ServerCore(ENVELOPES)
    frames = core.respond(GOOD, wait_s=0.5, clock_s=3.0)
    assert (code_of(frames), decode_clock(frames[1])) == ("rate-limited", 3.0)
    assert decode_envelope(frames[0]).refusal.retry_after_s == 0.5
    assert len(core.respond(b"junk", wait_s=0.5, clock_s=3.0)) == 1
