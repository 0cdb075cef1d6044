"""Protocols of streamed hand-overs in the scheduler's process: the request machines' questions, and the side channel's asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["AskClient", "AskListener", "StreamAnswer", "StreamCodec", "StreamQuestion", "StreamStanding", "StreamState"]


class StreamQuestion(Protocol):
    """Question of this engine for a hand-over, which goes to the engine that computes the prompt."""

    @property
    def request_id(self) -> str: ...
    @property
    def number(self) -> int:
        """Comes back with the answer, so that late answers are told apart."""
        ...

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def hand_over_id(self) -> str: ...
    @property
    def digest(self) -> str:
        """Digest of this engine's own prompt."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens under the digest."""
        ...

    @property
    def wants_final(self) -> bool: ...


class StreamAnswer(Protocol):
    """Answer of this engine to a peer's question."""

    @property
    def asker(self) -> str:
        """Name of the question, as `stream_question` had it."""
        ...

    @property
    def answer(self) -> Mapping[str, object]:
        """``kind`` (``offer``, ``final`` or ``no``) and what belongs to it."""
        ...


class StreamStanding(Protocol):
    """Answer that every further question for an id gets, also while a step runs or while this engine takes none."""

    @property
    def hand_over_id(self) -> str: ...
    @property
    def digest(self) -> str:
        """Digest of the prompt that it is for; empty for any."""
        ...

    @property
    def answer(self) -> Mapping[str, object] | None:
        """None: nothing stands for this id any more."""
        ...


class StreamState(Protocol):
    """Part of the request machines that asks and answers. Scheduler's thread only."""

    def stream_question(self, asker: str, question: Mapping[str, object]) -> None:
        """Take a peer's question: ``hand_over_id``, ``number``, ``digest``, ``tokens``, ``wants_final``."""
        ...

    def stream_cancelled(self, asker: str, hand_over_id: str) -> None:
        """Forget a peer's question that nobody waits for any more."""
        ...

    def take_stream_answers(self) -> Sequence[StreamAnswer]:
        """Return new answers to peers, each once."""
        ...

    def take_stream_standings(self) -> Sequence[StreamStanding]:
        """Return changes of the answers that stand, each once."""
        ...

    def take_stream_questions(self) -> Sequence[StreamQuestion]:
        """Return new questions of this engine, each once."""
        ...

    def take_stream_cancels(self) -> Sequence[tuple[str, int]]:
        """Return (request, number) of this engine's questions that nobody waits for any more, each once."""
        ...

    def stream_answered(self, request_id: str, number: int, answer: Mapping[str, object], *, now_s: float) -> bool:
        """Take the answer to a question of this engine; False for one that means nothing any more."""
        ...


class AskClient(Protocol):
    """Asks peers' listeners, from a thread of its own."""

    def ask(
        self, *, host: str, port: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> Callable[[], None]:
        """Ask and return at once a function that takes the ask back; `on_reply` gets (code, payload) once, on another thread.

        Only a peer that takes asks is asked; any other ends the ask with ``ask-unsupported``.
        """
        ...

    def close(self) -> None: ...


class AskListener(Protocol):
    """Hands peers' asks to this engine, and sends its answers."""

    def take_asks(self, on_ask: Callable[[int, bytes], None], on_gone: Callable[[int], None], *, wait_s: float) -> None:
        """Call `on_ask` with (ask id, payload) for each ask, `on_gone` for one that ended without an answer; before `start`."""
        ...

    def answer(self, ask_id: int, payload: bytes) -> None:
        """Send an answer, from any thread; to an ask that has ended it means nothing."""
        ...


class StreamCodec(Protocol):
    """Writes and reads the payloads of asks and answers; sealed by the first secret, opened by any."""

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
        """Return the answer to this very question; raises a coded error."""
        ...
