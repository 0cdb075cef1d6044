"""Attacks with real tickets, listeners and NIXL agents: each works on engines without keys and secrets, and is held with them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import LAYERS, TOKENS, Engine, page_of
from envelopes import rewritten
from figures import Figure
from prompts import Prompt

from kv_handshake import Codec, Listener
from kv_handshake.security import write_keypair
from vllm_adapter.config import Settings

Make = Callable[..., Engine]


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a fleet with a secret."""
    file = tmp_path / "secret"
    file.write_text("the secret of this fleet")
    file.chmod(0o400)
    return {"ticket_secrets": (str(file),)}


@pytest.fixture
def channel(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a fleet with one key pair."""
    folder = tmp_path / "keys"
    folder.mkdir()
    public, secret = map(str, write_keypair(folder, "fleet"))
    return {"side_channel_key": secret, "side_channel_server_key": public, "side_channel_clients": str(folder)}


def stolen(reader: Engine, request_id: str, victims: str, count: int) -> int:
    """Return how many of the victim's pages the reader's request holds now."""
    pages = (
        (reader.memory[0][layer][block], page_of(victims, layer, place))
        for (place, block), layer in itertools.product(enumerate(reader.held[request_id][:count]), range(LAYERS))
    )
    return sum(bool(np.array_equal(found, page)) for found, page in pages)


def attempt(reader: Engine, ticket: Any, tokens: int, prompt: Any = None) -> str:
    """Bring a ticket; wait for the read if there is one."""
    request_id = reader.start_decode(ticket, tokens, prompt=prompt)
    if reader.state.explain(request_id, now_s=time.monotonic())["state"] == "reading":
        reader.wait_received(request_id)
    return request_id


def refusal(engine: Engine, request_id: str) -> str:
    return str(engine.state.explain(request_id, now_s=time.monotonic())["rejected_code"])


@pytest.mark.parametrize("is_locked", [False, True])
def test_foreign_blocks_are_not_read(make: Make, secrets: dict[str, Any], is_locked: bool, figure: Figure) -> None:
    """An attacker's own live fence beside a victim's block ids: the whole of the victim's prompt, page by page."""
    settings = Settings(**secrets) if is_locked else Settings()
    producer, reader = make("P", settings=settings), make("D", settings=settings)
    tokens = 20 * TOKENS
    victim, victims_ticket = producer.prefill(tokens)
    _, ticket = producer.prefill(tokens)
    request_id = attempt(reader, {**ticket, "remote_block_ids": victims_ticket["remote_block_ids"]}, tokens)
    found = stolen(reader, request_id, victim, 20)
    figure(f"{'sealed' if is_locked else 'unsealed'}: {found} of {20 * LAYERS} foreign pages read")
    assert found == (0 if is_locked else 20 * LAYERS)
    if is_locked:
        assert refusal(reader, request_id) == "ticket-seal"
        reader.assert_takes(victims_ticket, victim, tokens)


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_ticket_is_not_bound_to_another_prompt_by_its_bearer(
    make: Make, secrets: dict[str, Any], is_locked: bool, figure: Figure
) -> None:
    """The digest alone protects nothing: whoever knows the other prompt can write its digest into the ticket."""
    settings = Settings(**secrets) if is_locked else Settings()
    producer, reader = make("P", settings=settings), make("D", settings=settings)
    tokens = 4 * TOKENS
    source, ticket = producer.prefill(tokens)
    prompt = Prompt(range(1, tokens + 1))
    request_id = attempt(reader, {**ticket, "kv_prompt": prompt.digest(tokens)}, tokens, prompt)
    found = stolen(reader, request_id, source, 4)
    figure(f"{'sealed' if is_locked else 'unsealed'}: {found} pages of a prompt under another one's tokens")
    assert found == (0 if is_locked else 4 * LAYERS)
    assert not is_locked or refusal(reader, request_id) == "ticket-seal"


HOSTS_LACKS = {"kv_fence", "kv_generation", "kv_dialect", "kv_nonce", "kv_prompt"}
"""Keys that tickets of vLLM's own connector do not have."""


@pytest.fixture
def squat() -> Iterator[Callable[..., int]]:
    """Return a function that serves another engine's metadata under a name of its own, and returns the port."""
    with contextlib.ExitStack() as made:

        def build(envelope: bytes, **options: Any) -> int:
            served = {(0, 0): rewritten(envelope, **options)}
            listener = made.enter_context(contextlib.closing(Listener("127.0.0.1", 0, payloads=served)))
            listener.start()
            return listener.port

        yield build


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_engine_that_serves_anothers_metadata_does_not_take_its_name(
    make: Make, squat: Callable[..., int], is_ours: bool, figure: Figure
) -> None:
    """Without secrets anybody can send a ticket that names such an engine; honest tickets go on to be read."""
    settings = Settings(enforce_handshake_compat=False)
    producer, reader = make("P", settings=settings), make("D", settings=settings)
    tokens = 3 * TOKENS
    source, ticket = producer.prefill(tokens)
    envelope = producer.workers[0].registration.envelope
    assert envelope is not None
    port = squat(envelope, engine_id="evil", is_ours=is_ours)
    _, attackers = producer.prefill(tokens)
    lie = {**attackers, "remote_engine_id": "evil", "remote_port": port}
    if not is_ours:
        lie = {key: value for key, value in lie.items() if key not in {"kv_fence", "kv_generation"}}
    reader.start_decode(lie, tokens)
    until = time.monotonic() + 10
    while time.monotonic() < until and not reader.received:
        reader.step()
        time.sleep(0.005)
    began = time.monotonic()
    reader.assert_takes(ticket, source, tokens)
    figure(f"the honest read took {1e3 * (time.monotonic() - began):.0f} ms beside the squatter")


@pytest.fixture(params=["open", "sealed", "keyed"])
def lock(
    request: pytest.FixtureRequest, secrets: dict[str, Any], channel: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return what a fleet is locked with, and its settings: nothing, a secret alone, side-channel keys alone."""
    return request.param, {"open": {}, "sealed": secrets, "keyed": channel}[request.param]


def test_a_stranger_neither_ends_nor_renews_a_lease(
    make: Make, lock: tuple[str, dict[str, Any]], figure: Figure
) -> None:
    """It knows the request's id, which is public, and the producer's agent."""
    name, keys = lock
    settings = Settings(kv_lease_duration=3.0, **keys)
    producer, reader = make("P", settings=settings), make("D", settings=settings)
    source, ticket = producer.prefill(3 * TOKENS)
    registration: Any = producer.workers[0]._registration
    payload = Codec().read_complete(str(ticket["remote_request_id"]), 1)
    for _ in range(3):
        registration.agent.call_soon(lambda: registration.leases.notified("nobody", payload))
    is_freed = frees(producer, source, is_due=name == "open")
    figure(f"{name}: the stranger {'freed' if is_freed else 'did not free'} the blocks")
    assert is_freed is (name == "open")
    if name != "open":
        reader.assert_takes(ticket, source, 3 * TOKENS)
        producer.wait_idle()


@pytest.mark.parametrize("make", ["nixl"], indirect=True)
def test_h11_a_ticket_that_names_anothers_request_frees_nothing(
    make: Make, squat: Callable[..., int], lock: tuple[str, dict[str, Any]], figure: Figure
) -> None:
    """By HTTP: a client reads its own blocks in another's name, so that the reader ends the other's lease.

    It does not know the other's nonce. It keeps its own, leaves it out, and names a listener that announces none.
    """
    name, keys = lock
    settings = Settings(enforce_handshake_compat=False, handshake_timeout_s=2.0, handshake_attempts=1, **keys)
    producer, reader = make("P", settings=settings), make("D", settings=settings)
    tokens = 3 * TOKENS
    victim, victims_ticket = producer.prefill(tokens)
    _, ticket = producer.prefill(tokens)
    envelope = producer.workers[0].registration.envelope
    assert envelope is not None
    port = squat(envelope, engine_id="P", is_ours=False)
    forged = {**ticket, "remote_request_id": victims_ticket["remote_request_id"]}
    nameless = {key: value for key, value in forged.items() if key != "kv_nonce"}
    elsewhere = {key: value for key, value in nameless.items() if key not in HOSTS_LACKS}
    is_freed = False
    for number, lie in enumerate((forged, nameless, {**elsewhere, "remote_port": port})):
        request_id = attempt(reader, lie, tokens)
        assert name != "sealed" or refusal(reader, request_id) == "ticket-seal"
        is_freed = frees(producer, victim, is_due=name == "open" and number == 2)
        assert number == 2 or not is_freed, number
    figure(f"{name}: naming another's request {'freed' if is_freed else 'did not free'} its blocks")
    assert is_freed is (name == "open")
    if name != "open":
        reader.assert_takes(victims_ticket, victim, tokens)


def frees(engine: Engine, request_id: str, *, is_due: bool) -> bool:
    """Return whether an engine frees a request: at last if that is due, else within 0.4 s."""
    until = time.monotonic() + (20 if is_due else 0.4)
    while request_id in engine.held and time.monotonic() < until:
        engine.step()
        time.sleep(0.02)
    return request_id not in engine.held
