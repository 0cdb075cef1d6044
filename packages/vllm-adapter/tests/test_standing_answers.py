"""Answers that stand: the listener's thread gives them by itself, also while the engine is in a step or at rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream_wires import InMemory
from test_stream_channel import FINAL, OFFER, Pair, Question


@dataclass(frozen=True)
class Standing:
    """An answer that stands."""

    answer: dict[str, object] | None
    digest: str = "d1" * 32
    hand_over_id: str = "0f" * 16


def test_an_offer_is_given_while_a_step_runs_but_not_to_who_wants_the_final_ticket() -> None:
    pair = Pair(InMemory())
    pair.producer.standings.append(Standing(OFFER))
    pair.turn()
    pair.ask()
    assert [answer["kind"] for *_, answer in pair.consumer.answers_given] == ["offer"]
    assert not pair.producer.asked, "no step was needed"
    pair.ask(number=2, wants_final=True)
    assert len(pair.consumer.answers_given) == 1
    assert [question["wants_final"] for question in pair.producer.asked.values()] == [True]


def test_the_board_of_answers_has_a_bound() -> None:
    pair = Pair(InMemory())
    pair.producer.standings.extend(Standing(FINAL, hand_over_id=f"{number:032x}") for number in range(5000))
    pair.turn()
    assert len(pair.there._board) == 4096
    assert f"{4999:032x}" in pair.there._board


class _PublishedMeanwhile(dict[str, Any]):
    """A board on which an answer is published right after the listener's thread has looked for it."""

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        self[key] = "", FINAL
        return found


def test_an_answer_that_is_published_while_a_question_arrives_reaches_it_without_a_further_step() -> None:
    """The engine rests from then on: nobody would take the question out of the inbox."""
    pair = Pair(InMemory())
    channel: Any = pair.there
    channel._board = _PublishedMeanwhile()
    pair.consumer.questions.append(Question("127.0.0.1", pair.wire.port))
    pair.here.send()
    pair.here.receive(0.0)
    assert [answer["kind"] for *_, answer in pair.consumer.answers_given] == ["final"]
    assert not channel._questions
