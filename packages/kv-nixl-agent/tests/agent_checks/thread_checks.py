"""Checks of a transfer thread beside a stopped peer: the same bodies on the fake, and on real NIXL between two processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agent_checks.stage import expect
from agent_checks.stream_checks import Listener
from kv_nixl_agent.streams.polls import PAD_COUNT, StreamWatch
from kv_nixl_agent.thread import TransferThread
from kv_nixl_agent.values import PeerSpec

_LIMIT_S: Final = 60.0
_SLOWING_S: Final = 2.5
"""Time after which a thread with leftovers polls every 50 ms."""
_MOST_TURNS: Final = 60


@dataclass
class ThreadStage:
    """A started transfer thread and a producer with stream slots.

    Attributes:
        thread: The consumer's thread.
        producer: The other side.
        spec: Description of the producer.
    """

    thread: TransferThread
    producer: Any
    spec: PeerSpec

    def do(self, call: Callable[[], object]) -> None:
        """Run a call on the owner thread, and wait for it."""
        done = threading.Event()
        self.thread.call_soon(call)
        self.thread.call_soon(done.set)
        expect(done.wait(_LIMIT_S), "the thread ran no call")

    def watch(self) -> tuple[Listener, StreamWatch]:
        """Watch slot 0, from its first progress on."""
        listener = Listener()
        watches: list[StreamWatch] = []
        self.do(lambda: watches.append(self.thread.agent.watch_stream("p", 0, listener)))
        self.wait_for(lambda: bool(listener.progressed), "progress")
        return listener, watches[0]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition`."""
        end_s = time.monotonic() + _LIMIT_S
        while not condition():
            expect(time.monotonic() < end_s, f"{what} did not come within {_LIMIT_S} s")
            time.sleep(0.01)

    def turns(self, duration_s: float) -> float:
        """Return the number of turns of the thread in so long a time, from those in at least that."""
        before, began_s = self.thread.statistics()["thread_turns"], time.monotonic()
        time.sleep(duration_s)
        return (self.thread.statistics()["thread_turns"] - before) * duration_s / (time.monotonic() - began_s)

    def expect_rest(self, situation: str) -> None:
        """Fail if the thread takes many turns a second although nothing is awaited."""
        time.sleep(_SLOWING_S)
        turns = self.turns(1.0)
        expect(turns < _MOST_TURNS, f"{turns:.0f} turns a second {situation}")


def check_a_stopped_peer_leaves_the_thread_at_rest(stage: ThreadStage) -> None:
    """A poll that a stopped peer does not answer wakes the thread rarely once its watch has ended, also after its removal."""
    thread = stage.thread
    thread.allow_slow_polling(True)
    stage.do(lambda: thread.agent.add_peer(stage.spec))
    _, watch = stage.watch()
    stage.producer.stop()
    time.sleep(0.2)  # a poll is on the wire by now
    stage.do(watch.end)
    stage.expect_rest("without a watch of the stopped peer")
    stage.do(lambda: thread.agent.remove_peer("p"))
    stage.expect_rest("after the removal of the stopped peer")
    stage.producer.resume()
    stage.wait_for(lambda: thread.statistics()["stream_pads_free"] == PAD_COUNT, "the end of all polls")
    stage.do(lambda: thread.agent.add_peer(stage.spec))
    listener, watch = stage.watch()
    stage.do(watch.end)
    expect(not listener.ends, f"{listener.ends}")


THREAD_CHECKS: tuple[Callable[[ThreadStage], None], ...] = (check_a_stopped_peer_leaves_the_thread_at_rest,)
