"""Tickets and vLLM's own requests: a ticket serves the prompt that it was written for, and no other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine import BLOCK, PREFILL, hand_over, prompt
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.engine import FinishReason

from vllm_adapter.host.requests import RequestIdentity
from vllm_adapter.host.vllm import has_content_ids

TOKENS = prompt(40)


def _picture(content: str, offset: int, *, kind: str = "") -> MultiModalFeatureSpec:
    data = MultiModalKwargsItem({kind: MultiModalKwargsItem.dummy()["dummy"]}) if kind else None
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=content, mm_position=PlaceholderRange(offset=offset, length=4)
    )


def _digest(request: Any, tokens: int = 40, *, has_content: bool = True) -> str | None:
    return RequestIdentity(request, has_content_ids=has_content).digest(tokens)


@pytest.mark.never_wrong("A1")
def test_a_ticket_with_another_prompt_is_computed_here_and_poisons_nothing(producer, consumer) -> None:
    ticket = hand_over(producer, "p", TOKENS)
    other = [*TOKENS[:20], *prompt(20, seed=5)]
    consumer.add("wrong", other, params=ticket)
    assert consumer.step() == {"wrong": 40}
    assert consumer.reads == []
    consumer.run()
    consumer.add("honest", TOKENS, params=ticket)
    consumer.step()
    assert [order.request_id for order in consumer.reads] == ["honest"]
    consumer.run(received=["honest"])


def test_the_producer_of_a_request_refused_by_the_frontend_is_notified(producer, consumer) -> None:
    ticket = hand_over(producer, "p", TOKENS)
    consumer.add("refused", [0], max_tokens=1, params=ticket, is_refused=True)
    consumer.step()
    (seen,) = consumer.orders("reads")
    assert (seen.is_notify_only, seen.ticket.peer_request_id) == (True, ticket["remote_request_id"])
    consumer.run()


def test_the_stand_in_of_a_request_with_an_early_ticket_reads_nothing_and_is_no_refused_ticket(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends one after each request whose client has left: it must not look like a second reader."""
    extra: dict[str, Any] = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
    consumer = make_engine("D", **extra)
    early = {"id": "a" * 32, "host": "127.0.0.1", "port": 5600}
    params = {"do_remote_prefill": True, "do_remote_decode": False, "kv_stream": early}
    consumer.add("left", TOKENS, params=params)
    consumer.step()
    refused: list[object] = []
    side = consumer.scheduler.connector._scheduler_side
    monkeypatch.setattr(side, "_note_refusal", lambda *seen, **_: refused.append(seen))
    consumer.add("stand-in", [0], max_tokens=1, params=params, is_refused=True)
    consumer.step()
    assert refused == []
    consumer.abort("left")
    consumer.run()


@pytest.mark.never_wrong("A1")
def test_a_client_that_sends_the_prompt_of_refused_requests_gets_nothing(producer, consumer) -> None:
    ticket = hand_over(producer, "p", TOKENS)
    consumer.add("client", [0], max_tokens=1, params=ticket)
    consumer.run()
    assert consumer.orders("reads") == []


def _ticket_of_pictures(producer: Any, *pictures: MultiModalFeatureSpec) -> dict[str, Any]:
    """Return the ticket of a prompt with pictures, whose encoder the scheduler's half of an engine does not have."""
    request = producer.add("p", TOKENS, max_tokens=1, params=dict(PREFILL))
    output, ran = producer._run(set(), set(), set(), 7)
    request.mm_features = list(pictures)
    producer._take(output, ran)
    request.mm_features = []
    return dict(json.loads(json.dumps(producer.ticket("p"))))


CAT, DOG = _picture("cat", 4, kind="pixel_values"), _picture("dog", 20, kind="pixel_values")
PLACEHOLDERS = [_picture("placeholder-1", 4, kind="image_embeds"), _picture("placeholder-2", 20, kind="image_embeds")]


