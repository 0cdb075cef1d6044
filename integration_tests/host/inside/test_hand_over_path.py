"""How much code one plain hand-over runs on the decode side: functions and modules of ours, the first time left out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
from engine import prompt
from full_engine import FullEngine, hand_over

from kv_nixl_agent.testing import FakeFabric

MOST_FUNCTIONS = 220
MOST_MODULES = 52
"""A hand-over that runs more than these has grown: find what can be left out before raising them."""
MOST_STAYS = 16
"""Functions that take `kv_transfer_params`, in whatever form, and pass them on, from vLLM's hook to the posted read."""
FORMS = ("Arrival", "HandoffTicket", "ReadOrder", "Read")
"""Their forms after vLLM's dict, one made of the other; steps carry `ReadOrder`s in the two containers below."""
CONTAINERS = ("StepPlan", "StepOrders")
OURS = ("/vllm_adapter/", "/kv_handshake/", "/kv_nixl_agent/", "/kv_scheduler_state/", "/kv_topology/")


class Calls:
    """The functions that run while `counted`, on `threads`."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.threads: set[int] = set()
        self.is_counting = False
        self.params: object = None
        self.is_posted = False
        self.takers: set[CodeType] = set()
        self.stays: set[CodeType] = set()

    def begin(self, params: object) -> None:
        """Count another hand-over."""
        self.params, self.is_posted = params, False
        self.functions, self.takers, self.stays = set(), set(), set()

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not (self.is_counting and event == "call" and threading.get_ident() in self.threads):
            return
        code = frame.f_code
        is_ours = any(name in code.co_filename for name in OURS) and "/testing" not in code.co_filename
        if is_ours and not code.co_name.startswith(
            "<"
        ):  # comprehensions and lambdas belong to the function around them
            self.functions.add(code)
            self._follow(frame)

    def _follow(self, frame: FrameType) -> None:
        """Note which function passes the params on, or what was made of them, until the read is posted."""
        if self.is_posted or not any(map(self._holds, frame.f_locals.values())):
            return
        self.takers.add(frame.f_code)
        if frame.f_back is not None and frame.f_back.f_code in self.takers:
            self.stays.add(frame.f_back.f_code)
        self.is_posted = frame.f_code.co_name == "_post"

    def _holds(self, value: object) -> bool:
        name = type(value).__name__
        plan: Any = getattr(value, "plan", value)
        return value is self.params or name in FORMS or (name in CONTAINERS and bool(plan.reads))

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.is_counting = True
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.is_counting = False


def test_a_plain_hand_over_runs_few_functions(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, fabric, runs = Calls(), FakeFabric(), list[set[CodeType]]()
    monkeypatch.setattr(threading, "_profile_hook", calls.note)  # threads that start from here on are profiled
    producer = FullEngine(tmp_path / "p", monkeypatch, fabric)
    before = {thread.ident for thread in threading.enumerate()}
    consumer = FullEngine(tmp_path / "d", monkeypatch, fabric)
    try:
        hand_over(producer, consumer, "0", prompt(100))  # the handshake and other first times
        calls.threads = {thread.ident for thread in threading.enumerate() if thread.ident not in before}  # type: ignore[misc]
        calls.threads.add(threading.get_ident())
        for number in range(1, 40):
            ticket = producer.prefill(f"p{number}", prompt(100, seed=number))
            assert ticket is not None
            calls.begin(ticket)
            with calls.counted():
                consumer.add(f"d{number}", prompt(100, seed=number), params=ticket)
                consumer.until(received=f"d{number}")
            consumer.assert_has(f"d{number}", prompt(100, seed=number), producer.weights)
            with calls.counted():
                consumer.run()
            runs.append(calls.functions)
            if number >= 3 and len(calls.functions) <= MOST_FUNCTIONS:
                break
    finally:
        producer.close()
        consumer.close()
    functions = min(runs, key=len)  # timers come between, in most runs of a slow machine
    modules = {code.co_filename for code in functions}
    with capsys.disabled():
        print(f"\none warm hand-over, decode side: {len(functions)} functions in {len(modules)} modules")
        print(f"kv_transfer_params from the hook to the posted read: {len(calls.stays)} stays")
    assert 50 < len(functions) <= MOST_FUNCTIONS
    assert calls.is_posted
    assert 10 < len(calls.stays) <= MOST_STAYS
    assert len(modules) <= MOST_MODULES
