"""Later turns of a conversation: the prefill engine reads back what the decode engine generated (`bidirectional_kv_xfer`).

Both engines draft tokens (from the text so far: a drafter without a model), so that hand-overs meet lookahead blocks and
rejected drafts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from fleets import ASK_TICKET, COMPUTED, ROLES, TRANSFERS, VLLM, Fleet, client, ours, prompt, started_fleet

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
DRAFTER = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
HAS_DRAFTS = not VLLM.startswith("0.30.")
"""vLLM 0.30 cannot sample drafts on a CPU, with or without a connector: its rejection sampler needs Triton."""
KEPT_S = 20


async def turn(
    session: aiohttp.ClientSession, fleet: Fleet, tokens: list[int] | str, ticket: object, length: int
) -> dict[str, Any]:
    """Hand a prompt over from `prefill` to `decode` and return the decode engine's answer."""
    asked = {**ASK_TICKET, **ticket} if isinstance(ticket, dict) else ASK_TICKET
    body = {"prompt": tokens, "max_tokens": 1, "kv_transfer_params": asked}
    given = (await fleet.post(session, "prefill", body))["kv_transfer_params"]
    more = {"max_tokens": length, "return_token_ids": True, "kv_transfer_params": given}
    return await fleet.post(session, "decode", {"prompt": tokens, **more})


def test_a_second_turn_reads_back_what_the_first_generated() -> None:
    """The roles are those of vLLM's documentation."""

    async def two_turns(fleet: Fleet) -> tuple[list[int], str]:
        async with client() as session:
            first = await turn(session, fleet, prompt(1, 30), None, 400)
            ticket = first["kv_transfer_params"]
            assert ticket["do_remote_decode"] is True
            assert ticket["remote_block_ids"]
            choice = first["choices"][0]
            # Tokens, not text: random weights generate bytes that are no UTF-8.
            tokens = [*choice["prompt_token_ids"], *choice["token_ids"], *choice["prompt_token_ids"][:20]]
            second = await turn(session, fleet, tokens, ticket, 24)
            return tokens, second["choices"][0]["text"]

    keys: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": KEPT_S}
    configs = {name: ours(role, **keys) for name, role in ROLES.items()}
    arguments = {name: ["--speculative-config", DRAFTER] for name in configs if HAS_DRAFTS}
    with started_fleet("dense", configs, arguments=arguments) as fleet:
        tokens, text = asyncio.run(two_turns(fleet))
        assert (fleet.count("decode", DRAFTED) > 0) is HAS_DRAFTS
        assert fleet.count("prefill", TRANSFERS) == 1
        computed = fleet.count("prefill", COMPUTED, source="local_compute")
        assert computed < len(tokens), f"{computed:.0f} tokens computed at the prefill engine in two turns"
        assert fleet.answers([tokens], decode="decode") == [text]
        fleet.assert_all_blocks_free(within_s=3 * KEPT_S)