@pytest.mark.proves("multimodal inputs: proof")
@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("media", [[], [CAT], PLACEHOLDERS], ids=["none", "one of two", "placeholders"])
@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({}, {}),
        ({"remote_host": "0.0.0.0"}, {}),
        ({"remote_num_tokens": 40.0}, {}),
        ({}, {"prompt_logprobs": 1}),
        ({}, {"skip_reading_prefix_cache": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("overrules", [True, False])
def test_a_prompt_whose_pictures_went_to_prefill_alone_is_not_computed_without_them(
    make_engine, caplog: pytest.LogCaptureFixture, policy: str, media: list[Any], changes: dict[str, Any],
    asks: dict[str, Any], overrules: bool,
) -> None:  # fmt: skip
    """Truth: the pictures that each leg got. Whatever else is wrong with the ticket, this engine cannot see them.

    Of a prompt that must be computed whole, the host overrules what a connector says, or asks it nothing.
    """
    producer, consumer = make_engine("P"), make_engine("D", policy=policy)
    ticket = {**_ticket_of_pictures(producer, CAT, DOG), **changes}
    request = consumer.add("blind", TOKENS, params=ticket, media=media, **asks)
    request.skip_reading_prefix_cache = bool(asks) and overrules  # the scheduler of 0.30 does not look at it
    consumer.add("beside", prompt(30, seed=3))
    assert consumer.step() == {"beside": 30}
    consumer.run()
    (ended,) = consumer.outputs["blind"]
    assert (ended.finish_reason, list(ended.new_token_ids)) == (FinishReason.ERROR, [])
    assert len(consumer.outputs["beside"]) == 4
    assert consumer.orders("reads") == []
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "ticket-media-missing" in line.getMessage()
    assert "its uuid to decode" in line.getMessage()


EMBEDDED = _picture("embeddings of an encoder", 4, kind="image_embeds")
SOUND = _picture("sound", 4, kind="input_audio_embeds")  # Phi-4's name for a sound itself


@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize(
    ("theirs", "ours", "is_error"),
    [
        (EMBEDDED, [], True),
        (EMBEDDED, [PLACEHOLDERS[0]], True),
        (EMBEDDED, [EMBEDDED], False),
        (SOUND, [], True),
        (SOUND, [SOUND], False),
    ],
    ids=["an encoder's, none here", "an encoder's, placeholder here", "an encoder's on both legs", "sound", "both"],
)
@pytest.mark.parametrize("changes", [{}, {"remote_host": "0.0.0.0"}], ids=["ticket", "refused ticket"])
def test_what_an_encoder_made_of_a_picture_is_not_computed_without_it(
    make_engine, theirs: Any, ours: list[Any], is_error: bool, changes: dict[str, Any]
) -> None:
    producer, consumer = make_engine("P"), make_engine("D", policy="recompute")
    consumer.add("d", TOKENS, params={**_ticket_of_pictures(producer, theirs), **changes}, media=ours)
    assert consumer.state.must_fail("d") == is_error


@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize(
    ("tokens", "media", "code"),
    [
        (TOKENS, [DOG, CAT], ""),
        ([*TOKENS[:-1], 1], [], "ticket-prompt"),
        (TOKENS, [_picture("fox", 4, kind="pixel_values"), DOG], "ticket-prompt"),
    ],
    ids=["uuids or pictures on both legs", "another text", "another picture"],
)
def test_a_prompt_that_this_engine_can_compute_is_read_or_computed(
    producer, consumer, tokens: list[int], media: list[Any], code: str
) -> None:
    ticket = _ticket_of_pictures(producer, CAT, DOG)
    request = consumer.add("d", tokens, params=ticket, media=media)
    connector = consumer.connector
    assert connector.get_num_new_matched_tokens(request, 0) == ((0, False) if code else (40, True))
    assert not consumer.state.must_fail("d")
    assert (connector.get_kv_connector_stats().data.get("num_refused_tickets") or [""]) == [code]


@pytest.mark.never_wrong("A1")
def test_a_prompt_differs_from_every_other(producer) -> None:
    request = producer.add("p", TOKENS)
    plain = _digest(request)
    assert plain == _digest(producer.add("same", TOKENS))
    seen = {plain, _digest(request, 39), _digest(producer.add("other", prompt(40, seed=1)))}
    request.cache_salt = "tenant"
    seen.add(_digest(request))
    request.cache_salt, request.lora_request = None, LoRARequest("adapter", 1, "/one/path")
    seen.add(_digest(request))
    request.lora_request = None
    for pictures in ([_picture("a", 0)], [_picture("b", 0)], [_picture("a", 4)], [_picture("a", 0), _picture("b", 8)]):
        request.mm_features = pictures
        seen.add(_digest(request))
    request.mm_features = [_picture("a", 0), _picture("b", 39)]
    assert _digest(request, 39) not in seen
    request.mm_features = []
    request.prompt_embeds = torch.zeros((40, 8))
    seen.add(_digest(request))
    request.prompt_embeds = torch.ones((40, 8))
    seen.add(_digest(request))
    assert None not in seen
    assert len(seen) == 11
    assert _digest(request, 41) is None


def _store_adapter(folder: Path, seed: int, rank: int = 4) -> str:
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    for part in ("A", "B"):
        weights = {f"layers.{n}.q_proj.lora_{part}.weight": draw.standard_normal((rank, 32)) for n in range(2)}
        save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 16}))
    return str(folder)


