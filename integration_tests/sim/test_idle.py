"""CPU time of workers that have nothing to do, on real NIXL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from engines import TOKENS, Engine

from vllm_adapter.config import Settings

IDLE_S = 10.0
MOST_TURNS = 15
"""A second, of each transfer thread: it polls every 0.25 s, and faster while a probe of an idle peer (every 10 s) is answered.
The code decides how many turns there are; what one costs, the machine does."""
MOST_SHARE = 0.06
"""Of a core. A turn takes 0.5 to 1 ms, up to 4 ms beside busy neighbours: 0.004 on a calm machine, up to 0.03 on a busy one."""
MOST_OF_ALL = 0.3
"""Of a core, with NIXL's threads and those of the side channel. NIXL's progress thread by itself took 1.0."""

Make = Callable[..., Engine]


@pytest.mark.full
@pytest.mark.parametrize("make", ["nixl"], indirect=True)
@pytest.mark.parametrize("progress_thread", ["off", "on"])
def test_workers_at_rest_take_less_than_a_hundredth_of_a_core(
    make: Make, progress_thread: Literal["off", "on"], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(progress_thread=progress_thread)
    producer, consumer = make("P", settings=settings), make("D", settings=settings)
    _hand_over(producer, consumer)
    time.sleep(2)  # polling slows down by and by
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kv-nixl-")]
    assert len(threads) == 2
    agents: list[Any] = [engine.workers[0]._registration.agent for engine in (producer, consumer)]
    turns = [agent._turns for agent in agents]
    shares, everything = _shares(threads)
    rates = [(agent._turns - before) / IDLE_S for agent, before in zip(agents, turns, strict=True)]
    with capsys.disabled():
        alone = ", ".join(f"{share:.4f}" for share in shares)
        print(f"\nidle, in cores: transfer threads {alone}; two ranks with all their threads {everything:.4f}")
    assert max(rates) <= MOST_TURNS
    assert max(shares) < MOST_SHARE
    assert everything < MOST_OF_ALL
    _hand_over(producer, consumer)


def _shares(threads: list[threading.Thread]) -> tuple[list[float], float]:
    """Return the cores that each of the threads used in `IDLE_S`, and those of the whole process."""
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in threads]
    began_s, all_began_s = [time.clock_gettime(clock) for clock in clocks], time.process_time()
    time.sleep(IDLE_S)
    shares = [(time.clock_gettime(clock) - began) / IDLE_S for clock, began in zip(clocks, began_s, strict=True)]
    return shares, (time.process_time() - all_began_s) / IDLE_S


def _hand_over(producer: Engine, consumer: Engine) -> None:
    source, ticket = producer.prefill(3 * TOKENS)
    request = consumer.start_decode(ticket, 3 * TOKENS)
    assert consumer.wait_received(request)
    consumer.assert_has(request, source, 3 * TOKENS)
    consumer.finish(request)
    producer.wait_idle()
