"""A fault on live engines under load: the requests that it touches, those beside it, and the return of service."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from live import FAILS, Live
from load import ASK_TICKET, Asked, Load, Pair, running_load
from recorder import family_of
from series import TRANSFERS, write_report
from verdicts import judge_all

from kvdev.engines import Engine, metric_sum

__all__ = [
    "KINDS",
    "MISBEHAVIOURS",
    "Fault",
    "FaultReport",
    "core_of",
    "end_outages",
    "first_limit",
    "judged",
    "limited",
    "revived",
    "standing_still",
    "start_anew",
    "used_descriptors",
]

KINDS = {
    "stop": "all processes of an engine are stopped (SIGSTOP), and go on",
    "scheduler-kill": "the scheduler process of an engine is killed, its API server is not",
    "descriptors-none": "no descriptor is left to the scheduler processes of a decode and of a prefill engine",
    "descriptors-few": "24 descriptors are left to the scheduler processes of a decode and of a prefill engine",
    "full-log": "nothing can be written to the logs of a decode and of a prefill engine",
    "net-delay": "each packet between the sides takes 50 ms longer",
    "net-loss": "1 of 100 packets between the sides is lost",
    "partition": "no packet passes between the sides",
    "prefill-unheard": "packets of prefill engines are lost, those of decode engines arrive",
    "decode-unheard": "packets of decode engines are lost, those of prefill engines arrive",
}
"""Faults of `test_faults.py` and `test_partitions.py`; each has a row in `docs/failure-modes.md`, and so have the next ones."""
MISBEHAVIOURS = {
    "delay": "side channel of a prefill engine: each piece of data comes 0.3 s late",
    "drop": "side channel: all that either side says is swallowed",
    "drop-answers": "side channel: all that the prefill engine says is swallowed",
    "half-open": "side channel: connections are accepted and never read",
    "cut-midway": "side channel: connections are reset after 100 bytes of an answer",
    "refuse": "side channel: connections are reset at once",
}
"""Behaviours of the proxy before the side channel of a prefill engine."""
_RESTORED_WITHIN_S = 60.0
_LOOKS_EVERY_S = 0.2


@final
@dataclass(frozen=True, slots=True)
class FaultReport:
    """Figures of a fault."""

    fault: str
    what: str
    victims: Sequence[str]
    seconds_on: float
    requests: int
    verdicts: dict[str, int]
    slowest_s: float
    """The slowest request that the fault touched and that got its text."""
    others: dict[str, float]
    """Requests that need no victim, sent and answered while the fault was on: their number, how many were right, the slowest."""
    restored_s: float
    """From the end of the fault until each pair has handed over a prompt that was sent after it."""
    deaths: Sequence[str]
    bad: list[str]


@final
@dataclass
class Fault:
    """The span of a fault; the test says when it begins and ends."""

    kind: str
    what: str
    victims: Sequence[str]
    began_s: float = 0.0
    ended_s: float = 0.0

    def begins(self) -> None:
        """Note the beginning."""
        self.began_s = time.monotonic()

    def ends(self) -> None:
        """Note the end."""
        self.ended_s = time.monotonic()

    def covers(self, asked: Asked) -> bool:
        """Whether a request was sent and has ended while the fault was on."""
        return self.began_s <= asked.started_s and asked.ended_s <= self.ended_s

    def touches(self, asked: Asked) -> bool:
        """Whether a request was under way while the fault was on."""
        return self.began_s <= asked.ended_s and asked.started_s <= self.ended_s


class Rewrite(Protocol):
    """Changes a ticket on its way."""

    def __call__(self, ticket: dict[str, Any], /) -> dict[str, Any]: ...


@contextlib.contextmanager
def judged(
    live: Live,
    kind: str,
    victims: Sequence[str],
    *,
    what: str = "",
    rewrite: Rewrite = dict,
    must_be_right: bool = False,
) -> Iterator[Fault]:
    """Send requests before, during and after a fault; all end well, others are served meanwhile, and service is restored.

    Args:
        live: The fleet, all of it well.
        kind: A name of `KINDS`, or a behaviour of the proxy.
        victims: Engines that the fault is about: pairs without them must be served as if there were none.
        what: The fault in words; default: those of its kind.
        rewrite: Changes each ticket on its way.
        must_be_right: Whether no request may fail at all, whatever engine is out.
    """
    fault = Fault(kind, what or KINDS[kind], victims)
    touched = live.load(seed=len(kind), workers=3, rewrite=rewrite)
    beside = [pair for pair in live.pairs() if not {pair.prefill, pair.decode} & set(victims)]
    others = Load(beside, live.prompts, seed=len(kind) + 1, workers=2, rewrite=rewrite)
    with running_load(touched), running_load(others) if beside else contextlib.nullcontext():
        time.sleep(2)
        yield fault
        assert fault.began_s < fault.ended_s, "the test does not say when the fault was on"
        restored_s = _wait_restored(live, fault, rewrite)
        end_outages(live)
    deaths = live.dead()
    report = _report(live, fault, touched.asked, others.asked, restored_s, deaths)
    write_report(f"fault-{kind}{'' if not what else '-' + victims[0]}", report)
    print(report)
    assert not report.bad, report.bad
    assert report.verdicts["right"] > report.requests / 3
    assert not must_be_right or report.verdicts["right"] == report.requests
    assert not beside or report.others["requests"] == report.others["right"] > 0, "others were not served meanwhile"
    assert not deaths, [live.engines[name].last_words(6) for name in deaths]
    left = live.stranded()
    assert not left, f"held two leases later: {left}"
    unread = [pair for pair in live.pairs() if not _is_read(live, pair, rewrite)]
    assert not unread, f"computed in place of read: {unread}"


def _report(
    live: Live,
    fault: Fault,
    touched: Sequence[Asked],
    others: Sequence[Asked],
    restored_s: float,
    deaths: Sequence[str],
) -> FaultReport:
    counts, bad = judge_all([*touched, *others], live.outages, FAILS)
    meanwhile = [each for each in others if fault.covers(each)]
    hit = [each for each in touched if fault.touches(each) and each.end == "text"]
    return FaultReport(
        fault=fault.kind,
        what=fault.what,
        victims=list(fault.victims),
        seconds_on=round(fault.ended_s - fault.began_s, 1),
        requests=len(touched) + len(others),
        verdicts={str(verdict): count for verdict, count in counts.items()},
        slowest_s=round(max((each.ended_s - each.started_s for each in hit), default=0.0), 1),
        others={
            "requests": len(meanwhile),
            "right": sum(each.end == "text" and each.text == each.prompt.answer for each in meanwhile),
            "slowest_s": round(max((each.ended_s - each.started_s for each in meanwhile), default=0.0), 1),
        },
        restored_s=round(restored_s, 1),
        deaths=list(deaths),
        bad=[repr(each)[:600] for each in bad[:5]],
    )


def revived(live: Live) -> Live:
    """Leave nothing of an earlier fault: engines that have ended start anew, and no outage goes on."""
    for name, engine in live.engines.items():
        engine.signal_all(signal.SIGCONT)
        if not engine.is_running:
            start_anew(live, name)
    end_outages(live)
    return live


def start_anew(live: Live, name: str) -> None:
    """End an engine, if it lives, and start it on its ports."""
    live.kill(name)
    live.begin_again(name)
    live.wait_serving(name)


def end_outages(live: Live) -> None:
    """Note that no engine is out any more."""
    for name in live.engines:
        now_s = time.monotonic()
        if live.outages.is_out(name, now_s, now_s):
            live.outages.end(name, now_s)


# ---------------------------------------------------------------------------------------------------------- restored


def _wait_restored(live: Live, fault: Fault, rewrite: Rewrite) -> float:
    """Ask each pair again and again, until each has answered a prompt by its ticket; return the seconds since the fault."""
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(running_load(Load([pair], live.prompts, seed=9, workers=1, rewrite=rewrite)))
            for pair in live.pairs()
        ]
        while True:
            served_s = [_first_served_s(load.asked) for load in loads]
            if all(served_s):
                return max(served_s) - fault.ended_s
            missing = [load.pairs[0] for load, at_s in zip(loads, served_s, strict=True) if not at_s]
            assert time.monotonic() - fault.ended_s < _RESTORED_WITHIN_S, f"not served again: {missing}, {live.held()}"
            time.sleep(_LOOKS_EVERY_S)


def _first_served_s(asked: Sequence[Asked]) -> float:
    return min((each.ended_s for each in asked if each.had_ticket and each.end == "text"), default=0.0)


def _is_read(live: Live, pair: Pair, rewrite: Rewrite) -> bool:
    """Whether the decode engine reads a prompt from the prefill engine, rather than compute it; both are at rest."""
    prompt = next(prompt for prompt in live.prompts if len(prompt.text) > 500)
    prefill, decode = live.engines[pair.prefill], live.engines[pair.decode]
    body: dict[str, object] = {"model": "tiny", "prompt": prompt.text, "max_tokens": 1, "temperature": 0}
    before = metric_sum(decode.metrics(), TRANSFERS)
    ticket = prefill.complete({**body, "kv_transfer_params": ASK_TICKET})["kv_transfer_params"]
    assert isinstance(ticket, dict), f"{pair.prefill} gives no ticket"
    decode.complete({**body, "kv_transfer_params": rewrite(ticket)})
    until = time.monotonic() + 5
    while metric_sum(decode.metrics(), TRANSFERS) <= before and time.monotonic() < until:
        live.take_steps()
    return metric_sum(decode.metrics(), TRANSFERS) > before


# --------------------------------------------------------------------------------------------------------- processes


def core_of(engine: Engine) -> int:
    """Return the scheduler process: of the server's descendants the one with the most memory."""
    return max(family_of(engine.pid)[1:], key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


@contextlib.contextmanager
def standing_still(live: Live, name: str) -> Iterator[None]:
    """Stop all processes of an engine for a while."""
    live.stop(name)
    try:
        until = time.monotonic() + 5
        while any(not _is_stopped(pid) for pid in family_of(live.engines[name].pid)):
            assert time.monotonic() < until, f"{name} goes on"
            time.sleep(0.01)
        yield
        assert all(_is_stopped(pid) for pid in family_of(live.engines[name].pid)), f"{name} went on"
    finally:
        live.resume(name)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def limited(pids: Sequence[int], kind: int, soft: Callable[[int], int]) -> Iterator[None]:
    """Lower a limit of live processes for a while, each to what `soft` says of it."""
    before = [(pid, resource.prlimit(pid, kind)) for pid in pids]
    try:
        for pid, (_, hard) in before:
            resource.prlimit(pid, kind, (soft(pid), hard))
        yield
    finally:
        for pid, limit in before:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, kind, limit)


def used_descriptors(pid: int) -> list[int]:
    """Return the numbers of a process's open descriptors."""
    return [int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()]


def first_limit(used: Sequence[int], spare: int) -> int:
    """Return the limit of descriptors under which so many more can be opened.

    Example: 0, 1 and 3 are in use, one is to be left: that is number 2, so the limit is 4, the next free one.
    """
    taken, number, left = set(used), 0, spare
    while number in taken or left:
        left -= number not in taken
        number += 1
    return number
