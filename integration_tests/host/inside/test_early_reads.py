"""Prompts that are read while they are computed, in vLLM's own scheduler: what waits behind them, and when words move."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from engine import BLOCK, prompt

from vllm_adapter.config import load_settings
from vllm_adapter.host import connector

HAND_OVER = "0f" * 16
STREAMING: dict[str, Any] = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
LONG = prompt(10 * BLOCK, seed=1)


@pytest.fixture(autouse=True)
def streams_may_hold_the_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(extra: Mapping[str, object]) -> Any:
        return msgspec.structs.replace(load_settings(extra)[0], stream_reserve_fraction=1.0), ()

    monkeypatch.setattr(connector, "load_settings", load)


def early(port: int, *, serves: bool) -> dict[str, Any]:
    """Return the params of a request that is read from an engine at this port, or served there."""
    stream = {"id": HAND_OVER, "host": "127.0.0.1", "port": port}
    return {"do_remote_decode": serves, "do_remote_prefill": not serves, "kv_stream": stream}


class Pair:
    """A prefill engine that computes two blocks of a prompt in a step, and a decode engine that reads them meanwhile."""

    def __init__(self, make: Callable[..., Any], **decode: Any) -> None:
        self.prefill = make("P", batch_tokens=2 * BLOCK, **STREAMING)
        self.decode = make("D", **{**STREAMING, **decode})
        self.port = self.prefill.prefill("first", prompt(BLOCK, seed=9))["remote_port"]
        self.answers: list[int | None] = []
        matched = self.decode.connector.get_num_new_matched_tokens

        def noted(request: Any, computed: int) -> Any:
            answer = matched(request, computed)
            if request.request_id == "d1":
                self.answers.append(answer[0])
            return answer

        self.decode.connector.get_num_new_matched_tokens = noted

    def begin(self) -> None:
        """Compute the first blocks of the prompt, and queue its reader."""
        self.prefill.add("p1", LONG, max_tokens=1, params=early(self.port, serves=True))
        self.decode.add("d1", LONG, params=early(self.port, serves=False))
        self.prefill.step()

    @property
    def is_offered(self) -> bool:
        return "consumer-offered" in self.decode.state.state_counts()


def leased(pair: Pair) -> None:
    """Let too few blocks be free: those of a lease are not."""
    pair.decode.prefill("lease", prompt(5 * BLOCK, seed=2))
    assert pair.decode.free_blocks < 10


def kept(pair: Pair) -> None:
    """Let enough be free, of which vLLM keeps some for prompts under way."""
    pair.decode.scheduler._inflight_prefill_reserved_blocks = lambda: 5
    assert pair.decode.free_blocks >= 10


@pytest.mark.parametrize(("shortage", "is_notified"), [(leased, False), (kept, True)])
def test_a_request_behind_an_offer_without_blocks_has_its_turn(
    make: Callable[..., Any], shortage: Callable[[Pair], None], is_notified: bool
) -> None:
    """vLLM's round ends at the first request without blocks, which it is to begin."""
    pair = Pair(make, blocks=14)
    shortage(pair)
    pair.begin()
    pair.decode.until(lambda: pair.is_offered)
    began_s, steps, ran = time.monotonic(), 30, 0
    for number in range(steps):
        pair.decode.add(f"own{number}", prompt(BLOCK, seed=20 + number), max_tokens=1)
        ran += f"own{number}" in pair.decode.step()
    assert pair.is_offered
    rounds = 2 + (time.monotonic() - began_s) / 0.25 if is_notified else 0
    assert len([answer for answer in pair.answers if answer is not None]) <= rounds
    assert ran >= steps - rounds


def test_a_withdrawn_hand_over_is_computed_at_once(make: Callable[..., Any]) -> None:
    """Its prefill request failed before the engine saw it; a decode engine waits 30 s for it unless the router says so."""
    pair = Pair(make)
    pair.decode.add("d1", LONG, max_tokens=1, params=early(pair.port, serves=False))
    for _ in range(20):
        pair.decode.step()
        time.sleep(0.01)
    assert pair.answers[-1] is None
    params = early(pair.port, serves=True)
    params["kv_stream"]["withdraw"] = True
    pair.prefill.add("w", [0], max_tokens=1, params=params)
    while "w" not in pair.prefill.outputs:
        pair.prefill.step()
    assert pair.prefill.outputs["w"][-1].kv_transfer_params is None
    assert pair.prefill.free_blocks == 63 - 1, "only the first prompt is leased"
    began_s = time.monotonic()
    pair.decode.until(lambda: "d1" in pair.decode.outputs)
    assert time.monotonic() - began_s < 20


@pytest.mark.never_wrong("B13")
def test_two_engines_that_wait_for_each_others_blocks_go_on_without_an_error(make: Callable[..., Any]) -> None:
    """Each has leased 10 of 13 blocks to two requests of the other, which need 5 blocks each and renew those leases."""
    engines = {name: make(name, blocks=14, policy="fail") for name in "AB"}
    prompts = {
        f"{name}{number}": prompt(5 * BLOCK, seed=3 + number + 5 * (name == "A")) for name in "AB" for number in (1, 2)
    }
    tickets = {key: engines[key[0]].prefill(f"p{key}", tokens) for key, tokens in prompts.items()}
    for key, tokens in prompts.items():
        engines["B" if key[0] == "A" else "A"].add(f"d{key}", tokens, params=tickets[key])
    began_s = time.monotonic()
    while any(engine.scheduler.requests for engine in engines.values()):
        assert time.monotonic() - began_s < 60, "a lease lasts for 30 s, and each heartbeat renews it"
        for engine in engines.values():
            engine.step()
        time.sleep(0.002)
    for name, engine in engines.items():
        peer = "B" if name == "A" else "A"
        assert {key: len(engine.outputs[f"d{peer}{key}"]) for key in (1, 2)} == {1: 4, 2: 4}, "tokens of each answer"
        assert engine.received == {f"d{peer}1": True}, "the older read was made"
        assert engine.orders("revokes") == []
        engine.assert_nothing_left()
    assert time.monotonic() - began_s > 0.9, "blocks may become free meanwhile"


def test_the_word_of_a_preempted_prompt_moves_before_the_step_writes_into_its_blocks(make: Callable[..., Any]) -> None:
    """A running request takes the last block, so that the prompt behind it is preempted at its last chunk."""
    engine = make("E", blocks=14, batch_tokens=2 * BLOCK, **STREAMING)
    engine.add("own", prompt(3 * BLOCK - 2, seed=4), max_tokens=32)
    engine.step()
    engine.step()
    fences = engine.side._registration.agent._agent._fences
    stand: dict[int, int] = {}
    moved: list[int] = []
    computes = engine._compute

    def seen(request_id: str, tokens: int) -> None:
        """Look at the words while the step writes."""
        streams = engine.plans[-1].plan.streams
        for void in streams.voids:
            assert fences.read(void.slot) != stand[void.slot], "a peer would take what is written now for its prompt"
            moved.append(stand.pop(void.slot))
        stand.update((opening.slot, opening.generation) for opening in streams.opens)
        assert {slot: fences.read(slot) for slot in stand} == stand
        computes(request_id, tokens)

    engine._compute = seen
    engine.add("p1", LONG, max_tokens=1, params=early(5600, serves=True))
    for _ in range(12):
        engine.step()
    assert moved
    assert engine.scheduler.requests["own"].num_preemptions == 0
