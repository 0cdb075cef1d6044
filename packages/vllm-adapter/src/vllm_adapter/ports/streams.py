"""Protocols of streamed hand-overs in the scheduler's process: questions of the request machines, and the side channel's asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_scheduler_state.streams import StreamAnswer, StreamOutcome, StreamQuestion, StreamStanding

__all__ = [
    "AskClient",
    "AskListener",
    "StreamCodec",
    "StreamState",
]


class StreamState(Protocol):
    """Part of the request machines that asks and answers. Scheduler's thread only."""

    def stream_question(self, asker: str, question: Mapping[str, object]) -> None:
        """Process a peer's question: ``hand_over_id``, ``number``, ``digest``, ``tokens``, ``wants_final``."""
        ...

    def stream_cancelled(self, asker: str, hand_over_id: str) -> None:
        """Forget a peer's question that has been withdrawn."""
        ...

    def give_offers(self, is_on: bool) -> None:
        """Offer prompts from now on, or none while this engine could write no ticket for them."""
        ...

    def take_stream_answers(self) -> Sequence[StreamAnswer]:
        """Return new answers to peers, each once."""
        ...

    def take_stream_standings(self) -> Sequence[StreamStanding]:
        """Return changes of the published answers, each once."""
        ...

    def take_stream_questions(self) -> Sequence[StreamQuestion]:
        """Return new questions of this engine, each once."""
        ...

    def take_stream_outcomes(self) -> Sequence[StreamOutcome]:
        """Return the decisions against streaming prompts for which peers were asked, each once."""
        ...

    def take_stream_cancels(self) -> Sequence[tuple[str, int]]:
        """Return (request, number) of this engine's questions that are no longer needed, each once."""
        ...

    def stream_answered(self, request_id: str, number: int, answer: Mapping[str, object], *, now_s: float) -> bool:
        """Process the answer to a question of this engine; return False if the answer is obsolete."""
        ...


class AskClient(Protocol):
    """Sends asks to peers' listeners, from its own thread."""

    def ask(
        self, *, host: str, port: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> Callable[[], None]:
        """Send an ask and return at once a function that cancels it; `on_reply` gets (code, payload) once, on another thread.

        Only a peer that accepts asks is asked; for any other the ask ends with ``ask-unsupported``.
        """
        ...

    def close(self) -> None: ...


class AskListener(Protocol):
    """Passes peers' asks to this engine, and sends its answers."""

    def take_asks(self, on_ask: Callable[[int, bytes], None], on_gone: Callable[[int], None], *, wait_s: float) -> None:
        """Call `on_ask` with (ask id, payload) per ask, `on_gone` for an ask that ended unanswered; set before `start`."""
        ...

    def answer(self, ask_id: int, payload: bytes) -> None:
        """Send an answer, from any thread; no effect if the ask has ended."""
        ...


class StreamCodec(Protocol):
    """Encodes and decodes the payloads of asks and answers; sealed with the first secret, opened with any."""

    def question_payload(self, question: Mapping[str, object], secrets: Sequence[bytes]) -> bytes: ...
    def answer_payload(
        self, question: Mapping[str, object], answer: Mapping[str, object], secrets: Sequence[bytes]
    ) -> bytes: ...
    def read_question(self, payload: bytes, secrets: Sequence[bytes]) -> Mapping[str, object]:
        """Return the question, with its ``nonce``; raises a coded error."""
        ...

    def read_answer(
        self, payload: bytes, question: Mapping[str, object], secrets: Sequence[bytes]
    ) -> Mapping[str, object]:
        """Return the answer, verified to belong to this question; raises a coded error."""
        ...
