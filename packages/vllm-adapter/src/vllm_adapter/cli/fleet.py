"""A fleet at one moment: the answers of all processes, merged into a row per engine, with speeds since the moment before."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.cli.status_table import troubles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_adapter.cli.asking import Answer

__all__ = ["EngineRow", "Fleet", "Waiting", "look"]

_MOST_WAITING = 5
_SUMS = (
    "reads",
    "streams",
    "reads_waiting_for_a_peer",
    "quarantined_transfers",
    "quarantined_bytes",
    "stalled_transfers",
    "stalled_bytes",
)
_COMPUTED = frozenset({"local", "prefilled", "complete"})
"""States of requests that the engine is computing: these wait for nothing but their own tokens."""
_WORST = ("dead", "stuck", "asleep", "drains", "running")
"""States of processes; an engine is in the first of them that one of its processes is in."""


@final
@dataclass(frozen=True, slots=True)
class EngineRow:
    """All processes of an engine.

    Attributes:
        engine_id: The engine.
        ranks: Ranks that answered.
        state: The worst state of its processes; empty for one of which only the scheduler answered.
        leases: Finished prompts whose blocks wait for a reader.
        leased_bytes: Memory that these keep.
        reads: Reads that are ordered and not over, summed over its ranks, like all that follows.
        streams: Streamed prompts that are followed.
        reads_waiting_for_a_peer: The part of them that waits for a handshake.
        quarantined_transfers: Transfers given up whose pages may still be written into.
        quarantined_bytes: Bytes of these.
        stalled_transfers: Transfers without progress.
        stalled_bytes: Bytes that these still have to bring.
        peers: Most engines that one of its ranks knows.
        transfers_done: Good transfers since its start.
        bytes_moved: Bytes of these.
        bytes_per_s: Speed since the moment before; None at the first look, or where a process is new.
        transfers_per_s: Good transfers a second, alike.
    """

    engine_id: str
    ranks: int
    state: str
    leases: int
    leased_bytes: int
    reads: int
    streams: int
    reads_waiting_for_a_peer: int
    quarantined_transfers: int
    quarantined_bytes: int
    stalled_transfers: int
    stalled_bytes: int
    peers: int
    transfers_done: int
    bytes_moved: int
    bytes_per_s: float | None
    transfers_per_s: float | None


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits.

    Attributes:
        engine_id: Its engine.
        request_id: The request.
        state: State of its machine.
        age_s: Time since its arrival.
        waits_for: The next event, and the process that has to bring it about.
    """

    engine_id: str
    request_id: str
    state: str
    age_s: float
    waits_for: str


@final
@dataclass(frozen=True, slots=True)
class Fleet:
    """A look at all engines.

    Attributes:
        answers: Answers of the processes, to compare with at the next look.
        rows: A row per engine.
        waiting: The oldest requests that wait, over all engines.
        troubles: Conditions to act on, in words.
    """

    answers: Sequence[Answer]
    rows: tuple[EngineRow, ...]
    waiting: tuple[Waiting, ...]
    troubles: tuple[str, ...]

    def as_values(self) -> dict[str, Any]:
        """Return everything but the answers as plain values."""
        rows, waiting = ([asdict(each) for each in part] for part in (self.rows, self.waiting))
        return {"engines": rows, "waiting": waiting, "troubles": list(self.troubles)}


def look(answers: Sequence[Answer], before: Sequence[Answer] = ()) -> Fleet:
    """Merge answers.

    Args:
        answers: Of all processes, now.
        before: The same at the moment before, for speeds.
    """
    engines: dict[str, list[Answer]] = {}
    for answer in answers:
        if "engine_id" in answer:
            engines.setdefault(str(answer["engine_id"]), []).append(answer)
    former = {_process(answer): answer for answer in before}
    rows = [_row(engine_id, parts, former) for engine_id, parts in engines.items()]
    return Fleet(answers, tuple(rows), _oldest(answers), tuple(troubles(answers)))


def _process(answer: Answer) -> tuple[object, ...]:
    return answer.get("engine_id"), answer.get("part"), answer.get("pid")


def _row(engine_id: str, parts: Sequence[Answer], former: dict[tuple[object, ...], Answer]) -> EngineRow:
    ranks = [answer for answer in parts if answer.get("part") != "scheduler"]
    schedulers = [answer for answer in parts if answer.get("part") == "scheduler"]
    sums = {name: sum(int(answer.get(name) or 0) for answer in ranks) for name in _SUMS}
    states = {_state(answer) for answer in parts}
    return EngineRow(
        engine_id=engine_id,
        ranks=len(ranks),
        state=next((state for state in _WORST if state in states), ""),
        leases=sum(int(answer.get("leases") or 0) for answer in schedulers),
        leased_bytes=sum(int(answer.get("leased_bytes") or 0) for answer in schedulers),
        **sums,
        peers=max((int(answer.get("peers") or 0) for answer in ranks), default=0),
        transfers_done=sum(int(_figure(answer, "transfers_done")) for answer in ranks),
        bytes_moved=sum(int(_figure(answer, "bytes_moved")) for answer in ranks),
        bytes_per_s=_speed(ranks, former, "bytes_moved"),
        transfers_per_s=_speed(ranks, former, "transfers_done"),
    )


def _state(answer: Answer) -> str:
    thread: dict[str, Any] = answer.get("thread") or {}
    if answer.get("is_draining"):
        return "drains"
    if answer.get("is_silent"):
        return "stuck"
    return str(thread.get("state") or ("asleep" if answer.get("is_asleep") else ""))


def _figure(answer: Answer, name: str) -> float:
    figures: dict[str, Any] = answer.get("figures") or {}
    return float(figures.get(name) or 0.0)


def _speed(ranks: Iterable[Answer], former: dict[tuple[object, ...], Answer], name: str) -> float | None:
    """Return how fast a count grew since the moment before, summed over the ranks.

    Example: two ranks counted 1000 and 4000 bytes more in 2 s: 2500 bytes a second.
    """
    speeds: list[float] = []
    for answer in ranks:
        earlier = former.get(_process(answer))
        if earlier is None:
            continue
        passed_s = float(answer.get("received_s", 0.0)) - float(earlier.get("received_s", 0.0))
        grown = _figure(answer, name) - _figure(earlier, name)
        if passed_s > 0 and grown >= 0:  # a registration that is made anew counts from 0
            speeds.append(grown / passed_s)
    return sum(speeds) if speeds else None


def _oldest(answers: Iterable[Answer]) -> tuple[Waiting, ...]:
    waiting = [
        Waiting(
            str(answer.get("engine_id", "")),
            str(entry.get("request_id", "")),
            str(entry.get("state", "")),
            float(entry.get("age_s") or 0.0),
            str(entry["waits_for"]),
        )
        for answer in answers
        for entry in answer.get("oldest_requests") or ()
        if entry.get("waits_for") and entry.get("state") not in _COMPUTED
    ]
    return tuple(sorted(waiting, key=lambda each: -each.age_s)[:_MOST_WAITING])
