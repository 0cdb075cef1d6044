"""Builders for tests of streamed hand-overs."""

from __future__ import annotations

from typing import Any

from scheduler_helpers import config

from kv_scheduler_state import SchedulerState

HAND_OVER = "0" * 31 + "7"
DIGEST = "d" * 64
PEERS = {"peer_networks": ("10.0.0.0/8",)}


class Prompt:
    """A prompt with one digest for any number of tokens, and without media."""

    def __init__(self, digest=DIGEST, *, refusal=""):
        self.value, self.refusal = digest, refusal

    def digest(self, tokens):
        return self.value if tokens else None

    def media(self, tokens):
        """Return None: the prompt has no media."""


def early(*, serves, hand_over_id=HAND_OVER, **changes):
    stream = {"id": hand_over_id, "host": "10.0.0.1", "port": 5600, **changes}
    return {"do_remote_decode": serves, "do_remote_prefill": not serves, "kv_stream": stream}


def producer(**changes):
    values = {"engine_id": "prefill-0", "stream_slots": 2, "fence_slots": 2, "fence_seed": 100, "tp": 1, **PEERS}
    return SchedulerState(config(**{**values, **changes}))


def consumer(**changes):
    values = {
        "engine_id": "decode-0",
        "host": "10.0.0.2",
        "tp": 1,
        "stream_reserve_fraction": 0.5,
        "cache_blocks": 20,
        "stream_ask_s": 10.0,
        "stream_retry_s": 1.0,
        **PEERS,
    }
    return SchedulerState(config(**{**values, **changes}))


def question(number=1, **changes):
    base = {"hand_over_id": HAND_OVER, "number": number, "digest": DIGEST, "tokens": 100, "wants_final": False}
    return {**base, **changes}


def run(state, events, request_id="p1", *, now_s=0.0):
    """Let things happen to a produced stream; a name stands for a call."""
    blocks = [[1, 2, 3, 4, 5, 6, 7]]
    for event in events:
        if event == "arrive":
            state.arrive(request_id, early(serves=True), prompt_tokens=100, identity=Prompt(), now_s=now_s)
        elif event == "allocate":
            state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=now_s)
        elif event in {"chunk", "last-chunk"}:
            is_last = event == "last-chunk"
            state.scheduled(
                request_id,
                new_block_ids=[blocks[0][3:] if is_last else blocks[0][:3]],
                is_prompt_complete=is_last,
                computed_tokens=100 if is_last else 48,
            )
        elif event == "whole":
            state.streams.produced.hand_over_whole(request_id)
        elif event == "preempt":
            state.preempt(request_id, now_s=now_s)
        elif event in {"length", "abort"}:
            values = {"block_ids": blocks, "computed_tokens": 100, "identity": Prompt(), "now_s": now_s}
            return state.finish(request_id, reason=event, **values)
        elif event == "plan":
            state.take_step_plan(now_s=now_s)
        else:
            getattr(state, event)(now_s=now_s)
    return None


def answer_of(state) -> dict[str, Any]:
    """The one new answer."""
    ((_, _, answer),) = state.streams.produced.take_answers()
    return answer


def offered(**changes) -> tuple[SchedulerState, dict[str, Any]]:
    """A producer with an offer out, and the offer."""
    state = producer(**changes)
    run(state, ["arrive", "allocate", "chunk"])
    state.streams.produced.ask("a", question())
    return state, answer_of(state)