@pytest.mark.proves("LoRA: proof")
@pytest.mark.never_wrong("A14")
def test_an_adapter_is_its_name_and_its_content(make_engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM numbers adapters as they are loaded, so a number stands for one load on one engine."""
    request = make_engine("P").add("p", TOKENS)
    one, same, other = (_store_adapter(tmp_path / name, seed) for name, seed in (("one", 1), ("same", 1), ("other", 2)))

    def of(name: str, number: int, path: str, *, in_place: bool = False) -> str | None:
        request.lora_request = LoRARequest(name, number, path, load_inplace=in_place)
        return _digest(request)

    first = of("sql", 1, one)
    assert first == of("sql", 7, same), "neither number nor path counts"
    assert len({first, of("sql", 2, other), of("chat", 3, one)}) == 3
    os.utime(tmp_path / "same" / "adapter_model.safetensors", ns=(1, 1))
    assert of("sql", 7, same) == first, "a file that was only touched is the same"
    assert "LoRA" not in caplog.text

    _store_adapter(tmp_path / "one", seed=2)
    after = of("sql", 1, one)
    assert after not in {first, of("sql", 2, other)}, "it is unknown which of the two vLLM has loaded"
    assert caplog.text.count("have changed since its first request") == 1
    assert of("sql", 1, one, in_place=False) == after
    assert of("sql", 8, one) == of("sql", 2, other), "loaded anew"
    _store_adapter(tmp_path / "same", seed=2)
    assert of("sql", 7, same, in_place=True) == of("sql", 2, other), "loaded in place"

    assert of("sql", 9, "/nowhere") == of("sql", 10, "s3://bucket/sql") != of("chat", 11, "/nowhere")
    assert caplog.text.count("identified by its name alone") == 3
    config = tmp_path / "one" / "adapter_config.json"
    config.write_text(config.read_text().replace("16", "32"))
    assert of("sql", 12, one) not in {first, after, of("sql", 2, other)}


@pytest.mark.never_wrong("A14")
def test_a_ticket_of_an_adapter_that_was_reloaded_on_one_side_is_computed_here(
    producer, consumer, tmp_path: Path
) -> None:
    old, new = (_store_adapter(tmp_path / f"sql-{seed}", seed) for seed in (1, 2))
    reads: list[int] = []
    for number, (theirs, ours) in enumerate(((old, old), (new, old)), 1):
        tokens = prompt(40, seed=number)
        ticket = hand_over(producer, f"p{number}", tokens, lora=LoRARequest("sql", number, theirs))
        consumer.add(f"d{number}", tokens, params=ticket, lora=LoRARequest("sql", 1, ours))
        scheduled = consumer.step()
        reads.append(len(consumer.reads))
        assert scheduled == ({} if number == 1 else {"d2": 40})
        consumer.run(**({"received": ["d1"]} if number == 1 else {}))
    assert reads == [1, 1]
    consumer.assert_nothing_left()


@pytest.mark.never_wrong("A1")
def test_pictures_without_content_ids_identify_no_prompt(producer, caplog: pytest.LogCaptureFixture) -> None:
    request = producer.add("p", TOKENS)
    assert RequestIdentity(request, has_content_ids=False).refusal == ""
    request.mm_features = [_picture("p-image-0", 0)]
    identity = RequestIdentity(request, has_content_ids=False)
    assert (identity.refusal, identity.digest(40)) == ("ticket-media-unidentified", None)

    def config(cache_gb: float, *, caches_prefixes: bool) -> Any:
        media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
        cache = SimpleNamespace(enable_prefix_caching=caches_prefixes)
        return SimpleNamespace(model_config=SimpleNamespace(multimodal_config=media), cache_config=cache)

    assert has_content_ids(producer.config)
    assert has_content_ids(config(4, caches_prefixes=False))
    assert has_content_ids(config(0, caches_prefixes=True))
    assert not has_content_ids(config(0, caches_prefixes=False))
    assert "mm_processor_cache_gb" in caplog.text


@pytest.mark.never_wrong("B7")
def test_children_of_one_request_share_one_read(producer, consumer) -> None:
    ticket = hand_over(producer, "p", TOKENS)
    for number in range(4):
        consumer.add(f"{number}_d", TOKENS, params=ticket)
    assert consumer.step() == {}
    assert [order.request_id for order in consumer.reads] == ["0_d"]
    assert consumer.step(received=["0_d"]) == {}
    assert consumer.step() == {"0_d": 1, **{f"{number}_d": 40 - 2 * BLOCK for number in (1, 2, 3)}}
    consumer.run()
    assert len(consumer.orders("reads")) == 1
    assert {len(outputs) for outputs in consumer.outputs.values()} == {4}


@pytest.mark.never_wrong("B10")
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_a_full_cache_makes_requests_wait_and_takes_no_lease(make_engine, role: str) -> None:
    """As with vLLM's own connector: the engine preempts its own request, which goes on when the readers have come."""
    engine = make_engine("P", blocks=1 + 8, role=role)
    for number in range(2):
        hand_over(engine, f"p{number}", prompt(2 * BLOCK, seed=number))
    request = engine.add("local", prompt(3 * BLOCK + 15, seed=7), max_tokens=30)
    engine.add("next", prompt(6 * BLOCK, seed=8), max_tokens=1)
    for _ in range(40):
        engine.step()
    assert request.num_preemptions == 1
    assert engine.state.lease_count == 2
    engine.step(sent=["p0", "p1"])
    engine.run()
    assert engine.orders("revokes") == []
    assert len(engine.outputs["local"]) == 30


@pytest.mark.never_wrong("B2")
def test_a_prefill_whose_id_cannot_be_notified_gets_no_ticket(producer) -> None:
    producer.add("HB:x", TOKENS, max_tokens=1, params=dict(PREFILL))
    producer.run()
    assert producer.outputs["HB:x"][-1].kv_transfer_params is None
