"""Later turns of a conversation: the prefill engine reads back what the decode engine generated (`bidirectional_kv_xfer`).

Both engines draft tokens (from the text so far: a drafter without a model), so that hand-overs meet lookahead blocks and
rejected drafts.
"""

from __future__ import annotations

from typing import Any

import pytest
from fleets import ASK_TICKET, COMPUTED, ROLES, TRANSFERS, VLLM, Fleet, ours, prompt, started_fleet

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
DRAFTER = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
HAS_DRAFTS = not VLLM.startswith("0.30.")
"""vLLM 0.30 cannot sample drafts on a CPU, with or without a connector: its rejection sampler needs Triton."""
KEPT_S = 8


def turn(fleet: Fleet, tokens: list[int] | str, ticket: object, length: int) -> dict[str, Any]:
    """Hand a prompt over from `prefill` to `decode` and return the decode engine's answer."""
    asked = {**ASK_TICKET, **ticket} if isinstance(ticket, dict) else ASK_TICKET
    body = {"prompt": tokens, "max_tokens": 1, "kv_transfer_params": asked}
    given = fleet.ask("prefill", body)["kv_transfer_params"]
    more = {"max_tokens": length, "return_token_ids": True, "kv_transfer_params": given}
    return fleet.ask("decode", {"prompt": tokens, **more})


@pytest.mark.proves("drafts without a cache: proof", "later turns read back: proof")
def test_a_second_turn_reads_back_what_the_first_generated() -> None:
    """The roles are those of vLLM's documentation."""

    keys: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": KEPT_S}
    configs = {name: ours(role, **keys) for name, role in ROLES.items()}
    arguments = {name: ["--speculative-config", DRAFTER] for name in configs if HAS_DRAFTS}
    with started_fleet("dense", configs, arguments=arguments) as fleet:
        first = turn(fleet, prompt(1, 30), None, 400)
        ticket, choice = first["kv_transfer_params"], first["choices"][0]
        assert ticket["do_remote_decode"] is True
        assert ticket["remote_block_ids"]
        # Tokens, not text: random weights generate bytes that are not UTF-8.
        tokens = [*choice["prompt_token_ids"], *choice["token_ids"], *choice["prompt_token_ids"][:20]]
        text = turn(fleet, tokens, ticket, 24)["choices"][0]["text"]
        assert (fleet.count("decode", DRAFTED) > 0) is HAS_DRAFTS
        assert fleet.count("prefill", TRANSFERS) == 1
        computed = fleet.count("prefill", COMPUTED, source="local_compute")
        assert computed < len(tokens), f"{computed:.0f} tokens computed at the prefill engine in two turns"
        assert fleet.answers([tokens], decode="decode") == [text]
        fleet.assert_all_blocks_free(within_s=KEPT_S + 30)
