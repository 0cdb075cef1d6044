"""Two scheduler sides that stream: one computes a prompt in chunks, the other reads it, as vLLM's schedulers call them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prompts import Prompt
from scheduler_engine import BLOCK, Engine
from stream_wires import InMemory

from vllm_adapter.scheduler.chunks import ScheduledTokens
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.steps import StepReport

HAND_OVER = "0f" * 16
TEXT = "x" * 6 * BLOCK
"""A prompt of six blocks."""
RANK = (0, 0)
STREAMING: dict[str, Any] = {
    "stream_slots": 2,
    "peer_networks": ("10.0.0.0/8", "127.0.0.0/8"),
    "stream_reserve_fraction": 0.5,
    "cache_blocks": 20,
    "stream_ask_s": 10.0,
    "stream_retry_s": 1.0,
}
_OFF: dict[str, Any] = {"stream_slots": 0, "stream_reserve_fraction": 0.0}


class StreamPair:
    """An engine that prefills and one that decodes, each with its clock, its plans and the reports to it."""

    def __init__(self, *, prefill: Any = (), decode: Any = (), streams: tuple[bool, bool] = (True, True)):
        self.wire = wire = InMemory()
        serving, reading = streams
        there, here = ({**STREAMING, **(_OFF if not is_on else {})} for is_on in streams)
        there, here = {**there, **dict(prefill)}, {**here, **dict(decode)}
        self.prefill = Engine("P", wire=wire if serving else None, is_asked=True, **there)
        self.decode = Engine("D", wire=wire if reading else None, **here)
        self.computed: dict[str, int] = {}
        self.tokens_left = len(TEXT)
        """Tokens of the prompt that the prefill engine computes."""
        self.blocks = list(range(1, 7))
        """Blocks of the prompt at the prefill engine."""

    def early(self, *, serves: bool) -> dict[str, Any]:
        stream = {"id": HAND_OVER, "host": "127.0.0.1", "port": self.wire.port}
        return {"do_remote_decode": serves, "do_remote_prefill": not serves, "kv_stream": stream}

    # ------------------------------------------------------------------------------------------- the prefill engine

    def arrive(self, request_id: str = "p", text: str = TEXT, *, max_tokens: int = 1, **more: Any) -> None:
        arrival = Arrival(request_id, self.early(serves=True), len(text), Prompt(text), max_tokens=max_tokens, **more)
        self.prefill.side.arrived(arrival)

    def start(self, request_id: str = "p", *, hits: int = 0, preemptions: int = 0) -> None:
        """Give the request its first blocks; of a prompt with a prefix hit the first `hits` are computed."""
        self.computed[request_id] = hits * BLOCK
        self.prefill.allocate(request_id, self.blocks[: hits + 1], hits=hits, preemptions=preemptions)

    def chunk(self, request_id: str = "p", blocks: int = 2, *, is_fresh: bool = False) -> Any:
        """Compute so many blocks of the prompt in one step; return its plan."""
        return self.prefill.step(scheduled=(self.tokens(request_id, blocks * BLOCK, is_fresh=is_fresh),))

    def tokens(self, request_id: str, count: int, *, is_fresh: bool) -> ScheduledTokens:
        start = self.computed[request_id]
        stop = self.computed[request_id] = min(start + count, self.tokens_left)
        first = 0 if is_fresh else -(-start // BLOCK)
        ids = self.blocks[first : -(-stop // BLOCK)]
        return ScheduledTokens(request_id, [ids for _ in self.prefill.facts.groups], is_fresh, start, stop - start)

    def finish(self, request_id: str = "p", **ending: Any) -> tuple[bool, dict[str, Any] | None]:
        reported = {"reason": "length", "computed_tokens": len(TEXT), "identity": Prompt(TEXT), **ending}
        return self.prefill.side.finished(
            Ending(request_id, **reported), [self.blocks for _ in self.prefill.facts.groups]
        )

    def run(self, *, chunks: int = 3) -> Any:
        """Compute the prompt from its arrival on in so many chunks; return the last plan."""
        self.arrive()
        self.start()
        blocks = -(-6 // chunks)
        plans = [self.chunk(blocks=blocks, is_fresh=number == 0) for number in range(chunks)]
        return plans[-1]

    # ------------------------------------------------------------------------------------------- the decode engine

    def admit(self, request_id: str = "d", text: str = TEXT) -> None:
        self.decode.admit(request_id, self.early(serves=False), text)

    def matched(self, request_id: str = "d", computed: int = 0) -> int | None:
        tokens, is_async = self.decode.side.external_tokens(request_id, computed)
        assert is_async is bool(tokens)
        return tokens

    def load(self, request_id: str = "d", *, hits: int = 0) -> None:
        """Give a request its blocks, if it may have them."""
        tokens = self.matched(request_id, hits * BLOCK)
        assert tokens, "it may not be loaded"
        self.decode.allocate(request_id, [11, 12, 13, 14, 15, 16], external=tokens, hits=hits)

    def reported(self, request_id: str = "d", *, is_done: bool, rank: Any = RANK) -> None:
        """Report of a decode worker: its part of the stream is quiet."""
        received = (request_id,) if is_done else ()
        self.decode.side.update_output(StepReport(received=received, stream_ends=((request_id, rank, is_done),)))

    # ------------------------------------------------------------------------------------------- both

    def until(self, condition: Callable[[], object]) -> None:
        """Step both engines until something is so."""
        end_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end_s, f"it did not happen: {self.states()}"
            for engine in (self.decode, self.prefill):
                engine.step()

    def states(self) -> tuple[list[str], list[str]]:
        """States of the requests at the prefill engine, and at the decode engine."""
        return list(self.prefill.state.state_counts()), list(self.decode.state.state_counts())


def streaming(pair: StreamPair, chunks: int) -> None:
    """Let a request read a prompt of which so many chunks are scheduled."""
    pair.arrive()
    pair.admit()
    pair.start()
    for number in range(chunks):
        pair.chunk(is_fresh=number == 0)
    pair.until(lambda: pair.matched() is not None)
    pair.load()
    assert pair.decode.step().streams.watches
