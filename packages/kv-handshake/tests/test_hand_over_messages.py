"""Messages of streamed hand-overs: bounded, sealed, and bound to their question."""

import random
from typing import Any

import msgspec
import pytest
from handshake_helpers import mutate

from kv_handshake import Codec, ConfigurationError, WireError

SECRET, OTHER = b"a fleet secret, 16+", b"the secret of another fleet"
QUESTION = {
    "hand_over_id": "0f" * 16,
    "number": 7,
    "nonce": "a1" * 16,
    "digest": "d1" * 32,
    "tokens": 1900,
    "wants_final": False,
}
TICKET = {"do_remote_prefill": True, "remote_block_ids": [[]], "kv_lease_s": 30.0}
OFFER = {"kind": "offer", "request_id": "cmpl-1", "slot": 3, "generation": 2**33 + 5, "tag": 5, "ticket": TICKET}
FINAL = {key: value for key, value in OFFER.items() if key != "tag"} | {"kind": "final"}
NO = {"kind": "no", "reason": "digest-mismatch"}
BLIND = {**NO, "media": (2, "d2" * 32)}
CODEC = Codec()


def refusal(read, *values):
    with pytest.raises(WireError) as caught:
        read(*values)
    return caught.value.code


@pytest.mark.parametrize("secrets", [(), (SECRET,), (SECRET, OTHER)])
def test_a_question_and_its_answers_survive_the_way(secrets):
    payload = CODEC.question_payload(QUESTION, secrets)
    assert len(payload) < 400
    question = CODEC.read_question(payload, secrets)
    assert question == QUESTION
    for answer in (OFFER, FINAL, NO, BLIND):
        read = CODEC.read_answer(CODEC.answer_payload(question, answer, secrets), QUESTION, secrets)
        assert {key: read[key] for key in answer} == answer


def test_only_the_fleets_seal_opens_a_message():
    sealed, plain = CODEC.question_payload(QUESTION, (SECRET,)), CODEC.question_payload(QUESTION, ())
    assert CODEC.read_question(sealed, (OTHER, SECRET)) == QUESTION
    assert CODEC.read_question(sealed, ()) == QUESTION
    assert refusal(CODEC.read_question, sealed, (OTHER,)) == "hand-over-seal"
    assert refusal(CODEC.read_question, plain, (SECRET,)) == "hand-over-seal"
    answer = CODEC.answer_payload(QUESTION, OFFER, (OTHER,))
    assert refusal(CODEC.read_answer, answer, QUESTION, (SECRET,)) == "hand-over-seal"


def test_every_changed_byte_breaks_the_seal():
    payload = CODEC.answer_payload(QUESTION, OFFER, (SECRET,))
    for at in range(len(payload)):
        changed = bytearray(payload)
        changed[at] ^= 1
        code = refusal(CODEC.read_answer, bytes(changed), QUESTION, (SECRET,))
        assert code in {"hand-over-seal", "malformed-hand-over"}, at


@pytest.mark.parametrize("change", [{"hand_over_id": "0e" * 16}, {"number": 8}, {"nonce": "a2" * 16}])
def test_an_answer_fits_its_own_question_alone(change):
    answer = CODEC.answer_payload(QUESTION, OFFER, (SECRET,))
    assert refusal(CODEC.read_answer, answer, {**QUESTION, **change}, (SECRET,)) == "hand-over-mismatch"


def test_a_question_is_no_answer_and_an_answer_no_question():
    question, answer = CODEC.question_payload(QUESTION, (SECRET,)), CODEC.answer_payload(QUESTION, NO, (SECRET,))
    assert refusal(CODEC.read_answer, question, QUESTION, (SECRET,)) == "malformed-hand-over"
    assert refusal(CODEC.read_question, answer, (SECRET,)) == "malformed-hand-over"


QUESTION_FAULTS = {
    "hand_over_id": ["0F" * 16, "0f" * 16 + "\n", ""],
    "number": [0, 2**53, True, 1.0],
    "nonce": ["a" * 31],
    "digest": ["d" * 63, b"d" * 64],
    "tokens": [0, 2**31 + 1],
    "wants_final": [1],
    "more": [1],
}
ANSWER_FAULTS = {
    "request_id": ["", "x" * 513],
    "slot": [-1, 2**24],
    "generation": [0, 2**53],
    "tag": [2**32],
    "kind": ["later"],
    "more": [1],
}


def each_of(faults):
    return [{name: value} for name, values in faults.items() for value in values]


def raw(**body):
    named = {("id" if key == "hand_over_id" else key): value for key, value in body.items()}
    return msgspec.msgpack.encode((b"", msgspec.msgpack.encode(named)))


@pytest.mark.parametrize("fault", each_of(QUESTION_FAULTS))
def test_questions_out_of_bounds_are_neither_written_nor_read(fault):
    with pytest.raises(ConfigurationError):
        CODEC.question_payload({**QUESTION, **fault}, ())
    assert refusal(CODEC.read_question, raw(**{"kind": "question", **QUESTION, **fault}), ()) == "malformed-hand-over"


def echoed(**values):
    return {**{key: QUESTION[key] for key in ("hand_over_id", "number", "nonce")}, **values}


@pytest.mark.parametrize("fault", each_of(ANSWER_FAULTS))
def test_answers_out_of_bounds_are_neither_written_nor_read(fault):
    with pytest.raises(ConfigurationError):
        CODEC.answer_payload(QUESTION, {**OFFER, **fault}, ())
    payload = raw(**echoed(**{**OFFER, "ticket": b"{}", **fault}))
    assert refusal(CODEC.read_answer, payload, QUESTION, ()) == "malformed-hand-over"


UNREADABLE = [{"ticket": ticket} for ticket in (b"", b"[]", b"{", b'{"a":1}x', b"null")] + [{"request_id": "a\nb"}]


@pytest.mark.parametrize("change", UNREADABLE)
def test_tickets_that_are_no_object_and_ids_that_cannot_be_printed_are_refused(change):
    payload = raw(**echoed(**{**OFFER, "ticket": b"{}", **change}))
    assert refusal(CODEC.read_answer, payload, QUESTION, ()) == "malformed-hand-over"


def test_unknown_reasons_and_tickets_that_are_too_long_are_not_written():
    tickets: list[Any] = [{"remote_block_ids": [[7] * 600_000]}, {1: object()}]
    for answer in ({"kind": "no", "reason": "because"}, *({**OFFER, "ticket": ticket} for ticket in tickets)):
        with pytest.raises(ConfigurationError):
            CODEC.answer_payload(QUESTION, answer, ())


def test_mutated_payloads_get_a_value_or_a_code():
    rng = random.Random(1)
    good = [CODEC.question_payload(QUESTION, ()), CODEC.answer_payload(QUESTION, OFFER, ())]
    codes = set()
    for _ in range(5000):
        frame = mutate(rng, rng.choice(good))
        for read in (lambda data: CODEC.read_question(data, ()), lambda data: CODEC.read_answer(data, QUESTION, ())):
            try:
                read(frame)
            except WireError as error:
                codes.add(error.code)
    assert codes >= {"malformed-hand-over", "hand-over-mismatch"}
