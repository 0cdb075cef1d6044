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
from processes import family_of, state_of
from proxy import Behaviour
from verdicts import judge_all

from kvdev.engines import Engine, metric_sum

MISBEHAVIOURS: Sequence[Behaviour] = ("delay", "drop", "drop-answers", "half-open", "cut-midway", "refuse")
"""Behaviours of the proxy before the side channel of a prefill engine; each has a row in `docs/failure-modes.md`."""
_TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
_RESTORED_WITHIN_S = 60.0
_LOOKS_EVERY_S = 0.2


@final
@dataclass
class Fault:
    """The span of a fault; the test says when it begins and ends."""

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


class Rewrite(Protocol):
    """Changes a ticket on its way."""

    def __call__(self, ticket: dict[str, Any], /) -> dict[str, Any]: ...


@contextlib.contextmanager
def judged(
    live: Live, kind: str, victims: Sequence[str], *, rewrite: Rewrite = dict, must_be_right: bool = False
) -> Iterator[Fault]:
    """Send requests before, during and after a fault; all end well, others are served meanwhile, and service is restored.

    Args:
        live: The fleet, all of it well.
        kind: Name of the fault.
        victims: Engines that the fault is about: pairs without them must be served as if there were none.
        rewrite: Changes each ticket on its way.
        must_be_right: Whether no request may fail at all, whatever engine is out.
    """
    fault = Fault()
    touched = live.load(seed=len(kind), workers=3, rewrite=rewrite)
    beside = [pair for pair in live.pairs() if not {pair.prefill, pair.decode} & set(victims)]
    others = Load(beside, live.prompts, seed=len(kind) + 1, workers=2, rewrite=rewrite)
    with running_load(touched), running_load(others) if beside else contextlib.nullcontext():
        time.sleep(2)
        yield fault
        assert fault.began_s < fault.ended_s, "the test does not say when the fault was on"
        restored_s = _wait_restored(live, fault, rewrite)
        _end_outages(live)
    deaths, asked = live.dead(), [*touched.asked, *others.asked]
    counts, bad = judge_all(asked, live.outages, FAILS)
    meanwhile = [each for each in others.asked if fault.covers(each)]
    print(f"{kind} of {victims}: {dict(counts)}, served again after {restored_s:.1f} s")
    assert not bad, bad[:5]
    assert counts["right"] > len(asked) / 3
    assert not must_be_right or counts["right"] == len(asked)
    assert not beside or (meanwhile and all(each.is_right for each in meanwhile)), "others were not served meanwhile"
    assert not deaths, [live.engines[name].last_words(6) for name in deaths]
    left = live.stranded()
    assert not left, f"held two leases later: {left}"
    unread = [pair for pair in live.pairs() if not _is_read(live, pair, rewrite)]
    assert not unread, f"computed in place of read: {unread}"


def revived(live: Live) -> Live:
    """Leave nothing of an earlier fault: engines that have ended start anew, and no outage goes on."""
    for name, engine in live.engines.items():
        engine.signal_all(signal.SIGCONT)
        if not engine.is_running:
            start_anew(live, name)
    _end_outages(live)
    return live


def start_anew(live: Live, name: str) -> None:
    """End an engine, if it lives, and start it on its ports."""
    live.kill(name)
    live.start_again(name)


def _end_outages(live: Live) -> None:
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
    before = metric_sum(decode.metrics(), _TRANSFERS)
    ticket = prefill.complete({**body, "kv_transfer_params": ASK_TICKET})["kv_transfer_params"]
    assert isinstance(ticket, dict), f"{pair.prefill} gives no ticket"
    decode.complete({**body, "kv_transfer_params": rewrite(ticket)})
    until = time.monotonic() + 5
    while metric_sum(decode.metrics(), _TRANSFERS) <= before and time.monotonic() < until:
        live.take_steps()
    return metric_sum(decode.metrics(), _TRANSFERS) > before


# --------------------------------------------------------------------------------------------------------- processes


def core_of(engine: Engine) -> int:
    """Return the scheduler process: of the server's descendants the one with the most memory."""
    return max(family_of(engine.pid)[1:], key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


@contextlib.contextmanager
def standing_still(live: Live, name: str) -> Iterator[None]:
    """Stop all processes of an engine for a while."""
    live.stop(name)
    try:
        until = time.monotonic() + 60
        while any(state_of(pid) != "T" for pid in family_of(live.engines[name].pid)):
            assert time.monotonic() < until, f"{name} goes on"
            time.sleep(0.01)
        yield
        assert all(state_of(pid) == "T" for pid in family_of(live.engines[name].pid)), f"{name} went on"
    finally:
        live.resume(name)


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
