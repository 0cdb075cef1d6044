"""Keys of docs/security.md, turned on one after the other as an operator would: what they let through, and what they refuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import TOKENS, Engine

from vllm_adapter.config import Settings

Make = Callable[..., Engine]
HERE, ELSEWHERE = ("127.0.0.0/8",), ("10.0.0.0/8",)


@pytest.fixture
def secret(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    def write(text: str) -> tuple[str, ...]:
        file = tmp_path / text.replace(" ", "-")
        file.write_text(text)
        file.chmod(0o440)
        return (str(file),)

    return write


POLICIES: dict[str, dict[str, Any]] = {
    "require": {},
    "unsigned here": {"ticket_policy": "accept-unsigned", "unsigned_hosts": HERE},
    "unsigned elsewhere": {"ticket_policy": "accept-unsigned", "unsigned_hosts": ELSEWHERE},
}
REFUSED = {("none", "require"), ("none", "unsigned elsewhere"), *(("another fleet", policy) for policy in POLICIES)}


@pytest.mark.parametrize("make", ["fake"], indirect=True)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sealed", ["this fleet", "another fleet", "none"])
def test_the_peers_place_decides_whether_it_must_seal(
    make: Make,
    secret: Callable[[str], tuple[str, ...]],
    caplog: pytest.LogCaptureFixture,
    sealed: str,
    policy: str,
) -> None:
    """A seal that is there must be good, wherever the peer is; a peer without one must be where the operator says."""
    seals = Settings() if sealed == "none" else Settings(ticket_secret_files=secret(f"secret of {sealed}"))
    keys = {"ticket_secret_files": secret("secret of this fleet"), **POLICIES[policy]}
    producer, reader = make("P", settings=seals), make("D", settings=Settings(**keys))
    for _ in range(2):
        source, ticket = producer.prefill(3 * TOKENS)
        request_id = reader.start_decode(ticket, 3 * TOKENS)
        code = str(reader.state.explain(request_id, now_s=time.monotonic())["rejected_code"])
        if (sealed, policy) in REFUSED:
            assert code == "ticket-seal"
            assert not reader.received
        else:
            assert reader.wait_received(request_id)
            reader.assert_has(request_id, source, 3 * TOKENS)
    seen = caplog.text.count("hands over without seals")
    assert seen == ((sealed, policy) == ("none", "unsigned here")), "said once per peer"


@pytest.mark.parametrize("make", ["nixl"], indirect=True)
@pytest.mark.parametrize("keys", [{"max_leases": 3}, {"max_leased_blocks": 12}], ids=["leases", "blocks"])
def test_clients_that_never_read_leave_prefill_its_cache(make: Make, keys: dict[str, Any]) -> None:
    """Four blocks a prompt: ten such clients would take 40 of 63 blocks; three get a ticket, the others an answer alone."""
    producer, reader = make("P", settings=Settings(**keys)), make("D")
    tokens = 4 * TOKENS
    given = [producer.prefill(tokens) for _ in range(10)]
    tickets = [(source, ticket) for source, ticket in given if ticket is not None]
    assert len(tickets) == 3
    assert sum(len(blocks) for blocks in producer.held.values()) == 12
    stats = producer.side.take_stats() or {}
    assert stats["withheld_ticket_codes"] == ["lease-quota"] * 7
    source, ticket = tickets[0]
    request_id = reader.start_decode(ticket, tokens)
    assert reader.wait_received(request_id)
    reader.assert_has(request_id, source, tokens)
    until_s = time.monotonic() + 20
    while source in producer.held:
        assert time.monotonic() < until_s
        producer.step()
        time.sleep(0.005)
    assert producer.prefill(tokens)[1] is not None, "a lease that was read makes room"
    assert producer.prefill(tokens)[1] is None
