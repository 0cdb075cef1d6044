"""Cost of sealed tickets and of a keyed side channel, each beside the same without, in one run.

- *Digest and seal* of a prompt of 131 072 tokens with its ticket of 8 192 blocks, beside one keyed pass of `hashlib` over the
  same tokens as bytes. Packing the list of tokens into bytes stands apart: a host that keeps them packed does not pay it.
- *Admission* of a ticket of 1 000 tokens, prompt digest included as the host asks for it, sealed beside unsealed; the last ticket
  was read before, as in an engine that runs.
- *First contact*: from the ticket's arrival until the first read of a fresh pair of engines has ended, with NIXL over DRAM. Pairs
  with keys and without take turns, and change who begins, so that a busy machine slows both down.

docs/performance.md quotes the figures.
"""

from __future__ import annotations

import hmac
import importlib
import logging
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from _rows import by_turns, row

from kv_handshake.security import write_keypair
from kv_scheduler_state import (
    SchedulerConfig,
    SchedulerState,
    TextPrompt,
    TicketReader,
    prefill_request_params,
    prompt_digest,
)

ROUNDS = 31
CONTACTS = 25
BLOCK_TOKENS = 16
LONG, SHORT = 131_072, 1_000
SECRET = b"the secret of this benchmark"
SEEDS: Any = {"fence_seed": 1, "nonce_seed": "n"}


def _state(*, is_sealed: bool, engine_id: str = "prefill-0") -> SchedulerState:
    config = SchedulerConfig(engine_id, "10.0.0.1", 5600, null_block=0, fence_slots=4, dialect=15, **SEEDS)
    return SchedulerState(config, secrets=(SECRET,) if is_sealed else ())


def _ticket(state: SchedulerState, tokens: int, prompt: TextPrompt) -> dict[str, Any]:
    blocks = [list(range(4096, 4096 + -(-tokens // BLOCK_TOKENS)))]
    state.arrive("p", prefill_request_params(), prompt_tokens=tokens, identity=prompt, now_s=0.0)
    state.allocate("p", block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
    state.take_step_plan(now_s=0.0)
    decision = state.finish("p", reason="length", block_ids=blocks, computed_tokens=tokens, identity=prompt, now_s=0.0)
    state.take_step_plan(now_s=0.0)
    state.report(sent=["p"], received=[], failed=[])
    return dict(decision.params or {})


def _digest_rows() -> list[dict[str, object]]:
    tokens = list(range(1000, 1000 + LONG))
    packed = array("q", tokens)
    raw = packed.tobytes()
    sealed = _state(is_sealed=True)
    seal: Any = sealed._producers.seal  # noqa: SLF001  (the seal alone, without the hooks around it)
    params = _ticket(sealed, LONG, TextPrompt(packed))
    ticket = TicketReader(sealed.config).read(params, "handoff")

    def digest_and_seal() -> None:
        prompt_digest(packed)
        seal.of(ticket)

    ours, keyed, packing = by_turns(
        ROUNDS, digest_and_seal, lambda: hmac.digest(SECRET, raw, "sha256"), lambda: array("q", tokens).tobytes()
    )
    return [
        row(f"digest-and-seal-{LONG}-tokens", "us", ours, keyed, "<= 1.5"),
        row(f"packing-{LONG}-tokens", "us", packing, keyed),
    ]


def _admission_rows() -> list[dict[str, object]]:
    tokens = list(range(1000, 1000 + SHORT))
    prompt = TextPrompt(tokens)
    readers = {is_sealed: _state(is_sealed=is_sealed, engine_id="decode-0") for is_sealed in (True, False)}
    tickets = {is_sealed: _ticket(_state(is_sealed=is_sealed), SHORT, prompt) for is_sealed in (True, False)}

    def admit(is_sealed: bool) -> None:
        state = readers[is_sealed]
        admission = state.arrive("d", tickets[is_sealed], prompt_tokens=SHORT, identity=prompt, now_s=0.0)
        if admission.role != "consumer":
            raise RuntimeError(admission.rejected_message)
        state.finish("d", reason="abort", block_ids=[[]], computed_tokens=0, identity=prompt, now_s=0.0)
        state.take_step_plan(now_s=0.0)

    # Turns of half a millisecond: what disturbs the machine for longer slows both down.
    sealed, unsealed = by_turns(20 * ROUNDS, lambda: admit(True), lambda: admit(False), repeat=10)
    return [row(f"admission-{SHORT}-tokens-sealed", "us", sealed, unsealed, "<= 1.3")]


def _contact_s(settings: Any) -> float:
    engines: Any = importlib.import_module("engines")  # the simulation's, whose folder `_contact_rows` adds
    tokens = engines.TOKENS
    made = closing(engines.Engine("P", settings=settings)), closing(engines.Engine("D", settings=settings))
    with made[0] as producer, made[1] as reader:
        _, ticket = producer.prefill(2 * tokens)
        begin = time.perf_counter()
        request_id = reader.start_decode(ticket, 2 * tokens)
        if not reader.wait_received(request_id):
            raise RuntimeError("the first read failed")
        return time.perf_counter() - begin


def _contact_rows() -> list[dict[str, object]]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "integration_tests" / "fakes"))
    logging.disable(logging.WARNING)
    from vllm_adapter.config import Settings

    with tempfile.TemporaryDirectory() as folder:
        public, secret = map(str, write_keypair(folder, "fleet"))
        keys = Settings(side_channel_key=secret, side_channel_server_key=public, side_channel_clients=folder)
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(CONTACTS):
            for is_keyed in (number % 2 == 0, number % 2 == 1):
                found[is_keyed].append(_contact_s(keys if is_keyed else Settings()))
    logging.disable(logging.NOTSET)
    keyed, plain = (1e6 * statistics.median(found[is_keyed]) for is_keyed in (True, False))
    return [row("first-contact-with-keys", "us", keyed, plain, "<= 1.3")]


def run() -> Iterator[dict[str, object]]:
    """Yield one row per figure (medians, taken in turns)."""
    for measure in (_digest_rows, _admission_rows, _contact_rows):
        yield from measure()
