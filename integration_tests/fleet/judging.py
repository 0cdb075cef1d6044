"""Judge a fleet by its ends: the texts of one engine alone, the hand-overs in its metrics, no lease left.

All fleets serve one model, so one plain engine answers for all of them. It runs once, before the first fleet starts, and
ends when it has answered every prompt that the tests may ask: engines share two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from kvdev.engines import EngineSpec, Launch, local_model, metric_sum, start_all

TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
FAILED = "vllm:nixl_num_failed_transfers_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
LIVE = "vllm:kv_transfer_live_requests"
SLOTS = "vllm:kv_transfer_fence_slots_used"
USAGE = "vllm:kv_cache_usage_perc"

IS_LONG = os.environ.get("KVDEV_LONG") == "1"
LEASE_S = 15
"""Half of the default: a test waits until an unrenewed lease has ended."""
REQUESTS = 200 if IS_LONG else 40
"""Prompts from 0 on of a rolling restart; the others are free for other tests that share its engines."""
PROMPTS = 260 if IS_LONG else 60
LONG_PROMPTS = range(1000, 1008)
"""Numbers of prompts of about 1 800 tokens."""
_ANSWER_TOKENS = 16


def fleet_python() -> Path:
    """Return the python that has the host, our packages and the fleets' own engines."""
    return Path(os.environ["KVDEV_FLEET_PYTHON"])


def model_folder() -> Path:
    """Return the model that every fleet serves, under the name `tiny`."""
    return local_model(Path(os.environ["KVDEV_UV"]), "dense", os.environ["KVDEV_VLLM"])[1]


def prompt(number: int) -> str:
    """Return a prompt of about 300 tokens, one for each character, that shares no block with that of another number."""
    words = 300 if number in LONG_PROMPTS else 60
    return f"{number:04d} " + " ".join(f"w{number * 7 + k * k % 97}" for k in range(words))


def request_body(text: str) -> dict[str, object]:
    """Return the greedy completion request that every fleet and the plain engine get for a prompt."""
    return {"model": "tiny", "prompt": text, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its HTTP status and text; status 0 is a connection that failed."""

    number: int
    status: int
    text: str


def _ask(url: str, timeout_s: float, number: int) -> Reply:
    data = json.dumps(request_body(prompt(number))).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return Reply(number, 200, str(json.load(reply)["choices"][0]["text"]))
    except urllib.error.HTTPError as error:
        return Reply(number, error.code, error.read().decode(errors="replace"))
    except (OSError, HTTPException) as error:
        return Reply(number, 0, repr(error))


def ask_all(url: str, numbers: Sequence[int], *, at_once: int = 4, timeout_s: float = 240) -> list[Reply]:
    """Send the prompts of these numbers, a few at a time, and return the replies in their order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(partial(_ask, url, timeout_s), numbers))


class Load:
    """Prompts of these numbers on a thread of its own, a few at a time: each once, and again and again while `is_needed`."""

    def __init__(self, url: str, numbers: Sequence[int], *, at_once: int, is_needed: bool = False) -> None:
        self.replies: list[Reply] = []
        self._url, self._numbers, self._at_once, self._is_needed = url, numbers, at_once, is_needed
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ended(self) -> list[Reply]:
        """Need no more, wait for the answers, and return them."""
        self._is_needed = False
        self._thread.join(timeout=240)
        assert len(self.replies) >= len(self._numbers)
        return self.replies

    def _run(self) -> None:
        count = len(self._numbers)
        while self._is_needed or len(self.replies) < count:
            numbers = [self._numbers[(len(self.replies) + n) % count] for n in range(self._at_once)]
            self.replies += ask_all(self._url, numbers, at_once=self._at_once)
            # Engines that start share the cores with those that answer.
            time.sleep(0.3)


class Alone:
    """The right answers, by the number of the prompt."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = dict(texts)

    def assert_same(self, replies: Sequence[Reply]) -> None:
        """Every reply came (HTTP 200) and has the text of one engine alone."""
        assert replies, "no request was made"
        refused = [reply for reply in replies if reply.status != 200]
        assert not refused, f"{len(refused)} of {len(replies)} were not answered: {refused[:4]}"
        different = [(reply, self._texts[reply.number]) for reply in replies if reply.text != self._texts[reply.number]]
        assert not different, f"{len(different)} of {len(replies)} differ (fleet's, alone): {different[:4]}"


@contextlib.contextmanager
def started_alone(launch: Launch) -> Iterator[Alone]:
    """Let one plain engine, without a connector, answer all prompts, and end it; `launch` starts it."""
    numbers = [*range(PROMPTS), *LONG_PROMPTS]
    spec = EngineSpec("fleet-alone", model_folder(), "0")
    with start_all([spec], fleet_python(), quiet=True, launch=launch) as (engine,):
        replies = ask_all(engine.url, numbers)
    assert all(reply.status == 200 for reply in replies), replies
    texts = {reply.number: reply.text for reply in replies}
    assert len(set(texts.values())) == len(texts), "two prompts have one answer: a mix-up would not show"
    yield Alone(texts)


def handed_over(pages: Sequence[str]) -> int:
    """Count the hand-overs on the metrics pages of all decode engines."""
    return round(sum(metric_sum(page, TRANSFERS) for page in pages))


def failures(pages: Sequence[str]) -> dict[str, float]:
    """Count the failed reads and the expired leases, by the metrics pages of all engines."""
    return {name: sum(metric_sum(page, name) for page in pages) for name in (FAILED, EXPIRED)}


def assert_nothing_failed(pages: Sequence[str], before: Mapping[str, float] | None = None) -> None:
    """No read failed and no lease expired, or none since the `failures` of before."""
    counts = failures(pages)
    assert counts == (before or dict.fromkeys(counts, 0.0)), counts


def held(pages: Sequence[str]) -> dict[str, float]:
    """Return what engines hold, by their metrics pages: requests with a hand-over, fence slots, the share of blocks in use."""
    return {name: sum(metric_sum(page, name) for page in pages) for name in (LIVE, SLOTS, USAGE)}


def assert_no_lease_left(
    pages: Callable[[], Sequence[str]],
    take_steps: Callable[[], object],
    within_s: float,
    at_rest: Mapping[str, float] | None = None,
) -> None:
    """No engine holds a lease, a fence slot or a block any more, or no more than `at_rest`.

    Engines take steps meanwhile, because they report with their steps. Where each step is itself a hand-over, which shows
    until the next one, `at_rest` is what the last ones hold.
    """
    until = time.monotonic() + within_s
    while True:
        take_steps()
        now = held(pages())
        if all(level <= (at_rest or {}).get(name, 0) for name, level in now.items()):
            return
        assert time.monotonic() < until, f"still held after {within_s:.0f} s: {now}, at rest {at_rest or 'nothing'}"
        time.sleep(1)
