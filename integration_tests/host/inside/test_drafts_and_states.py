"""Speculative decoding and prefix caching of state models: what is handed over, in vLLM's own scheduler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import (
    BLOCK,
    CACHED_STATE,
    FULL,
    PREFILL,
    STATE,
    STOP_TOKEN,
    WINDOW,
    Engine,
    hand_over,
    ids,
    prompt,
    tokens_of,
)
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as host_metadata
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from kv_handshake import Codec
from vllm_adapter.host import requests as host_requests
from vllm_adapter.host import vllm as host_vllm
from vllm_adapter.host.vllm import drop_prompt_tail, engine_facts

SCRATCH = 2
DRAFTER = replace(FULL, num_kv_heads=1, dtype=torch.bfloat16)
"""A drafter's own layers: a further group."""
CACHED_STATES = [
    CACHED_STATE,
    replace(CACHED_STATE, num_speculative_blocks=SCRATCH),
    replace(CACHED_STATE, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1),
]
KINDS = ["plain", "scratch", "checkpoint"]
"""Of Mamba-2 vLLM also keeps the state at the last block boundary within a prompt's last step, in a block of its own."""


# ------------------------------------------------------------------------------------------------------------- drafters


@pytest.mark.proves("drafter: equal ranks")
@pytest.mark.never_wrong("C1")
@pytest.mark.parametrize("batch_tokens", [256, 2 * BLOCK])
@pytest.mark.parametrize(
    "specs", [(FULL,), (FULL, WINDOW), (STATE, FULL), (FULL, DRAFTER)], ids=["dense", "sliding", "state", "drafter"]
)
def test_blocks_that_wait_for_drafts_are_not_handed_over(
    make_engine, specs: tuple[Any, ...], batch_tokens: int
) -> None:
    """Readers pair lists from their ends, so one such block too many would shift every page."""
    tokens = prompt(3 * BLOCK + (STATE in specs))  # the last computed token fills a block
    options = {"specs": specs, "prefix_caching": False, "draft_tokens": 3}
    producer = make_engine("P", batch_tokens=batch_tokens, **options)
    ticket = hand_over(producer, "p", tokens)
    whole = [number for number, spec in enumerate(specs) if spec in (FULL, DRAFTER)]
    assert ticket["remote_num_tokens"] == 3 * BLOCK
    for group in whole:
        assert len(producer.blocks("p")[group]) == 4  # the last is for drafts
        assert ticket["remote_block_ids"][group] == list(producer.blocks("p")[group][:3])
    consumer = make_engine("D", **options)
    consumer.add("d", tokens, params=ticket)
    consumer.step()
    (read,) = consumer.reads
    assert [len(ids(read.local_blocks)[group]) for group in whole] == [3 for _ in whole]
    consumer.run(received=["d"])
    producer.step(sent=["p"])
    producer.assert_nothing_left()


@pytest.mark.parametrize(
    ("ahead", "specs", "left"), [(1, (FULL,), 0), (4, (FULL,), 3), (1, (STATE, FULL), 1), (4, (STATE, FULL), 3)]
)
def test_the_tokens_that_a_drafter_reads_ahead_are_left_to_the_decode_engine(
    make_engine, monkeypatch: pytest.MonkeyPatch, ahead: int, specs: tuple[Any, ...], left: int
) -> None:
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda _self: ahead), raising=False)
    producer, consumer = (make_engine(name, specs=specs, prefix_caching=False) for name in "PD")
    ticket = hand_over(producer, "p", prompt(50))
    assert ticket["remote_num_tokens"] == 50 - left
    consumer.add("d", prompt(50), params=ticket)
    consumer.step()
    (read,) = consumer.reads
    assert tokens_of(read) == 50 - left
    consumer.step(received=["d"])
    assert consumer.step() == {"d": max(left, 1)}
    consumer.run()


def test_a_prompt_within_the_drafters_reach_is_computed_where_it_is_decoded(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda _self: 9), raising=False)
    producer, consumer = make_engine("P"), make_engine("D")
    consumer.add("d", prompt(5), params=hand_over(producer, "p", prompt(5)))
    assert consumer.step() == {"d": 5}
    assert [order.ticket.peer_request_id for order in consumer.orders("reads")] == ["p"]  # notified, not read
    consumer.run()


