"""The memory registration that this engine's tickets may name, and the listener that serves it.

Theory of operation. A worker that was asleep registers its memory again, with other metadata and another generation. The host
reports every reset of the caches, which it makes whenever it discards the cache's memory, but not the sleep itself. So after a
reset the current registration is unknown, and no ticket is written. When the host wakes up, it collects the metadata of all
workers as at the start, before it resumes: tickets of the first step name the new registration. After a reset without a sleep
every step asks the ranks, until the output of a step contains the answers of all of them: the host finishes that step's
requests before it passes the output on, so a request that finishes meanwhile is answered without a ticket, and its prompt is
computed where it is decoded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.ports import HandshakeListener
    from vllm_adapter.steps import Rank, RankRegistration

__all__ = ["ServedRegistration"]

_logger = logging.getLogger("vllm.vllm_adapter")


@final
class ServedRegistration:
    """The latest reports of all ranks, served to peers from the first `serve` until `close`. Scheduler's thread only.

    Args:
        facts: This engine; its generation is that of the first registration.
        listener: Serves the ranks' envelopes; it has not been started yet.

    Attributes:
        is_sure: Whether `generation` is known to be the current one.
        generation: The generation that all ranks reported last.
        ranks: Ranks whose reports are needed.
    """

    def __init__(self, facts: EngineFacts, listener: HandshakeListener) -> None:
        self._name = facts.name
        self._listener = listener
        self._is_serving = False
        self.generation = facts.generation
        self.ranks: frozenset[Rank] = frozenset()
        self._registrations: dict[Rank, RankRegistration] = {}
        self._question = 0
        self.is_sure = True

    @property
    def question(self) -> int:
        """Number of the question for this step's orders; 0 for no question, also once all ranks have answered it.

        A rank without memory (asleep, or its transfer thread dead) answers once, and reports again by itself when it has memory.
        """
        is_answered = bool(self.ranks) and len(self._answers(self.ranks)) == len(self.ranks)
        return 0 if self.is_sure or is_answered else self._question

    def serve(self, envelopes: Mapping[Rank, bytes], ranks: Iterable[Rank], generation: int | None = None) -> None:
        """Serve these envelopes; the generation becomes unknown if that of any of `ranks`, all workers, is missing.

        A port that cannot be bound stops the engine here, with the reason.
        """
        self.ranks = frozenset(ranks)
        self._registrations.clear()  # they may come from workers that no longer exist
        is_whole = self.ranks <= envelopes.keys()
        if generation is not None and is_whole and self.ranks:
            self._question += not self.is_sure  # answers to an open question are older
            self.generation, self.is_sure = generation, True
        elif not (self.is_sure and is_whole):
            self.doubt()
        self._listener.replace(envelopes)
        if self._is_serving:
            return
        self._listener.start()
        self._is_serving = True
        self._log_served(len(envelopes), f"on port {self._listener.port}")

    def doubt(self) -> None:
        """Discard all earlier reports: the current registration is unknown until the ranks report again."""
        self.is_sure = False
        self._question += 1

    def update(self, registrations: Mapping[Rank, RankRegistration]) -> None:
        """Process reports of ranks: serve the envelopes of a new registration, and none until all ranks are ready."""
        if self.is_sure and all(one.envelope and one.generation == self.generation for one in registrations.values()):
            return
        self._registrations.update(registrations)
        ranks = self.ranks or self._registrations.keys()
        answers = self._answers(ranks)
        envelopes = {rank: one.envelope for rank, one in answers.items() if one.envelope is not None}
        generations = {answers[rank].generation for rank in envelopes}
        if len(envelopes) == len(ranks) and len(generations) == 1:
            self.generation = generations.pop()
            self.is_sure = True
            self._renew(envelopes)
            return
        if self.is_sure:
            self.doubt()
        if any(one.envelope is None or one.generation != self.generation for one in registrations.values()):
            self._renew({})

    def _renew(self, envelopes: Mapping[Rank, bytes]) -> None:
        if self._is_serving:
            self._listener.replace(envelopes)
            self._log_served(len(envelopes), "again" if envelopes else "until all are registered again")

    def _log_served(self, ranks: int, where: str) -> None:
        plural = "" if ranks == 1 else "s"
        _logger.info("side channel of engine %s serves %s rank%s %s", self._name, ranks or "no", plural, where)

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._is_serving:
            self._is_serving = False
            self._listener.close()

    def _answers(self, ranks: Iterable[Rank]) -> dict[Rank, RankRegistration]:
        """Return the registrations of the ranks that have answered the latest question."""
        known = {rank: self._registrations[rank] for rank in ranks if rank in self._registrations}
        return {rank: one for rank, one in known.items() if one.answer >= self._question}
