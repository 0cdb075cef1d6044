"""Both halves of the protocol by `Codec`, for transports of one's own: frames in, frames out."""

import pytest

from kv_handshake import Codec, LocalOffer
from kv_handshake.testing import sample_envelopes

FACTORS = {"model": "toy", "dtype": "float16"}


def core():
    return Codec.server_core(sample_envelopes(factors=FACTORS))


def meet(server, **options):
    session = Codec.client_session(LocalOffer(factors=FACTORS, policy="negotiated"), [(0, 0)], dialect=14, **options)
    frames = server.respond(session.next_query(now_s=0.0), clock_s=5.0)
    session.receive_message(frames, now_s=0.5)
    return session


def test_a_handshake_without_sockets():
    server, engine_id = core(), "engine-a"
    session = meet(server, engine_id=engine_id)
    assert (session.error, session.is_over) == (None, True)
    assert session.peers[0, 0].engine_id == engine_id
    assert session.clock_offset_s == pytest.approx(4.75)
    assert server.statistics() == {"answered": 1}