def _drafter(**change: Any) -> Any:
    """Stand in for a speculative configuration: the hash asks nothing else of it."""
    facts: dict[str, Any] = {"method": "eagle3", "parallel_drafting": False, "kv_cache_dtype": None, "layers": [2, 5]}
    facts["model"] = "draft"
    facts |= change
    resolved = PretrainedConfig(eagle_aux_hidden_state_layer_ids=facts["layers"])
    draft = SimpleNamespace(
        model=facts["model"],
        revision=None,
        code_revision=None,
        quantization=None,
        hf_config=resolved,
        hf_text_config=resolved,
    )
    return SimpleNamespace(
        method=facts["method"],
        use_eagle=lambda: facts["method"].startswith("eagle"),
        use_multi_module_mtp=lambda: False,
        draft_model_config=draft,
        parallel_drafting=facts["parallel_drafting"],
        kv_cache_dtype=facts["kv_cache_dtype"],
    )


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"kv_cache_dtype": "auto"}, True),  # inherited anyway
        ({"kv_cache_dtype": "fp8"}, False),
        ({"model": "another"}, False),
        ({"method": "eagle"}, False),
        ({"layers": None}, False),
        ({"parallel_drafting": True}, False),
        ({"method": "ngram"}, False),
    ],
)
def test_a_drafter_on_hidden_states_is_part_of_the_hosts_hash(producer, change: dict[str, Any], is_same: bool) -> None:
    config, cache = producer.config, producer.scheduler.kv_cache_config

    def digest(drafter: Any) -> str:
        config.speculative_config = drafter
        found = Codec().compatibility_hash(engine_facts(config, cache, is_worker=False).factors)
        assert found == host_metadata.compute_nixl_compatibility_hash(config, "")
        return found

    assert (digest(_drafter(**change)) == digest(_drafter())) == is_same
    assert (digest(_drafter(**change)) == digest(None)) == (change.get("method") == "ngram")


# ---------------------------------------------------------------------------------------------- states with a prefix


def _cached(make_engine: Any, name: str, state: Any, **options: Any) -> Engine:
    return make_engine(name, specs=(state, FULL), mamba_cache_mode="align", **options)


