"""Ways to learn of a peer's finished chunks: one-sided reads of its progress words, against replies of its process.

Both are asked once a millisecond for a second. *Latency* is from the question to the answer. *Loss* is the share of
pure-Python steps that the producer's main thread does not get done meanwhile, against a second in which nobody asks: it stands
for an engine's own work. Docs/adr/0018 says which figures decide what.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.testing import PeerProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

ROUNDS = 7
LENGTH_S = 1.0
PACE_S = 0.001
STEP_S = 0.001
WORDS = (64, 256)
TRANSPORTS: dict[str, dict[str, str]] = {"default": {}, "tcp": {"TLS": "tcp"}}


def run(report: Callable[[str], None]) -> list[dict[str, object]]:
    """Measure every case and return one mapping per number."""
    replies = _replies()
    report(f"replies: {_text(replies)}")
    rows: list[dict[str, object]] = []
    for transport, config in TRANSPORTS.items():
        for words in WORDS:
            mailbox = _mailbox(words, config)
            report(f"{words} progress words over {transport}: {_text(mailbox)}")
            rows += _rows(f"{words} words, {transport}", mailbox, replies)
    return rows


def _rows(case: str, mailbox: list[tuple[float, float]], replies: list[tuple[float, float]]) -> list[dict[str, object]]:
    late_s, reply_s = (median(late for late, _ in each) for each in (mailbox, replies))
    loss, reply_loss = (median(lost for _, lost in each) for each in (mailbox, replies))
    return [
        _row(f"latency p95, {case}", "ms", late_s * 1e3, reply_s * 1e3, ("<= 1 ms", late_s <= 1e-3)),
        _row(f"producer's loss, {case}", "share", loss, reply_loss, ("<= 0.2 of replies", loss <= 0.2 * reply_loss)),
    ]


def _row(name: str, unit: str, ours: float, baseline: float, goal: tuple[str, bool]) -> dict[str, object]:
    target, met = goal
    ratio = ours / baseline if baseline > 0 else float("inf")
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "baseline": baseline,
        "ratio": round(ratio, 3),
        "target": target,
        "met": met,
    }


def _text(figures: list[tuple[float, float]]) -> str:
    return ", ".join(f"p95 {late_s * 1e3:.2f} ms, loss {lost:.3f}" for late_s, lost in figures)


def _ask_for(length_s: float, ask: Callable[[], object]) -> float:
    """Ask at the pace for so long; return the 95th percentile of the seconds to an answer."""
    taken: list[float] = []
    end_s = time.perf_counter() + length_s
    while (began_s := time.perf_counter()) < end_s:
        ask()
        taken.append(time.perf_counter() - began_s)
        time.sleep(max(0.0, PACE_S - taken[-1]))
    return quantiles(taken, n=20)[-1]


# Mailbox -------------------------------------------------------------------------------------------------------------


def _mailbox(words: int, config: dict[str, str]) -> list[tuple[float, float]]:
    """Return (latency, loss) of each round; the words are a page of the producer's region."""
    producer = PeerProcess("streams-producer", page_bytes=8 * words, page_count=2, engine_config=config)
    memory = np.zeros((2, 8 * words), dtype=np.uint8)
    ended = threading.Event()

    def on_result(result: TransferResult) -> None:
        if result.outcome != "done":
            raise RuntimeError(result.message)
        ended.set()

    thread = TransferThread(
        "streams-consumer",
        [(memory.ctypes.data, memory.nbytes, 0, "DRAM")],
        on_result=on_result,
        on_notification=lambda *_: None,
        options=AgentOptions(backends=(BackendOptions(engine_config=config),)),
    )
    thread.start()
    try:
        mine = np.array([[memory.ctypes.data, 8 * words, 0, 8 * words, 2]], dtype=np.uint64)
        added = threading.Event()

        def add() -> None:
            thread.agent.add_peer(PeerSpec("p", producer.agent_metadata, mine, producer.rows, fence=producer.fence))
            added.set()

        thread.call_soon(add)
        if not added.wait(10):
            message = "the peer was not added within 10 s"
            raise TimeoutError(message)
        first = np.zeros(1, dtype=np.int32)
        number = 0

        def ask() -> None:
            nonlocal number
            number += 1
            ended.clear()
            name = f"poll-{number}"
            thread.call_soon(lambda: thread.agent.post_read(name, "p", first, first))
            if not ended.wait(10):
                message = "no answer within 10 s"
                raise TimeoutError(message)

        ask()
        return [
            _round(lambda: producer.begin("compute", LENGTH_S, STEP_S), producer.finish, ask) for _ in range(ROUNDS)
        ]
    finally:
        thread.close()
        producer.close()


def _round(begin: Callable[[], object], finish: Callable[[], int], ask: Callable[[], object]) -> tuple[float, float]:
    begin()
    alone = finish()
    begin()
    late_s = _ask_for(LENGTH_S * 0.95, ask)
    return late_s, 1 - finish() / alone


# Replies -------------------------------------------------------------------------------------------------------------


def _replies() -> list[tuple[float, float]]:
    """Return (latency, loss) of each round; a thread beside the computing one answers."""
    context = multiprocessing.get_context("spawn")
    commands, their_commands = context.Pipe()
    questions, their_questions = context.Pipe()
    process = context.Process(target=_answer, args=(their_commands, their_questions))
    process.start()
    their_commands.close()
    their_questions.close()
    try:

        def ask() -> object:
            questions.send_bytes(b"?")
            return questions.recv_bytes()

        ask()
        return [_round(lambda: commands.send(LENGTH_S), commands.recv, ask) for _ in range(ROUNDS)]
    finally:
        commands.close()
        questions.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _answer(commands: Connection[Any, Any], questions: Connection[Any, Any]) -> None:
    """Compute in the main thread when told, and answer with a table's worth of bytes from another."""
    table = bytes(8 + 4 * 128)

    def listen() -> None:
        try:
            while questions.recv_bytes():
                questions.send_bytes(table)
        except EOFError:
            return

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            commands.send(_compute(commands.recv()))
    except EOFError:
        return


def _compute(length_s: float) -> int:
    """Do what `compute` of a producer process does."""
    end_s, steps = time.monotonic() + length_s, 0
    while time.monotonic() < end_s:
        step_end_s = time.monotonic() + STEP_S
        while time.monotonic() < step_end_s:
            steps += 1
        time.sleep(0)
    return steps
