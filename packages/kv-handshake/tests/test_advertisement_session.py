"""The session that asks for an advertisement, without input and output."""

import pytest

from kv_handshake import Advertisement, ConfigurationError, WireError
from kv_handshake._advertisement_session import AdvertisementRequest
from kv_handshake._endpoint import endpoint_of
from kv_handshake._server import ServerCore
from kv_handshake.testing import sample_envelopes

ADVERTISEMENT = Advertisement(engine_id="e", host="10.0.0.1", port=5600, dialect=14, compatibility_id="00ff")


def session():
    return AdvertisementRequest(endpoint_of("10.0.0.1", 5600)).new_session()


def ask(core):
    asker = session()
    assert (asker.queries_left, asker.queries_outstanding) == (1, 0)
    query = asker.next_query(now_s=0.0)
    assert (asker.queries_left, asker.queries_outstanding) == (0, 1)
    asker.receive_message(core.respond(query, clock_s=1.0), now_s=1.0)
    assert asker.is_over
    return asker


def test_an_advertisement_is_read_with_its_bytes():
    asker = ask(ServerCore(advertisement=ADVERTISEMENT.encode()))
    assert asker.error is None
    assert (asker.advertisement, asker.data) == (ADVERTISEMENT, ADVERTISEMENT.encode())
    asker.receive_message([b"late"], now_s=2.0)
    asker.fail(WireError("refused", "late"))
    assert asker.error is None


def test_a_refusal_is_named():
    asker = ask(ServerCore())
    assert asker.error.code == "refused"
    assert "no-advertisement" in str(asker.error)
    with pytest.raises(ConfigurationError) as caught:
        _ = asker.advertisement
    assert caught.value.code == "illegal-event"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], "unexpected-reply"),
        ([b""], "unexpected-reply"),
        ([b"{}"], "malformed-advertisement"),
        ([b"\xc1"], "malformed-envelope"),
        ([sample_envelopes()[0, 0]], "refused"),
    ],
)
def test_replies_that_hold_no_advertisement(frames, code):
    asker = session()
    asker.next_query(now_s=0.0)
    asker.receive_message(frames, now_s=1.0)
    assert asker.error.code == code


def test_a_reply_before_the_query_is_the_callers_fault():
    asker = session()
    asker.receive_message([b"{}"], now_s=0.0)
    assert (asker.error.code, asker.error.fault) == ("illegal-event", "local")
