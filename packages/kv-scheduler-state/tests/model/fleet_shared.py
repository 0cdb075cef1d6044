"""Parts that all engines of a random fleet share: the configuration, the clock, memory, truth and the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from kv_scheduler_state.config import GroupConfig
from kv_scheduler_state.ticket.prompt import prompt_digest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Configuration", "FleetIdentity", "FleetPrompt", "Note", "Results", "Shared", "draw_configuration"]

Note = tuple[str, str, str, str, int]
"""A notification: kind, request id at the producer, nonce, consumer, rank."""

_GROUPS: Final = (
    (GroupConfig("full", 4),),
    (GroupConfig("full", 4), GroupConfig("window", 4, window_tokens=6)),
    (GroupConfig("full", 8), GroupConfig("window", 4, window_tokens=9)),
    (GroupConfig("state", 4), GroupConfig("full", 4)),
    (GroupConfig("full", 4), GroupConfig("state", 4, scratch_blocks=1), GroupConfig("window", 4, window_tokens=5)),
)
_LEASES_S: Final = (1.0, 3.0, 7.0, 30.0)
_TOLERANCE_S: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class Configuration:
    """A fleet, as it was drawn.

    Attributes:
        groups: KV-cache groups of the model.
        workers: Workers of the producer.
        readers: Ranks of each consumer.
        consumers: Consumers that may hold one ticket.
        siblings: Requests of one consumer that may hold one ticket.
        fence_slots: Words of each worker's fence array.
        ids: Request ids that the producer uses again and again.
        lease_s: Length of leases.
        has_lag: Whether each engine orders a step before it knows the results of the step before (vLLM's `AsyncScheduler`).
    """

    groups: tuple[GroupConfig, ...]
    workers: int
    readers: int
    consumers: int
    siblings: int
    fence_slots: int
    ids: int
    lease_s: float
    has_lag: bool


@final
@dataclass(slots=True)
class FleetPrompt:
    """A request of the producer, and its hand-over."""

    text: int
    tokens: int
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    status: str = "waiting"
    start: int = 0
    preemptions: int = 0
    is_stepped: bool = False
    ticket: dict[str, Any] | None = None
    revoked_rounds: int = 0
    words: dict[int, int] = field(default_factory=dict[int, int])
    told: list[dict[str, set[int]]] = field(default_factory=list[dict[str, set[int]]])
    deadlines_s: list[float] = field(default_factory=list[float])
    left_s: list[float] = field(default_factory=list[float])
    ended: set[int] = field(default_factory=set[int])


@final
class FleetIdentity:
    """A prompt whose tokens all equal its text."""

    refusal = ""

    def __init__(self, text: int, tokens: int) -> None:
        self._text = text
        self._tokens = tokens

    def digest(self, tokens: int) -> str | None:
        return prompt_digest([self._text] * tokens) if tokens <= self._tokens else None

    def media(self, tokens: int) -> None:
        """Return None: the prompt has no media."""


def draw_configuration(below: Callable[[int], int]) -> Configuration:
    """Draw a configuration."""
    return Configuration(
        groups=_GROUPS[below(len(_GROUPS))],
        workers=1 + below(2),
        readers=1 + below(2),
        consumers=1 + below(2),
        siblings=1 + below(3),
        fence_slots=1 + below(3),
        ids=2 + below(3),
        lease_s=_LEASES_S[below(len(_LEASES_S))],
        has_lag=below(2) == 1,
    )


@final
class Results:
    """Delivers the results of an engine's steps: at once or, with a lag, when the next step has been ordered."""

    def __init__(self, *, has_lag: bool) -> None:
        self._has_lag = has_lag
        self._waiting: list[Callable[[], None]] = []

    def tell(self, result: Callable[[], None]) -> None:
        """Let the engine act on a result."""
        if self._has_lag:
            self._waiting.append(result)
        else:
            result()

    def step_ordered(self) -> None:
        """Note that the next step has been ordered."""
        waiting, self._waiting = self._waiting, []
        for result in waiting:
            result()


@final
class Shared:
    """The clock, the producer's memory and fence words, the hand-overs by nonce, and the queues of its workers."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below
        self.config = draw_configuration(below)
        self.now_s = 0.0
        self.is_healing = False
        self.memory: dict[int, object] = {}
        self.words: list[dict[int, int]] = [{} for _ in range(self.config.workers)]
        self.by_nonce: dict[str, FleetPrompt] = {}
        self.queues: list[list[Note]] = [[] for _ in range(self.config.workers)]
        self.past: list[Note] = []

    def tell(self, kind: str, order_id: str, nonce: str, consumer: str, rank: int) -> None:
        """Send a notification to every worker of the producer; now and then it is lost."""
        message = (kind, order_id, nonce, consumer, rank)
        for worker, queue in enumerate(self.queues):
            if self.is_healing or self.below(30):  # else it is lost
                queue.append(message)
                self.note(worker, message)
        self.past.append(message)

    def note(self, worker: int, note: Note) -> None:
        """Remember a notification that has reached a worker."""
        kind, _, nonce, consumer, rank = note
        prompt = self.by_nonce.get(nonce)
        if prompt is not None and kind == "beat":
            deadline_s = prompt.deadlines_s[worker]
            if self.now_s < deadline_s - _TOLERANCE_S:
                prompt.deadlines_s[worker] = max(deadline_s, self.now_s + self.config.lease_s * 2 / 3)
        elif prompt is not None:
            prompt.told[worker].setdefault(consumer, set()).add(rank)