@pytest.mark.parametrize("batch_tokens", [256, 2 * BLOCK])
@pytest.mark.parametrize("tokens", [3 * BLOCK + 1, 3 * BLOCK + 2, 50, 5])
@pytest.mark.parametrize("state", CACHED_STATES, ids=KINDS)
def test_only_the_running_state_is_handed_over(make_engine, state: Any, tokens: int, batch_tokens: int) -> None:
    """A request holds states of earlier boundaries (or their placeholders) before it, and scratch behind it."""
    producer = _cached(make_engine, "P", state, batch_tokens=batch_tokens)
    ticket = hand_over(producer, "p", prompt(tokens))
    running = -(-(tokens - 1) // BLOCK) - 1
    held = producer.blocks("p")[0]
    assert len(held) == running + 1 + state.num_speculative_blocks
    assert ticket["remote_block_ids"][0] == [held[running]]
    assert held[running] != 0
    producer.step(sent=["p"])
    producer.assert_nothing_left()


@pytest.mark.proves("Mamba-2: prefix hits")
@pytest.mark.parametrize("state", CACHED_STATES, ids=KINDS)
def test_a_state_that_lags_behind_the_other_groups_hit_is_read_all_the_same(make_engine, state: Any) -> None:
    """The host may find more blocks of tokens than states; the read brings the state, so those blocks count."""
    producer, consumer = _cached(make_engine, "P", state), _cached(make_engine, "D", state)
    consumer.add("warm", prompt(5 * BLOCK + 3))  # a single step: a state is kept at its last boundary only
    consumer.run()
    tokens = prompt(4 * BLOCK) + prompt(2 * BLOCK, seed=3)  # four blocks in common
    consumer.take_over(producer, tokens)
    (read,) = consumer.reads
    states, whole = consumer.blocks("d")
    assert ids(read.local_blocks) == ((states[5],), whole[4:])
    assert tokens_of(read) == 2 * BLOCK - 1
    consumer.step(received=["d"])
    assert consumer.step() == {"d": 1}
    consumer.run()


@pytest.mark.parametrize("tokens", [3 * BLOCK + 1, 3 * BLOCK + 2, 50, 5])
@pytest.mark.parametrize("state", CACHED_STATES, ids=KINDS)
def test_a_later_prompt_hits_no_state_but_where_a_read_ended(make_engine, state: Any, tokens: int) -> None:
    """A read brings the state behind its last token; only where a block ends there, vLLM may find it again."""
    producer = make_engine("P", specs=(STATE, FULL), prefix_caching=False)
    consumer = _cached(make_engine, "D", state)
    consumer.take_over(producer, prompt(tokens))
    consumer.run(received=["d"])
    found = [block for block in consumer.scheduler.kv_cache_manager.block_pool.blocks if block.block_hash is not None]
    states = [block.block_hash_num_tokens for block in found if get_group_id(block.block_hash) == 0]
    assert states == ([tokens - 1] if (tokens - 1) % BLOCK == 0 else [])


@pytest.mark.proves("pages mirrored in host memory: proof")
@pytest.mark.parametrize("batch_tokens", [256, 3 * BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("tokens", [3 * BLOCK + 1, 50, 161])
@pytest.mark.parametrize("state", CACHED_STATES, ids=KINDS)
def test_the_mirror_gets_the_running_state_and_no_block_that_was_given_away(
    make_engine, monkeypatch: pytest.MonkeyPatch, state: Any, tokens: int, batch_tokens: int
) -> None:
    monkeypatch.setattr(host_vllm, "wants_host_buffer", lambda _config: True)
    producer = _cached(make_engine, "P", state, batch_tokens=batch_tokens)
    ticket = hand_over(producer, "p", prompt(tokens))
    saves = [blocks for _, blocks in producer.orders("saves")]
    assert [list(states) for states, _ in saves if states] == [ticket["remote_block_ids"][0]]
    assert {block for _, whole in saves for block in whole} == set(ticket["remote_block_ids"][1])
    producer.step(sent=["p"])
    producer.assert_nothing_left()


@pytest.mark.parametrize("change", [0, 1, 9])
def test_a_state_that_has_seen_too_much_is_not_read(make_engine, change: int) -> None:
    """Of a producer that kept the last token, or a ticket of a longer prompt."""
    producer, consumer = _cached(make_engine, "P", CACHED_STATE), _cached(make_engine, "D", CACHED_STATE)
    ticket = hand_over(producer, "p", prompt(50))
    ticket["remote_num_tokens"] += change
    consumer.add("d", prompt(50), params=ticket)
    consumer.step()
    assert len(consumer.reads) == (0 if change else 1)
    consumer.run(received=[] if change else ["d"])


# ------------------------------------------------------------------------------------------------- prompts of all kinds

WHOLE = 37
SHAPES: dict[str, tuple[bool, bool, bool]] = {
    "ids": (True, False, False),
    "embeds": (False, True, False),
    "ids-embeds": (True, True, False),
    "ids-mask": (True, False, True),
    "mixed": (True, True, True),
}
"""Whether a prompt has token ids, embeddings, and a mask of which position is which."""


def _request(shape: str, tokens: int = WHOLE) -> Request:
    has_ids, has_embeds, has_mask = SHAPES[shape]
    return Request(
        request_id="p",
        prompt_token_ids=prompt(tokens) if has_ids else None,
        prompt_embeds=torch.ones(tokens, 8) if has_embeds else None,
        prompt_is_token_ids=[position % 3 > 0 for position in range(tokens)] if has_mask else None,
        sampling_params=SamplingParams(max_tokens=7),
        pooling_params=None,
    )


def _lengths(request: Request) -> set[int]:
    copies = (request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids, request.all_token_ids)
    return {request.num_prompt_tokens, request.num_tokens, *(len(copy) for copy in copies if copy is not None)}


@pytest.mark.parametrize("tokens", [1, 3, WHOLE - 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_copies_of_a_prompt_are_shortened_together(shape: str, tokens: int) -> None:
    request = _request(shape)
    assert drop_prompt_tail(request, tokens)
    assert _lengths(request) == {WHOLE - tokens}
    assert request.max_tokens == 1
    # The model runner refuses a prompt of two lengths.
    state = CachedRequestState(
        req_id="p",
        prompt_token_ids=request.prompt_token_ids,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    assert state.num_prompt_tokens == WHOLE - tokens


@pytest.mark.parametrize("name", ["prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "_all_token_ids"])
def test_a_prompt_of_two_lengths_is_left_as_it_is(name: str) -> None:
    request = _request("mixed")
    setattr(request, name, getattr(request, name)[:-1])
    assert not drop_prompt_tail(request, 1)
    lengths = {
        key: len(getattr(request, key))
        for key in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "_all_token_ids")
    }
    assert lengths == {**dict.fromkeys(lengths, WHOLE), name: WHOLE - 1}
    assert (request.num_prompt_tokens, request.max_tokens) == (WHOLE, 7)


@pytest.mark.parametrize("tokens", [WHOLE, WHOLE + 1])
def test_no_prompt_is_shortened_to_nothing(tokens: int) -> None:
    request = _request("ids")
    assert not drop_prompt_tail(request, tokens)
    assert _lengths(request) == {WHOLE}


@pytest.mark.parametrize("specs", [(STATE, FULL), (FULL, WINDOW), (FULL,)], ids=["state", "sliding", "dense"])
@pytest.mark.parametrize(
    "skips", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=lambda it: next(iter(it))
)
def test_a_prompt_whose_client_asks_for_each_token_stays_whole(
    make_engine: Any, specs: tuple[Any, ...], skips: dict[str, Any]
) -> None:
    """vLLM's frontend expects logprobs of every prompt token; a state cannot be handed over then."""
    engine = make_engine("P", specs=specs, prefix_caching=False)
    tokens = prompt(3 * BLOCK - 1)  # a window leaves its last token to the reader
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": dict(PREFILL)}, **skips)
    sampling.update_from_generation_config({}, eos_token_id=50)
    request = Request(request_id="p", prompt_token_ids=list(tokens), sampling_params=sampling, pooling_params=None)
    engine.scheduler.add_request(request)
    assert _lengths(request) == {len(tokens)}
    while "p" not in engine.outputs:
        engine.step()
    ticket = engine.outputs["p"][-1].kv_transfer_params
    assert (ticket is None) is (STATE in specs)
    if ticket is not None:
        reader = make_engine("D", specs=specs, prefix_caching=False)
        reader.add("d", tokens, params=dict(ticket))
        reader.step()
        assert len(reader.reads) == (0 if WINDOW in specs else 1), "the window's block of the last token is gone"


@pytest.mark.never_wrong("A5")
@pytest.mark.parametrize("sampled", [[1, 2, 3, STOP_TOKEN], [1, STOP_TOKEN, 3, 7], [STOP_TOKEN, 2, 3, 7]])
def test_accepted_drafts_behind_the_end_of_an_answer_are_not_promised(make_engine: Any, sampled: list[int]) -> None:
    """Truth: the tokens that the client gets; vLLM's count of computed tokens goes on to the last accepted draft."""
    options = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": BLOCK}
    producer, decode, other = (make_engine(name, **options) for name in "PDQ")
    request = decode.take_over(producer, prompt(40), max_tokens=60)
    decode.step(received=["d"])
    while request.num_output_tokens < 4:
        decode.step()
    request.spec_token_ids = sampled[:3]
    decode.scheduler.num_spec_tokens = 3
    output = decode.scheduler.schedule()
    decode._take(output, ModelRunnerOutput(req_ids=["d"], req_id_to_index={"d": 0}, sampled_token_ids=[list(sampled)]))
    ticket = decode.ticket("d")
    whole = list(request.all_token_ids)
    assert len(whole) == 44 + sampled.index(STOP_TOKEN) + 1
    assert ticket["remote_num_tokens"] == min(len(whole), request.num_computed_tokens)
    assert len(ticket["kv_prompt"]) == 64
    turn = whole + prompt(30, seed=5)
    other.add("turn2", turn, max_tokens=1, params=ticket)
    other.step()
    (read,) = other.reads
    assert read.tokens <= len(whole)


def test_a_state_of_a_prompt_that_could_not_be_shortened_is_not_handed_over(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_requests, "drop_prompt_tail", lambda _request, _tokens: False)
    producer = make_engine("P", specs=(STATE, FULL), prefix_caching=False)
    producer.add("p", prompt(WHOLE), max_tokens=1, params=dict(PREFILL))
    producer.run()
    assert producer.outputs["p"][-1].kv_transfer_params is None
